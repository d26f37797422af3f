"""Solve a plan's problem again with a bound relaxed: what a bound costs is what its absence would bring. Pure.

A bound is more memory, a larger batch or step than was asked for, a faster device, or copies that cost nothing. Times
beyond what was measured go on along the last slope of each curve, memory along the line near each ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autosplit.solve.memory import Ceiling, MemoryFit, Region
from autosplit.solve.search_space import Space
from autosplit.solve.solver import BACKWARD_SHARE, RankSolver, Solver, geometric
from autosplit.solve.split import accumulation_steps, even_split, micro_batch_sizes, proportional_split
from autosplit.solve.step_time import Fit, StepTime, TimeCurve, overlapped_seconds

__all__ = ["MOST_WORK", "NO_LIMIT_BYTES", "Found", "Overhead", "Problem"]

NO_LIMIT_BYTES = 2**60
"""More memory than any step takes: an exbibyte."""

MOST_WORK = 20_000
"""What takes more (numbers of forwards to look at, times the largest of them) is not solved: it would take seconds."""

MOST_COMBINED = 256
"""Numbers of forwards times the square of the devices: for more it is not solved, which would take many seconds."""

MORE_FORWARDS = 3
"""Than the fewest are looked at: each costs a copy and brings nothing but memory."""

Overhead = Literal["copies", "gather", "overhead", "update"]
"""What a step takes beside the devices' own work; ``"overhead"`` is all of it but the optimizer."""


@dataclass(frozen=True)
class Found:
    """An answer of the model.

    Attributes:
        split: Samples per device in one forward.
        accumulation_steps: Forwards per optimizer step.
        samples_per_s: Predicted throughput of whole optimizer steps.
    """

    split: tuple[int, ...]
    accumulation_steps: int
    samples_per_s: float


