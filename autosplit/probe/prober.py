"""Run training steps of one workload or predict them from traces, time them, and count the steps that were run."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autosplit.accelerators import is_accelerator
from autosplit.devices.host_memory import available_host_bytes
from autosplit.errors import AutosplitError, advise, from_user_code
from autosplit.oom import OutOfMemoryError, is_kernel_limit
from autosplit.runtime.affine_traces import AffineTraces
from autosplit.runtime.protocol import Measurement, Runtime, StepMemory, StepShape
from autosplit.runtime.simulated import SimulatedRuntime, Traces, attention_of, traced_parts, traced_peaks
from autosplit.runtime.tracer import Tracer
from autosplit.runtime.trainee import ran_a_step
from autosplit.solve.memory import MemoryParts, Role
from autosplit.solve.timed_sizes import TimedSize
from autosplit.text import ms_text
from autosplit.workload.workload import copying

_log = logging.getLogger(__name__)

_MANY = 32
"""Smallest ceiling at which a single sample is not timed. One sample is 3% of this ceiling, so plans hardly use it."""


@dataclass
class Counts:
    """The number of real steps, and how many of them ran out of memory."""

    steps: int = 0
    ooms: int = 0


@dataclass
class Prober:
    """Run and predict steps of one workload on one runtime.

    Attributes:
        report: Function that is called with progress messages.
        num_ranks: Number of DDP processes in the job. 0 means one process on each device.
        exact: Confirm that one more sample than a ceiling runs out of memory.
        deadline_s: `time.monotonic()` after which no step is run to confirm a ceiling, and only two sizes are timed.
            None for no limit.
        memories: The memory of the steps that ran on accelerators.
        found_on: The last device and its ceiling, by the device's name and capacity, role, and number of micro-steps.
    """

    runtime: Runtime
    tracer: Tracer
    max_batch_size: int
    report: Callable[[str], None] = lambda _message: None
    num_ranks: int = 0
    exact: bool = False
    deadline_s: float | None = None
    counts: Counts = field(default_factory=Counts)
    _has_state: bool = False
    _measured: dict[StepShape, Measurement] = field(default_factory=dict)
    memories: dict[StepShape, StepMemory] = field(default_factory=dict)
    found_on: dict[tuple[str, int, Role, int], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        optimizer = self.tracer.workload.optimizer
        self._has_state = isinstance(optimizer, torch.optim.Optimizer) and bool(optimizer.state)

    @property
    def out_of_time(self) -> bool:
        """Whether the time is up. Then no further step is run to confirm a ceiling."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    @functools.cached_property
    def decides_by_steps(self) -> bool:
        """Whether real steps decide what fits, and traces only choose the first size to run. True on accelerators."""
        return is_accelerator(self.runtime.devices[0].kind)

    def keeps_distance(self, index: int) -> bool:
        """Return whether real steps must stay clear of a device's limit, because the device uses the host's memory."""
        return self.decides_by_steps and self.runtime.devices[index].integrated

    @property
    def limited_by_time(self) -> bool:
        """Whether time limits the batch, because no device has a memory limit: a CPU without a budget."""
        return all(device.kind == "cpu" and not device.budgeted for device in self.runtime.devices)

    @property
    def has_traces(self) -> bool:
        """Whether traces can predict memory. A model that runs only on its GPU can't be traced."""
        return self.tracer.fake or not self.decides_by_steps

    @functools.cached_property
    def _traces(self) -> Traces:
        return self.runtime.tracer if isinstance(self.runtime, SimulatedRuntime) else AffineTraces(self.tracer)

    def least_batch(self) -> int:
        """Return the smallest batch to train on: 2 if a BatchNorm layer gets one value per sample, otherwise 1."""
        if not self.tracer.norms_over_samples:
            return 1
        return self._least_traced if self.has_traces else 2

    @functools.cached_property
    def _least_traced(self) -> int:
        one = StepShape(((1,),))
        try:
            with named_steps(one):
                self.tracer.trace(one)
        except AutosplitError as error:
            # torch nn/functional.py, _verify_batch_size. The wrapper's error has torch's error as its cause.
            if "Expected more than 1 value per channel" not in str(error.__cause__):
                raise
            return 2
        return 1

    # Predictions from traces

    def traced(self, shape: StepShape) -> tuple[int, ...]:
        """Predict the peak bytes of each device in a step."""
        before = self.tracer.runs
        with named_steps(shape):
            found = traced_peaks(self._traces, shape, self.runtime.devices)
        if not self.tracer.fake:  # A trace with real tensors is a real step.
            self.count(self.tracer.runs - before)
        return found

    def attention(self) -> list[tuple[str, ...]]:
        """Return the attention back ends on each device, as traced."""
        return attention_of(self._traces, self.runtime.devices)

    def foretold(self, shape: StepShape) -> bool:
        """Trace a step and return whether its prediction was right.

        If the prediction was wrong, similar steps are traced from now on instead of predicted.
        """
        if not isinstance(self._traces, AffineTraces) or not self.tracer.fake or self.decides_by_steps:
            return True
        given_up = self._traces.given_up
        with self._traces.checking():
            self.traced(shape)
        if self._traces.given_up == given_up:
            return True
        self._measured.clear()  # another code path may also take a different time
        return False

    @functools.cached_property
    def largest_traced(self) -> int:
        """The largest batch to trace. With real tensors, it fits a quarter of the host's memory."""
        if self.tracer.fake:
            return self.max_batch_size
        n = max(self.least_batch(), min(self.tracer.workload.sample_batch_size, self.max_batch_size))
        fixed_bytes, bytes_per_sample = self.line(lambda size: self.traced(StepShape(((size,),)))[0], 2 * n)
        room_bytes = available_host_bytes() / 4 - fixed_bytes
        return max(2 * n, min(self.max_batch_size, int(room_bytes / max(1, bytes_per_sample))))

    def parts(self, shape: StepShape, peaks: Sequence[int]) -> tuple[MemoryParts | None, ...]:
        """Return the traced parts of the devices' peaks, or None if they are unknown."""
        if not (self.tracer.fake or self.runtime.simulated):
            return (None,) * len(peaks)  # a trace with real tensors needs a step's memory
        with named_steps(shape):
            found = traced_parts(self._traces, shape, self.runtime.devices)
        measured = not self.runtime.simulated
        return tuple(parts.of_peak(peak, measured=measured) for parts, peak in zip(found, peaks, strict=True))

    def rank_parts(
        self, batch_sizes: Sequence[int], peaks: Sequence[int], *, accumulates: bool
    ) -> tuple[MemoryParts | None, ...]:
        """Return the traced parts of the ranks' peaks, as `parts` does."""
        found: list[MemoryParts | None] = [None] * len(peaks)
        for index, samples in enumerate(batch_sizes) if self.tracer.fake or self.runtime.simulated else ():
            shape = self.shapes(index, "rank", (), accumulates)(samples)
            own = self.parts(shape, self.traced(shape))[index]
            found[index] = None if own is None else own.of_peak(peaks[index], measured=False)
        return tuple(found)

    def line(self, predicted: Callable[[int], float], batch_size: int) -> tuple[int, int]:
        """Return the fixed bytes and the bytes per sample of the line through a ceiling and half of this ceiling.

        For a ceiling of 3, use 2 as its half, because a batch of 1 may run a different code path.
        """
        if batch_size < 2 * self.least_batch():
            return (int(predicted(batch_size)), 0) if batch_size else (0, 0)
        half = 2 if batch_size == 3 else batch_size // 2
        slope = max(0.0, (predicted(batch_size) - predicted(half)) / (batch_size - half))  # plans refuse negatives
        return int(predicted(batch_size) - slope * batch_size), int(slope)

    # Real steps

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step to measure its memory, and count the steps that were run."""
        if not self.decides_by_steps:
            evaluates = shape.arrangement == "eval"
            # The first step creates the optimizer state. If `fits` has "resume" or "save", the second step begins by
            # making their copies. So only a third step finds the memory unchanged, which ends the measurement.
            first = 3 if copying(self.tracer.workload.held) else 2
            self.count(1 if self._has_state or evaluates else first)
            self._has_state = self._has_state or not evaluates
            return self.runtime.peaks(shape)
        accelerators: Any = self.runtime  # an `AcceleratorRuntime`, or an `IsolatedRuntime` around one
        try:
            self.memories[shape] = memory = accelerators.memory(shape)
        except Exception:
            self.count(1)
            raise
        self.count(memory.steps)
        return self.memories[shape].allocated_bytes

    def confirmed_peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step to measure its memory, or trace it if memory is never filled. Both may raise OutOfMemoryError."""
        if self.decides_by_steps or all(device.budgeted for device in self.runtime.devices):
            return self.peaks(shape)
        peaks = self.traced(shape)
        limits = zip(self.runtime.devices, peaks, self.runtime.capacities_bytes, strict=True)
        for index, (device, peak_bytes, capacity_bytes) in enumerate(limits):
            if peak_bytes > capacity_bytes:
                raise OutOfMemoryError(
                    f"{device.label} needs {peak_bytes} bytes for {shape.splits[0][index]} samples, but only "
                    f"{capacity_bytes} are allowed. Give it fewer samples.",
                    device=device.label,
                    device_index=index,
                    requested_bytes=peak_bytes,
                    capacity_bytes=capacity_bytes,
                )
        return peaks

    def measured(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Time a step, once for each shape. Its repeats count as steps."""
        if shape not in self._measured:
            try:
                self._measured[shape] = timed = self.runtime.measure(shape, budget_s=budget_s)
            except OutOfMemoryError as error:
                _log.info("timed %s: out of memory (%s)", shape, error)
                self.count(1, ooms=1)
                raise
            told = ms_text(timed.seconds), ms_text(timed.error_s), timed.repeats
            _log.info("timed %s: %s, plus or minus %s, in %d repeats", shape, *told)
            self.count(timed.repeats)
        return self._measured[shape]

    def micro_seconds(self, shape: StepShape, *, budget_s: float) -> float:
        """Return the time of a step of one micro-step in seconds, without its optimizer."""
        measured = self.measured(shape, budget_s=budget_s)
        return max(1e-9, measured.seconds - measured.update_s)

    def rank_seconds(self, index: int, samples: int, *, budget_s: float) -> float:
        """Return the time of a micro-step of one device as a DDP rank, in seconds."""
        self.report(f"timing {samples} sample{'s' * (samples > 1)} on {self.runtime.devices[index].label}")
        return self.micro_seconds(self.shapes(index, "rank", (), False)(samples), budget_s=budget_s)

    def update_seconds(self) -> float:
        """Return the optimizer's time in seconds, from the timed steps. It does not depend on the batch."""
        timed = (measured.update_s for shape, measured in self._measured.items() if shape.updates)
        return min(timed, default=0.0)

    def step(self, splits: tuple[tuple[int, ...], ...], *, budget_s: float, copies_s: float = 0.0) -> Measurement:
        """Measure a whole optimizer step: its time, and the peak of each device.

        A real step of many micro-steps is computed from a step of the first two and, if it differs, the last
        micro-step. All other micro-steps are equal.

        Args:
            copies_s: Time in seconds that a step spends copying parameters and gradients, once for all its micro-steps.
        """
        if self.runtime.simulated:
            return self.measured(StepShape(splits), budget_s=budget_s)
        begin = StepShape(splits[:2])
        peaks = () if self.decides_by_steps else self.confirmed_peaks(begin)  # the timed run measures the peaks
        timed = self.measured(begin, budget_s=budget_s)
        seconds, error_s = timed.seconds, timed.error_s
        if len(splits) > 2:
            once_s = min(copies_s, (timed.seconds - timed.update_s) / 2)
            last_s = micro_s = (timed.seconds - timed.update_s - once_s) / len(begin.splits)
            if splits[-1] != splits[0]:
                last_s = self.micro_seconds(StepShape((splits[-1],)), budget_s=budget_s)
                last_s = max(0.0, last_s - once_s) if any(splits[-1][1:]) else last_s
            seconds = once_s + micro_s * (len(splits) - 1) + last_s + timed.update_s
            error_s = timed.error_s * seconds / timed.seconds
        return replace(timed, seconds=seconds, error_s=error_s, peak_bytes=timed.peak_bytes or peaks)

    def count(self, steps: int, ooms: int = 0) -> None:
        """Add real steps to the counts. Simulated steps do not count."""
        if not self.runtime.simulated:
            self.counts.steps += steps
            self.counts.ooms += ooms

    # Kinds of steps

    def shapes(
        self, index: int, role: Role, elsewhere: tuple[int, ...], accumulates: bool
    ) -> Callable[[int], StepShape]:
        """Return a function from n to the `StepShape` in which device `index` has n samples in this role."""
        count = len(self.runtime.devices)
        assert role != "primary" or index == 0, "the primary is device 0"
        others = (0, *(elsewhere or (0,) * (count - 1))) if role == "primary" else (0,) * count
        micro_steps = 2 if accumulates else 1

        def shape(n: int) -> StepShape:
            split = tuple(n if position == index else samples for position, samples in enumerate(others))
            if role in ("primary", "replica"):
                # Only the replica's own memory matters here, so device 0 may have the same number of samples. The
                # simulation can predict this step from the steps that plans need.
                beside = role == "replica" and self.runtime.simulated and index > 0
                return balanced((n, *split[1:]) if beside else split, accumulates=accumulates)
            if role == "eval":
                return StepShape((split,), "eval", num_ranks=self.num_ranks or count)
            return StepShape((split,) * micro_steps, "rank", num_ranks=self.num_ranks or count)

        return shape

    def forward_and_backward(self, index: int) -> Callable[[int], StepShape]:
        """Return a function that makes the forward and backward of n samples on one device, without an update."""
        places = range(len(self.runtime.devices))
        return lambda n: StepShape((tuple(n if place == index else 0 for place in places),), "rank", updates=False)


def timed_sizes(
    prober: Prober, index: int, ceiling: int, *, role: Role, budget_s: float, alone: bool = True
) -> list[TimedSize]:
    """Time a device at its ceiling, at the smallest batch (1 or 2), and at every power of two in between.

    A slow device next to fast ones may get 1% of its ceiling. Below its first point, a curve is constant. So a curve
    that began higher would make small batches look too slow, and the device would get almost no samples.

    Args:
        role: ``"rank"``, ``"primary"``, or ``"replica"``. A replica without device 0 is timed without an optimizer.
        budget_s: Time in seconds for repeating each step.
        alone: Time a replica without device 0, so that neither copies nor the gather count. Without device 0, the
            replica needs more memory at once than its part of a step.

    Raises:
        OutOfMemoryError: No size could be run.
    """
    # A simulated step of one sample needs its own trace, but larger steps are extrapolated. Skip it for a large
    # ceiling.
    least = min(max(prober.least_batch(), 2 if prober.runtime.simulated and ceiling >= _MANY else 1), ceiling)
    apart = alone and role == "replica"
    shape_of = prober.forward_and_backward(index) if apart else prober.shapes(index, role, (), False)
    if prober.runtime.simulated:
        prober.foretold(shape_of(ceiling))  # one trace instead of one for each size
    # Use powers of two, so that devices share their traces.
    between = [2**power for power in reversed(range(ceiling.bit_length())) if least < 2**power < ceiling]
    timed: list[TimedSize] = []
    lacking: OutOfMemoryError | None = None
    for n in dict.fromkeys((ceiling, least, *between)):  # Both ends come first, because time may run out.
        if len(timed) > 1 and prober.out_of_time:
            break
        prober.report(f"timing {n} sample{'s' * (n > 1)} on {prober.runtime.devices[index].label}")
        try:
            seconds = prober.micro_seconds(shape_of(n), budget_s=budget_s)
        except OutOfMemoryError as error:
            lacking = error
            continue
        timed.append(TimedSize(n, seconds, prober.measured(shape_of(n), budget_s=budget_s).error_s))
    if not timed:
        assert lacking is not None, "there is at least one size"
        raise lacking
    return sorted(timed, key=lambda size: size.samples)


def balanced(split: tuple[int, ...], *, accumulates: bool) -> StepShape:
    """Return a step over all devices. With accumulation it has two micro-steps."""
    return StepShape((split,) * (2 if accumulates else 1))


@contextmanager
def named_steps(shape: StepShape) -> Iterator[None]:
    """Add the batch size to errors of the user's code, because other sizes than the sample batch's are run, too."""
    try:
        yield
    except (AutosplitError, OutOfMemoryError):
        raise
    except Exception as error:
        if is_kernel_limit(error) or not ran_a_step(error.__traceback__):
            raise
        samples, shares = sum(shape.splits[0]), [share for share in shape.splits[0] if share]
        cut = f", cut {tuple(shares)}" if len(shares) > 1 else ""
        advise(
            error,
            "fix it and run again. If only the sample batch's own size runs, batch_dim may not be the dimension of "
            "the samples. Make a single sample a batch with sample.unsqueeze(0). Or the batch has values that "
            "autosplit does not cut. Make them tensors or lists, or pass make_batch=.",
        )
        what = f"The workload, with a batch of {samples}{cut} (max_batch_size bounds the batches that are run),"
        raise from_user_code(error, what) from error
