"""Model the time of a step: a curve per device, costs of transfers and waits, and a fit to measured steps.

A BalancedDataParallel step has k micro-steps and creates its replicas once. Device i gets ``n_i`` samples per
micro-step. The sums and maxima are over the devices that get samples::

    slowest copies_i + k * (sum of gather_i * n_i + contention * slowest device) + update

The host starts the forwards of the R replicas one after another. If this takes longer, the time of the step is::

    k * R * host + gather and backward of the last micro-step + copies of the gradients + update

A DDP step takes::

    slowest rank's k micro-steps + the part of the all-reduce that its last backward does not hide + update
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from typing import Annotated, ClassVar

from msgspec import Meta


@dataclass(frozen=True)
class TimeCurve:
    """Time of a micro-step on one device, in seconds, by number of samples: lines between measured points.

    Attributes:
        points: Measured ``(samples, seconds)``, at least one, in ascending order of samples.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, measured: Sequence[tuple[int, float]]) -> TimeCurve:
        """Make a curve from measured points. A batch takes at least the time of any smaller batch."""
        points: list[tuple[int, float]] = []
        for samples, seconds in sorted(measured):
            points.append((samples, max(seconds, points[-1][1]) if points else seconds))
        assert points, "a curve has at least one point"
        return cls(tuple(points))

    @property
    def seconds_per_sample(self) -> float:
        """Slope of the last segment."""
        if len(self.points) < 2:
            return self.points[0][1] / self.points[0][0]
        (n0, t0), (n1, t1) = self.points[-2:]
        return (t1 - t0) / (n1 - n0)

    def __call__(self, samples: int) -> float:
        """Predict the time of a micro-step in seconds: 0 for 0 samples, linear beyond the last point."""
        if samples == 0:
            return 0.0
        points = self.points
        after = bisect.bisect_left(points, (samples,))  # (n,) sorts before (n, seconds)
        if after == len(points):
            return points[-1][1] + self.seconds_per_sample * (samples - points[-1][0])
        if points[after][0] == samples or after == 0:
            # Below the smallest measured size, costs that do not depend on the batch dominate.
            return points[after][1]
        (n0, t0), (n1, t1) = points[after - 1], points[after]
        return t0 + (t1 - t0) * (samples - n0) / (n1 - n0)

    def most_within(self, seconds: float, least: int, most: int) -> int:
        """Return the largest number of samples in `least` ... `most` that take at most `seconds`.

        Return `least` if all numbers take longer.
        """
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
        # Rounding may be off by one.
        while found < most and self(found + 1) <= seconds:
            found += 1
        while found > least and self(found) > seconds:
            found -= 1
        return found


