"""Turn the arguments of `tune` into a workload and the worker that runs its steps."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autosplit.addons import addon
from autosplit.devices.catalog import UNMEASURED_RATES, unmeasured_rates
from autosplit.devices.device import Device
from autosplit.devices.host_memory import FILLED_SHARE, HOST_SHARE
from autosplit.errors import InputError, WorkloadError, users_errors
from autosplit.notes import Note
from autosplit.runtime.accelerator import AcceleratorWorker
from autosplit.runtime.cpu import MOST_FEW, CpuWorker
from autosplit.runtime.interrupts import held_interrupts
from autosplit.runtime.model_copy import bytes_held_twice, training_copy
from autosplit.runtime.protocol import Worker
from autosplit.text import size_text
from autosplit.torch_versions import FakeTensor
from autosplit.workload.workload import PRECISIONS, Workload, precision_name

if TYPE_CHECKING:
    from autosplit.runtime.child_worker import LocalWorker

Source = Workload | Callable[[], Workload]
"""A workload, or a function that builds it."""


@dataclass(frozen=True)
class Built:
    """A built workload and its source."""

    source: Source
    workload: Workload


@dataclass(frozen=True)
class Prepared:
    """A workload, and the worker that runs or simulates its steps.

    Attributes:
        notes: Notes on the workload and the devices.
        rebuild: Builds the workload again with real tensors. None if it already has real tensors.
    """

    workload: Workload
    worker: Worker
    notes: tuple[Note, ...]
    rebuild: Callable[[], Workload] | None = None


@contextmanager
def quick_collections() -> Iterator[None]:
    """Make garbage collections examine only new objects, after one full collection.

    With torch and the user's libraries loaded, a full collection takes 0.1 to 0.3 s. Tuning on two devices collects 100
    times.
    """
    with held_interrupts():  # a KeyboardInterrupt in a finalizer would be lost
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def workload_source(given: Any, sample_batch: Any, described: Mapping[str, Any]) -> Source:
    """Make a source from `tune`'s first arguments.

    Args:
        described: The workload's other keywords. None counts as missing. `precision` and `checkpointing` override a
            Workload's values.
    """
    if isinstance(torch.empty(0), FakeTensor):
        raise InputError(
            "A FakeTensorMode is active, so tensors have no values. Call autosplit outside of this mode. autosplit "
            "makes its own fake tensors.",
        )
    options = {name: value for name, value in described.items() if value is not None}
    changes: dict[str, Any] = {name: options.pop(name) for name in ("precision", "checkpointing") if name in options}
    if sample_batch is not None:
        if isinstance(given, Workload):
            raise InputError(
                "A Workload and a sample_batch are given. Expected one of them: a Workload has its own batch.",
            )
        return _changed(Workload(given, sample_batch, **options), changes)
    if isinstance(given, nn.Module):
        raise WorkloadError(
            f"A {type(given).__name__} is given without sample_batch. Expected one batch as training sees it. "
            "Pass it as the second argument.",
        )
    if options:
        raise InputError(
            f"{', '.join(options)} given with a {type(given).__name__}. Expected them inside the Workload. "
            "Pass them to Workload(...).",
        )
    if not isinstance(given, Workload) and not callable(given):
        raise WorkloadError(
            f"The workload is {given!r:.80}. Expected a model with a sample_batch, a Workload, or a function that "
            "returns a Workload.",
        )
    return _changed(given, changes)


def _built_with(build: Callable[[], Workload], changes: Mapping[str, Any]) -> Workload:
    built = build()
    # `built_workload` raises for a function that returns something other than a Workload.
    return replace(built, **changes) if isinstance(built, Workload) else built


def _changed(source: Source, changes: Mapping[str, Any]) -> Source:
    precision = precision_name(changes.get("precision", "none"))
    if precision not in PRECISIONS:
        raise WorkloadError(
            f"precision is {precision!r}. Expected one of {', '.join(map(repr, PRECISIONS))}. 'none' is fp32, or "
            "the precision of the model.",
        )
    if not changes:
        return source
    if isinstance(source, Workload):
        return replace(source, **changes)
    return functools.partial(_built_with, source, changes)


def build(source: Source, devices: Sequence[Device]) -> Built:
    """Build the workload. For simulated GPUs, build a large workload without allocating memory, if possible.

    Raises:
        UserCodeError: The function raised.
        WorkloadError: The function returned something other than a Workload.
    """
    if devices[0].kind == "sim":
        built: Built = addon("build_simulated")(source)
        return built
    return Built(source, built_workload(source))


def prepare(
    built: Built,
    devices: tuple[Device, ...],
    capacities_bytes: tuple[int, ...],
    closing: ExitStack,
    *,
    largest_batch: int,
    isolate: bool = False,
    deadline_s: float | None = None,
    described: Any = None,
) -> Prepared:
    """Make the worker of a workload for devices of one kind.

    Args:
        closing: Receives clean-up callbacks, such as the restoration of a borrowed model.
        largest_batch: The largest batch to run.
        isolate: Run real steps in a separate process.
        described: A key that is equal for equal workloads. Simulations of several machines share traces by this key.

    Raises:
        UserCodeError: The workload failed on its own sample batch.
        WorkloadError: The workload cannot make a training step.
    """
    if devices[0].kind == "sim":
        simulated: Prepared = addon("prepare_simulated")(
            built, devices, capacities_bytes, closing, largest_batch=largest_batch, described=described
        )
        return simulated
    closing.enter_context(quick_collections())
    worker: Worker
    if isolate:
        from autosplit.runtime.child_worker import ChildWorker  # few users isolate steps

        make = functools.partial(_worker_of_source, built.source, devices, capacities_bytes, largest_batch)
        worker = ChildWorker(make, devices, deadline_s=deadline_s)
        closing.callback(worker.close)
    else:
        worker = _local_worker(devices, capacities_bytes, built.workload, largest_batch, closing)
    held = _held_twice(built.workload, devices[0].kind, isolated=isolate)
    return Prepared(built.workload, worker, (*held, *notes_on(devices)))


def _worker_of_source(
    source: Source,
    devices: tuple[Device, ...],
    capacities_bytes: tuple[int, ...],
    largest_batch: int,
    most_few: int,
) -> LocalWorker:
    """Make the worker in a process that ends afterwards, so nothing has to be restored."""
    worker = _local_worker(devices, capacities_bytes, built_workload(source), largest_batch, ExitStack(), most_few)
    gc.freeze()  # speeds up collections, see `quick_collections`
    return worker


def _local_worker(
    devices: tuple[Device, ...],
    capacities_bytes: tuple[int, ...],
    workload: Workload,
    largest_batch: int,
    closing: ExitStack,
    most_few: int = MOST_FEW,
) -> LocalWorker:
    if devices[0].kind == "cpu":
        trainee = training_copy(workload, device=torch.device("cpu"))
        closing.callback(trainee.restore)
        return CpuWorker(devices, capacities_bytes, trainee, largest_batch, most_few)
    worker = AcceleratorWorker(devices, capacities_bytes, workload)
    closing.callback(worker.close)
    return worker


def _held_twice(workload: Workload, kind: str, *, isolated: bool) -> tuple[Note, ...]:
    what = "The model and its optimizer states" if isolated else "Optimizer states"
    advice = "Move the model to the device after tuning" if isolated else "Tune before the first training step"
    text = "{} are already on {} and take {} there, next to autosplit's copies. {}, so that larger batches fit."
    return tuple(
        Note("model-on-device", text.format(what, device, size_text(nbytes), advice))
        for device, nbytes in bytes_held_twice(workload, isolated=isolated).items()
        if device.type == kind
    )


def notes_on(devices: Sequence[Device]) -> tuple[Note, ...]:
    """Return notes on devices with computed rates, and on devices that use the host's memory."""
    rates = unmeasured_rates(device.spec for device in devices if device.spec is not None)
    integrated = ", ".join(device.label for device in devices if device.integrated)
    text = (
        f"{integrated} uses the host's memory, and a host without free memory stops responding. So autosplit lets "
        f"training use {float(HOST_SHARE):.0%} of the memory that is available now. It predicts ceilings from "
        f"steps that fill about {FILLED_SHARE:.0%} of this."
    )
    return (
        *([Note(UNMEASURED_RATES, rates)] if rates else []),
        *([Note("integrated-memory", text)] if integrated else []),
    )


def built_workload(source: Source) -> Workload:
    """Return the workload of a source."""
    if isinstance(source, Workload):
        return source
    with users_errors("The function that builds the workload"):
        workload = source()
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"The function returned a {type(workload).__name__}. Expected an autosplit.Workload. "
            "Return Workload(model, sample_batch).",
        )
    return workload
