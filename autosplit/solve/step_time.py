"""Model the time of a step from what was measured: a curve for each device, transfers, waits, and the fit of them.

Seconds of a step of k micro-steps, whose replicas are kept from the first to the last, over those that take part::

    slowest copies_i + k * (sum of gather_i * n_i + contention * slowest device) + update

or, where that is more, as long as the host takes to start the forwards of R replicas in turn, and what follows::

    k * R * host + what the last micro-step gathers and its backward + gradients' way home + update

Seconds of a DDP step::

    slowest rank's k micro-steps + what its last backward does not hide of the all-reduce + update
"""

from __future__ import annotations

import bisect
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from typing import Annotated, ClassVar

from msgspec import Meta


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
            micro-step without `keeps`; they go over all links at once. The first device's is 0.
        gather_s_per_sample: For each device, what each of its samples adds to a micro-step where several take part:
            scatter, gather, the loss over gathered outputs. The first device's is 0.
        update_s: The optimizer, once a step.
        adds_up: The devices share one processor, so that their times add.
        contention: Devices that work at once take so many times what the slowest takes alone: more than 1 where they
            share a bus, a processor or a power supply; less where copies hide behind work.
        keeps: Replicas are kept from the first micro-step of a step to its last.
        host_s: What the host takes to start a micro-step of one device. R replicas take turns with it.
        lead_s: What the turns have in them of the last micro-step's backward, where the host starts that in them, too.
        leaves_out: A device without samples costs nothing, so that some may be better left out.
    """

    leaves_out: ClassVar[bool] = True

    curves: tuple[TimeCurve, ...]
    copies_s: tuple[float, ...]
    gather_s_per_sample: tuple[float, ...]
    update_s: float
    adds_up: bool
    contention: Annotated[float, Meta(gt=0)] = 1.0
    keeps: bool = True
    host_s: float = 0.0
    lead_s: float = 0.0

    def __post_init__(self) -> None:
        """Let devices that are alike share their curve, so that what is known of one is known of all."""
        known: dict[TimeCurve, TimeCurve] = {}
        object.__setattr__(self, "curves", tuple(known.setdefault(curve, curve) for curve in self.curves))

    @classmethod
    def bare(cls, curves: tuple[TimeCurve, ...], update_s: float, *, adds_up: bool) -> StepTime:
        """Return the time of devices that have nothing to do with each other."""
        return cls(curves, (0.0,) * len(curves), (0.0,) * len(curves), update_s, adds_up)

    def seconds(self, splits: Sequence[Sequence[int]]) -> float:
        """Return the time of an optimizer step of these micro-steps."""
        return self.counted_seconds(Counter(tuple(split) for split in splits))

    def counted_seconds(self, counted: Mapping[tuple[int, ...], int]) -> float:
        """Return the time of an optimizer step.

        Args:
            counted: Splits, each with how many micro-steps have it, the last micro-step's last.
        """
        return sum(self._longest(counted)) + self.update_s

    def _longest(self, counted: Mapping[tuple[int, ...], int]) -> tuple[float, float, float, float]:
        """Return copies, gathers, what contention multiplies, and what is known, along what a step waits for.

        The host runs ahead. Devices end a micro-step a whole one after the last, or its backward after the host has
        started its forwards in turn, whichever is later; of alike ones it is the first that waits so, or the last.
        """
        copies_s, started_s = self._counted_copying_s(counted), 0.0
        path = copies_s / 2, 0.0, 0.0, 0.0
        for split, count in counted.items():
            gather_s, busy_s, alone_s, replicas = self._amounts(split)
            busy_s *= self.contention
            turns_s = replicas * self.host_s
            paths = [(path[0], path[1] + count * gather_s, path[2] + count * busy_s, path[3] + count * alone_s)]
            for after in {0, count - 1} if self.host_s else ():
                known_s = started_s + (count - after) * turns_s + (after + 1) * alone_s - self.lead_s
                paths.append((0.0, (after + 1) * gather_s, (after + BACKWARD_SHARE) * busy_s, known_s))
            path = max(paths, key=sum)
            started_s += count * turns_s
        return path[0] + copies_s / 2, *path[1:]

    def copying_s(self, splits: Sequence[Sequence[int]]) -> float:
        """Return the seconds that an optimizer step spends on copying parameters and gradients."""
        return self._counted_copying_s(Counter(tuple(split) for split in splits))

    def _counted_copying_s(self, counted: Mapping[tuple[int, ...], int]) -> float:
        if self.keeps:
            return max(compress(self.copies_s[1:], islice(map(any, zip(*counted, strict=True)), 1, None)), default=0.0)
        return sum(count * max(compress(self.copies_s[1:], split[1:]), default=0.0) for split, count in counted.items())

    def with_overhead(
        self,
        index: int,
        measured: Sequence[tuple[Sequence[int], float]],
        further: tuple[Sequence[int], float] | None = None,
    ) -> StepTime:
        """Fit the copies and the gather of one device to steps that it makes with the first device alone.

        Args:
            measured: One or two ``(split, seconds without the optimizer)`` of one micro-step, with other shares where
                there are two, the larger last.
            further: A split and what a further micro-step of it takes. It bounds the gather: of two first ones the
                small one may hide its copies behind the host.
        """
        bare, slope = self.with_costs_of(index, 0.0, 0.0), 0.0
        (few, few_s), (many, many_s) = measured[0], measured[-1]
        if many[index] > few[index]:
            own = replace(bare, host_s=0.0)
            more_s = many_s - few_s - own.seconds([many]) + own.seconds([few])
            slope = max(0.0, more_s) / (many[index] - few[index])
        if further is not None:
            split, second_s = further
            more_s = second_s - bare.seconds([split] * 2) + bare.seconds([split])
            slope = min(slope, max(0.0, more_s) / split[index])
        bare = self.with_costs_of(index, 0.0, slope)
        return self.with_costs_of(index, bare.copies_of(many, many_s), slope)

    def copies_of(self, split: Sequence[int], seconds: float) -> float:
        """Return the copies of a step of one micro-step, by what it took without the optimizer."""
        free = replace(self, copies_s=(0.0,) * len(self.curves), update_s=0.0)
        by_devices = replace(free, host_s=0.0).seconds([split])
        return max(0.0, min(seconds - by_devices, 2 * (seconds - free.seconds([split]))))

    def with_costs_of(self, index: int, copies_s: float, gather_s_per_sample: float) -> StepTime:
        """Return the same with what it costs that one device takes part."""
        copies, gathers = list(self.copies_s), list(self.gather_s_per_sample)
        copies[index], gathers[index] = copies_s, gather_s_per_sample
        return replace(self, copies_s=tuple(copies), gather_s_per_sample=tuple(gathers))

    def with_copies(self, split: Sequence[int], seconds: float) -> StepTime:
        """Charge what a step of one micro-step took beyond its slowest device to the copies of all others alike.

        Args:
            seconds: Without the optimizer.
        """
        count = len(self.curves)
        return replace(self, copies_s=(0.0, *(self.copies_of(split, seconds),) * (count - 1)))

    def refitted(self, measured: Sequence[tuple[Sequence[Sequence[int]], float]]) -> StepTime:
        """Fit copies, gather and contention, each by one factor, to whole optimizer steps: non-negative least squares.

        Errors count as shares of the measured time. What few steps can't tell apart stays near what it is now.

        Args:
            measured: ``(split of each micro-step, seconds)``.
        """
        rows = []
        for splits, seconds in measured:
            *columns, known_s = self._longest(Counter(tuple(split) for split in splits))
            known_s += self.update_s
            if any(columns):
                rows.append(([column / seconds for column in columns], (seconds - known_s) / seconds))
        if not rows:
            return self
        copies, gather, contention = _non_negative_fit(rows, (1.0, 1.0, 1.0), PRIOR_WEIGHT)
        return replace(
            self,
            copies_s=tuple(copies * seconds for seconds in self.copies_s),
            gather_s_per_sample=tuple(gather * seconds for seconds in self.gather_s_per_sample),
            contention=max(LEAST_CONTENTION, contention * self.contention),
        )

    def _amounts(self, split: Sequence[int]) -> tuple[float, float, float, int]:
        """Return the gathers, what contention multiplies, what nobody is in the way of, and the turns with the host."""
        if not any(split[1:]):
            return 0.0, 0.0, self.curves[0](split[0]), 0
        pairs = list(zip(self.curves, split, strict=True))
        if not self.adds_up:  # of many devices most are alike, and a split is timed for thousands of times
            pairs = list({(id(curve), samples): (curve, samples) for curve, samples in pairs}.values())
        times = [curve(samples) for curve, samples in pairs]
        gather_s = sum(map(operator.mul, self.gather_s_per_sample, split))
        replicas = sum(map(bool, split))
        if replicas == 1:
            return gather_s, 0.0, max(times), 0
        return gather_s, sum(times) if self.adds_up else max(times), 0.0, replicas

    def with_host(self, split: Sequence[int], once_s: float, twice_s: float) -> StepTime:
        """Fit what the host takes to steps of one and of two micro-steps of several devices, without the optimizer.

        Its turns are a further micro-step, where that takes longer than the devices do; else they are hidden, and no
        longer than what the backward leaves of the first.
        """
        _, busy_s, _, replicas = self._amounts(split)
        turns_s, first_s = twice_s - once_s, once_s - BACKWARD_SHARE * self.contention * busy_s
        if turns_s <= self.contention * busy_s:
            turns_s = max(0.0, min(turns_s, first_s))
        return replace(self, host_s=turns_s / replicas, lead_s=max(0.0, turns_s - first_s))


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

    def _amounts(self, split: Sequence[int]) -> tuple[float, float, float, int]:
        return 0.0, max(curve(max(1, samples)) for curve, samples in zip(self.curves, split, strict=True)), 0.0, 0


LEAST_CONTENTION = 0.1
"""Where copies or the host take nearly all the time, a fit may find that computing takes none, which can't be."""

