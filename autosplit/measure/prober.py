"""How many samples each device holds, and how long it takes over them: the only module that may provoke an OOM.

A ceiling is predicted from traces, checked with two small real steps, and confirmed by running the very size. On
accelerators, where a real step costs less than a trace, few of them decide, and two traces tell where to begin; on
simulated cards the trace is the truth. Nobody doubles until something breaks.
"""

from __future__ import annotations

import bisect
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from autosplit.accelerators import is_accelerator
from autosplit.devices.host_memory import available_host_bytes
from autosplit.errors import AutosplitError, UserCodeError, WorkloadError, from_user_code, one_line
from autosplit.measure.observations import SLOPE_TOLERANCE, Observations, alike_slopes, step_kind, traced_near
from autosplit.measure.wall_search import WallSearch
from autosplit.oom import DoesNotFitError, OutOfMemoryError, is_kernel_limit
from autosplit.runtime.affine_traces import AffineTraces
from autosplit.runtime.protocol import Measurement, Runtime, SeesMemory, StepMemory, StepShape
from autosplit.runtime.simulated import traced_parts, traced_peaks
from autosplit.runtime.subprocess_runtime import IsolatedRuntime, StepLostError
from autosplit.runtime.tracer import Tracer, Traces
from autosplit.runtime.trainee import ran_a_step
from autosplit.runtime.training_copy import bytes_on_accelerators
from autosplit.solve.memory import LONGEST_LEAP, Ceiling, Limit, MemoryFit, MemoryParts, Role, largest_fitting
from autosplit.solve.split import proportional_split
from autosplit.solve.step_time import TimeCurve
from autosplit.solve.timed_sizes import TimedSize
from autosplit.text import ms_text, size_text
from autosplit.workload.workload import optimizers_of

__all__ = ["Prober", "does_not_fit"]


_log = logging.getLogger(__name__)

STRAIGHT_ENOUGH = 0.1
"""A line of so much the same slope may be followed beyond what was traced: real steps correct it."""

STEP_DOWN = 0.05
"""After a step that ran out of memory, the next has this share of its samples less; four times that after a second."""

MAX_CONFIRMATIONS = 8
"""Real steps at or near the ceiling, at most; the largest that ran is the answer then."""

MOST_TRACED = 5
"""Sizes, where a trace is a real step."""

KNEE_GAIN = 0.03
"""On a plain CPU no larger batch is tried once two doublings in a row gained less throughput."""

LONGEST_STEP_S = 2.0
"""On a plain CPU no larger batch is tried once a step takes longer."""

DOUBLING_BUDGET_S = 0.5
"""Repeating one of those batches stops after this long."""


@dataclass
class Counts:
    """Real steps so far, and how many ran out of memory."""

    steps: int = 0
    ooms: int = 0


