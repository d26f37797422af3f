"""What a step costs, as a function of the split: memory and time models, fitted to measurements. Pure arithmetic.

Peak bytes of device 0::

    fixed + per_share * gpu0_bsz + per_batch * batch_size

Peak bytes of another one::

    fixed + per_share * share

Seconds of a step of k micro-steps, whose replicas are kept from the first to the last, over those that take part::

    sum of copies_i + k * (sum of gather_i * n_i + contention * slowest device) + update

Seconds of a DDP step::

    slowest rank's k micro-steps + what its last backward does not hide of the all-reduce + update
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

__all__ = [
    "Ceiling",
    "Fit",
    "MemoryFit",
    "MemoryParts",
    "Region",
    "Residual",
    "StepTime",
    "TimeCurve",
    "largest_fitting",
    "overlapped_seconds",
]


LONGEST_LEAP = 16
"""Where the peak bends, a search for what fits looks at nothing over so many times the largest it has looked at."""

Role = Literal["primary", "replica", "rank", "eval"]
"""What a device does: device 0 of BalancedDataParallel, another of it, a DDP process, a forward without gradients."""

Limit = Literal["memory", "max_batch_size", "kernel", "time"]
"""What a ceiling was limited by."""


@dataclass(frozen=True)
class Ceiling:
    """The largest number of samples that a device runs in one training step, and how it was found.

    Attributes:
        device: The device's label.
        role: What it does in the step.
        batch_size: The ceiling; 0 where not even one sample fits.
        limited_by: ``"memory"``; ``"max_batch_size"``, where no more was looked for; ``"kernel"``, where a kernel takes
            no larger tensors (2^31 elements); ``"time"``, where a larger batch would bring no more throughput or
            take too long.
        fixed_bytes: Held at any batch, by the line through the points near the ceiling.
        bytes_per_sample: Added by each sample, by the same line.
        peak_bytes: The most it held at the ceiling.
        capacity_bytes: What it may hold.
        steps: Real training steps that were run to find it.
        ooms: How many of them ran out of memory.
        confirmed: A real step ran at this very size. Never for simulated cards.
        points: ``(samples, bytes, ran)`` for each size that was looked at: of a real step, or of a trace.
        notes: What became of processes that ran steps and died, a sentence for each cause.
    """

    device: str
    role: Role
    batch_size: int
    limited_by: Limit
    fixed_bytes: int
    bytes_per_sample: int
    peak_bytes: int
    capacity_bytes: int
    steps: int = 0
    ooms: int = 0
    confirmed: bool = False
    # How it came to be known is no part of what it is.
    points: tuple[tuple[int, int, bool], ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def headroom_bytes(self) -> int:
        """What is left of the capacity at the ceiling."""
        return self.capacity_bytes - self.peak_bytes


@dataclass(frozen=True)
class MemoryParts:
    """What a device holds at the moment of a step at which it holds the most; together that is its peak.

    Attributes:
        parameters_bytes: Parameters, buffers, a replica's copies of them, and whatever else outlives a step.
        gradients_bytes: Gradients of the parameters; a rank's buckets, too.
        optimizer_bytes: The optimizer's state.
        gathered_bytes: Outputs of all devices, put together on the first.
        activations_bytes: What is kept for the backward, the batch, the loss, and what ops need in passing.
        untraced_bytes: Measured beyond all of these: workspaces of libraries, and blocks that an allocator keeps.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    activations_bytes: int
    untraced_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        held = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.gathered_bytes
        return held + self.activations_bytes + self.untraced_bytes

    def of_peak(self, peak_bytes: int, *, measured: bool) -> MemoryParts | None:
        """Return the same for another peak; None where that is less than what is there all through.

        Args:
            peak_bytes: What the device holds.
            measured: The peak is that of a real step, so that what it has more was not traced; otherwise it is of a
                line through traces, and what it has more is more of the activations.
        """
        more_bytes = peak_bytes - self.total_bytes
        if more_bytes >= 0 and measured:
            return replace(self, untraced_bytes=self.untraced_bytes + more_bytes)
        left_bytes = self.activations_bytes + more_bytes
        return replace(self, activations_bytes=left_bytes) if left_bytes >= 0 else None


