"""Find the best DDP settings with the same batch size on all ranks, for tools without uneven splits. Pure.

Such a tool runs k forwards of n samples on each of W ranks. So an optimizer step has exactly k * n * W samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autosplit.solve.solver import MOST_STEPS, WITHIN_REACH
from autosplit.solve.step_time import Fit

MOST_FORWARDS = 20_000
"""Most forwards of an optimizer step to try in the search for a step of exactly the requested samples."""

MORE_FORWARDS = 2
"""Most forwards of an exact step compared with the fewest, if no fit predicts the cost of forwards."""

MOST_RANKS = 64
"""Most ranks for which leaving some out is tried. With more it would take seconds."""


@dataclass(frozen=True)
class EvenRanks:
    """Settings for a tool with identical ranks. `samples_per_s` is None without a fit."""

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
        ceilings: The most samples of each rank per forward.
        effective_batch_size: The requested samples per optimizer step.
        effective_batch_sizes: The fewest and the most samples per optimizer step that are acceptable; None if only
            `effective_batch_size` is.
        max_batch_size: The most samples per forward over all ranks; None for no bound.
        least_batch: The fewest samples per rank and forward.
        accumulates: Whether an optimizer step may have several forwards.
        fit: The time model, with a curve for each rank; None if there is none.
    """

    ceilings: tuple[int, ...]
    effective_batch_size: int
    effective_batch_sizes: tuple[int, int] | None = None
    max_batch_size: int | None = None
    least_batch: int = 1
    accumulates: bool = True
    fit: Fit | None = None

    def best(self) -> EvenRanks | None:
        """Return the settings nearest to the requested step, or None if a rank can't hold its batch.

        Only settings with at least `WITHIN_REACH` of the best predicted throughput count. Among them, prefer a step of
        acceptable size, then the smallest distance from the requested size, then the fastest, then the fewest forwards.
        """
        found = self._looked_at()
        if self.fit is None:
            most = MORE_FORWARDS * min((even.accumulation_steps for even in found), default=0)
            near = [even for even in found if even.accumulation_steps <= most]
        else:
            least_rate = WITHIN_REACH * max((even.samples_per_s or 0.0 for even in found), default=0.0)
            near = [even for even in found if (even.samples_per_s or 0.0) >= least_rate]
        return min(near, key=self._preference, default=None)

    def exact(self) -> EvenRanks | None:
        """Return the fastest settings with exactly the requested samples per step, however slow, or None."""
        found = [even for even in self._looked_at() if even.effective_batch_size == self.effective_batch_size]
        return min(found, key=self._preference, default=None)

    def without_slow(self) -> tuple[tuple[int, ...], EvenRanks] | None:
        """Return a subset of the ranks that is faster, with its settings, or None if no subset is or there is no fit.

        With one batch size for all, the slowest rank determines the speed of each rank.
        """
        everyone = self.best()
        if self.fit is None or everyone is None or not 1 < len(self.ceilings) <= MOST_RANKS:
            return None
        if everyone.samples_per_s is None or self.fit.step_time.adds_up:
            return None
        found: tuple[tuple[int, ...], EvenRanks] | None = None
        fastest = everyone.samples_per_s
        curves = self.fit.step_time.curves
        sizes = [max(1, min(ceiling, self.effective_batch_size)) for ceiling in self.ceilings]
        by_pace = sorted(range(len(sizes)), key=lambda rank: curves[rank](sizes[rank]) / sizes[rank])
        for count in range(len(by_pace) - 1, 0, -1):
            kept = tuple(sorted(by_pace[:count]))
            ceilings = tuple(self.ceilings[rank] for rank in kept)
            even = replace(self, ceilings=ceilings, fit=self.fit.among(kept)).best()
            if even is not None and even.samples_per_s is not None and even.samples_per_s > fastest:
                found, fastest = (kept, even), even.samples_per_s
        return found

    def rate(self, batch_size: int, accumulation_steps: int) -> float | None:
        """Predict the samples/s of identical ranks, or None without a fit."""
        if self.fit is None:
            return None
        split = (batch_size,) * len(self.ceilings)
        return sum(split) * accumulation_steps / self.fit.rank_seconds({split: accumulation_steps})

    # Parts

    def _looked_at(self) -> list[EvenRanks]:
        largest = min(self.ceilings)
        if self.max_batch_size is not None:
            largest = min(largest, self.max_batch_size // len(self.ceilings))
        if largest < max(1, self.least_batch):
            return []
        sizes = dict.fromkeys(self._sizes(largest))
        return [EvenRanks(len(self.ceilings), size, steps, self.rate(size, steps)) for size, steps in sizes]

    def _sizes(self, largest: int) -> Iterator[tuple[int, int]]:
        """Yield ``(batch size, forwards)``.

        For each number of forwards, try the two sizes nearest to the requested step.
        """
        ranks, least, wanted = len(self.ceilings), max(1, self.least_batch), self.effective_batch_size
        fewest = -(-wanted // (ranks * largest)) if self.accumulates else 1
        most = fewest + MOST_STEPS if self.accumulates else 1
        for steps in range(fewest, most + 1):
            below, rest = divmod(wanted, ranks * steps)
            for size in (below, below + 1) if rest else (below,):
                yield min(max(size, least), largest), steps
            if below < least:
                return
        if self.accumulates and wanted % ranks == 0:
            each = wanted // ranks
            for steps in range(most + 1, min(each // least, MOST_FORWARDS) + 1):
                if each % steps == 0:
                    yield each // steps, steps
                    return

    def _preference(self, even: EvenRanks) -> tuple[bool, int, float, int, int]:
        step, wanted = even.effective_batch_size, self.effective_batch_size
        least, most = self.effective_batch_sizes or (0, math.inf)
        rate = float(f"{even.samples_per_s or 0.0:.6g}")  # rates that differ by rounding errors are equal
        return not least <= step <= most, abs(step - wanted), -rate, even.accumulation_steps, even.batch_size