@dataclass
class Prober:
    """Finds ceilings and times of one workload on one runtime.

    Attributes:
        runtime: Where steps run.
        tracer: Predicts their memory.
        max_batch_size: Nothing larger is looked at.
        counts: Real steps and OOMs so far.
        report: Told what is being done, in a few words.
        num_ranks: DDP processes in the job; 0 for one on each device.
        exact: Confirm that one sample more than a ceiling runs out of memory.
        deadline_s: `time.monotonic()` after which the largest batch that was seen to fit is the ceiling, and two sizes
            are timed; None for no limit.
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
    _traced: dict[StepShape, tuple[int, ...]] = field(default_factory=dict)
    _measured: dict[StepShape, Measurement] = field(default_factory=dict)
    _equals: dict[tuple[str, int, Role, int], tuple[int, int]] = field(default_factory=dict)
    _slopes: dict[tuple[str, int, Role, int], tuple[int, float]] = field(default_factory=dict)
    _memories: dict[StepShape, StepMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        optimizer = self.tracer.workload.optimizer
        self._has_state = isinstance(optimizer, torch.optim.Optimizer) and bool(optimizer.state)

    def least_batch(self) -> int:
        """Return the smallest share that a device trains on: 2 where a BatchNorm sees one value per sample, else 1."""
        if not self.tracer.norms_over_samples:
            return 1
        if not self.has_traces:
            return 2
        return self._least_traced

    @functools.cached_property
    def _least_traced(self) -> int:
        one = StepShape(((1,),))
        try:
            if self.decides_by_steps:  # with this one size nothing is to be foretold
                with _naming(one):
                    self.tracer.trace(one)
            else:
                self.traced(one)
        except AutosplitError as error:
            # torch nn/functional.py, _verify_batch_size; the wrapper's own words for it are raised from it.
            if "Expected more than 1 value per channel" not in str(error.__cause__):
                raise
            return 2
        return 1

    def ceiling(
        self,
        index: int,
        role: Role,
        *,
        elsewhere: tuple[int, ...] = (),
        accumulates: bool = False,
        start: int | None = None,
        slope: float = 0.0,
    ) -> Ceiling:
        """Find the ceiling of one device in one role.

        Args:
            index: The device's position.
            role: What it does; ``primary`` is device 0's alone.
            elsewhere: For ``primary``, the samples of the other devices at the same time; default none.
            accumulates: Several micro-steps make a step, so that gradients are held all through the second.
            start: Where to begin to look. Default: the sample batch's size.
            slope: Bytes per sample, roughly; 0 where nothing is known of it.

        Returns:
            The ceiling; 0 where not even one sample fits.
        """
        self.report(f"{self.runtime.devices[index].label}: ceiling as {role}")
        self._refuse_unlike_steps()
        shape_of = self._shapes(index, role, elsewhere, accumulates)
        if self.decides_by_steps:
            return self._ceiling_by_steps(index, role, shape_of, start)
        capacity_bytes = self.runtime.capacities_bytes[index]
        before = Counts(self.counts.steps, self.counts.ooms)
        least = self.least_batch()
        seen = Observations()

        def traced(n: int) -> float:
            n = max(n, least)  # fewer can't be run to see
            if n in seen.on_line:
                return seen.on_line[n]
            if n not in seen.traced:
                seen.traced[n] = self.traced(shape_of(n))[index]
            return seen.traced[n]

        predicted = self._extended(traced, capacity_bytes)
        start = min(max(1, start or self.tracer.workload.sample_batch_size), self.max_batch_size)
        real_slope = self._real_slope(index, role, shape_of, start, predicted, seen)
        batch_size = largest_fitting(
            predicted,
            capacity_bytes,
            least=0,
            most=self.max_batch_size,
            start=start,
            slope=real_slope or slope,
            straight_within=SLOPE_TOLERANCE if real_slope else 0.0,
            enough=lambda: self.out_of_time,
        )
        if real_slope:
            seen.draw_line(start, batch_size, real_slope)
        batch_size = 0 if batch_size < least else batch_size
        confirmed = False
        if not self.runtime.simulated and batch_size > 0:
            batch_size = self._confirmed(index, role, shape_of, predicted, batch_size, seen)
            confirmed = batch_size > 0
        peak_bytes = seen.ran[batch_size] if confirmed else int(predicted(batch_size)) if batch_size else 0
        fixed_bytes, bytes_per_sample = self._line(predicted, batch_size, seen.known())
        limit: Limit = seen.limit or ("max_batch_size" if batch_size >= self.max_batch_size else "memory")
        if limit == "memory" and self.out_of_time and not seen.ends_at(batch_size):
            limit = "time"
        self._log_ceiling(index, role, batch_size, limit, peak_bytes, confirmed=confirmed)
        return Ceiling(
            device=self.runtime.devices[index].label,
            role=role,
            batch_size=batch_size,
            limited_by=limit,
            fixed_bytes=fixed_bytes,
            bytes_per_sample=bytes_per_sample,
            peak_bytes=peak_bytes,
            capacity_bytes=capacity_bytes,
            steps=self.counts.steps - before.steps,
            ooms=self.counts.ooms - before.ooms,
            confirmed=confirmed,
            points=seen.points(),
        )

    @functools.cached_property
    def decides_by_steps(self) -> bool:
        """Whether real steps say what fits, and traces only where to begin: on accelerators."""
        return is_accelerator(self.runtime.devices[0].kind)

    @property
    def has_traces(self) -> bool:
        """Whether anything can be predicted: a model that runs on nothing but its device has real steps alone."""
        return self.tracer.fake or not self.decides_by_steps

    @functools.cached_property
    def _traces(self) -> Traces:
        """Return the traces that foretell steps: where a real step costs less than a trace, few that tell of all."""
        if not self.decides_by_steps:
            return self.tracer
        samples = max(self.least_batch(), self.tracer.workload.sample_batch_size)
        return AffineTraces(self.tracer, samples, max(self.max_batch_size, samples))

    def _ceiling_by_steps(
        self, index: int, role: Role, shape_of: Callable[[int], StepShape], start: int | None
    ) -> Ceiling:
        """Find a ceiling by real steps; see `ceiling`."""
        device, capacity_bytes = self.runtime.devices[index], self.runtime.capacities_bytes[index]
        least, steps, ooms = self.least_batch(), self.counts.steps, self.counts.ooms
        begin = start or self.tracer.workload.sample_batch_size
        search = WallSearch(
            (lambda n: self.traced(shape_of(max(n, least)))[index]) if self.has_traces else None,
            capacity_bytes,
            least,
            self.max_batch_size,
            start=min(max(begin, least), max(least, self.max_batch_size)),
            known=self._alike(index, role, shape_of) or 0,
        )
        seen = Observations()
        n = search.next() if self.max_batch_size >= least else None
        while n is not None:
            self._run_for(search, index, shape_of, n, seen)
            n = None if self.out_of_time and search.found else self._following(search, capacity_bytes)
        found = search.found
        self._equals[step_kind(self.runtime, index, role, shape_of)] = index, found
        limit: Limit = seen.limit or ("max_batch_size" if found >= self.max_batch_size else "memory")
        if limit == "memory" and self.out_of_time and found + 1 not in seen.failed:
            limit = "time"
        fixed_bytes, bytes_per_sample = self._line(search.corrected, found)
        peak_bytes = search.allocated.get(found, 0)
        self._log_ceiling(index, role, found, limit, peak_bytes, confirmed=found > 0)
        return Ceiling(
            device=device.label,
            role=role,
            batch_size=found,
            limited_by=limit,
            fixed_bytes=fixed_bytes,
            bytes_per_sample=bytes_per_sample,
            peak_bytes=peak_bytes,
            capacity_bytes=capacity_bytes,
            steps=self.counts.steps - steps,
            ooms=self.counts.ooms - ooms,
            confirmed=found > 0,
            points=seen.points(),
        )

    def _following(self, search: WallSearch, capacity_bytes: int) -> int | None:
        """Return the next size; where a ceiling is to be exact, one sample more until that fails."""
        n = search.next()
        if n is None and self.exact and search.found < self.max_batch_size and search.failed != search.found + 1:
            n = search.found + 1
        if n is not None:
            _log.info("next %d of %s: %d ran, of the sizes tried", n, size_text(capacity_bytes), search.found)
        return n

    def _run_for(
        self, search: WallSearch, index: int, shape_of: Callable[[int], StepShape], n: int, seen: Observations
    ) -> None:
        """Run a size, and tell the search what came of it."""
        if self._ran(index, shape_of, n, seen):
            memory = self._memories[shape_of(n)]
            search.ran(n, memory.allocated_bytes[index], memory.reserved_bytes[index], memory.steps)
        else:
            search.ran_out(n)
            search.blind = seen.limit == "kernel" or seen.lost

    def _peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step for its memory, and count the steps that this took."""
        if not self.decides_by_steps:
            self._count(self._steps_to_see(shape))
            return self.runtime.peaks(shape)
        assert isinstance(self.runtime, SeesMemory), self.runtime
        try:
            self._memories[shape] = memory = self.runtime.memory(shape)
        except Exception:
            self._count(1)
            raise
        self._count(memory.steps)
        return memory.allocated_bytes

    def _refuse_unlike_steps(self) -> None:
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers_of(self.tracer.trainee.optimizers)):
            raise WorkloadError(
                "the optimizer is LBFGS, which holds more or less from step to step, as its history fills and the loss "
                "falls; expected one whose steps are alike, or no batch is known to fit; run its largest batch by "
                "itself, or plan with another optimizer"
            )

    def _log_ceiling(
        self, index: int, role: Role, batch_size: int, limit: Limit, peak_bytes: int, *, confirmed: bool
    ) -> None:
        _log.info(
            "%s as %s: the ceiling is %d samples, limited by %s, %s: %s of %s",
            *(self.runtime.devices[index].label, role, batch_size, limit),
            "a step of it ran" if confirmed else "by traces",
            *(size_text(peak_bytes), size_text(self.runtime.capacities_bytes[index])),
        )

    def _real_slope(
        self,
        index: int,
        role: Role,
        shape_of: Callable[[int], StepShape],
        start: int,
        predicted: Callable[[int], float],
        seen: Observations,
    ) -> float:
        """Run two small steps before anything but one of them is traced, where a step costs less than a trace.

        That is on a processor that counts every byte: there real bytes lie where the trace would see them. What they
        tell of the slope spares the trace of a second size.

        Returns:
            Bytes per sample; 0 where that can't be said.
        """
        device, least = self.runtime.devices[index], self.least_batch()
        counts_bytes = device.kind == "cpu" and device.budgeted and self.tracer.fake and not self.runtime.simulated
        alike = step_kind(self.runtime, index, role, shape_of)
        other, slope = self._slopes.get(alike, (index, 0.0))
        if other != index:
            return slope
        # Twice the samples are no more than twice the bytes; where that is too much, half as many will do.
        roomy = 2 * start <= self.max_batch_size and 2 * predicted(start) <= self.runtime.capacities_bytes[index]
        first, second = (start, 2 * start) if roomy else (start // 2, start)
        if not counts_bytes or first < least or predicted(start) > self.runtime.capacities_bytes[index]:
            return 0.0
        if not all(self._ran(index, shape_of, n, seen) for n in (first, second)):
            return 0.0
        slope = max(0.0, (seen.ran[second] - seen.ran[first]) / (second - first))
        self._slopes[alike] = index, slope
        return slope

    def traced(self, shape: StepShape) -> tuple[int, ...]:
        """Predict each device's peak in a step, in bytes."""
        if shape not in self._traced:
            before = self.tracer.runs
            with _naming(shape):
                self._traced[shape] = traced_peaks(self._traces, shape)
            _log.debug("traced %s: %s", _shape_text(shape), _bytes_texts(self._traced[shape]))
            if not self.tracer.fake:  # followed with real tensors, a trace is a step
                self._count(self.tracer.runs - before)
        return self._traced[shape]

    def parts(self, shape: StepShape, peaks: Sequence[int]) -> tuple[MemoryParts | None, ...]:
        """Tell what the devices hold at their peaks, as traced; None where that is not known.

        Args:
            shape: The step.
            peaks: What each device held, in bytes.
        """
        if not (self.tracer.fake or self.runtime.simulated):
            return (None,) * len(peaks)  # a trace of real tensors is a step, and holds what the devices hold
        with _naming(shape):
            found = traced_parts(self._traces, shape)
        measured = not self.runtime.simulated
        return tuple(parts.of_peak(peak, measured=measured) for parts, peak in zip(found, peaks, strict=True))

    def rank_parts(
        self, batch_sizes: Sequence[int], peaks: Sequence[int], *, accumulates: bool
    ) -> tuple[MemoryParts | None, ...]:
        """Tell what DDP's ranks hold at their peaks, as `parts` does.

        Args:
            batch_sizes: Samples of each.
            peaks: What each is predicted to hold, in bytes.
            accumulates: The optimizer step has several forwards.
        """
        found: list[MemoryParts | None] = []
        for index, (samples, peak_bytes) in enumerate(zip(batch_sizes, peaks, strict=True)):
            shape = self._shapes(index, "rank", (), accumulates)(samples)
            traced = self.parts(shape, self.traced(shape)) if self.tracer.fake or self.runtime.simulated else ()
            own = traced[index] if traced else None
            found.append(None if own is None else own.of_peak(peak_bytes, measured=False))
        return tuple(found)

    @functools.cached_property
    def largest_traced(self) -> int:
        """The largest batch that is traced: any with fake tensors; with real ones what fits a quarter of the host."""
        if self.tracer.fake:
            return self.max_batch_size
        n = max(self.least_batch(), min(self.tracer.workload.sample_batch_size, self.max_batch_size))
        fixed_bytes, bytes_per_sample = self._line(lambda size: self.traced(StepShape(((size,),)))[0], 2 * n)
        room_bytes = available_host_bytes() / 4 - fixed_bytes
        return max(2 * n, min(self.max_batch_size, int(room_bytes / max(1, bytes_per_sample))))

    def _extended(self, traced: Callable[[int], float], capacity_bytes: int) -> Callable[[int], float]:
        """Return the traced peaks; where a trace is a real step, of few sizes, with lines between and beyond them."""
        if self.tracer.fake or self.runtime.simulated:
            return self._traced_up_to(self.largest_traced, traced)
        known = self._few_traced(traced, capacity_bytes)
        sizes = sorted(known)

        def peak(n: int) -> float:
            if n in known or n < sizes[0]:
                return traced(n)
            after = min(max(1, bisect.bisect_left(sizes, n)), len(sizes) - 1)
            low, high = sizes[max(0, after - 1)], sizes[after]
            return known[low] + (known[high] - known[low]) / max(1, high - low) * (n - low)

        return peak

    def _few_traced(self, traced: Callable[[int], float], capacity_bytes: int) -> dict[int, float]:
        """Trace growing sizes until one fits no more, or three lie on a line that may be followed to the ceiling.

        A trace has no budget to run out of. As long as the optimizer's moment is the fullest, say, the peak does not
        grow at all, and no line through small sizes tells of large ones: none is followed too far.
        """
        n = max(self.least_batch(), min(self.tracer.workload.sample_batch_size, self.max_batch_size))
        known, slope = {n: traced(n)}, 0.0
        following = min(2 * n, self.max_batch_size)
        while following > n and known[n] <= capacity_bytes and len(known) < MOST_TRACED:
            known[following] = traced(following)
            before, slope = slope, (known[following] - known[n]) / (following - n)
            n = following
            if slope > 0 and abs(slope - before) <= STRAIGHT_ENOUGH * slope:
                break
            aim = n + (capacity_bytes - known[n]) / slope if slope > 0 else self.max_batch_size
            following = int(min(aim, LONGEST_LEAP * n, self.largest_traced))
        return known

    def _traced_up_to(self, largest: int, traced: Callable[[int], float]) -> Callable[[int], float]:
        def peak(n: int) -> float:
            if n <= largest:
                return traced(n)
            half = largest // 2
            return traced(largest) + (traced(largest) - traced(half)) / (largest - half) * (n - largest)

        return peak

    def predicted_ceiling(self, index: int, role: Role, *, accumulates: bool, start: int) -> int:
        """Return a ceiling by traces alone; 0 where not even one sample fits. See `ceiling`."""
        shape_of, least = self._shapes(index, role, (), accumulates), self.least_batch()
        if not self.has_traces:
            return start  # trials will tell
        found = largest_fitting(
            lambda n: self.traced(shape_of(max(n, least)))[index],
            self.runtime.capacities_bytes[index],
            least=0,
            most=self.max_batch_size,
            start=max(1, start),
            enough=lambda: self.out_of_time,
        )
        return 0 if found < least else found

    def primary_fit(self, share: int, elsewhere: int, *, accumulates: bool) -> MemoryFit:
        """Fit device 0's peak over its own share and the whole batch, with replicas beside it.

        A peak bends where another moment of the step becomes the fullest, so the plane is laid where it is needed:
        at the edge of what fits.

        Args:
            share: About the most that device 0 holds.
            elsewhere: About the most that the others hold together.
            accumulates: See `ceiling`.
        """
        least = self.least_batch()
        share, elsewhere = max(share, least + 1), max(elsewhere, least + 1)
        less = max(least, share - max(1, share // 4))
        fewer = max(least, elsewhere - max(1, elsewhere // 2))

        def point(own: int, others: int) -> tuple[int, int, int]:
            return own, own + others, self.traced(_balanced((own, others), accumulates))[0]

        # From one point to the second both the share and the batch grow, to the third the batch alone.
        return MemoryFit.through(point(less, fewer), point(share, fewer), point(less, elsewhere))

    def primary_fit_by_steps(
        self, traced: MemoryFit | None, share: int, others: Sequence[int], *, accumulates: bool
    ) -> MemoryFit | None:
        """Fit device 0's peak to steps that all devices really make together, with about a half of what each holds.

        Args:
            traced: The plane by traces, whose shape it keeps: two steps tell by how much its slopes are off. Without
                it three steps make the plane.
            share: About the most that device 0 holds.
            others: About the most that each of the others holds.
            accumulates: See `ceiling`.

        Returns:
            The plane; None where one of the steps did not run.
        """
        least = self.least_batch()

        def part(samples: int, quarters: int) -> int:
            return samples and max(least * quarters, samples * quarters // 4)

        def point(own: int, beside: int) -> tuple[StepShape, tuple[int, int, int]]:
            split = (part(max(1, share), own), *(part(samples, beside) for samples in others))
            shape = _balanced(split, accumulates)
            return shape, (split[0], sum(split), self.confirmed_peaks(shape)[0])

        try:
            if traced is None:
                return MemoryFit.through(*(point(own, beside)[1] for own, beside in ((1, 1), (2, 1), (1, 2))))
            points = [point(1, 1), point(2, 2)]
        except OutOfMemoryError as error:
            _log.info("device 0 beside the others: out of memory (%s)", error)
            self.counts.ooms += 1
            return None
        (t0, y0), (t1, y1) = ((self.traced(shape)[0], peak) for shape, (_, _, peak) in points)
        scale = max(0.0, (y1 - y0) / (t1 - t0)) if t1 > t0 else 1.0
        fixed_bytes = y1 - scale * (t1 - traced.fixed_bytes)
        return MemoryFit(fixed_bytes, scale * traced.bytes_per_share, scale * traced.bytes_per_batch)

    def timed_sizes(
        self, index: int, ceiling: int, *, role: Role, budget_s: float, alone: bool = True
    ) -> list[TimedSize]:
        """Time one device alone on its ceiling and on every power of two from the least share on.

        A slow device among fast ones gets a hundredth of its ceiling; a curve that ended above would hold its time for
        constant there, and leave the device with next to nothing.

        Args:
            index: The device's position.
            ceiling: The largest size, at least 1.
            role: ``"rank"``, ``"primary"``, or ``"replica"`` for a device that holds no more than that: it is timed
                without an optimizer.
            budget_s: For each size.
            alone: Time a replica without the first device, so that neither copies nor a gather count. By itself it
                holds more at once than its part of a step.

        Returns:
            Seconds of a micro-step for each.

        Raises:
            OutOfMemoryError: None of them could be run.
        """
        least = min(self.least_batch(), ceiling)
        apart = alone and role == "replica"
        shape_of = self._forward_and_backward(index) if apart else self._shapes(index, role, (), False)
        # Powers of two, so that a trace which one device needs serves the others, too.
        between = [2**power for power in reversed(range(ceiling.bit_length())) if least < 2**power < ceiling]
        timed: list[TimedSize] = []
        lacking: OutOfMemoryError | None = None
        for n in dict.fromkeys((ceiling, least, *between)):  # both ends first: time may run out
            if len(timed) > 1 and self.out_of_time:
                break
            self.report(f"{self.runtime.devices[index].label}: time of {n} samples")
            try:
                seconds = self.micro_seconds(shape_of(n), budget_s=budget_s)
            except OutOfMemoryError as error:
                lacking = error
                continue
            timed.append(TimedSize(n, seconds, self.measured(shape_of(n), budget_s=budget_s).error_s))
        if not timed:
            assert lacking is not None, "there is at least one size"
            raise lacking
        return sorted(timed, key=lambda size: size.samples)

    def rank_seconds(self, index: int, samples: int, *, budget_s: float) -> float:
        """Time a micro-step of one device as a DDP rank.

        Raises:
            OutOfMemoryError: It ran out of memory.
        """
        self.report(f"{self.runtime.devices[index].label}: time of {samples} samples")
        return self.micro_seconds(self._shapes(index, "rank", (), False)(samples), budget_s=budget_s)

    def update_seconds(self) -> float:
        """Return the optimizer's time, by the steps that were timed already: it is the same at any batch."""
        timed = (measured.update_s for shape, measured in self._measured.items() if shape.updates)
        return min(timed, default=0.0)

    def untraced_bytes(self, ceiling: Ceiling) -> int:
        """Return what a confirmed step on device 0 held beyond its trace; 0 for a ceiling that was not run."""
        if not ceiling.confirmed or not ceiling.batch_size or not self.has_traces:
            return 0
        shape = self._shapes(0, "primary", (), False)(ceiling.batch_size)
        return max(0, ceiling.peak_bytes - self.traced(shape)[0])

    def room_beside(
        self, share: int, least: tuple[int, ...], most: tuple[int, ...], *, accumulates: bool
    ) -> tuple[int, ...]:
        """Return the largest shares of the other devices beside which device 0 still holds its own.

        Args:
            share: Device 0's samples.
            least: The other devices' shares that are known to fit.
            most: Their own ceilings.
            accumulates: See `ceiling`.
        """

        def lowered(total: int) -> tuple[int, ...]:
            return proportional_split(total, tuple(max(1, n) for n in most), most)

        def peak(total: int) -> float:
            return self.traced(_balanced((share, max(total, self.least_batch())), accumulates))[0]

        if not self.has_traces:
            return least
        total = largest_fitting(
            peak, self.runtime.capacities_bytes[0], least=sum(least), most=sum(most), start=sum(least) + 1
        )
        grown = lowered(total)
        return grown if all(n >= floor for n, floor in zip(grown, least, strict=True)) else least

    def micro_seconds(self, shape: StepShape, *, budget_s: float) -> float:
        """Time a step of one micro-step, without its optimizer."""
        measured = self.measured(shape, budget_s=budget_s)
        return max(1e-9, measured.seconds - measured.update_s)

    def measured(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Time a step, once for each shape; its repeats count as steps run.

        Raises:
            OutOfMemoryError: A device ran out of memory.
        """
        if shape not in self._measured:
            try:
                self._measured[shape] = timed = self.runtime.measure(shape, budget_s=budget_s)
            except OutOfMemoryError as error:
                _log.info("timed %s: out of memory (%s)", _shape_text(shape), error)
                self._count(1, ooms=1)
                raise
            told = ms_text(timed.seconds), ms_text(timed.error_s), timed.repeats
            _log.info("timed %s: %s, give or take %s, in %d of it", _shape_text(shape), *told)
            self._count(timed.repeats)
        return self._measured[shape]

    def step(self, splits: tuple[tuple[int, ...], ...], *, budget_s: float, copies_s: float = 0.0) -> Measurement:
        """Measure a whole optimizer step: its time, and each device's peak.

        Real steps of many micro-steps are put together from two of them and, where it is another, the last: the
        rest are alike.

        Args:
            splits: Samples per device, for each micro-step.
            budget_s: For each thing that is timed.
            copies_s: What a step spends on copying parameters and gradients, once for all its micro-steps.

        Raises:
            OutOfMemoryError: A device would hold more than it may.
        """
        if self.runtime.simulated:
            return self.measured(StepShape(splits), budget_s=budget_s)
        begin = StepShape(splits[:2])
        peaks = self._peaks_of(begin)
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

    def confirmed_peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step for its memory alone, or trace it where memory is never filled.

        Raises:
            OutOfMemoryError: A device would hold more than it may.
        """
        return self._peaks(shape) if self.decides_by_steps else self._peaks_of(shape)

    def _peaks_of(self, shape: StepShape) -> tuple[int, ...]:
        """Return the peaks of a real step: of a run where that is bounded, traced where memory is never filled."""
        devices = self.runtime.devices
        if self.decides_by_steps:
            return ()  # the timed run measures them
        if all(device.budgeted for device in devices):
            return self._peaks(shape)
        peaks = self.traced(shape)
        for index, peak_bytes in enumerate(peaks):
            if peak_bytes > self.runtime.capacities_bytes[index]:
                raise OutOfMemoryError(
                    f"{devices[index].label} would hold {peak_bytes} bytes with {shape.splits[0][index]} samples and "
                    f"may hold {self.runtime.capacities_bytes[index]}; give it fewer samples",
                    device=devices[index].label,
                    device_index=index,
                    requested_bytes=peak_bytes,
                    capacity_bytes=self.runtime.capacities_bytes[index],
                )
        return peaks

    def until_it_stops_paying(self, needed: int = 0, role: Role = "primary") -> tuple[TimeCurve, Ceiling]:
        """Time growing batches on a plain CPU, whose memory is predicted and never filled.

        The batch doubles until that twice gains less than `KNEE_GAIN` of throughput, or a step takes longer than
        `LONGEST_STEP_S`, or the next would not fit, or the time limit is over. A model that fails with a few samples
        is looked at from the sample batch's size on.

        Args:
            needed: So many samples have to run at once, whether that pays or not.
            role: What the processor does.

        Returns:
            The curve, and the largest size that ran, as the ceiling.

        Raises:
            DoesNotFitError: Not even one sample fits.
        """
        capacity_bytes = self.runtime.capacities_bytes[0]
        before = self.counts.steps
        points: list[tuple[int, float]] = []
        n = self.least_batch()
        if n > self.max_batch_size:
            raise does_not_fit(self, 0)
        limit: Limit = "time"
        shape_of = self._shapes(0, role, (), False)
        sample = min(self.tracer.workload.sample_batch_size, self.max_batch_size)
        while True:
            shape = shape_of(n)
            try:
                peak_bytes = self.traced(shape)[0]
            except UserCodeError:
                if points or n >= sample:
                    raise
                n = sample  # which is known to run
                continue
            if peak_bytes > capacity_bytes:
                limit = "memory"
                _log.info("%d samples are not tried: they would hold %s", n, size_text(peak_bytes))
                break
            self.report(f"{self.runtime.devices[0].label}: time of {n} samples")
            measured = self.measured(shape, budget_s=DOUBLING_BUDGET_S)
            points.append((n, max(1e-9, measured.seconds - measured.update_s)))
            enough = measured.seconds > LONGEST_STEP_S or _stops_paying(points) or self.out_of_time
            if n == self.max_batch_size or (enough and n >= needed):
                limit = "max_batch_size" if n == self.max_batch_size else "time"
                _log.info("no more than %d samples are tried: limited by %s", n, limit)
                break
            n = min(2 * n, self.max_batch_size)
        if not points:
            raise does_not_fit(self, 0)
        largest = points[-1][0]
        traced = {size: self.traced(shape_of(size))[0] for size, _ in points}
        fixed_bytes, bytes_per_sample = self._line(lambda size: self.traced(shape_of(size))[0], largest, traced)
        ceiling = Ceiling(
            device=self.runtime.devices[0].label,
            role=role,
            batch_size=largest,
            limited_by=limit,
            fixed_bytes=fixed_bytes,
            bytes_per_sample=bytes_per_sample,
            peak_bytes=traced[largest],
            capacity_bytes=capacity_bytes,
            steps=self.counts.steps - before,
            confirmed=True,
            points=tuple((size, nbytes, False) for size, nbytes in sorted(traced.items())),
        )
        return TimeCurve.of(points), ceiling

    def _shapes(
        self, index: int, role: Role, elsewhere: tuple[int, ...], accumulates: bool
    ) -> Callable[[int], StepShape]:
        """Return what makes the step in which a device has n samples in a role."""
        count = len(self.runtime.devices)
        assert role != "primary" or index == 0, "the primary is device 0"
        others = (0, *(elsewhere or (0,) * (count - 1))) if role == "primary" else (0,) * count
        micro_steps = 2 if accumulates else 1

        def shape(n: int) -> StepShape:
            split = tuple(n if position == index else samples for position, samples in enumerate(others))
            if role in ("primary", "replica"):
                # Of a replica only what it holds itself is asked for, and the optimizer is not on it.
                return replace(_balanced(split, accumulates), updates=role == "primary" or not self.runtime.simulated)
            if role == "eval":
                return StepShape((split,), "eval")
            return StepShape((split,) * micro_steps, "rank", num_ranks=self.num_ranks or count)

        return shape

    def _forward_and_backward(self, index: int) -> Callable[[int], StepShape]:
        """Return what makes the part of a step that a device does with n samples of its own."""
        count = len(self.runtime.devices)

        def shape(n: int) -> StepShape:
            return StepShape((tuple(n if place == index else 0 for place in range(count)),), "rank", updates=False)

        return shape

    def _line(
        self, predicted: Callable[[int], float], batch_size: int, known: Mapping[int, float] | None = None
    ) -> tuple[int, int]:
        """Return fixed bytes and bytes per sample, by the line through the ceiling and about half of it.

        Args:
            predicted: Bytes at n samples.
            batch_size: The ceiling.
            known: Bytes of sizes that were looked at: one above a third of the ceiling will do, or a smaller one that
                lies on one line with the ceiling and another, below it or a little above the ceiling.
        """
        least, known = self.least_batch(), known or {}
        if batch_size < 2 * least:
            return (int(predicted(batch_size)), 0) if batch_size else (0, 0)

        def bytes_at(n: int) -> float:
            return known[n] if n in known else predicted(n)

        def slope_from(n: int, end: int = batch_size) -> float:
            return (bytes_at(end) - bytes_at(n)) / (end - n)

        margin = batch_size // 8
        below = sorted(n for n in known if least <= n < batch_size - margin)
        half = batch_size // 2
        if below and below[-1] >= batch_size / 3:
            half = min(below, key=lambda n: abs(n - half))
        elif below:
            others = [slope_from(n, below[-1]) for n in below[-2:-1]]
            others += [slope_from(batch_size, n) for n in known if batch_size < n <= batch_size + max(1, margin)]
            if any(alike_slopes(slope_from(below[-1]), other) for other in others):
                half = below[-1]
        slope = slope_from(half)
        return int(bytes_at(batch_size) - slope * batch_size), int(slope)

    def _confirmed(
        self,
        index: int,
        role: Role,
        shape_of: Callable[[int], StepShape],
        predicted: Callable[[int], float],
        guess: int,
        seen: Observations,
    ) -> int:
        """Run the predicted ceiling for real; step up while there is room, shrink by the refitted model if not.

        Returns:
            The largest size that ran; 0 where none did.
        """
        capacity_bytes, least = self.runtime.capacities_bytes[index], self.least_batch()
        alike = self._alike(index, role, shape_of)
        if alike is None:
            self._check(index, shape_of, guess, seen)
            n = self._next_size(predicted, seen, capacity_bytes, least - 1, self.max_batch_size + 1, guess)
        else:  # an equal device ran there, and its numbers are this one's until a step says otherwise
            n = alike
        low, high = least - 1, self.max_batch_size + 1  # low ran, or is too few to run; high did not
        n = max(least, n)
        failures = 0  # in a row
        for _ in range(MAX_CONFIRMATIONS):
            if self._ran(index, shape_of, n, seen):
                low, failures = n, 0
            else:
                high, failures = n, failures + 1
            following = self._next_size(predicted, seen, capacity_bytes, low, high, n)
            if failures:
                # By how much it failed, nothing says: far enough down to run, which tells what to add again.
                following = max(low, min(following, high - max(1, int(high * STEP_DOWN * failures**2))))
            if following == low and self.exact and high - low > 1:
                following = low + 1
            if following == low and low < least:
                following = max(least, high // 2)  # the trace knows too little here; something small may still run
            if high - low <= 1 or following == low or self.out_of_time:
                break
            between = f"{low} ran" if low >= least else "none ran yet"
            between += f", {high} did not" if high <= self.max_batch_size else ""
            _log.info("%s as %s: next %d (%s)", self.runtime.devices[index].label, role, following, between)
            n = following
        found = low if low in seen.ran else 0
        self._equals[step_kind(self.runtime, index, role, shape_of)] = index, found
        return found

    def _alike(self, index: int, role: Role, shape_of: Callable[[int], StepShape]) -> int | None:
        """Return the ceiling of an equal device in the same role, found before: same card, and as much memory."""
        other, found = self._equals.get(step_kind(self.runtime, index, role, shape_of), (index, 0))
        return found if other != index and found else None

    @property
    def out_of_time(self) -> bool:
        """Whether no further step may confirm anything."""
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def _check(
        self,
        index: int,
        shape_of: Callable[[int], StepShape],
        guess: int,
        seen: Observations,
    ) -> None:
        """Hold the traced line against two small real steps; what they show corrects it.

        About 1/16 and 1/8 of the guess, and rather sizes that were traced already: a trace may cost more than a step.
        """
        small = max(self.least_batch(), guess // 16)
        if 2 * small >= guess or len(seen.ran) > 1:
            return
        if not self.tracer.fake and self.runtime.devices[index].kind == "cpu":
            return  # its traces were such steps
        first = traced_near(seen, small, most=max(2 * small, guess // 3))
        second = traced_near(seen, 2 * first, most=max(4 * small, 2 * guess // 3), least=first + 1)
        for n in (first, second):
            if n < guess and not self._ran(index, shape_of, n, seen):
                return

    def _next_size(
        self,
        predicted: Callable[[int], float],
        seen: Observations,
        capacity_bytes: int,
        low: int,
        high: int,
        start: int,
    ) -> int:
        """Return the largest size, between what ran and what did not, that fits by the corrected trace."""
        if high - low <= 1:
            return low
        if seen.limit == "kernel" or seen.lost:
            # Nothing tells where a kernel ends, or a process dies, but running it.
            return (max([low, *(ran for ran in seen.ran if ran < high)]) + high) // 2
        return largest_fitting(
            lambda n: predicted(n) + seen.residual(n, predicted),
            capacity_bytes,
            least=low,
            most=high - 1,
            start=min(max(start, low + 1), high - 1),
            slope=seen.slope_near(start),
        )

    def _ran(
        self,
        index: int,
        shape_of: Callable[[int], StepShape],
        n: int,
        seen: Observations,
    ) -> bool:
        """Run a step for its memory, and keep what it shows."""
        shape = shape_of(n)
        try:
            with _naming(shape):
                seen.ran[n] = self._peaks(shape)[index]
        except OutOfMemoryError as error:
            _log.info("ran %s: out of memory (%s)", _shape_text(shape), error)
            self.counts.ooms += 1
            seen.lost = seen.lost or isinstance(error, StepLostError)
            seen.failed[n] = self.runtime.capacities_bytes[index] + 1
            return False
        except RuntimeError as error:
            if not is_kernel_limit(error):
                raise
            _log.info("ran %s: too large for a kernel (%s)", _shape_text(shape), one_line(error))
            seen.limit = "kernel"
            return False
        _log.info("ran %s: %s on %s", _shape_text(shape), size_text(seen.ran[n]), self.runtime.devices[index].label)
        return True

    def _steps_to_see(self, shape: StepShape) -> int:
        """Return how many steps a runtime makes to tell the peaks of one."""
        if self._has_state or shape.arrangement == "eval":
            return 1
        self._has_state = True
        return 2  # in the first of all the optimizer's state appears

    def _count(self, steps: int, ooms: int = 0) -> None:
        if not self.runtime.simulated:
            self.counts.steps += steps
            self.counts.ooms += ooms


def _shape_text(shape: StepShape) -> str:
    """Name a step in the log: ``(4, 0) x 2 as rank``."""
    first, times = shape.splits[0], f" x {len(shape.splits)}" if len(shape.splits) > 1 else ""
    return f"{first}{times} as {shape.arrangement}"


def _bytes_texts(nbytes: tuple[int, ...]) -> str:
    return ", ".join(map(size_text, nbytes))


@contextmanager
def _naming(shape: StepShape) -> Iterator[None]:
    """Let what the user's own code raises say at which batch: the sample batch's own size is not the only one run."""
    try:
        yield
    except (AutosplitError, OutOfMemoryError):
        raise
    except Exception as error:
        if is_kernel_limit(error) or not ran_a_step(error.__traceback__):
            raise
        samples, shares = sum(shape.splits[0]), [share for share in shape.splits[0] if share]
        cut = f", cut {tuple(shares)}" if len(shares) > 1 else ""
        what = f"the workload, with a batch of {samples}{cut} (max_batch_size bounds what is run),"
        raise from_user_code(error, what) from error


def does_not_fit(prober: Prober, index: int) -> DoesNotFitError:
    """Say that the workload does not fit a device at one sample, with the bytes it needs and has."""
    device, capacity_bytes = prober.runtime.devices[index], prober.runtime.capacities_bytes[index]
    least = prober.least_batch()
    held = bytes_on_accelerators(prober.tracer.workload)
    own_bytes = sum(held[place] for place in held if (place.type, place.index) == (device.kind, device.index))
    if own_bytes:
        return DoesNotFitError(
            f"a copy of the model does not fit {device.label} ({device.name}) at batch {least} beside the model, which "
            f"is there already and takes {own_bytes} of the {capacity_bytes} bytes that it may hold; expected room for "
            "a step; tune with the model on the processor (model.cpu()), and move it afterwards",
            device=device.label,
            device_index=index,
            requested_bytes=own_bytes,
            capacity_bytes=capacity_bytes,
        )
    if prober.max_batch_size < least:
        return DoesNotFitError(
            f"a batch of {prober.max_batch_size} is the most that is asked for, and BatchNorm trains on no fewer than "
            f"{least} samples; expected at least {least}; raise effective_batch_size or max_batch_size"
        )
    needed = prober.traced(StepShape(((least,),)))[0] if prober.has_traces else 0
    if needed <= capacity_bytes:
        lost = prober.runtime.notes if isinstance(prober.runtime, IsolatedRuntime) else ()
        if lost or prober.out_of_time:
            return _never_ran(prober, index, needed, lost)
        return DoesNotFitError(
            f"the workload does not fit {device.label} ({device.name}) at batch {least}: a real step needs more than "
            f"the {needed} bytes that its trace tells, and may hold {capacity_bytes} ({size_text(capacity_bytes)}); "
            "expected at least one sample to fit; use a smaller model, a lower precision, or a larger device",
            device=device.label,
            device_index=index,
            requested_bytes=needed,
            capacity_bytes=capacity_bytes,
        )
    return DoesNotFitError(
        f"the workload does not fit {device.label} ({device.name}) at batch {least}: it needs {needed} bytes "
        f"({size_text(needed)}) and may hold {capacity_bytes} ({size_text(capacity_bytes)}); "
        "expected at least one sample to fit; use a smaller model, a lower precision, or a larger device",
        device=device.label,
        device_index=index,
        requested_bytes=needed,
        capacity_bytes=capacity_bytes,
    )


def _never_ran(prober: Prober, index: int, needed: int, lost: tuple[str, ...]) -> DoesNotFitError:
    """Say what kept every step from running, where that was not a lack of memory that was seen."""
    device, capacity_bytes = prober.runtime.devices[index], prober.runtime.capacities_bytes[index]
    reason = "; ".join(lost) or "the time limit was over"
    return DoesNotFitError(
        f"no step of the workload ran to its end on {device.label} ({device.name}): {reason}; expected one of the "
        f"{needed} bytes that the smallest one takes by its trace, of {capacity_bytes} that it may hold; "
        f"{'run one step by itself to see why' if lost else 'raise time_limit_s'}",
        device=device.label,
        device_index=index,
        requested_bytes=needed,
        capacity_bytes=capacity_bytes,
    )


def _balanced(split: tuple[int, ...], accumulates: bool) -> StepShape:
    return StepShape((split,) * (2 if accumulates else 1))


def _stops_paying(points: list[tuple[int, float]]) -> bool:
    """Tell whether two doublings in a row gained too little: one alone may be the machine's noise."""
    if len(points) < 3:
        return False
    *before, last_but_one, last = [n / seconds for n, seconds in points]
    return max(last_but_one, last) < (1 + KNEE_GAIN) * max(before)
