"""From what `tune` is given to a workload that is followed, and a runtime that runs it."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autosplit.accelerators import is_accelerator
from autosplit.devices.device import Device
from autosplit.devices.host_memory import available_host_bytes
from autosplit.errors import InputError, WorkloadError, one_line, users_errors
from autosplit.notes import Note
from autosplit.parallel.checkpointed import checkpointed_in
from autosplit.runtime.accelerator import AcceleratorRuntime
from autosplit.runtime.affine_traces import AffineTraces
from autosplit.runtime.build_small import TooLarge, built_within
from autosplit.runtime.cpu import CpuRuntime
from autosplit.runtime.fake_copy import built_without_memory, fake_mode
from autosplit.runtime.gpu_kernels import GpuKernels
from autosplit.runtime.interrupts import held_interrupts
from autosplit.runtime.model_copy import bytes_on_accelerators, training_copy
from autosplit.runtime.protocol import Runtime
from autosplit.runtime.quantization import refuse_quantized
from autosplit.runtime.simulated import SimulatedRuntime, Traces
from autosplit.runtime.subprocess_runtime import IsolatedRuntime, RealRuntime
from autosplit.runtime.tracer import Tracer, make_device_tracer, make_tracer
from autosplit.text import size_text
from autosplit.torch_versions import FakeTensor
from autosplit.workload.sequence_length import at_length
from autosplit.workload.workload import PRECISIONS, Workload

_log = logging.getLogger(__name__)

Source = Workload | Callable[[], Workload]
"""A workload, or a function that builds it."""

SMALL_BYTES = 256 * 2**20
"""Bound up to which a workload for simulated cards is built with its memory, without waiting for torch's compiler."""


@dataclass(frozen=True)
class Followed:
    """A workload with the tracer that follows it, and a sentence for each thing to be said about both.

    Attributes:
        isolated: Runs its steps in a process of its own; None where they run in this one.
        rebuild: Builds the workload again, with its memory; None where it has it, or never had any.
    """

    workload: Workload
    tracer: Tracer
    notes: tuple[Note, ...]
    isolated: IsolatedRuntime | None = None
    rebuild: Callable[[], Workload] | None = None

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """The names of the layers that were checkpointed for it."""
        if self.workload.checkpointing is None:
            return ()
        (model,) = self.tracer.trainee.models.modules
        return checkpointed_in(getattr(model, "named_by", model))  # what is trained is not what is around it

    @functools.cached_property
    def traces(self) -> Traces:
        """Its traces at any batch; of real tensors the truth, since what such a model does may depend on numbers."""
        return AffineTraces(self.tracer) if self.tracer.fake else self.tracer


_SHARED: ContextVar[tuple[ExitStack, list[tuple[Any, Followed]]] | None] = ContextVar("_SHARED", default=None)


@contextmanager
def followed_once() -> Iterator[None]:
    """Let tunings for several simulated machines share the traces of one workload: they are of no card."""
    with ExitStack() as closing:
        closing.callback(_SHARED.reset, _SHARED.set((closing, [])))
        yield


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Let garbage collections look at what is made from here on only, once all before was looked at.

    With torch and the user's libraries loaded, a full one takes 0.1 to 0.3 s; a tuning on two devices collects a
    hundred times.
    """
    with held_interrupts():  # one that comes in a finalizer is lost
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class Built:
    """A workload as it was built; `why_real` says why it has memory although none was needed."""

    source: Source
    workload: Workload
    why_real: str | None = None
    fake: bool = False


def workload_source(given: Any, sample_batch: Any, described: Mapping[str, Any]) -> Source:
    """Make a source of `tune`'s first arguments.

    Args:
        described: The other keywords of a workload, with a model; None where one was not given. `precision`,
            `checkpointing` and `fits` replace a Workload's own, and `length` is what samples are to have.
    """
    if isinstance(torch.empty(0), FakeTensor):
        raise InputError(
            "A FakeTensorMode is active, so tensors have no values. Expected a call outside of it: autosplit runs the "
            "workload, and makes its own fake tensors where it needs them.",
            code="fake-tensor-mode",
        )
    options = {name: value for name, value in described.items() if value is not None}
    changes: dict[str, Any] = {
        name: options.pop(name) for name in ("precision", "checkpointing", "fits", "length") if name in options
    }
    if sample_batch is not None:
        if isinstance(given, Workload):
            raise InputError(
                "a Workload and a sample_batch are given; expected one of them; the Workload has its own",
                code="sample-batch-twice",
            )
        return _changed(Workload(given, sample_batch, **options), changes)
    if isinstance(given, nn.Module):
        raise WorkloadError(
            f"a {type(given).__name__} is given without sample_batch; expected one batch as training sees it; "
            "pass it as the second argument",
            code="sample-batch-missing",
        )
    if options:
        raise InputError(
            f"{', '.join(options)} given beside a {type(given).__name__}; expected them inside the Workload; "
            "pass them to Workload(...)",
            code="workload-arguments-twice",
        )
    if not isinstance(given, Workload) and not callable(given):
        raise WorkloadError(
            f"the workload is {given!r:.80}; expected a model with a sample_batch, a Workload, or a function that "
            "returns one; pass one of these",
            code="workload-type",
        )
    return _changed(given, changes)


def _built_with(build: Callable[[], Workload], changes: Mapping[str, Any]) -> Workload:
    """Build a function's workload, otherwise than the function makes it."""
    built = build()
    # What is not a workload is told of where all of them are.
    return _with(built, changes) if isinstance(built, Workload) else built


