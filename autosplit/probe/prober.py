"""Run or predict training steps of one workload, time them, and count what ran out of memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autosplit.devices.device import Evidence
from autosplit.errors import AutosplitError, advise, from_user_code
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError, is_kernel_limit
from autosplit.runtime.protocol import Facts, Measurement, StepMemory, StepShape, Worker
from autosplit.runtime.trainee import ran_a_step
from autosplit.solve.memory import MemoryParts, Role
from autosplit.solve.timed_sizes import TimedSize
from autosplit.text import ms_text
from autosplit.workload.model_call import assumptions
from autosplit.workload.workload import Workload

_log = logging.getLogger(__name__)

_MANY = 32
"""Smallest ceiling at which a single sample is not timed. One sample is 3% of this ceiling, so plans hardly use it."""


@dataclass
class Prober:
    """Run and predict steps of one workload on one worker.

    Attributes:
        report: Function that is called with progress messages.
        num_ranks: Number of DDP processes in the job. 0 means one process on each device.
        exact: Confirm that one more sample than a ceiling runs out of memory.
        deadline_s: `time.monotonic()` after which no step is run to confirm a ceiling, and only two sizes are timed.
            None for no limit.
        ooms: Number of real steps that ran out of memory.
        memories: The memory of the steps that ran on accelerators.
        found_on: The last device and its ceiling, by the device's name and capacity, role, and number of micro-steps.
    """

    worker: Worker
    workload: Workload
    max_batch_size: int
    report: Callable[[str], None] = lambda _message: None
    num_ranks: int = 0
    exact: bool = False
    deadline_s: float | None = None
    ooms: int = 0
    _measured: dict[StepShape, Measurement] = field(default_factory=dict)
    memories: dict[StepShape, StepMemory] = field(default_factory=dict)
    found_on: dict[tuple[str, int, Role, int], tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def facts(self) -> Facts:
        """What small steps of the workload show."""
        return self.worker.facts()

    @property
    def steps(self) -> int:
        """Number of real steps so far."""
        return self.worker.steps

    @property
    def out_of_time(self) -> bool:
        """Whether the time is up. Then no further step is run to confirm a ceiling."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    @property
    def evidence(self) -> Evidence:
        """What shows how many samples fit, see `Device.evidence`."""
        found = {device.evidence for device in self.worker.devices}
        return found.pop() if len(found) == 1 else "bytes"  # `find_ceiling` puts a device without a budget first

    @property
    def shares_processor(self) -> bool:
        """Whether the devices take turns on one CPU, so that their compute times add up."""
        return self.worker.devices[0].kind == "cpu"

    def keeps_distance(self, index: int) -> bool:
        """Return whether real steps must stay clear of a device's limit, because the device uses the host's memory."""
        return self.evidence == "steps" and self.worker.devices[index].integrated

    @property
    def least_batch(self) -> int:
        """The smallest batch to train on: 2 if a BatchNorm layer gets one value per sample, otherwise 1."""
        return self.facts.least_batch

    def notes(self) -> tuple[Note, ...]:
        """Return a note for each argument of the workload that was assumed."""
        return assumptions(self.workload, self.facts.loss_rule)

    # Predictions

    def predicted(self, shape: StepShape) -> tuple[int, ...]:
        """Predict the peak bytes of each device in a step, where bytes are counted."""
        with named_steps(shape):
            found = self.worker.predicted(shape)
        assert found is not None, "steps decide on accelerators"
        return tuple(parts.total_bytes for parts in found)

    def prediction_holds(self, shape: StepShape) -> bool:
        """Return whether the prediction of a step was right. If it was wrong, later predictions may differ."""
        with named_steps(shape):
            holds = self.worker.prediction_holds(shape)
        if not holds:
            self._measured.clear()  # another code path may also take a different time
        return holds

    def parts(self, shape: StepShape, peaks: Sequence[int], *, measured: bool = True) -> tuple[MemoryParts | None, ...]:
        """Return the parts of the devices' peaks, or None if they are unknown.

        Args:
            measured: Whether a step had these peaks. Then bytes beyond a prediction are not activations.
        """
        with named_steps(shape):
            found = self.worker.known_parts(shape)
        beyond = measured and not self.worker.exact and self.evidence != "steps"
        return tuple(parts.of_peak(peak, measured=beyond) for parts, peak in zip(found, peaks, strict=True))

    def rank_parts(
        self, batch_sizes: Sequence[int], peaks: Sequence[int], *, accumulates: bool
    ) -> tuple[MemoryParts | None, ...]:
        """Return the parts of the ranks' peaks, as `parts` does."""
        found: list[MemoryParts | None] = []
        for index, samples in enumerate(batch_sizes):
            shape = self.shapes(index, "rank", (), accumulates)(samples)
            found.append(self.parts(shape, peaks, measured=False)[index])
        return tuple(found)

    def line(self, predicted: Callable[[int], float], batch_size: int) -> tuple[int, int]:
        """Return the fixed bytes and the bytes per sample of the line through a ceiling and half of this ceiling.

        For a ceiling of 3, use 2 as its half, because a batch of 1 may run a different code path.
        """
        if batch_size < 2 * self.least_batch:
            return (int(predicted(batch_size)), 0) if batch_size else (0, 0)
        half = 2 if batch_size == 3 else batch_size // 2
        slope = max(0.0, (predicted(batch_size) - predicted(half)) / (batch_size - half))  # plans refuse negatives
        return int(predicted(batch_size) - slope * batch_size), int(slope)

    # Real steps

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step to measure its memory."""
        if self.evidence != "steps":
            return self.worker.peaks(shape)
        accelerators: Any = self.worker  # an `AcceleratorWorker`, or an `ChildWorker` around one
        memory: StepMemory = accelerators.memory(shape)
        self.memories[shape] = memory
        return memory.allocated_bytes

    def confirmed_peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Measure the memory of a step, or predict it if memory is never filled. May raise OutOfMemoryError."""
        if self.evidence == "steps" or all(device.budgeted for device in self.worker.devices):
            return self.peaks(shape)
        peaks = self.predicted(shape)
        limits = zip(self.worker.devices, peaks, self.worker.capacities_bytes, strict=True)
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
        """Time a step, once for each shape."""
        if shape not in self._measured:
            try:
                self._measured[shape] = timed = self.worker.measure(shape, budget_s=budget_s)
            except OutOfMemoryError as error:
                _log.info("timed %s: out of memory (%s)", shape, error)
                self.ooms += not self.worker.exact
                raise
            figures = ms_text(timed.seconds), ms_text(timed.error_s), timed.repeats
            _log.info("timed %s: %s, plus or minus %s, in %d repeats", shape, *figures)
        return self._measured[shape]

    def seconds_without_update(self, shape: StepShape, *, budget_s: float) -> float:
        """Return the time of a step in seconds, without its optimizer."""
        measured = self.measured(shape, budget_s=budget_s)
        return max(1e-9, measured.seconds - measured.update_s)

    def rank_seconds(self, index: int, samples: int, *, budget_s: float) -> float:
        """Return the time of a micro-step of one device as a DDP rank, in seconds."""
        self.report(f"timing {samples} sample{'s' * (samples > 1)} on {self.worker.devices[index].label}")
        return self.seconds_without_update(self.shapes(index, "rank", (), False)(samples), budget_s=budget_s)

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
        if self.worker.exact:
            return self.measured(StepShape(splits), budget_s=budget_s)
        begin = StepShape(splits[:2])
        peaks = () if self.evidence == "steps" else self.confirmed_peaks(begin)  # the timed run measures the peaks
        timed = self.measured(begin, budget_s=budget_s)
        seconds, error_s = timed.seconds, timed.error_s
        if len(splits) > 2:
            once_s = min(copies_s, (timed.seconds - timed.update_s) / 2)
            last_s = micro_s = (timed.seconds - timed.update_s - once_s) / len(begin.splits)
            if splits[-1] != splits[0]:
                last_s = self.seconds_without_update(StepShape((splits[-1],)), budget_s=budget_s)
                last_s = max(0.0, last_s - once_s) if any(splits[-1][1:]) else last_s
            seconds = once_s + micro_s * (len(splits) - 1) + last_s + timed.update_s
            error_s = timed.error_s * seconds / timed.seconds
        return replace(timed, seconds=seconds, error_s=error_s, peak_bytes=timed.peak_bytes or peaks)

    # Kinds of steps

    def shapes(
        self, index: int, role: Role, elsewhere: tuple[int, ...], accumulates: bool
    ) -> Callable[[int], StepShape]:
        """Return a function from n to the `StepShape` in which device `index` has n samples in this role."""
        count = len(self.worker.devices)
        assert role != "primary" or index == 0, "the primary is device 0"
        others = (0, *(elsewhere or (0,) * (count - 1))) if role == "primary" else (0,) * count
        micro_steps = 2 if accumulates else 1

        def shape(n: int) -> StepShape:
            split = tuple(n if position == index else samples for position, samples in enumerate(others))
            if role in ("primary", "replica"):
                # Only the replica's own memory matters here, so device 0 may have the same number of samples. The
                # simulation can predict this step from the steps that plans need.
                beside = role == "replica" and self.worker.exact and index > 0
                return balanced((n, *split[1:]) if beside else split, accumulates=accumulates)
            if role == "eval":
                return StepShape((split,), "eval", num_ranks=self.num_ranks or count)
            return StepShape((split,) * micro_steps, "rank", num_ranks=self.num_ranks or count)

        return shape

    def forward_and_backward(self, index: int) -> Callable[[int], StepShape]:
        """Return a function that makes the forward and backward of n samples on one device, without an update."""
        places = range(len(self.worker.devices))
        return lambda n: StepShape((tuple(n if place == index else 0 for place in places),), "rank", updates=False)


