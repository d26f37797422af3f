"""Find the best DDP settings with the same batch size on all ranks, for tools without uneven splits.

Such a tool runs k forwards of n samples on each of W ranks. So an optimizer step has exactly k * n * W samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autosplit.solve.change import Change, changed
from autosplit.solve.problem import Problem
from autosplit.solve.solver import MOST_STEPS, WITHIN_REACH

MOST_FORWARDS = 20_000
"""Maximum number of forwards to try in the search for exactly the requested samples per step."""

MOST_RANKS = 64
"""Maximum number of ranks whose subsets are tried. With more ranks, the search would take seconds."""


@dataclass(frozen=True)
class EvenRanks:
    """Settings for a tool with identical ranks. `samples_per_s` is None if it can't be predicted."""

    num_ranks: int
    batch_size: int
    accumulation_steps: int
    samples_per_s: float | None = None

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks and forwards."""
        return self.num_ranks * self.batch_size * self.accumulation_steps


@dataclass(frozen=True)
class EvenProblem:
    """The search for one batch size for all ranks.

    Attributes:
        effective_batch_size: The requested samples per optimizer step.
    """

    problem: Problem
    effective_batch_size: int

    def best(self) -> EvenRanks | None:
        """Return the settings nearest to the requested step, or None if a rank fits no batch.

        Only settings with at least `WITHIN_REACH` of the best predicted throughput count. Among them, prefer a step of
        allowed size, then the smallest distance from the requested size, then the fastest, then the smallest number of
        forwards.
        """
        found = self._candidates()
        enough = WITHIN_REACH * max((even.samples_per_s or 0.0 for even in found), default=0.0)
        return min((even for even in found if (even.samples_per_s or 0.0) >= enough), key=self._order, default=None)

    def exact(self) -> EvenRanks | None:
        """Return the fastest settings with exactly the requested samples per step, or None. They may be slow."""
        found = [even for even in self._candidates() if even.effective_batch_size == self.effective_batch_size]
        return min(found, key=self._order, default=None)

    def without_slow(self) -> tuple[tuple[int, ...], EvenRanks] | None:
        """Return the fastest subset of the ranks with its settings, or None if no subset is faster than all ranks.

        With one batch size for all ranks, the slowest rank determines the speed.
        """
        problem, everyone = self.problem, self.best()
        ceilings, curves = problem.region.ceilings, problem.step_time.curves
        if everyone is None or not 1 < len(ceilings) <= MOST_RANKS or problem.step_time.adds_up:
            return None
        found, fastest = None, everyone.samples_per_s or 0.0
        sizes = [max(1, min(ceiling, self.effective_batch_size)) for ceiling in ceilings]
        by_pace = sorted(range(len(sizes)), key=lambda rank: curves[rank](sizes[rank]) / sizes[rank])
        for count in range(len(by_pace) - 1, 0, -1):
            kept = tuple(sorted(by_pace[:count]))
            even = replace(self, problem=changed(problem, Change(devices=kept))).best()
            if even is not None and (even.samples_per_s or 0.0) > fastest:
                found, fastest = (kept, even), even.samples_per_s or 0.0
        return found

    def rate(self, batch_size: int, accumulation_steps: int) -> float:
        """Predict the samples/s of identical ranks."""
        ranks = len(self.problem.ceilings)
        return self.problem.rate((batch_size,) * ranks, ranks * batch_size * accumulation_steps)

    def _candidates(self) -> list[EvenRanks]:
        region, ranks = self.problem.region, len(self.problem.ceilings)
        largest = min(*region.ceilings, region.max_batch_size // ranks)
        if largest < max(1, region.least_share):
            return []
        sizes = dict.fromkeys(self._sizes(largest))
        return [EvenRanks(ranks, size, steps, self.rate(size, steps)) for size, steps in sizes]

    def _sizes(self, largest: int) -> Iterator[tuple[int, int]]:
        """Yield ``(batch size, forwards)``: for each number of forwards, the two sizes nearest to the request."""
        ranks, least, wanted = len(self.problem.ceilings), self.problem.region.least_share, self.effective_batch_size
        accumulates = self.problem.accumulates
        fewest = -(-wanted // (ranks * largest)) if accumulates else 1
        most = fewest + MOST_STEPS if accumulates else 1
        for steps in range(fewest, most + 1):
            below, rest = divmod(wanted, ranks * steps)
            for size in (below, below + 1) if rest else (below,):
                yield min(max(size, least), largest), steps
            if below < least:
                return
        if accumulates and wanted % ranks == 0:
            each = wanted // ranks
            more = range(most + 1, min(each // least, MOST_FORWARDS) + 1)
            yield from [(each // steps, steps) for steps in more if each % steps == 0][:1]

    def _order(self, even: EvenRanks) -> tuple[bool, int, float, int, int]:
        step, wanted = even.effective_batch_size, self.effective_batch_size
        least, most = self.problem.effective_batch_sizes or (0, math.inf)
        rate = float(f"{even.samples_per_s or 0.0:.6g}")  # rates that differ by rounding errors are equal
        return not least <= step <= most, abs(step - wanted), -rate, even.accumulation_steps, even.batch_size
