"""Simulate GPUs: replay traces on a clock for each GPU and one for the host.

Order of a simulated micro-step: scatter, broadcast of the parameters, all replicas' forwards, gather, loss, and all
backwards. Then the optimizer runs on device 0. With several micro-steps, replicas persist: parameters are broadcast
before the first micro-step and gradients are reduced after the last. Between transfers, the devices' clocks are
independent. A transfer starts when both devices are free, and occupies both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from autosplit.devices.device import Device
from autosplit.devices.host_memory import available_host_bytes
from autosplit.errors import UserCodeError, WorkloadError
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError
from autosplit.probe.prober import named_steps
from autosplit.runtime.protocol import Facts, Measurement, StepShape
from autosplit.runtime.small_steps import checkpointed_names
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.allocator_settings import AllocatorSettings
from autosplit.sim.clocks import Clocks
from autosplit.sim.op_cost import Work
from autosplit.sim.replay import ComposedStep, Traces, WholeStep, active, source_of, tracers_of
from autosplit.sim.tracer import Tracer
from autosplit.solve.memory import MemoryParts
from autosplit.workload.workload import Workload

T = TypeVar("T")

NOTHING = MemoryParts(0, 0, 0, 0, 0)
"""The memory of a device without samples."""


class SimulatedWorker:
    """A training step on simulated GPUs.

    Args:
        free: Purposes whose transfers take no time: ``"parameter"``, ``"output"`` and so on, see `transfer.transfer`.
        largest_batch: The largest batch to predict.
    """

    exact = True
    steps = 0

    def __init__(
        self,
        devices: tuple[Device, ...],
        capacities_bytes: tuple[int, ...],
        tracer: Traces,
        *,
        free: frozenset[str] = frozenset(),
        fused_share: float = 1.0,
        largest_batch: int = 2**31,
    ) -> None:
        self._largest_batch = largest_batch
        self.devices = devices
        self.capacities_bytes = capacities_bytes
        self.tracer = tracer
        self.free = free
        self.fused_share = fused_share
        self._specs = [device.spec for device in devices if device.spec is not None]
        self._settings = AllocatorSettings.of_environment()
        self.notes = notes_on(self._settings)

    def ask(self, function: Callable[[Workload], T]) -> T:
        """Call a function on the workload."""
        return function(self._tracer.workload)

    @property
    def _tracer(self) -> Tracer:
        return self.tracer.tracer if isinstance(self.tracer, AffineTraces) else self.tracer

    def facts(self) -> Facts:
        """Return what the traces show, see `protocol.Facts`."""
        tracer = self._tracer
        return Facts(
            least_batch=self._least_batch(tracer),
            leaves_unused=tracer.leaves_unused(),
            loss_rule=tracer.loss_rule,
            gradient_bytes=bucket_bytes(tracer.trainee),
            checkpointed=checkpointed_names(tracer.trainee),
            largest_batch=None if tracer.fake else self._largest_traced(tracer),
        )

    def _least_batch(self, tracer: Tracer) -> int:
        if not tracer.norms_over_samples:
            return 1
        one = StepShape(((1,),))
        try:
            with named_steps(one):
                tracer.trace(one)
        except (UserCodeError, WorkloadError):  # a BatchNorm of one value, or an error that two samples repeat
            return 2
        return 1

    def _largest_traced(self, tracer: Tracer) -> int:
        """Return the largest batch to trace with real tensors: it fits a quarter of the host's memory."""
        few = max(self._least_batch(tracer), min(tracer.workload.sample_batch_size, self._largest_batch))
        low, high = (traced_peaks(self.tracer, StepShape(((size,),)), self.devices)[0] for size in (few, 2 * few))
        bytes_per_sample = max(1.0, (high - low) / few)
        room_bytes = available_host_bytes() / 4 - (high - 2 * few * bytes_per_sample)
        return max(2 * few, min(self._largest_batch, int(room_bytes / bytes_per_sample)))

    def predicted(self, shape: StepShape) -> tuple[MemoryParts, ...]:
        """Return the parts of the memory that the allocator reserves on each GPU, even above its capacity."""
        return self._parts(source_of(tracers_of(self.tracer, shape, self.devices), shape))

    def _parts(self, source: WholeStep | ComposedStep) -> tuple[MemoryParts, ...]:
        # A step may be of device 0 alone. Then there are more capacities than devices.
        pairs = zip(source.devices(), self.capacities_bytes, strict=False)
        return tuple(NOTHING if one is None else one.parts(self._settings, most_bytes) for one, most_bytes in pairs)

    known_parts = predicted

    def prediction_holds(self, shape: StepShape) -> bool:
        """Trace a step and return whether its prediction was right.

        If the prediction was wrong, similar steps are traced from now on instead of predicted.
        """
        if not isinstance(self.tracer, AffineTraces) or not self.tracer.fake:
            return True
        given_up = self.tracer.given_up
        with self.tracer.checking():
            self.predicted(shape)
        return self.tracer.given_up == given_up

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Return the most memory that the allocator reserves on each GPU, in bytes."""
        peaks = tuple(parts.total_bytes for parts in self.predicted(shape))
        self._refuse_overflow(peaks, shape)
        return peaks

    def measure(self, shape: StepShape, *, budget_s: float = 0.0) -> Measurement:  # noqa: ARG002  # the protocol's
        """Return the time and the peaks of one optimizer step. Both are exact, so `budget_s` is not used.

        For a step without an optimizer (a replica's part), return only the time: a single device may need more memory.
        """
        source = source_of(tracers_of(self.tracer, shape, self.devices), shape)
        peaks = tuple(parts.total_bytes for parts in self._parts(source)) if shape.updates else ()
        if peaks:
            self._refuse_overflow(peaks, shape)
        replicas = 1 if shape.alone else len(active(shape.splits[0]))
        clocks = Clocks(self._specs, self.free, replicas, self.fused_share)
        _, begin_s = self._played(source, shape, clocks)
        busy_s = tuple(clocks.busy_s)
        update_s, end_s = self._played(source, shape, clocks)
        return Measurement(end_s - begin_s, 0.0, peaks, busy_s, update_s)

    def _played(self, source: WholeStep | ComposedStep, shape: StepShape, clocks: Clocks) -> tuple[float, float]:
        """Play one optimizer step. Return the time of its update, and the time at which it is done.

        In a training loop, the host launches the next step while the GPU still runs this one. So a second step on the
        same clocks takes the time of each later step.
        """
        source.play(clocks, shape.splits[0], "first")
        if len(shape.splits) > 1:
            self._begin_gradients(clocks, shape)
        for split, alike in itertools.groupby(shape.splits[1:]):
            clocks.repeat(partial(source.play, clocks, split, "micro"), len(list(alike)))
        source.play(clocks, shape.splits[0], "reduce")
        before_s = clocks.meet()
        if shape.updates:
            if self.tracer.scales_loss:
                clocks.await_device(0)
            source.play(clocks, shape.splits[0], "update")
        end_s = clocks.meet()
        return end_s - before_s, end_s

    def _begin_gradients(self, clocks: Clocks, shape: StepShape) -> None:
        """Correct the first micro-step. Its trace adds to earlier gradients, which do not exist yet."""
        added = Work.of(0, self.tracer.accumulation_costs())
        for device in active(shape.splits[0]):
            clocks.take_back(device, added)
        if not shape.alone and not shape.splits[0][0]:
            clocks.work(0, Work.of(0, self.tracer.zeroing_costs()))

    def _refuse_overflow(self, peaks: tuple[int, ...], shape: StepShape) -> None:
        for index, (device, peak_bytes) in enumerate(zip(self.devices, peaks, strict=True)):
            if peak_bytes > self.capacities_bytes[index]:
                raise OutOfMemoryError(
                    f"{device.label} ({device.name}) is out of memory: {shape.splits[0][index]} samples need "
                    f"{peak_bytes} bytes, and {self.capacities_bytes[index]} are allowed. Give it fewer samples.",
                    device=device.label,
                    device_index=index,
                    requested_bytes=peak_bytes,
                    capacity_bytes=self.capacities_bytes[index],
                )


def traced_peaks(tracer: Traces, shape: StepShape, devices: Sequence[Device] = ()) -> tuple[int, ...]:
    """Return the peak of each device's tensors, in bytes.

    Without `devices`, all devices run the kernels of `tracer`.
    """
    found = source_of(tracers_of(tracer, shape, devices), shape).devices()
    return tuple(0 if traced is None else traced.peak_bytes for traced in found)


def attention_of(tracer: Traces, devices: Sequence[Device]) -> list[tuple[str, ...]]:
    """Return the attention back ends that each device used in traces. Empty for a device with unknown kernels."""
    shape = StepShape(((1,) * len(devices),))
    tracers = [one.tracer if isinstance(one, AffineTraces) else one for one in tracers_of(tracer, shape, devices)]
    return [tuple(sorted({*one.attention.values()})) if one.kernels is not None else () for one in tracers]


def notes_on(settings: AllocatorSettings) -> tuple[Note, ...]:
    """Return a note if a setting of the allocator is not simulated."""
    if not settings.ignored:
        return ()
    names = ", ".join(settings.ignored)
    return (Note("allocator-settings", f"The predicted memory is that without {names}, which sim: does not simulate."),)


def attention_of_worker(worker: SimulatedWorker) -> list[tuple[str, ...]]:
    """Return the attention back ends on each device of a worker."""
    return attention_of(worker.tracer, worker.devices)
