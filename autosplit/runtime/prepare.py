"""Turn the arguments of `tune` into a traced workload and a runtime that runs it."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autosplit.accelerators import is_accelerator
from autosplit.devices.catalog import UNMEASURED_RATES, unmeasured_rates
from autosplit.devices.device import Device
from autosplit.devices.host_memory import FILLED_SHARE, HOST_SHARE, available_host_bytes
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
from autosplit.runtime.model_copy import bytes_held_twice, training_copy
from autosplit.runtime.protocol import Runtime
from autosplit.runtime.quantization import refuse_quantized
from autosplit.runtime.simulated import SimulatedRuntime, Traces
from autosplit.runtime.tracer import Tracer, make_device_tracer, make_tracer
from autosplit.text import size_text
from autosplit.torch_versions import FakeTensor
from autosplit.workload.compiled import fused_share_of
from autosplit.workload.workload import PRECISIONS, Workload, modules_of, precision_name

if TYPE_CHECKING:
    from autosplit.runtime.subprocess_runtime import IsolatedRuntime, RealRuntime

_log = logging.getLogger(__name__)

Source = Workload | Callable[[], Workload]
"""A workload, or a function that builds it."""

SMALL_BYTES = 256 * 2**20
"""Size limit for building a simulated workload with real memory. Below it, torch's compiler need not be loaded."""


@dataclass(frozen=True)
class Followed:
    """A workload with its tracer, and notes about both.

    Attributes:
        isolated: Runs real steps in a separate process. None if they run in this process.
        rebuild: Builds the workload again with real tensors. None if it already has real tensors.
    """

    workload: Workload
    tracer: Tracer
    notes: tuple[Note, ...]
    isolated: IsolatedRuntime | None = None
    rebuild: Callable[[], Workload] | None = None

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """Names of the workload's checkpointed layers."""
        if self.workload.checkpointing is None:
            return ()
        (model,) = self.tracer.trainee.models.modules
        return checkpointed_in(getattr(model, "named_by", model))  # skip a wrapper around the trained model

    @functools.cached_property
    def traces(self) -> Traces:
        """Traces at any batch size. Real tensors are never predicted, because such a model may depend on values."""
        return AffineTraces(self.tracer) if self.tracer.fake else self.tracer


_SHARED: ContextVar[tuple[ExitStack, list[tuple[Any, Followed]]] | None] = ContextVar("_SHARED", default=None)


@contextmanager
def followed_once() -> Iterator[None]:
    """Share the traces of one workload between tunings for several simulated machines. Traces are valid for any GPU."""
    with ExitStack() as closing:
        closing.callback(_SHARED.reset, _SHARED.set((closing, [])))
        yield


@contextmanager
def _quick_collections() -> Iterator[None]:
    """Make garbage collections examine only new objects, after one full collection.

    With torch and the user's libraries loaded, a full collection takes 0.1 to 0.3 s. Tuning on two devices collects 100
    times.
    """
    fake_mode()  # the first one imports 900 modules of torch, which no collection has to examine
    with held_interrupts():  # a KeyboardInterrupt in a finalizer would be lost
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class Built:
    """A built workload, and the reason if it has real memory although fake tensors were preferred."""

    source: Source
    workload: Workload
    why_real: str | None = None
    fake: bool = False


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
            code="fake-tensor-mode",
        )
    options = {name: value for name, value in described.items() if value is not None}
    changes: dict[str, Any] = {name: options.pop(name) for name in ("precision", "checkpointing") if name in options}
    if sample_batch is not None:
        if isinstance(given, Workload):
            raise InputError(
                "A Workload and a sample_batch are given. Expected one of them: a Workload has its own batch.",
                code="sample-batch-twice",
            )
        return _changed(Workload(given, sample_batch, **options), changes)
    if isinstance(given, nn.Module):
        raise WorkloadError(
            f"A {type(given).__name__} is given without sample_batch. Expected one batch as training sees it. "
            "Pass it as the second argument.",
            code="sample-batch-missing",
        )
    if options:
        raise InputError(
            f"{', '.join(options)} given with a {type(given).__name__}. Expected them inside the Workload. "
            "Pass them to Workload(...).",
            code="workload-arguments-twice",
        )
    if not isinstance(given, Workload) and not callable(given):
        raise WorkloadError(
            f"The workload is {given!r:.80}. Expected a model with a sample_batch, a Workload, or a function that "
            "returns a Workload.",
            code="workload-type",
        )
    return _changed(given, changes)


def _built_with(build: Callable[[], Workload], changes: Mapping[str, Any]) -> Workload:
    built = build()
    # `_built` raises for a function that returns something other than a Workload.
    return replace(built, **changes) if isinstance(built, Workload) else built