def timed_sizes(prober: Prober, index: int, ceiling: int, *, role: Role, budget_s: float) -> list[TimedSize]:
    """Time a device at its ceiling, at the smallest batch (1 or 2), and at every power of two in between.

    A slow device next to fast ones may get 1% of its ceiling. Below its first point, a curve is constant. So a curve
    that began higher would make small batches look too slow, and the device would get almost no samples.

    Args:
        role: ``"rank"``, ``"primary"``, or ``"replica"``. A replica is timed without device 0 and an optimizer, so
            that neither copies nor the gather count.
        budget_s: Time in seconds for repeating each step.

    Raises:
        OutOfMemoryError: No size could be run.
    """
    # A simulated step of one sample needs its own trace, but larger steps are extrapolated. Skip it for a large
    # ceiling.
    least = min(max(prober.least_batch, 2 if prober.worker.exact and ceiling >= _MANY else 1), ceiling)
    apart = role == "replica"
    shape_of = prober.forward_and_backward(index) if apart else prober.shapes(index, role, (), False)
    if prober.worker.exact:
        prober.prediction_holds(shape_of(ceiling))  # one trace instead of one for each size
    # Use powers of two, so that devices share their traces.
    between = [2**power for power in reversed(range(ceiling.bit_length())) if least < 2**power < ceiling]
    timed: list[TimedSize] = []
    lacking: OutOfMemoryError | None = None
    for n in dict.fromkeys((ceiling, least, *between)):  # Both ends come first, because time may run out.
        if len(timed) > 1 and prober.out_of_time:
            break
        prober.report(f"timing {n} sample{'s' * (n > 1)} on {prober.worker.devices[index].label}")
        try:
            seconds = prober.seconds_without_update(shape_of(n), budget_s=budget_s)
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