@dataclass(frozen=True)
class StepTime:
    """The time of a BalancedDataParallel step.

    Each device has its own costs, because the fastest split may leave out a device behind a slow link.

    Attributes:
        idle_is_free: Whether a device without samples costs nothing.
        curves: For each device, the compute time when no other device runs.
        copies_s: For each device, time in seconds to broadcast parameters to it and reduce its gradients to device 0.
            Spent once per step, or in every micro-step if `keeps` is False. All links copy at the same time. Device 0's
            entry is 0.
        gather_s_per_sample: For each device, time in seconds that each of its samples adds to a micro-step on several
            devices: scatter, gather and the loss over the gathered outputs. Device 0's entry is 0.
        update_s: Time of the optimizer in seconds, once per step.
        adds_up: Whether the devices share one CPU, so that their times add up.
        contention: Factor on the slowest device's time when several devices run. It is above 1 if they share a bus, a
            CPU or a power supply, and below 1 if copies overlap with computation.
        keeps: Whether replicas persist through all micro-steps of a step.
        host_s: Time in seconds that the host takes to start one device's micro-step, one device after another.
        lead_s: Host time in seconds that overlaps with the last backward, because the host also starts that backward.
    """

    idle_is_free: ClassVar[bool] = True

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
        """Share one curve object between identical devices, so that `fastest_split` caches results for all of them."""
        known: dict[TimeCurve, TimeCurve] = {}
        object.__setattr__(self, "curves", tuple(known.setdefault(curve, curve) for curve in self.curves))

    @classmethod
    def bare(cls, curves: tuple[TimeCurve, ...], update_s: float, *, adds_up: bool) -> StepTime:
        """Return the time model of devices without copies, gather or contention."""
        return cls(curves, (0.0,) * len(curves), (0.0,) * len(curves), update_s, adds_up)

    def seconds(self, splits: Sequence[Sequence[int]]) -> float:
        """Predict the time of an optimizer step in seconds, from the split of each micro-step."""
        return self.counted_seconds(Counter(tuple(split) for split in splits))

    def counted_seconds(self, counted: Mapping[tuple[int, ...], int]) -> float:
        """Predict the time of an optimizer step in seconds.

        Args:
            counted: Number of micro-steps with each split. The last entry is the split of the last micro-step.
        """
        return sum(self._longest(counted)) + self.update_s

    def _longest(self, counted: Mapping[tuple[int, ...], int]) -> tuple[float, float, float, float]:
        """Return the critical path of a step in four parts: copies, gathers, time that contention scales, other time.

        The host runs ahead of the devices. A micro-step ends one micro-step after the previous one, or one backward
        after the host has started all forwards, whichever is later. Among equal micro-steps, only the first or the last
        can wait for the host.
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
        """Predict the time that an optimizer step spends on copies of parameters and gradients, in seconds."""
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
        """Fit the copies and the gather of one device to steps that use only this device and device 0.

        Args:
            measured: One or two pairs ``(split, seconds without the optimizer)`` of a step of one micro-step. The
                second pair has more samples on the device.
            further: A split, and the time in seconds that a second micro-step with this split adds. This time
                limits the gather. In a small first micro-step, host time may hide the copies, so `measured` gives too
                large a slope.
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
        """Return the time of copies in a step of one micro-step, in seconds.

        Args:
            seconds: Time of the step without the optimizer.
        """
        free = replace(self, copies_s=(0.0,) * len(self.curves), update_s=0.0)
        by_devices = replace(free, host_s=0.0).seconds([split])
        return max(0.0, min(seconds - by_devices, 2 * (seconds - free.seconds([split]))))

    def with_costs_of(self, index: int, copies_s: float, gather_s_per_sample: float) -> StepTime:
        """Return this model with other costs of one device."""
        copies, gathers = list(self.copies_s), list(self.gather_s_per_sample)
        copies[index], gathers[index] = copies_s, gather_s_per_sample
        return replace(self, copies_s=tuple(copies), gather_s_per_sample=tuple(gathers))

    def with_copies(self, split: Sequence[int], seconds: float) -> StepTime:
        """Attribute measured time beyond the slowest device to copies, equally for devices 1, 2, ...

        `seconds` is the time of a step of one micro-step without the optimizer.
        """
        count = len(self.curves)
        return replace(self, copies_s=(0.0, *(self.copies_of(split, seconds),) * (count - 1)))

    def refitted(self, measured: Sequence[tuple[Sequence[Sequence[int]], float]]) -> StepTime:
        """Fit one factor each for copies, gather and contention to measured steps, by non-negative least squares.

        Errors are relative to the measured time. Factors that a few steps can't distinguish stay near 1.

        Args:
            measured: Pairs ``(split of each micro-step, seconds)``.
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
        """Return times in seconds (gather, time that contention scales, other time), and the number of replicas."""
        if not any(split[1:]):
            return 0.0, 0.0, self.curves[0](split[0]), 0
        pairs = list(zip(self.curves, split, strict=True))
        if not self.adds_up:  # skip identical devices: this code runs thousands of times
            pairs = list({(id(curve), samples): (curve, samples) for curve, samples in pairs}.values())
        times = [curve(samples) for curve, samples in pairs]
        gather_s = sum(map(operator.mul, self.gather_s_per_sample, split))
        replicas = sum(map(bool, split))
        if replicas == 1:
            return gather_s, 0.0, max(times), 0
        return gather_s, sum(times) if self.adds_up else max(times), 0.0, replicas

    def with_host(self, split: Sequence[int], once_s: float, twice_s: float) -> StepTime:
        """Fit the host time to steps of one and of two micro-steps on several devices, both without the optimizer.

        The host starts the forwards of all devices in `turns_s`. If the second micro-step takes longer than the devices
        compute, it takes `turns_s`. Otherwise the devices hide the host time, which is at most the time of the first
        micro-step without its backward.
        """
        _, busy_s, _, replicas = self._amounts(split)
        turns_s, first_s = twice_s - once_s, once_s - BACKWARD_SHARE * self.contention * busy_s
        if turns_s <= self.contention * busy_s:
            turns_s = max(0.0, min(turns_s, first_s))
        return replace(self, host_s=turns_s / replicas, lead_s=max(0.0, turns_s - first_s))


@dataclass(frozen=True)
class RankStepTime(StepTime):
    """The time of a DDP step, with the same attributes.

    `copies_s` is the time that the all-reduce adds to a step, divided among ranks 1, 2, ... It includes ranks without
    samples, which run one sample with weight 0. `contention` is the slowdown of ranks on one machine.
    """

    idle_is_free: ClassVar[bool] = False

    def _counted_copying_s(self, _counted: Mapping[tuple[int, ...], int]) -> float:
        return sum(self.copies_s)

    def _amounts(self, split: Sequence[int]) -> tuple[float, float, float, int]:
        return 0.0, max(curve(max(1, samples)) for curve, samples in zip(self.curves, split, strict=True)), 0.0, 0


LEAST_CONTENTION = 0.1
"""Minimum of the contention factor in a fit, because copies or host time may hide the compute time."""

PRIOR_WEIGHT = 0.03
"""Weight of a parameter's previous value in a fit, as a number of measured steps."""