def _changed(source: Source, changes: Mapping[str, Any]) -> Source:
    precision = precision_name(changes.get("precision", "none"))
    if precision not in PRECISIONS:
        raise WorkloadError(
            f"precision is {precision!r}. Expected one of {', '.join(map(repr, PRECISIONS))}. 'none' is fp32, or "
            "the precision of the model.",
            code="precision",
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
    if devices[0].kind != "sim" or isinstance(source, Workload):
        return Built(source, _built(source))
    try:
        return Built(source, built_within(lambda: _built(source), SMALL_BYTES))
    except (TooLarge, Exception) as error:  # noqa: BLE001  # a real error is raised again below
        _log.info("building the workload without real memory: %s", one_line(error) or "it is large")
    try:
        with held_interrupts():
            return Built(source, built_without_memory(lambda: _built(source), fake_mode()), fake=True)
    except Exception as error:  # noqa: BLE001  # fake tensors do not support it, or it fails again with real tensors
        return Built(source, _built(source), _built_for_real(error))


def isolated_runtime(
    source: Source,
    devices: tuple[Device, ...],
    capacities_bytes: tuple[int, ...],
    closing: ExitStack,
    *,
    deadline_s: float | None = None,
) -> IsolatedRuntime | None:
    """Start a process that builds the workload and runs the real steps. This process traces only.

    Return None on simulated GPUs.
    """
    from autosplit.runtime.subprocess_runtime import IsolatedRuntime  # few users isolate steps

    if devices[0].kind == "sim":
        return None
    make = functools.partial(_runtime_of_source, source, devices, capacities_bytes)
    runtime = IsolatedRuntime(make, devices, deadline_s=deadline_s)
    closing.callback(runtime.close)
    return runtime


def _runtime_of_source(source: Source, devices: tuple[Device, ...], capacities_bytes: tuple[int, ...]) -> RealRuntime:
    """Make the runtime in a process that ends afterwards, so nothing has to be restored."""
    runtime = _real_runtime(devices, capacities_bytes, _built(source), ExitStack())
    gc.freeze()  # speeds up collections, see `_quick_collections`
    return runtime


def follow(
    built: Built,
    devices: Sequence[Device],
    closing: ExitStack,
    isolated: IsolatedRuntime | None = None,
    *,
    described: Any = None,
) -> Followed:
    """Trace one step of a workload.

    Args:
        built: The workload. If it was built without allocating memory and cannot be traced, it is built again with
            real tensors.
        closing: Receives clean-up callbacks, such as the restoration of a borrowed model.
        described: A key that is equal for equal workloads. `followed_once` shares traces by this key.

    Raises:
        UserCodeError: The workload failed on its own sample batch.
        WorkloadError: The workload cannot make a training step.
    """
    closing.enter_context(_quick_collections())
    shared = _SHARED.get()
    if shared is None or devices[0].kind != "sim":
        return _follow(built, devices, closing, isolated)
    for other, followed in shared[1]:
        if other == described:
            return followed
    own = ExitStack()
    with own:  # after an error, restore the user's model before the next machine is simulated
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
            why_real = f"The workload was built with real memory, because {', '.join(bounded)} depends on values."
        if built.fake and why_real is not None:
            tracer.trainee.restore()  # the function may return the same model again, which may be borrowed
    if built.fake and why_real is not None:
        workload = _built(built.source)
        tracer, note = _traced(workload, devices[0])
        why_real = note or why_real
    closing.callback(tracer.trainee.restore)
    held = _held_twice(workload, devices[0].kind, isolated=isolated is not None)
    assumed = (*tracer.assumptions(), *held, *_notes_on(devices))
    rebuild = functools.partial(_built, built.source) if built.fake and why_real is None else None
    notes = assumed if why_real is None else (Note("real-tensors", why_real), *assumed)
    return Followed(workload, tracer, notes, isolated, rebuild)


def _held_twice(workload: Workload, kind: str, *, isolated: bool) -> tuple[Note, ...]:
    what = "The model and its optimizer states" if isolated else "Optimizer states"
    advice = "Move the model to the device after tuning" if isolated else "Tune before the first training step"
    text = "{} are already on {} and take {} there, next to autosplit's copies. {}, so that larger batches fit."
    return tuple(
        Note("model-on-device", text.format(what, device, size_text(nbytes), advice))
        for device, nbytes in bytes_held_twice(workload, isolated=isolated).items()
        if device.type == kind
    )


def _notes_on(devices: Sequence[Device]) -> tuple[Note, ...]:
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


def _traced(workload: Workload, device: Device) -> tuple[Tracer, str | None]:
    if is_accelerator(device.kind):
        return make_device_tracer(workload, torch.device(device.kind, device.index))
    refuse_quantized(workload)
    kernels = None if device.spec is None else GpuKernels.of(device.spec.compute_capability)
    return make_tracer(workload, like_gpu=device.kind == "sim", kernels=kernels)


def _built_for_real(error: Exception) -> str:
    return (
        f"autosplit could not build the workload without real memory, and used real memory instead: {one_line(error)}."
    )


def _refuse_beyond_this_machine(workload: Workload, error: Exception) -> None:
    needed = _bytes_to_train(workload)
    if needed > available_host_bytes():
        raise WorkloadError(
            f"autosplit can't trace the workload without real memory ({one_line(error)}). A copy with gradients "
            f"needs {size_text(needed)}, more than this machine has. Plan a model with fewer layers.",
            code="workload-too-large",
        ) from error


def _bytes_to_train(workload: Workload) -> int:
    return 3 * sum(parameter.nbytes for module in modules_of(workload) for parameter in module.parameters())


def _built(source: Source) -> Workload:
    if isinstance(source, Workload):
        return source
    with users_errors("The function that builds the workload"):
        workload = source()
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"The function returned a {type(workload).__name__}. Expected an autosplit.Workload. "
            "Return Workload(model, sample_batch).",
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
        fused_share = fused_share_of(modules_of(followed.workload))
        return SimulatedRuntime(devices, capacities_bytes, followed.traces, fused_share=fused_share)
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