PRIOR_WEIGHT = 0.03
"""Number of measured steps that a parameter's earlier value counts as in a fit."""


def _non_negative_fit(
    rows: Sequence[tuple[Sequence[float], float]], now: Sequence[float], weight: float
) -> list[float]:
    """Minimise ``sum (row . x - y)^2`` over x >= 0, held near `now`: coordinate descent, which is exact in the limit.

    Args:
        weight: Of staying at `now`: that of so many rows.
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

    def among(self, devices: Sequence[int]) -> Fit:
        """Return the cost where only these devices take part, each by itself; a single one has nothing to reduce."""
        curves = tuple(self.step_time.curves[device] for device in devices)
        bare = StepTime.bare(curves, self.step_time.update_s, adds_up=self.step_time.adds_up)
        return Fit(bare, self.all_reduce_s if len(curves) > 1 else 0.0)

    def rank_seconds(self, counted: Mapping[tuple[int, ...], int], least_batch: int = 1) -> float:
        """Return the time of a DDP step.

        Args:
            counted: Splits over the ranks, each with how many forwards have it; the last is that of the last forward.
            least_batch: Samples that a rank runs where a forward has none for it.
        """
        busy_s = [0.0] * len(self.step_time.curves)
        forward_s = busy_s
        for split, count in counted.items():
            shares = zip(self.step_time.curves, split, strict=True)
            forward_s = [curve(max(least_batch, share)) for curve, share in shares]
            busy_s = [busy + count * seconds for busy, seconds in zip(busy_s, forward_s, strict=True)]
        return overlapped_seconds(
            [sum(busy_s)] if self.step_time.adds_up else busy_s,
            self.all_reduce_s,
            self.step_time.update_s,
            BACKWARD_SHARE * max(forward_s),
        )


BACKWARD_SHARE = 2 / 3
"""Share of a backward in its micro-step: it does twice the arithmetic of its forward."""


def overlapped_seconds(
    compute_s: Sequence[float], all_reduce_s: float, update_s: float, last_backward_s: float
) -> float:
    """Return the time of a DDP step: the slowest rank, what its backward does not hide of the all-reduce, the update.

    DDP reduces a bucket as soon as its gradients are there, so all but the first bucket's wait lies behind the
    backward (torch nn/parallel/distributed.py: buckets in reverse order of the forward).

    Args:
        last_backward_s: The backward of the last micro-step, behind which the all-reduce hides.
    """
    return max(compute_s) + max(0.0, all_reduce_s - last_backward_s) + update_s