def _non_negative_fit(
    rows: Sequence[tuple[Sequence[float], float]], now: Sequence[float], weight: float
) -> list[float]:
    """Minimise ``sum (row . x - y)^2`` over x >= 0, with a penalty of `weight` rows on the distance from `now`."""
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
    """A measured optimizer step and the time that the fit predicts for it.

    Attributes:
        split: Samples per device in a full forward.
        accumulation_steps: Forwards per optimizer step.
        measured_s: Measured time of the optimizer step, in seconds.
        predicted_s: Predicted time of the optimizer step, in seconds.
    """

    split: tuple[int, ...]
    accumulation_steps: int
    measured_s: float
    predicted_s: float


@dataclass(frozen=True)
class Cost:
    """A fitted time model. With it, a plan can be solved again.

    Attributes:
        step_time: The time of a BalancedDataParallel step. Predictions of DDP steps use the same curves.
        all_reduce_s: Time of DDP's all-reduce of the gradients when nothing else runs, in seconds.
        residuals: All trials that ran, in order, with the predictions of the final fit.
    """

    step_time: StepTime
    all_reduce_s: float = 0.0
    residuals: tuple[Residual, ...] = ()

    def fits(self, count: int) -> bool:
        """Return whether there is a curve for each of `count` devices, with rising sizes and positive times."""
        curves = self.step_time.curves
        return len(curves) == count and all(
            curve.points
            and all(a[0] < b[0] for a, b in itertools.pairwise(curve.points))
            and curve.points[0][0] >= 1
            and min(seconds for _, seconds in curve.points) > 0
            for curve in curves
        )

    def among(self, devices: Sequence[int]) -> Cost:
        """Return the fit for DDP ranks on the devices with these indices. A single rank needs no all-reduce."""
        curves = tuple(self.step_time.curves[device] for device in devices)
        bare = StepTime.bare(curves, self.step_time.update_s, adds_up=self.step_time.adds_up)
        return Cost(bare, self.all_reduce_s if len(curves) > 1 else 0.0)

    def rank_seconds(self, counted: Mapping[tuple[int, ...], int], least_batch: int = 1) -> float:
        """Predict the time of a DDP step in seconds.

        Args:
            counted: Number of forwards with each split over the ranks. The last entry is the split of the last forward.
            least_batch: Number of samples that a rank without samples runs.
        """
        busy_s = self.rank_compute_seconds(counted, least_batch)
        *_, last = counted
        return overlapped_seconds(
            [sum(busy_s)] if self.step_time.adds_up else busy_s,
            self.all_reduce_s,
            self.step_time.update_s,
            BACKWARD_SHARE * max(self.rank_compute_seconds({last: 1}, least_batch)),
        )

    def rank_compute_seconds(self, counted: Mapping[tuple[int, ...], int], least_batch: int = 1) -> list[float]:
        """Predict the compute time of each DDP rank in an optimizer step. The arguments are those of `rank_seconds`."""
        return [
            sum(count * curve(max(least_batch, split[rank])) for split, count in counted.items())
            for rank, curve in enumerate(self.step_time.curves)
        ]


BACKWARD_SHARE = 2 / 3
"""Fraction of a micro-step's time that the backward takes: twice the arithmetic of the forward."""


def overlapped_seconds(
    compute_s: Sequence[float], all_reduce_s: float, update_s: float, last_backward_s: float
) -> float:
    """Return the time of a DDP step in seconds: slowest rank, part of the all-reduce that is not hidden, and update.

    DDP reduces a bucket as soon as its gradients are ready. So the last micro-step's backward can hide the all-reduce
    of all but the last buckets (torch nn/parallel/distributed.py: buckets in reverse order of the forward).
    """
    return max(compute_s) + max(0.0, all_reduce_s - last_backward_s) + update_s
