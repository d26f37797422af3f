"""The closed-form answer: for each number of micro-steps the fastest split under the caps, by the fitted model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autosplit.cost import StepTime, TimeCurve, overlapped_seconds
from autosplit.errors import InputError
from autosplit.space import KNEE_SHARE, Configuration, Space
from autosplit.split import accumulation_steps, even_split, fastest_split, micro_batch_sizes, proportional_split

__all__ = ["MOST_STEPS", "RankAnswer", "RankSolver", "Solver"]

MOST_STEPS = 64
"""Accumulation steps beyond the fewest that are worth a look: each costs a copy and brings nothing but memory."""


class Solver:
    """Solves the search space by the cost model.

    Args:
        space: What may be searched.
        step_time: Predicts seconds.
    """

    def __init__(self, space: Space, step_time: StepTime) -> None:
        self.space = space
        self.step_time = step_time

    def split_of(self, configuration: Configuration) -> tuple[int, ...]:
        """Return the fastest split that gives device 0 its share, under the other devices' ceilings.

        Args:
            configuration: In the space.
        """
        rest = configuration.batch_size - configuration.gpu0_bsz
        ceilings = self.space.region.replica_ceilings
        if not ceilings:
            return (configuration.batch_size,)
        if self.step_time.adds_up:
            # One processor: no split is faster, so the even one, as far as the ceilings let it be.
            return (configuration.gpu0_bsz, *proportional_split(rest, tuple(max(1, c) for c in ceilings), ceilings))
        return (configuration.gpu0_bsz, *fastest_split(rest, self.step_time.curves[1:], ceilings))

    def splits_of(self, configuration: Configuration) -> tuple[tuple[int, ...], ...]:
        """Return the split of each micro-step; the last one shares what is left in proportion."""
        split = self.split_of(configuration)
        if self.space.effective_batch_size is None:
            return (split,)
        sizes = micro_batch_sizes(self.space.effective_batch_size, configuration.batch_size)
        return tuple(split if size == configuration.batch_size else proportional_split(size, split) for size in sizes)

    def samples_per_s(self, configuration: Configuration) -> float:
        """Predict the throughput of whole optimizer steps."""
        splits = self.splits_of(configuration)
        return sum(map(sum, splits)) / self.step_time.seconds(splits)

    def fastest_of(self, batch_size: int, steps: int) -> Configuration | None:
        """Return the fastest configuration of a batch size; None where no split of it fits."""
        shares = self.space.region.gpu0_bounds(batch_size)
        if shares is None:
            return None
        least, most = shares
        ceilings = self.space.region.replica_ceilings
        if self.step_time.adds_up or not ceilings:
            even = even_split(batch_size, 1 + len(ceilings))[0]
            return Configuration(min(max(even, least), most), batch_size, steps)
        try:
            split = fastest_split(batch_size, self.step_time.curves, (most, *ceilings))
        except InputError:  # the caps hold no such batch
            return None
        shared = Configuration(max(split[0], least), batch_size, steps)
        if most < batch_size:
            return shared
        # Alone, device 0 has neither copies nor a gather to wait for: small batches may be faster so.
        return max(shared, Configuration(batch_size, batch_size, steps), key=self.samples_per_s)

    def answers(self) -> list[Configuration]:
        """Return the best configuration for each batch size worth a look, the best by the objective first."""
        found = [c for c in (self.fastest_of(n, k) for n, k in self._sizes()) if c is not None and self.space.holds(c)]
        ranked = sorted(found, key=self.samples_per_s, reverse=True)
        if not ranked or self.space.effective_batch_size is not None:
            return ranked
        top = self.samples_per_s(ranked[0])
        knee = min((c for c in ranked if self.samples_per_s(c) >= KNEE_SHARE * top), key=lambda c: c.batch_size)
        return [knee, *(c for c in ranked if c != knee)]

    def first_trials(self) -> list[Configuration]:
        """Return what to try first: the answer, its neighbours, the even split, and other numbers of micro-steps."""
        answers = self.answers()
        if not answers:
            return []
        best = answers[0]
        even = even_split(best.batch_size, 1 + len(self.space.region.replica_ceilings))[0]
        near = max(1, best.gpu0_bsz // 16)
        shares = (best.gpu0_bsz, best.gpu0_bsz + near, best.gpu0_bsz - near, even)
        same_batch = [Configuration(share, best.batch_size, best.accumulation_steps) for share in shares]
        return [*same_batch, *answers[1:6]]

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Yield batch sizes with their number of micro-steps: the smallest of each number, or a geometric grid."""
        if self.space.effective_batch_size is not None:
            fewest, most = self.space.steps_bounds()
            for steps in range(fewest, most + 1):
                bounds = self.space.batch_bounds(steps)
                if bounds is not None:
                    yield bounds[0], steps
            return
        for size in geometric(self.space.region.largest_batch):
            yield size, 1