@dataclass(frozen=True)
class MemoryFit:
    """A device's peak as a plane over its share and the whole batch.

    Attributes:
        fixed_bytes: Held at any batch: parameters, gradients, optimizer state.
        bytes_per_share: Added by each sample of the device's own share.
        bytes_per_batch: Added by each sample of the whole batch: the outputs that device 0 gathers.
    """

    fixed_bytes: float
    bytes_per_share: float
    bytes_per_batch: float = 0.0

    def peak_bytes(self, share: int, batch_size: int) -> float:
        """Return the predicted peak: ``fixed + per_share * share + per_batch * batch_size``."""
        return self.fixed_bytes + self.bytes_per_share * share + self.bytes_per_batch * batch_size

    @classmethod
    def through(
        cls, base: tuple[int, int, int], more_share: tuple[int, int, int], more_batch: tuple[int, int, int]
    ) -> MemoryFit:
        """Fit three points ``(share, batch_size, peak_bytes)``.

        Args:
            base: Any point.
            more_share: A larger share, and by as much a larger batch.
            more_batch: The base's share of a larger batch.
        """
        (s0, n0, y0), (s1, n1, y1), (s2, n2, y2) = base, more_share, more_batch
        assert n1 - n0 == s1 - s0 > 0, (base, more_share)
        assert n2 - n0 > s2 - s0 == 0, (base, more_batch)
        per_batch = max(0.0, (y2 - y0) / (n2 - n0))
        per_share = max(0.0, (y1 - y0) / (s1 - s0) - per_batch)
        return cls(y0 - per_share * s0 - per_batch * n0, per_share, per_batch)


@dataclass(frozen=True)
class Region:
    """Which splits fit: the bounds of the search.

    Attributes:
        primary: Memory of device 0.
        primary_capacity_bytes: What device 0 may hold.
        primary_ceiling: Its ceiling when it is alone, with a batch of its own share only.
        replica_ceilings: Ceilings of the other devices; none for a single device.
        max_batch_size: No batch may be larger.
        least_share: No share but 0 may be smaller: a BatchNorm trains on no fewer than two samples.
    """

    primary: MemoryFit
    primary_capacity_bytes: int
    primary_ceiling: int
    replica_ceilings: tuple[int, ...]
    max_batch_size: int
    least_share: int = 1

    @property
    def largest_batch(self) -> int:
        """The largest batch that some split of it fits."""
        return _largest_batch(self)

    def gpu0_bounds(self, batch_size: int) -> tuple[int, int] | None:
        """Return the least and the most that device 0 may take of a batch; None where no split of it fits."""
        if batch_size > self.max_batch_size:
            return None
        least = max(0, batch_size - sum(self.replica_ceilings))
        most = min(batch_size, self.primary_most(batch_size))
        if least <= most:
            return least, most
        # The plane has no say about a batch that device 0 runs by itself, without replicas.
        return (batch_size, batch_size) if batch_size <= self.primary_ceiling else None

    def primary_most(self, batch_size: int) -> int:
        """Return the most that device 0 may take of a batch beside others; -1 where it can't even gather it."""
        if not self.replica_ceilings:
            return self.primary_ceiling
        left = self.primary_capacity_bytes - self.primary.peak_bytes(0, batch_size)
        if left < 0:
            return -1
        if self.primary.bytes_per_share <= 0:
            return self.primary_ceiling
        return int(min(self.primary_ceiling, left / self.primary.bytes_per_share))


@functools.lru_cache(maxsize=256)  # asked for thousands of times while a plan is solved
def _largest_batch(region: Region) -> int:
    low, high = 0, min(region.max_batch_size, region.primary_ceiling + sum(region.replica_ceilings))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if region.gpu0_bounds(middle) is not None else (low, middle - 1)
    return low


