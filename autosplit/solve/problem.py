"""Define the problem that a layout solves, and solve it: the fastest split that fits into memory.

Beyond the measured sizes, times are extrapolated along the last slope of each curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosplit.solve.fastest_split import fastest_split
from autosplit.solve.memory import Ceiling, Region, largest_size
from autosplit.solve.search_space import Space
from autosplit.solve.solver import MOST_STEPS, Solver, geometric, spread
from autosplit.solve.split import accumulation_steps, even_split, micro_batch_sizes, proportional_split, short_split
from autosplit.solve.step_time import Cost, StepTime
from autosplit.solve.trial import KNEE_SHARE, LEAST_DIFFERENCE

MOST_WORK = 20_000
"""Limit for solving: how many values of `accumulation_steps` are tried, times the largest. More would take seconds."""

MOST_COMBINED = 256
"""Limit for solving: how many values of `accumulation_steps` are tried, times the square of the number of devices."""

MOST_FORWARDS = 1024
"""Maximum forwards of an optimizer step. If memory is so short that a step needs more, measure again instead."""

MORE_FORWARDS = 3
"""How many numbers of forwards to try beyond the fewest. Each further forward costs time and only saves memory."""


@dataclass(frozen=True)
class Solution:
    """The settings that solve a problem, and their predicted throughput."""

    split: tuple[int, ...]
    accumulation_steps: int
    effective_batch_size: int
    samples_per_s: float


@dataclass(frozen=True)
class Problem:
    """The problem that a layout solves. `least_difference` and `most_samples_per_s` are those of `Solver`.

    Attributes:
        ceilings: The ceiling of each device, with its memory model.
        ranks: Whether the devices are DDP ranks, each with at least one sample. Otherwise they are devices of
            BalancedDataParallel.
        effective_batch_sizes: Minimum and maximum samples per optimizer step. None for one forward of any size.
        accumulates: Whether an optimizer step may have several forwards.
        accumulating: The splits that fit in a step of several forwards, if they differ from `region`.
    """

    cost: Cost
    ceilings: tuple[Ceiling, ...]
    region: Region
    ranks: bool
    effective_batch_sizes: tuple[int, int] | None
    accumulates: bool
    accumulating: Region | None = None
    least_difference: float = LEAST_DIFFERENCE
    most_samples_per_s: float = math.inf

    @classmethod
    def of(
        cls,
        cost: Cost,
        ceilings: tuple[Ceiling, ...],
        region: Region | None,
        *,
        effective_batch_sizes: tuple[int, int] | None,
        max_batch_size: int | None,
        accumulates: bool,
        least_batch: int = 1,
        least_difference: float = LEAST_DIFFERENCE,
    ) -> Problem:
        """Make the problem from the parts of a plan."""
        ranks = region is None
        if region is None:
            caps = [ceiling.batch_size for ceiling in ceilings]
            given = [n for n in (max_batch_size, *(effective_batch_sizes or ())[1:]) if n is not None]
            region = Region.apart(caps, min([*given, sum(caps)]), least_batch)
        return cls(cost, ceilings, region, ranks, effective_batch_sizes, accumulates, least_difference=least_difference)

    @property
    def step_time(self) -> StepTime:
        """The time model of BalancedDataParallel."""
        return self.cost.step_time

    # Solutions

    def solve(self) -> Solution | None:
        """Return the best settings, or None if nothing fits or a step would need more than `MOST_FORWARDS` forwards."""
        if self.ranks:
            return self._solved_ranks()
        most = self._steps_worth_a_look()
        if most is None:
            return None
        space = Space(self.region, self.effective_batch_sizes, most, self.accumulating)
        solver = Solver(
            space, self.step_time, least_difference=self.least_difference, most_samples_per_s=self.most_samples_per_s
        )
        for best in solver.ranked():
            steps, rate = best.accumulation_steps, solver.samples_per_s(best)
            return Solution(solver.split_of(best), steps, space.effective_of(best), rate)
        return None

    def best(self) -> float:
        """Return the highest predicted samples/s, or 0 if nothing fits or a step would need too many forwards."""
        if self.ranks and self._most_forwards() is not None:
            problem = self
            if self.effective_batch_sizes is None:
                # Find the fastest step of up to one forward per rank, not the smallest batch that is fast enough.
                sizes = 1, max(1, self._most_of_ranks)
                problem = replace(self, effective_batch_sizes=sizes, accumulates=False)
            solution = problem.solve()
            return 0.0 if solution is None else solution.samples_per_s
        solver = self.solver()
        # Without an effective batch size, the first result is the smallest fast batch, and the second is the fastest.
        return 0.0 if solver is None else max(map(solver.samples_per_s, solver.ranked()[:2]), default=0.0)

    def solver(self) -> Solver | None:
        """Return the solver of this problem, or None for ranks or if solving would take too long."""
        most = self._most_forwards()
        if most is None or self.ranks:
            return None
        return Solver(Space(self.region, self.effective_batch_sizes, most), self.step_time)

    def rate(self, split: Sequence[int], effective_batch_size: int) -> float:
        """Predict the samples/s of a split."""
        full, rest = divmod(effective_batch_size, sum(split))
        counted = {tuple(split): full} if full else {}
        if rest:
            counted[short_split(rest, split) if self.ranks else proportional_split(rest, split)] = 1
        if self.ranks:
            return effective_batch_size / self.cost.rank_seconds(counted, self.region.least_share)
        return effective_batch_size / self.step_time.counted_seconds(counted)

    def even(self, effective_batch_size: int) -> Solution | None:
        """Return the fastest even split with the smallest number of forwards, or None if none fits.

        Either all forwards except the last have the largest size that fits, or all have about the same size. Without an
        effective batch size in the problem, the step is one forward of any size.
        """
        count = len(self.ceilings)
        most = largest_size(self.region.max_batch_size, lambda size: self._fits(even_split(size, count)))
        if most < count:  # a device with a ceiling of 0 rules out an even split
            return None
        if self.effective_batch_sizes is None:
            pairs = [(size, size) for size in geometric(most)]
        else:
            fewest = accumulation_steps(effective_batch_size, most)
            if fewest > MOST_WORK or (fewest > 1 and not self.accumulates):
                return None
            sizes = {min(most, effective_batch_size), -(-effective_batch_size // fewest)}
            pairs = [(size, effective_batch_size) for size in sorted(sizes)]
        found = []
        for size, total in pairs:
            split = even_split(size, count)
            if all(split) and self._fits(split):
                found.append(Solution(split, accumulation_steps(total, size), total, self.rate(split, total)))
        return max(found, key=lambda one: one.samples_per_s, default=None)

    def region_of(self, steps: int) -> Region:
        """Return the splits that fit in an optimizer step of this many forwards."""
        return self.region if steps == 1 or self.accumulating is None else self.accumulating

    # Parts

    def _steps_worth_a_look(self) -> int | None:
        sizes, several = self.effective_batch_sizes, self.region_of(2)
        if sizes is None or not self.accumulates or several.largest_batch == 0:
            return 1 if (1 if sizes is None else sizes[0]) <= self.region.largest_batch else None
        fewest, most = (accumulation_steps(size, several.largest_batch) for size in sizes)
        return None if fewest > MOST_FORWARDS else min(most, MOST_FORWARDS) + MORE_FORWARDS

    def _most_forwards(self) -> int | None:
        most_counts = MOST_COMBINED // len(self.ceilings) ** 2
        if self.effective_batch_sizes is None or not self.accumulates:
            return 1 if most_counts >= 1 else None
        largest = max(1, self.region.largest_batch)
        fewest, most = (accumulation_steps(size, largest) for size in self.effective_batch_sizes)
        most += MORE_FORWARDS
        counts = most - fewest + 1
        return most if counts * most <= MOST_WORK and counts <= most_counts else None

    def _fits(self, split: tuple[int, ...]) -> bool:
        bounds = self.region.gpu0_bounds(sum(split))
        within = all(share <= most for share, most in zip(split[1:], self.region.replica_ceilings, strict=True))
        trains = not any(0 < share < self.region.least_share for share in split)
        return within and trains and bounds is not None and bounds[0] <= split[0] <= bounds[1]

    # Ranks

    @property
    def _most_of_ranks(self) -> int:
        return min(self.region.max_batch_size, sum(self.region.ceilings))

    def _solved_ranks(self) -> Solution | None:
        found = [solution for size, total in self._sizes_of_ranks() if self._trains(solution := self._at(size, total))]
        if not found:
            return None
        top = max(solution.samples_per_s for solution in found)
        enough = (1 - self.least_difference) * top
        if self.effective_batch_sizes is None:
            enough = min(KNEE_SHARE * top, self.most_samples_per_s)

        def plainness(solution: Solution) -> tuple[int, bool, int]:
            batch_size = sum(solution.split)
            return solution.accumulation_steps, solution.effective_batch_size % batch_size != 0, batch_size

        return min((solution for solution in found if solution.samples_per_s >= enough), key=plainness)

    def _sizes_of_ranks(self) -> list[tuple[int, int]]:
        most, least = self._most_of_ranks, len(self.ceilings) * self.region.least_share
        if min(self.region.ceilings) < self.region.least_share or most < least:
            return []
        if self.effective_batch_sizes is None:
            return [(size, size) for size in geometric(most) if size >= least]
        fewest_samples, most_samples = self.effective_batch_sizes
        fewest = accumulation_steps(fewest_samples, most)
        if not self.accumulates and fewest > 1:
            return []
        found = set()
        for steps in range(fewest, fewest + MOST_STEPS if self.accumulates else 2):
            upper = most_samples if steps == 1 else -(-most_samples // (steps - 1)) - 1
            smallest, largest = max(least, -(-fewest_samples // steps)), min(most, upper)
            if smallest <= largest:
                sizes = [smallest] if fewest_samples == most_samples else spread(smallest, largest)
                found |= {(size, min(size * steps, most_samples)) for size in sizes}
        return sorted(found)

    def _trains(self, solution: Solution) -> bool:
        last = micro_batch_sizes(solution.effective_batch_size, sum(solution.split))[-1]
        return not any(0 < share < self.region.least_share for share in short_split(last, solution.split))

    def _at(self, batch_size: int, total: int) -> Solution:
        floors = (self.region.least_share,) * len(self.ceilings)
        split = fastest_split(batch_size, self.step_time.curves, self.region.ceilings, floors)
        return Solution(split, accumulation_steps(total, batch_size), total, self.rate(split, total))