@dataclass(frozen=True)
class RankAnswer:
    """DDP's answer by the model.

    Attributes:
        batch_sizes: Samples per forward, for each rank.
        accumulation_steps: Forwards per optimizer step, equal on all ranks.
        samples_per_s: Predicted throughput of whole optimizer steps.
    """

    batch_sizes: tuple[int, ...]
    accumulation_steps: int
    samples_per_s: float


BACKWARD_SHARE = 2 / 3
"""Of a micro-step: a backward does twice the arithmetic of its forward."""


class RankSolver:
    """Solves DDP's batch sizes: the fastest split over the ranks, at least one sample on each.

    Args:
        curves: For each rank, its time on its share.
        ceilings: The most samples each rank runs.
        all_reduce_s: The all-reduce of the gradients alone.
        update_s: The optimizer.
        effective_batch_size: Samples per optimizer step; None for one micro-step of any size.
        max_batch_size: The most samples per forward, over all ranks.
        adds_up: The ranks share one processor, so that their times add.
        least_batch: The fewest samples that a rank can train on.
        accumulates: False where an optimizer step has to be a single forward.
    """

    def __init__(
        self,
        curves: tuple[TimeCurve, ...],
        ceilings: tuple[int, ...],
        *,
        all_reduce_s: float,
        update_s: float,
        effective_batch_size: int | None,
        max_batch_size: int,
        adds_up: bool,
        least_batch: int = 1,
        accumulates: bool = True,
    ) -> None:
        self.least_batch = least_batch
        self.accumulates = accumulates
        self.curves = curves
        self.ceilings = ceilings
        self.all_reduce_s = all_reduce_s
        self.update_s = update_s
        self.effective_batch_size = effective_batch_size
        self.max_batch_size = max_batch_size
        self.adds_up = adds_up

    def answer(self) -> RankAnswer | None:
        """Return the best by the objective; None where a rank holds nothing, or there are more ranks than samples."""
        found = [self._at(size) for size in self._sizes()]
        if not found:
            return None
        top = max(answer.samples_per_s for answer in found)
        least_share = 1.0 if self.effective_batch_size is not None else KNEE_SHARE
        return min(
            (answer for answer in found if answer.samples_per_s >= least_share * top),
            key=lambda answer: sum(answer.batch_sizes),
        )

    def _sizes(self) -> list[int]:
        most = min(sum(self.ceilings), self.max_batch_size)
        least = len(self.curves) * self.least_batch
        if min(self.ceilings) < self.least_batch or most < least:
            return []
        if self.effective_batch_size is None:
            return [size for size in geometric(most) if size >= least]
        fewest = accumulation_steps(self.effective_batch_size, most)
        if not self.accumulates:
            return [self.effective_batch_size] if fewest == 1 and self.effective_batch_size >= least else []
        sizes = {-(-self.effective_batch_size // steps) for steps in range(fewest, fewest + MOST_STEPS)}
        return sorted(size for size in sizes if size >= least)

    def _at(self, batch_size: int) -> RankAnswer:
        total = batch_size if self.effective_batch_size is None else self.effective_batch_size
        floors = (self.least_batch,) * len(self.curves)
        split = fastest_split(batch_size, self.curves, self.ceilings, floors)
        sizes = micro_batch_sizes(total, batch_size)
        times = [curve(samples) for curve, samples in zip(self.curves, split, strict=True)]
        # The last micro-step is the shorter by what it lacks.
        amount = len(sizes) - 1 + sizes[-1] / batch_size
        seconds = overlapped_seconds(
            [sum(times) * amount] if self.adds_up else [time_s * amount for time_s in times],
            self.all_reduce_s,
            self.update_s,
            BACKWARD_SHARE * max(times) * sizes[-1] / batch_size,
        )
        return RankAnswer(split, len(sizes), total / seconds)


def geometric(largest: int) -> list[int]:
    """Return sizes from 1 to `largest`, four to each doubling."""
    sizes, n = {largest}, 1.0
    while n < largest:
        sizes.add(int(n))
        n *= 2**0.25
    return sorted(sizes)