@dataclass(frozen=True)
class TimeCurve:
    """Seconds of one micro-step on one device against its samples: the measured points, and lines between them.

    Attributes:
        points: ``(samples, seconds)``, samples ascending, at least one.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, measured: Sequence[tuple[int, float]]) -> TimeCurve:
        """Make a curve of measured points; one that is faster than a smaller batch is noise, and raised to it."""
        points: list[tuple[int, float]] = []
        for samples, seconds in sorted(measured):
            points.append((samples, max(seconds, points[-1][1]) if points else seconds))
        assert points, "a curve has at least one point"
        return cls(tuple(points))

    @property
    def seconds_per_sample(self) -> float:
        """The slope at the far end."""
        if len(self.points) < 2:
            return self.points[0][1] / self.points[0][0]
        (n0, t0), (n1, t1) = self.points[-2:]
        return (t1 - t0) / (n1 - n0)

    def __call__(self, samples: int) -> float:
        """Return the seconds of a micro-step; none for no samples."""
        if samples == 0:
            return 0.0
        points = self.points
        after = bisect.bisect_left(points, (samples,))  # what is shorter comes first, so before the point of that size
        if after == len(points):
            return points[-1][1] + self.seconds_per_sample * (samples - points[-1][0])
        if points[after][0] == samples or after == 0:
            # Below the smallest measured size a step is bound by what does not shrink with the batch.
            return points[after][1]
        (n0, t0), (n1, t1) = points[after - 1], points[after]
        return t0 + (t1 - t0) * (samples - n0) / (n1 - n0)

    def most_within(self, seconds: float, least: int, most: int) -> int:
        """Return the most samples of a range that take no longer; `least` where no more of them do."""
        after = bisect.bisect_right(self.points, seconds, key=operator.itemgetter(1))
        if after == len(self.points):
            slope = self.seconds_per_sample
            guess = self.points[-1][0] + (seconds - self.points[-1][1]) / slope if slope > 0 else most
        elif after == 0:
            guess = 0
        else:
            (n0, t0), (n1, t1) = self.points[after - 1], self.points[after]
            guess = n0 + (seconds - t0) * (n1 - n0) / (t1 - t0)
        found = int(min(max(guess, least), most))
        # What is rounded may be one off.
        while found < most and self(found + 1) <= seconds:
            found += 1
        while found > least and self(found) > seconds:
            found -= 1
        return found


@dataclass(frozen=True)
class StepTime:
    """The time of a BalancedDataParallel step.

    A device without samples costs nothing, so that what each costs by taking part is kept apart: leaving a slow link
    alone may be the fastest.

    Attributes:
        curves: For each device, its time on its share, alone.
        copies_s: For each device, its parameters' broadcast and its gradients' way home: once a step, or in every
            micro-step without `keeps`. The first device's is 0.
        gather_s_per_sample: For each device, what each of its samples adds to a micro-step where several take part:
            scatter, gather, the loss over gathered outputs. The first device's is 0.
        update_s: The optimizer, once a step.
        adds_up: The devices share one processor, so that their times add.
        contention: Devices that work at once take so many times what the slowest takes alone: more than 1 where they
            share a bus, a processor or a power supply; less where copies hide behind work.
        keeps: Replicas are kept from the first micro-step of a step to its last.
        leaves_out: A device without samples costs nothing, so that some may be better left out.
    """

    leaves_out: ClassVar[bool] = True

    curves: tuple[TimeCurve, ...]
    copies_s: tuple[float, ...]
    gather_s_per_sample: tuple[float, ...]
    update_s: float
    adds_up: bool
    contention: float = 1.0
    keeps: bool = True

    def __post_init__(self) -> None:
        """Let devices that are alike share their curve, so that what is known of one is known of all."""
        known: dict[TimeCurve, TimeCurve] = {}
        object.__setattr__(self, "curves", tuple(known.setdefault(curve, curve) for curve in self.curves))

    @classmethod
    def bare(cls, curves: tuple[TimeCurve, ...], update_s: float, *, adds_up: bool) -> StepTime:
        """Return the time of devices that have nothing to do with each other."""
        return cls(curves, (0.0,) * len(curves), (0.0,) * len(curves), update_s, adds_up)

    def micro_seconds(self, split: Sequence[int]) -> float:
        """Return ``contention * max_i t_i(n_i) + sum_i gather_i * n_i``, without copies.

        The sum of the times where they add; nothing is gathered, and nobody in the way, where device 0 works alone.
        """
        busy_s, gather_s, alone_s = self._amounts(split)
        return alone_s + self.contention * busy_s + gather_s

    def seconds(self, splits: Sequence[Sequence[int]]) -> float:
        """Return the time of an optimizer step of these micro-steps."""
        return self.counted_seconds(Counter(tuple(split) for split in splits))

    def counted_seconds(self, counted: Mapping[tuple[int, ...], int]) -> float:
        """Return the time of an optimizer step of these splits, each with how many micro-steps have it."""
        micro_s = sum(self.micro_seconds(split) * count for split, count in counted.items())
        return self._counted_copying_s(counted) + micro_s + self.update_s

    def copying_s(self, splits: Sequence[Sequence[int]]) -> float:
        """Return what an optimizer step spends on copying parameters and gradients."""
        return self._counted_copying_s(Counter(tuple(split) for split in splits))

    def _counted_copying_s(self, counted: Mapping[tuple[int, ...], int]) -> float:
        if self.keeps:
            return sum(s for i, s in enumerate(self.copies_s) if i and any(split[i] for split in counted))
        return sum(
            count * s
            for split, count in counted.items()
            for s, samples in zip(self.copies_s[1:], split[1:], strict=True)
            if samples
        )

    def with_overhead(self, index: int, measured: Sequence[tuple[Sequence[int], float]]) -> StepTime:
        """Fit the copies and the gather of one device to steps that it makes with the first device alone.

        Args:
            index: The device's position, not the first.
            measured: One or two ``(split, seconds without the optimizer)`` of one micro-step, with other shares where
                there are two.
        """
        bare = self.with_costs_of(index, 0.0, 0.0)
        left = [(split[index], max(0.0, seconds - bare.micro_seconds(split))) for split, seconds in measured]
        (n0, t0), (n1, t1) = min(left), max(left)
        slope = max(0.0, (t1 - t0) / (n1 - n0)) if n1 > n0 else 0.0
        return self.with_costs_of(index, max(0.0, t0 - slope * n0), slope)

    def with_costs_of(self, index: int, copies_s: float, gather_s_per_sample: float) -> StepTime:
        """Return the same with what it costs that one device takes part."""
        return replace(
            self,
            copies_s=_with(self.copies_s, index, copies_s),
            gather_s_per_sample=_with(self.gather_s_per_sample, index, gather_s_per_sample),
        )

    def with_copies(self, split: Sequence[int], seconds: float) -> StepTime:
        """Charge what a step of one micro-step took beyond its slowest device to the copies of all others, evenly.

        Args:
            split: Samples per device.
            seconds: Without the optimizer.
        """
        count = len(self.curves)
        left_s = max(0.0, seconds - replace(self, copies_s=(0.0,) * count).micro_seconds(split))
        return replace(self, copies_s=(0.0, *(left_s / (count - 1),) * (count - 1)))

    def refitted(self, measured: Sequence[tuple[Sequence[Sequence[int]], float]]) -> StepTime:
        """Fit copies, gather and contention, each by one factor, to whole optimizer steps: non-negative least squares.

        Errors count as shares of the measured time. What few steps can't tell apart stays near what it is now.

        Args:
            measured: ``(split of each micro-step, seconds)``.
        """
        rows = []
        for splits, seconds in measured:
            counted = Counter(tuple(split) for split in splits)
            amounts = [(count, *self._amounts(split)) for split, count in counted.items()]
            busy_s, gather_s, alone_s = (sum(a[0] * a[part] for a in amounts) for part in (1, 2, 3))
            known_s = alone_s + self.update_s
            columns = (self._counted_copying_s(counted), gather_s, self.contention * busy_s)
            if any(columns):
                rows.append(([column / seconds for column in columns], (seconds - known_s) / seconds))
        if not rows:
            return self
        copies, gather, contention = _non_negative_fit(rows, (1.0, 1.0, 1.0), PRIOR_WEIGHT)
        return replace(
            self,
            copies_s=tuple(copies * seconds for seconds in self.copies_s),
            gather_s_per_sample=tuple(gather * seconds for seconds in self.gather_s_per_sample),
            contention=contention * self.contention,
        )

    def _amounts(self, split: Sequence[int]) -> tuple[float, float, float]:
        """Return what contention multiplies, the gathers, and the time of device 0 alone, in seconds."""
        times = [curve(samples) for curve, samples in zip(self.curves, split, strict=True)]
        if not any(split[1:]):
            return 0.0, 0.0, times[0]
        gather_s = sum(seconds * samples for seconds, samples in zip(self.gather_s_per_sample, split, strict=True))
        return (sum(times) if self.adds_up else max(times)), gather_s, 0.0


@dataclass(frozen=True)
class RankStepTime(StepTime):
    """The time of a DDP step, in the same terms.

    `copies_s` is what the all-reduce adds to a step, shared out over the ranks above 0: all take part in it, whoever
    has samples. `contention` is what ranks of one machine take from each other, and nothing is gathered. A rank
    without samples runs one that counts for nothing.
    """

    leaves_out: ClassVar[bool] = False

    def _counted_copying_s(self, _counted: Mapping[tuple[int, ...], int]) -> float:
        return sum(self.copies_s)

    def _amounts(self, split: Sequence[int]) -> tuple[float, float, float]:
        return max(curve(max(1, samples)) for curve, samples in zip(self.curves, split, strict=True)), 0.0, 0.0


def _with(values: tuple[float, ...], index: int, value: float) -> tuple[float, ...]:
    return (*values[:index], value, *values[index + 1 :])


PRIOR_WEIGHT = 0.03
"""In a fit, what each parameter was before counts as so many measured steps."""


def _non_negative_fit(
    rows: Sequence[tuple[Sequence[float], float]], now: Sequence[float], weight: float
) -> list[float]:
    """Minimise ``sum (row . x - y)^2`` over x >= 0, held near `now`: coordinate descent, which is exact in the limit.

    Args:
        rows: Coefficients, and what they should add up to.
        now: Where x is.
        weight: Of staying there: that of so many rows.
    """
    x = list(now)
    width = range(len(x))
    sizes = [sum(row[j] for row, _ in rows) / len(rows) for j in width]
    weights = [weight * size**2 for size in sizes]
    for _ in range(200):
        moved = 0.0
        for j in width:
            curvature = sum(row[j] ** 2 for row, _ in rows) + weights[j]
            if curvature <= 0:
                continue
            left = sum(row[j] * (y - sum(row[i] * x[i] for i in width if i != j)) for row, y in rows)
            value = max(0.0, (left + weights[j] * now[j]) / curvature)
            moved = max(moved, abs(value - x[j]) * sizes[j])
            x[j] = value
        if moved < 1e-9:
            break
    return x


@dataclass(frozen=True)
class Residual:
    """A measured optimizer step beside what the fit says of it.

    Attributes:
        split: Samples per device in a full forward.
        accumulation_steps: Forwards of the step.
        measured_s: What it took.
        predicted_s: What the fit says that it takes.
    """

    split: tuple[int, ...]
    accumulation_steps: int
    measured_s: float
    predicted_s: float


@dataclass(frozen=True)
class Fit:
    """The cost of a step as it was fitted: what a plan is solved from, and can be solved from again.

    Attributes:
        step_time: The time of a BalancedDataParallel step; its curves are DDP's, too.
        all_reduce_s: DDP's all-reduce of the gradients alone.
        residuals: Every trial that ran, in order, beside the fit that was made of all of them.
    """

    step_time: StepTime
    all_reduce_s: float = 0.0
    residuals: tuple[Residual, ...] = ()


def overlapped_seconds(
    compute_s: Sequence[float], all_reduce_s: float, update_s: float, last_backward_s: float
) -> float:
    """Return the time of a DDP step: the slowest rank, what its backward does not hide of the all-reduce, the update.

    DDP reduces a bucket as soon as its gradients are there, so all but the first bucket's wait lies behind the
    backward (torch nn/parallel/distributed.py: buckets in reverse order of the forward).

    Args:
        compute_s: For each rank, the time of all its micro-steps.
        all_reduce_s: The all-reduce alone.
        update_s: The optimizer.
        last_backward_s: The backward of the last micro-step, behind which the all-reduce hides.
    """
    return max(compute_s) + max(0.0, all_reduce_s - last_backward_s) + update_s


def largest_fitting(
    peak_bytes: Callable[[int], float],
    capacity_bytes: float,
    *,
    least: int,
    most: int,
    start: int,
    slope: float = 0.0,
    straight_within: float = 0.0,
    max_calls: int = 24,
    enough: Callable[[], bool] = lambda: False,
) -> int:
    """Find the largest n in ``least..most`` whose peak fits, for a peak that grows with n, in few calls.

    The line through the two nearest known points says where to look next, as long as halving what is left could
    still end within `max_calls`; then it is halved.

    Args:
        peak_bytes: Bytes at n samples.
        capacity_bytes: What fits.
        least: Known or assumed to fit; returned where nothing larger does.
        most: Nothing larger is looked at.
        start: A size to begin with.
        slope: Bytes per sample, roughly, for the second look; 0 where nothing is known of it.
        straight_within: Believe, without a look, that one sample more does not fit, or that one less does, where the
            line through the first look and the last says so clearly, as long as its slope is `slope` to within this
            share of it; 0 for a look in any case.
        max_calls: After this many looks the largest size that was seen to fit is returned.
        enough: Asked after `HURRIED_LOOKS` whether what was seen to fit will do, because there is no more time.

    Returns:
        The largest n that fits; exact where `max_calls` is more than the times that ``most - least`` can be halved.
    """
    if most <= least:
        return least
    known: dict[int, float] = {}

    def look(n: int) -> bool:
        known[n] = peak_bytes(n)
        return known[n] <= capacity_bytes

    low, high = least, most + 1  # low fits; high does not
    n = min(max(start, least + 1), most)
    widths: list[int] = []
    for calls_left in reversed(range(max_calls)):
        low, high = (n, high) if look(n) else (low, n)
        straight = _straight_end(known, n, capacity_bytes, slope, straight_within)
        if straight is not None:
            return straight
        if high - low <= 1 or (low > least and len(known) >= HURRIED_LOOKS and enough()):
            break
        widths.append(high - low)
        halvings = (high - low - 1).bit_length()  # looks that halving would take from here
        # A line that does not halve what is left in three looks is no line: neither is the peak, there.
        creeping = high in known and len(widths) > 3 and 2 * widths[-1] > widths[-4]
        halve = calls_left <= halvings or creeping
        n = (low + high) // 2 if halve else _next_size(known, capacity_bytes, low, high, slope)
    return low


HURRIED_LOOKS = 6
"""Looks that are made although there is no more time: from a sample batch of 8 they reached 63,355 of a CNN on an H100,
where three ended at 16 and left that card next to nothing."""

CLEAR_SHARE = 0.9
"""Of a sample's bytes: with so much of them one sample more is clearly too much. Blocks are rounded; lines are not."""