def _with(workload: Workload, changes: Mapping[str, Any]) -> Workload:
    fields = {name: value for name, value in changes.items() if name != "length"}
    changed = replace(workload, **fields) if fields else workload
    return at_length(changed, changes["length"]) if "length" in changes else changed


def _changed(source: Source, changes: Mapping[str, Any]) -> Source:
    precision = changes.get("precision", "none")
    if precision not in PRECISIONS:
        raise WorkloadError(
            f"precision is {precision!r}; expected one of {', '.join(map(repr, PRECISIONS))}; choose one of them",
            code="precision",
        )
    if not changes:
        return source
    return _with(source, changes) if isinstance(source, Workload) else functools.partial(_built_with, source, changes)


def build(source: Source, devices: Sequence[Device]) -> Built:
    """Build the workload; for simulated cards without its memory, where it is not small and that can be.

    Raises:
        UserCodeError: The function raised.
        WorkloadError: It returned something else.
    """
    if devices[0].kind != "sim" or isinstance(source, Workload):
        return Built(source, _built(source))
    try:
        return Built(source, built_within(lambda: _built(source), SMALL_BYTES))
    except (TooLarge, Exception) as error:  # noqa: BLE001  # what is wrong with it shows again below
        _log.info("the workload is built without its memory: %s", one_line(error) or "it is large")
    try:
        with held_interrupts():
            return Built(source, built_without_memory(lambda: _built(source), fake_mode()), fake=True)
    except Exception as error:  # noqa: BLE001  # whatever fake tensors can't do; what is wrong shows again with real ones
        return Built(source, _built(source), _built_for_real(error))


def isolated_runtime(
    source: Source,
    devices: tuple[Device, ...],
    capacities_bytes: tuple[int, ...],
    closing: ExitStack,
    *,
    deadline_s: float | None = None,
) -> IsolatedRuntime | None:
    """Start a process for real steps, which builds the workload itself, while this one goes on to trace it.

    Args:
        source: Picklable, made of what can be imported there.
    """
    if devices[0].kind == "sim":
        return None
    make = functools.partial(_runtime_of_source, source, devices, capacities_bytes)
    runtime = IsolatedRuntime(make, devices, deadline_s=deadline_s)
    closing.callback(runtime.close)
    return runtime


def _runtime_of_source(source: Source, devices: tuple[Device, ...], capacities_bytes: tuple[int, ...]) -> RealRuntime:
    """Make the runtime in a process that ends, where nothing has to be undone."""
    runtime = _real_runtime(devices, capacities_bytes, _built(source), ExitStack())
    gc.freeze()  # collections are quick, see `_quick_collections`
    return runtime


def follow(
    built: Built,
    devices: Sequence[Device],
    closing: ExitStack,
    isolated: IsolatedRuntime | None = None,
    *,
    described: Any = None,
) -> Followed:
    """Follow one step of a workload.

    Args:
        built: The workload; one that was built without memory and can't be followed is built again.
        closing: Gets what has to be undone at the end: a model that can't be copied is borrowed.
        isolated: Where its steps are to run, if not in this process.
        described: Equal for equal workloads, of which `followed_once` shares the traces.

    Raises:
        UserCodeError: The workload failed on its own sample batch.
        WorkloadError: No training step can be made of it.
    """
    closing.enter_context(_quick_collections())
    shared = _SHARED.get()
    if shared is None or devices[0].kind != "sim":
        return _follow(built, devices, closing, isolated)
    for other, followed in shared[1]:
        if other == described:
            return followed
    own = ExitStack()
    with own:  # a model that is borrowed is given back before the next machine describes it
        followed = _follow(built, devices, own, isolated)
        (shared[0] if followed.tracer.fake else closing).push(own.pop_all())
    if followed.tracer.fake:
        shared[1].append((described, followed))
    return followed