@dataclass(frozen=True)
class Problem:
    """The problem that a plan solves.

    Attributes:
        fit: The cost of a step.
        ceilings: Each device's ceiling, with its memory's line: of a rank where `region` is None.
        caps: The most samples of each device, where `region` is None.
        region: Which splits fit; None for DDP's ranks.
        effective_batch_sizes: The least and the most samples per optimizer step; None for one forward of any size.
        most_samples: Per forward.
        accumulates: An optimizer step may have several forwards.
    """

    fit: Fit
    ceilings: tuple[Ceiling, ...]
    caps: tuple[int, ...]
    region: Region | None
    effective_batch_sizes: tuple[int, int] | None
    most_samples: int
    accumulates: bool

    @classmethod
    def of(
        cls,
        fit: Fit,
        ceilings: tuple[Ceiling, ...],
        region: Region | None,
        *,
        effective_batch_sizes: tuple[int, int] | None,
        max_batch_size: int | None,
        accumulates: bool,
    ) -> Problem:
        """Put together what a plan holds.

        Args:
            fit: The cost of a step.
            ceilings: Each device's.
            region: Which splits fit; None for DDP's ranks.
            effective_batch_sizes: As asked for.
            max_batch_size: As asked for.
            accumulates: An optimizer step may have several forwards.
        """
        caps = tuple(ceiling.batch_size for ceiling in ceilings)
        given = [n for n in (max_batch_size, *(effective_batch_sizes or ())[1:]) if n is not None]
        most = region.max_batch_size if region is not None else min([*given, sum(caps)])
        return cls(fit, ceilings, caps, region, effective_batch_sizes, most, accumulates)

    @property
    def step_time(self) -> StepTime:
        """The time of a step."""
        return self.fit.step_time

    # Answers

    def best(self) -> float:
        """Return the highest samples/s that the model promises; 0 where nothing fits, or only in too many forwards."""
        if self.region is None and self._most_forwards() is not None:
            answer = self._rank_solver().answer()
            return 0.0 if answer is None else answer.samples_per_s
        solver = self.solver()
        # Without an effective batch the first is the knee, and the fastest comes next.
        return 0.0 if solver is None else max(map(solver.samples_per_s, solver.answers()[:2]), default=0.0)

    def solver(self) -> Solver | None:
        """Return what solves it; None for ranks, and where that would take too long."""
        most = self._most_forwards()
        if most is None or self.region is None:
            return None
        return Solver(Space(self.region, self.effective_batch_sizes, most), self.step_time)

    def rate(self, split: Sequence[int], effective_batch_size: int) -> float:
        """Predict the samples/s of a split.

        Args:
            split: Samples per device in a full forward.
            effective_batch_size: Samples per optimizer step.
        """
        sizes = micro_batch_sizes(effective_batch_size, sum(split))
        splits = [tuple(split)] * (len(sizes) - 1) + [proportional_split(sizes[-1], split)]
        seconds = self.step_time.seconds(splits) if self.region is not None else self._rank_seconds(splits)
        return effective_batch_size / seconds

    def even(self, effective_batch_size: int) -> Found | None:
        """Return the even split in as few forwards as it fits, full or of equal size; None where none fits.

        Args:
            effective_batch_size: Samples of the step; without an effective batch asked for, one forward of any size.
        """
        low, high = 0, self.most_samples
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(even_split(middle, len(self.ceilings))) else (low, middle - 1)
        if low < len(self.ceilings):  # a device that holds nothing has no even share
            return None
        if self.effective_batch_sizes is None:
            pairs = [(size, size) for size in geometric(low)]
        else:
            fewest = accumulation_steps(effective_batch_size, low)
            if fewest > MOST_WORK or (fewest > 1 and not self.accumulates):
                return None
            sizes = {min(low, effective_batch_size), -(-effective_batch_size // fewest)}
            pairs = [(size, effective_batch_size) for size in sorted(sizes)]
        found = []
        for size, total in pairs:
            split = even_split(size, len(self.ceilings))
            if all(split) and self._fits(split):
                found.append(Found(split, accumulation_steps(total, size), self.rate(split, total)))
        return max(found, key=lambda one: one.samples_per_s, default=None)

    # Relaxed

    def with_memory(self, index: int, more_bytes: int) -> Problem:
        """Return the problem of a device with more memory: its ceiling grows by ``more_bytes / bytes_per_sample``.

        A ceiling that a kernel or the time of a step limits stays.

        Args:
            index: The device.
            more_bytes: How much more.
        """
        if self.ceilings[index].limited_by in ("kernel", "time"):
            return self
        grown = _samples(more_bytes, self._line(index)[1], self.most_samples)
        caps = [cap + grown * (position == index) for position, cap in enumerate(self._own_caps())]
        region = self.region
        if region is not None and index == 0:
            region = replace(region, primary_capacity_bytes=region.primary_capacity_bytes + more_bytes)
        return replace(self, region=region).with_caps(caps)

    def with_most(self, most_samples: int) -> Problem:
        """Return the problem of larger forwards; a ceiling that was looked for no further grows along its line.

        Args:
            most_samples: Per forward.
        """
        caps = list(self._own_caps())
        for index, ceiling in enumerate(self.ceilings):
            if caps[index] >= self.most_samples:
                fixed_bytes, per_sample = self._line(index)
                caps[index] = max(caps[index], _samples(ceiling.capacity_bytes - fixed_bytes, per_sample, most_samples))
        region = None if self.region is None else replace(self.region, max_batch_size=most_samples)
        return replace(self, most_samples=most_samples, region=region).with_caps(caps)

    def with_caps(self, caps: Sequence[int]) -> Problem:
        """Return the problem of other ceilings.

        Args:
            caps: Of each device; device 0's is its own alone.
        """
        held = tuple(min(cap, self.most_samples) for cap in caps)
        if self.region is None:
            return replace(self, caps=held)
        return replace(self, region=replace(self.region, primary_ceiling=held[0], replica_ceilings=held[1:]))

    def with_effective(self, most_samples: int, *, max_batch_size: int | None) -> Problem:
        """Return the problem of optimizer steps that may be larger.

        Args:
            most_samples: Per optimizer step.
            max_batch_size: As asked for.
        """
        assert self.effective_batch_sizes is not None
        least, most = self.effective_batch_sizes
        larger = replace(self, effective_batch_sizes=(least, most_samples))
        if self.most_samples < most:
            return larger
        return larger.with_most(min(most_samples, max_batch_size or most_samples))

    def faster(self, indices: Sequence[int], times: float) -> Problem:
        """Return the problem of devices that work so many times as fast.

        Args:
            indices: The devices.
            times: How much faster.
        """
        curves = tuple(
            TimeCurve(tuple((n, seconds / times) for n, seconds in curve.points)) if index in indices else curve
            for index, curve in enumerate(self.step_time.curves)
        )
        return self._with_step_time(replace(self.step_time, curves=curves))

    def without(self, overhead: Overhead) -> Problem:
        """Return the problem of a step in which something costs nothing.

        Args:
            overhead: What; for ranks, all but the optimizer is the all-reduce.
        """
        if overhead == "update":
            return self._with_step_time(replace(self.step_time, update_s=0.0))
        if self.region is None:
            return replace(self, fit=replace(self.fit, all_reduce_s=0.0))
        free, step_time = (0.0,) * len(self.step_time.curves), self.step_time
        if overhead != "gather":
            step_time = replace(step_time, copies_s=free)
        if overhead != "copies":
            step_time = replace(step_time, gather_s_per_sample=free)
        if overhead == "overhead":
            step_time = replace(step_time, contention=min(1.0, step_time.contention))
        return self._with_step_time(step_time)

    def with_links(self, times: float) -> Problem:
        """Return the problem of devices that are so many times as fast to reach."""
        time = self.step_time
        copies_s, gather_s = (tuple(s / times for s in values) for values in (time.copies_s, time.gather_s_per_sample))
        return self._with_step_time(replace(time, copies_s=copies_s, gather_s_per_sample=gather_s))

    def alone(self, index: int, ceiling: int) -> Problem:
        """Return the problem of a single device; the optimizer takes what it takes on device 0.

        Args:
            index: The device.
            ceiling: The most samples that it runs by itself.
        """
        cap = min(ceiling, self.most_samples)
        step_time = StepTime.bare((self.step_time.curves[index],), self.step_time.update_s, adds_up=False)
        region = Region(MemoryFit(0.0, 0.0), 0, cap, (), self.most_samples)
        ceilings = self.ceilings[index : index + 1]
        return replace(self, fit=Fit(step_time), ceilings=ceilings, caps=(cap,), region=region)

    # Parts

    def _most_forwards(self) -> int | None:
        """Return the most forwards per optimizer step that are looked at; None where that would take too long."""
        most_counts = MOST_COMBINED // len(self.ceilings) ** 2
        if self.effective_batch_sizes is None or not self.accumulates:
            return 1 if most_counts >= 1 else None
        largest = min(self.most_samples, sum(self.caps)) if self.region is None else self.region.largest_batch
        fewest, most = (accumulation_steps(size, max(1, largest)) for size in self.effective_batch_sizes)
        most += MORE_FORWARDS
        counts = most - fewest + 1
        return most if counts * most <= MOST_WORK and counts <= most_counts else None

    def _with_step_time(self, step_time: StepTime) -> Problem:
        return replace(self, fit=replace(self.fit, step_time=step_time))

    def _own_caps(self) -> tuple[int, ...]:
        """Return the most samples that each device runs, whatever the others do."""
        return self.caps if self.region is None else (self.region.primary_ceiling, *self.region.replica_ceilings)

    def _line(self, index: int) -> tuple[float, float]:
        """Return what a device holds at any batch, and what each sample of its own adds."""
        if index > 0 or self.region is None:
            return float(self.ceilings[index].fixed_bytes), float(self.ceilings[index].bytes_per_sample)
        plane = self.region.primary
        return plane.fixed_bytes, plane.bytes_per_share + plane.bytes_per_batch

    def _fits(self, split: tuple[int, ...]) -> bool:
        if self.region is None:
            return all(0 < share <= cap for share, cap in zip(split, self.caps, strict=True))
        bounds = self.region.gpu0_bounds(sum(split))
        within = all(share <= most for share, most in zip(split[1:], self.region.replica_ceilings, strict=True))
        trains = not any(0 < share < self.region.least_share for share in split)
        return within and trains and bounds is not None and bounds[0] <= split[0] <= bounds[1]

    def _rank_solver(self) -> RankSolver:
        # One forward of any size, for the fastest and not the knee: a step of up to as much as one forward takes.
        sizes = self.effective_batch_sizes or (1, max(1, min(self.most_samples, sum(self.caps))))
        return RankSolver(
            self.step_time.curves,
            self.caps,
            all_reduce_s=self.fit.all_reduce_s,
            update_s=self.step_time.update_s,
            effective_batch_sizes=sizes,
            max_batch_size=self.most_samples,
            adds_up=self.step_time.adds_up,
            accumulates=self.effective_batch_sizes is not None and self.accumulates,
        )

    def _rank_seconds(self, splits: Sequence[Sequence[int]]) -> float:
        curves = self.step_time.curves
        last = [curve(samples) for curve, samples in zip(curves, splits[-1], strict=True)]
        busy = [sum(curve(split[rank]) for split in splits) for rank, curve in enumerate(curves)]
        return overlapped_seconds(
            [sum(busy)] if self.step_time.adds_up else busy,
            self.fit.all_reduce_s,
            self.step_time.update_s,
            BACKWARD_SHARE * max(last),
        )


def _samples(nbytes: float, bytes_per_sample: float, most: int) -> int:
    """Return how many samples bytes hold, up to `most`."""
    if nbytes <= 0:
        return 0
    return most if bytes_per_sample <= 0 else math.floor(min(most, nbytes / bytes_per_sample))