def _straight_end(known: dict[int, float], last: int, capacity_bytes: float, slope: float, within: float) -> int | None:
    """Return what fits where that is the last look, or one sample less, and a straight line leads there.

    Returns:
        The size; None where the line is bent, or ends elsewhere, or too near a whole number of samples to tell.
    """
    first = next(iter(known))
    # `slope` may be that of the first look and twice as many samples: the last has to be a third point.
    if within <= 0 or slope <= 0 or last <= 2 * first:
        return None
    chord = (known[last] - known[first]) / (last - first)
    if abs(chord - slope) > within * slope:
        return None
    room = (capacity_bytes - known[last]) / chord
    if 0 <= room < CLEAR_SHARE:
        return last
    return last - 1 if -CLEAR_SHARE < room < 0 else None


def _next_size(known: dict[int, float], capacity_bytes: float, low: int, high: int, hint: float) -> int:
    """Choose where to look between a size that fits and one that does not."""
    if len(known) == 1:
        n, bytes_at_n = next(iter(known.items()))
        aim = n + math.floor((capacity_bytes - bytes_at_n) / hint) if hint > 0 else 2 * n if n == low else n // 2
        return min(max(low + 1, aim), high - 1)
    if low in known and high in known:
        # A peak bends upwards, if at all: the chord between what fits and what does not tells too much of it, and
        # the slope below too little. Where the latter aims between them, it ends sooner.
        n0, n1 = low, high
        below = max((n for n in known if n < low), default=low)
        local = (known[low] - known[below]) / (low - below) if below < low else 0.0
        if capacity_bytes - known[low] < local * (high - low):
            n0, n1 = below, low
    else:
        # All fit, or none did: the line through the two nearest to the capacity, of equal ones the largest.
        n0, n1 = sorted(sorted(known, key=lambda n: (abs(known[n] - capacity_bytes), -n))[:2])
    slope = (known[n1] - known[n0]) / (n1 - n0)
    if slope <= 0:
        # Flat so far: something else of the step holds still more. Not at once to the middle of what may be vast.
        return min((low + high) // 2, max(2 * n1, low + 1))
    aim = math.floor(n0 + (capacity_bytes - known[n0]) / slope)
    if _is_bent(known):  # a slope that has only begun to rise would leap far beyond what fits
        aim = min(aim, LONGEST_LEAP * max(known))
    return min(max(low + 1, aim), high - 1)


def _is_bent(known: dict[int, float]) -> bool:
    """Tell whether the known points lie on no line."""
    sizes = sorted(known)
    slopes = [(known[n1] - known[n0]) / (n1 - n0) for n0, n1 in itertools.pairwise(sizes)]
    return max(slopes) - min(slopes) > 0.1 * abs(max(slopes))