def _follow(built: Built, devices: Sequence[Device], closing: ExitStack, isolated: IsolatedRuntime | None) -> Followed:
    workload, why_real = built.workload, built.why_real
    try:
        tracer, note = _traced(workload, devices[0])
    except Exception as error:
        if not built.fake:
            raise
        _refuse_beyond_this_machine(workload, error)
        why_real = _built_for_real(error)
    else:
        why_real = note or why_real
        bounded = tracer.data_dependent.bounded
        if built.fake and bounded and _bytes_to_train(workload) <= available_host_bytes():
            why_real = f"the workload was built with its memory, since {', '.join(bounded)} depends on values"
        if built.fake and why_real is not None:
            tracer.trainee.restore()  # the function may return the very same model again, and that may be borrowed
    if built.fake and why_real is not None:
        workload = _built(built.source)
        tracer, note = _traced(workload, devices[0])
        why_real = note or why_real
    closing.callback(tracer.trainee.restore)
    assumed = (*tracer.assumptions(), *_held_already(workload, devices[0].kind, twice=isolated is not None))
    rebuild = functools.partial(_built, built.source) if built.fake and why_real is None else None
    notes = assumed if why_real is None else (Note("real-tensors", why_real), *assumed)
    return Followed(workload, tracer, notes, isolated, rebuild)


def _held_already(workload: Workload, kind: str, *, twice: bool) -> tuple[Note, ...]:
    """Return a note for each device that the model is on already: it takes memory next to the copy that is trained."""
    held = bytes_on_accelerators(workload)
    return tuple(
        Note(
            "model-on-device",
            f"the model is on {device} already and takes {size_text(nbytes)} of it next to the copy that was run"
            f"{', in each of two processes' if twice else ''}; if it is moved there after tuning, as much more fits",
        )
        for device, nbytes in held.items()
        if device.type == kind
    )


def _traced(workload: Workload, device: Device) -> tuple[Tracer, str | None]:
    if is_accelerator(device.kind):
        return make_device_tracer(workload, torch.device(device.kind, device.index))
    refuse_quantized(workload)
    kernels = None if device.spec is None else GpuKernels.of(device.spec.compute_capability)
    return make_tracer(workload, like_gpu=device.kind == "sim", kernels=kernels)


def _built_for_real(error: Exception) -> str:
    return f"the workload could not be built without its memory, and was built for real: {one_line(error)}"


def _refuse_beyond_this_machine(workload: Workload, error: Exception) -> None:
    """Raise WorkloadError if the model cannot be trained with real tensors on this machine."""
    needed = _bytes_to_train(workload)
    if needed > available_host_bytes():
        raise WorkloadError(
            f"the workload can't be followed without its memory ({one_line(error)}); with it, a copy and gradients "
            f"take {size_text(needed)}; expected no more than this machine has; plan a model with fewer layers",
            code="workload-too-large",
        ) from error


def _bytes_to_train(workload: Workload) -> int:
    """Return the bytes of the model, of a copy of it, and of the copy's gradients."""
    return 3 * sum(parameter.nbytes for module in workload.modules for parameter in module.parameters())


def _built(source: Source) -> Workload:
    if isinstance(source, Workload):
        return source
    with users_errors("the function that builds the workload"):
        workload = source()
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"the function returned a {type(workload).__name__}; expected an autosplit.Workload; "
            "return Workload(model, sample_batch)",
            code="workload-function",
        )
    return workload


def runtime_for(
    devices: tuple[Device, ...], capacities_bytes: tuple[int, ...], followed: Followed, closing: ExitStack
) -> Runtime:
    """Make the runtime for devices of one kind."""
    if followed.isolated is not None:
        assert followed.isolated.devices == devices, (followed.isolated.devices, devices)
        return followed.isolated
    if devices[0].kind == "sim":
        return SimulatedRuntime(devices, capacities_bytes, followed.traces)
    return _real_runtime(devices, capacities_bytes, followed.workload, closing)


def _real_runtime(
    devices: tuple[Device, ...], capacities_bytes: tuple[int, ...], workload: Workload, closing: ExitStack
) -> RealRuntime:
    if devices[0].kind == "cpu":
        trainee = training_copy(workload, device=torch.device("cpu"))
        closing.callback(trainee.restore)
        return CpuRuntime(devices, capacities_bytes, trainee)
    runtime = AcceleratorRuntime(devices, capacities_bytes, workload)
    closing.callback(runtime.close)
    return runtime
