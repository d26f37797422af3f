"""Build a workload for simulated GPUs without memory, trace its step, and simulate the GPUs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from autosplit.devices.device import Device
from autosplit.devices.host_memory import available_host_bytes
from autosplit.errors import WorkloadError, one_line
from autosplit.notes import Note
from autosplit.runtime.interrupts import held_interrupts
from autosplit.runtime.prepare import Built, Prepared, Source, built_workload, notes_on, quick_collections
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.build_small import TooLarge, built_within
from autosplit.sim.fake_copy import built_without_memory, fake_mode
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.quantization import refuse_quantized
from autosplit.sim.replay import Traces
from autosplit.sim.simulated import SimulatedWorker
from autosplit.sim.tracer import Tracer, make_tracer
from autosplit.text import size_text
from autosplit.workload.compiled import fused_share_of
from autosplit.workload.workload import Workload, modules_of

_log = logging.getLogger(__name__)

SMALL_BYTES = 256 * 2**20
"""Size limit for building a simulated workload with real memory. Below it, torch's compiler need not be loaded."""


@dataclass(frozen=True)
class SimBuilt(Built):
    """A built workload, and the reason if it has real memory although fake tensors were preferred."""

    why_real: str | None = None
    fake: bool = False


@dataclass(frozen=True)
class Traced:
    """A workload with its tracer, and notes about both.

    Attributes:
        rebuild: Builds the workload again with real tensors. None if it already has real tensors.
    """

    workload: Workload
    tracer: Tracer
    notes: tuple[Note, ...]
    rebuild: Callable[[], Workload] | None = None

    @functools.cached_property
    def traces(self) -> Traces:
        """Traces at any batch size. Real tensors are never predicted, because such a model may depend on values."""
        return AffineTraces(self.tracer) if self.tracer.fake else self.tracer


_SHARED: ContextVar[tuple[ExitStack, list[tuple[Any, Traced]]] | None] = ContextVar("_SHARED", default=None)


@contextmanager
def traced_once() -> Iterator[None]:
    """Share the traces of one workload between tunings for several simulated machines. Traces are valid for any GPU."""
    with ExitStack() as closing:
        closing.callback(_SHARED.reset, _SHARED.set((closing, [])))
        yield


def build_simulated(source: Source) -> SimBuilt:
    """Build a workload for simulated GPUs, a large one without allocating memory, if possible.

    Raises:
        UserCodeError: The function raised.
        WorkloadError: The function returned something other than a Workload.
    """
    if isinstance(source, Workload):
        return SimBuilt(source, source)
    try:
        return SimBuilt(source, built_within(lambda: built_workload(source), SMALL_BYTES))
    except (TooLarge, Exception) as error:  # noqa: BLE001  # a real error is raised again below
        _log.info("building the workload without real memory: %s", one_line(error) or "it is large")
    try:
        with held_interrupts():
            return SimBuilt(source, built_without_memory(lambda: built_workload(source), fake_mode()), fake=True)
    except Exception as error:  # noqa: BLE001  # fake tensors do not support it, or it fails again with real tensors
        return SimBuilt(source, built_workload(source), _built_for_real(error))


def prepare_simulated(
    built: SimBuilt,
    devices: tuple[Device, ...],
    capacities_bytes: tuple[int, ...],
    closing: ExitStack,
    *,
    largest_batch: int,
    described: Any = None,
) -> Prepared:
    """Trace a workload, and simulate its devices. See `runtime.prepare.prepare`."""
    traced = traced_workload(built, devices, closing, described=described)
    fused_share = fused_share_of(modules_of(traced.workload))
    worker = SimulatedWorker(
        devices, capacities_bytes, traced.traces, fused_share=fused_share, largest_batch=largest_batch
    )
    return Prepared(traced.workload, worker, traced.notes, rebuild=traced.rebuild)


def traced_workload(built: SimBuilt, devices: Sequence[Device], closing: ExitStack, *, described: Any = None) -> Traced:
    """Trace one step of a workload.

    Args:
        built: The workload. If it was built without allocating memory and cannot be traced, it is built again with
            real tensors.
        closing: Receives clean-up callbacks, such as the restoration of a borrowed model.
        described: A key that is equal for equal workloads. `traced_once` shares traces by this key.

    Raises:
        UserCodeError: The workload failed on its own sample batch.
        WorkloadError: The workload cannot make a training step.
    """
    fake_mode()  # the first one imports 900 modules of torch, which no collection has to examine
    closing.enter_context(quick_collections())
    shared = _SHARED.get()
    if shared is None:
        return _traced_workload(built, devices, closing)
    for other, traced in shared[1]:
        if other == described:
            return traced
    own = ExitStack()
    with own:  # after an error, restore the user's model before the next machine is simulated
        traced = _traced_workload(built, devices, own)
        (shared[0] if traced.tracer.fake else closing).push(own.pop_all())
    if traced.tracer.fake:
        shared[1].append((described, traced))
    return traced


def _traced_workload(built: SimBuilt, devices: Sequence[Device], closing: ExitStack) -> Traced:
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
        workload = built_workload(built.source)
        tracer, note = _traced(workload, devices[0])
        why_real = note or why_real
    closing.callback(tracer.trainee.restore)
    notes = (*tracer.notes(), *notes_on(devices))
    rebuild = functools.partial(built_workload, built.source) if built.fake and why_real is None else None
    if why_real is not None:
        notes = (Note("real-tensors", why_real), *notes)
    return Traced(workload, tracer, notes, rebuild)


def _traced(workload: Workload, device: Device) -> tuple[Tracer, str | None]:
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
        ) from error


def _bytes_to_train(workload: Workload) -> int:
    return 3 * sum(parameter.nbytes for module in modules_of(workload) for parameter in module.parameters())
