"""Set the stage: from what `tune` is given to a workload that is followed, and a runtime that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autosplit.devices import Device
from autosplit.errors import AutosplitError, InputError, WorkloadError, from_user_code, one_line
from autosplit.runtime.cpu import CpuRuntime
from autosplit.runtime.cuda import CudaRuntime
from autosplit.runtime.measurement import Runtime
from autosplit.runtime.simulated import SimulatedRuntime
from autosplit.runtime.tracing import Tracer, make_tracer
from autosplit.trainee import built_without_memory, fake_mode, training_copy
from autosplit.workload import PRECISIONS, Workload

__all__ = ["Followed", "Source", "follow", "runtime_for", "workload_source"]

Source = Workload | Callable[[], Workload]
"""A workload, or a function that builds it."""


@dataclass(frozen=True)
class Followed:
    """A workload with the tracer that follows it, and what is to be said about both."""

    workload: Workload
    tracer: Tracer
    notes: tuple[str, ...]


def workload_source(given: Any, sample_batch: Any, described: Mapping[str, Any]) -> Source:
    """Make a source of `tune`'s first arguments.

    Args:
        given: A model, a `Workload`, or a function that returns a `Workload`.
        sample_batch: With a model.
        described: What else describes a workload, with a model; None where it was not given. A `precision` replaces
            a Workload's own.

    Raises:
        InputError: Arguments that do not go together.
        WorkloadError: No workload can be made of them.
    """
    options = {name: value for name, value in described.items() if value is not None}
    if sample_batch is not None:
        if isinstance(given, Workload):
            raise InputError("a Workload and a sample_batch are given; expected one of them; the Workload has its own")
        return Workload(given, sample_batch, **options)
    precision = options.pop("precision", None)
    if isinstance(given, nn.Module):
        raise WorkloadError(
            f"a {type(given).__name__} is given without sample_batch; expected one batch as training sees it; "
            "pass it as the second argument"
        )
    if options:
        raise InputError(
            f"{', '.join(options)} given beside a {type(given).__name__}; expected them inside the Workload; "
            "pass them to Workload(...)"
        )
    if not isinstance(given, Workload) and not callable(given):
        raise WorkloadError(
            f"the workload is {given!r:.80}; expected a model with a sample_batch, a Workload, or a function that "
            "returns one; pass one of these"
        )
    source: Source = given
    return source if precision is None else _in_precision(source, precision)


@dataclass(frozen=True)
class _InPrecision:
    """A function's workload in another precision than the function gave it."""

    build: Callable[[], Workload]
    precision: str

    def __call__(self) -> Workload:
        built = self.build()
        # What is not a workload is told of where all of them are.
        return replace(built, precision=self.precision) if isinstance(built, Workload) else built


def _in_precision(source: Source, precision: Any) -> Source:
    if precision not in PRECISIONS:
        raise WorkloadError(
            f"precision is {precision!r}; expected one of {', '.join(map(repr, PRECISIONS))}; choose one of them"
        )
    return replace(source, precision=precision) if isinstance(source, Workload) else _InPrecision(source, precision)


def follow(source: Source, devices: Sequence[Device], closing: ExitStack) -> Followed:
    """Build the workload and follow one step of it.

    For simulated cards a function is called under fake tensors first, so that what it builds takes no memory.

    Args:
        source: See `Source`.
        devices: What it is tuned for, all of one kind.
        closing: Gets what has to be undone at the end: a model that can't be copied is borrowed.

    Raises:
        UserCodeError: The function raised, or the workload failed on its own sample batch.
        WorkloadError: No training step can be made of it.
    """
    followed, why_real = None, None
    if devices[0].kind == "sim" and not isinstance(source, Workload):
        followed, why_real = _built_fake(source)
    if followed is None:
        workload = _built(source)
        tracer, note = make_tracer(workload, like_gpu=devices[0].kind != "cpu")
        followed = _said(workload, tracer, note or why_real)
    closing.callback(followed.tracer.trainee.restore)
    return followed


def _built(source: Source) -> Workload:
    if isinstance(source, Workload):
        return source
    try:
        workload = source()
    except AutosplitError:
        raise
    except Exception as error:
        raise from_user_code(error, "the function that builds the workload") from error
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"the function returned a {type(workload).__name__}; expected an autosplit.Workload; "
            "return Workload(model, sample_batch)"
        )
    return workload


def _built_fake(source: Callable[[], Workload]) -> tuple[Followed | None, str | None]:
    """Build without memory; where anything is in the way, say what, and let the real thing tell what is wrong."""
    try:
        workload = built_without_memory(lambda: _built(source), fake_mode())
        tracer, note = make_tracer(workload, like_gpu=True)
    except Exception as error:  # noqa: BLE001  # whatever fake tensors can't do; what is really wrong shows again with real ones
        return None, f"the workload could not be built without its memory, and was built for real: {one_line(error)}"
    return _said(workload, tracer, note), None


def _said(workload: Workload, tracer: Tracer, note: str | None) -> Followed:
    notes = [*tracer.assumptions()]
    return Followed(workload, tracer, tuple(notes if note is None else [note, *notes]))


def runtime_for(
    devices: tuple[Device, ...], capacities_bytes: tuple[int, ...], followed: Followed, closing: ExitStack
) -> Runtime:
    """Make the runtime for devices of one kind.

    Args:
        devices: What to run on.
        capacities_bytes: What each may hold.
        followed: The workload and its tracer.
        closing: Gets what has to be undone at the end.
    """
    if devices[0].kind == "sim":
        return SimulatedRuntime(devices, capacities_bytes, followed.tracer)
    if devices[0].kind == "cpu":
        trainee = training_copy(followed.workload, device=torch.device("cpu"))
        closing.callback(trainee.restore)
        return CpuRuntime(devices, capacities_bytes, trainee)
    runtime = CudaRuntime(devices, capacities_bytes, followed.workload)
    closing.callback(runtime.close)
    return runtime
