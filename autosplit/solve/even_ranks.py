"""DDP with one batch size for all ranks, all that other tools know: the best of such numbers. Pure.

Such a tool runs k forwards of n samples on each of W ranks: an optimizer step has exactly k * n * W samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autosplit.solve.solver import MOST_STEPS, WITHIN_REACH
from autosplit.solve.step_time import Fit

MOST_FORWARDS = 20_000
"""Most forwards of an optimizer step, where no fewer give it exactly the samples wanted: with more nobody trains."""

MORE_FORWARDS = 2
"""Factor on the fewest forwards that an exact step may cost where, without a fit, nobody knows what forwards cost."""

MOST_RANKS = 64
"""Ranks of which some are left out on trial; with more that would take seconds."""


@dataclass(frozen=True)
class EvenRanks:
    """Numbers for a tool that gives every rank the same; `samples_per_s` is None without a fit."""

    num_ranks: int
    batch_size: int
    accumulation_steps: int
    samples_per_s: float | None = None

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step, of all ranks in all forwards."""
        return self.num_ranks * self.batch_size * self.accumulation_steps


@dataclass(frozen=True)
class EvenProblem:
    """The problem of one batch size for all ranks.

    Attributes:
        effective_batch_sizes: The least and the most samples per optimizer step that will do; None where only
            `effective_batch_size` does.
        max_batch_size: The most samples per forward, over all ranks; None for no bound.
        fit: The cost of a step, with a curve for each rank; None where nobody knows.
    """

    ceilings: tuple[int, ...]
    effective_batch_size: int
    effective_batch_sizes: tuple[int, int] | None = None
    max_batch_size: int | None = None
    least_batch: int = 1
    accumulates: bool = True
    fit: Fit | None = None

    def best(self) -> EvenRanks | None:
        """Return the even ranks nearest to what is wanted; None where some rank can't hold its share.

        Of those that the model promises `WITHIN_REACH` of the best to: first the ones whose optimizer step is within
        what will do, then the nearest to what is wanted, the fastest, those with the fewest forwards.
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
        """Return the fastest even ranks whose step has what is wanted to the sample, however slow; None without any."""
        found = [even for even in self._looked_at() if even.effective_batch_size == self.effective_batch_size]
        return min(found, key=self._preference, default=None)

    def without_slow(self) -> tuple[tuple[int, ...], EvenRanks] | None:
        """Return fewer ranks that are faster, and their numbers; None where nothing is gained, or nobody knows.

        With one batch for all, the slowest rank sets the pace of each.
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
        """Predict the samples/s of even ranks; None without a fit."""
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
        """Yield batches with their forwards, for each number of these the two nearest to the step that is wanted."""
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
        rate = float(f"{even.samples_per_s or 0.0:.6g}")  # what differs by rounding only is as fast
        return not least <= step <= most, abs(step - wanted), -rate, even.accumulation_steps, even.batch_size
