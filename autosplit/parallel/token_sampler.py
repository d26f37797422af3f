"""The batch sampler of samples that differ in length: batches of like length, as many samples as fit at that length."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autosplit.errors import InputError
from autosplit.parallel.batch_sampler import RankSlice, ScheduledBatchSampler, StepSchedule
from autosplit.solve.padded_length import Batches, LengthPlan, checked_lengths, cut_epoch, shares_of


class TokenBatchSampler(ScheduledBatchSampler):
    """Hands out an epoch as batches of like length, each of as many samples as the devices hold at its length.

    Every sample comes once an epoch. With an effective batch, each optimizer step has exactly the samples that the
    plan's `batch_sampler` would give it, sorted and cut otherwise; without, every batch is an optimizer step, so that
    steps have unlike numbers of samples. Within a batch the longest sample comes first, and devices, or ranks, get
    their samples in that order.

    Args:
        lengths: Of each sample of the data set, in what the plan's lengths are counted in.
        split: Samples of the longest length that each device, or each rank, gets in a full forward.
        keeps_effective: Every step has exactly `effective_batch_size` samples; otherwise every batch is a step.
        rank: Whose part of every batch to hand out; None for all of it.

    Raises:
        InputError: Lengths that are no whole numbers of 1 or more, or are above the longest of the plan.
    """

    unlike_lengths = True

    def __init__(
        self,
        plan: LengthPlan,
        lengths: Any,
        split: Sequence[int],
        effective_batch_size: int,
        *,
        keeps_effective: bool,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
    ) -> None:
        self._lengths = checked_lengths(lengths)
        self._digest: str | None = None
        self._plan, self._split = plan, tuple(split)
        self._keeps_effective, self._rank = keeps_effective, rank
        plan.times_at(max(self._lengths))  # or one is too long
        super().__init__(
            len(self._lengths),
            sum(split),
            effective_batch_size,
            shuffle=shuffle,
            seed=seed,
            rank_slice=None if rank is None else RankSlice(rank, self._split),
        )
        self._cut: tuple[int, list[Batches], tuple[StepSchedule, ...]] | None = None

    def _schedule_of_epoch(self, epoch: int) -> tuple[StepSchedule, ...]:
        return self._of_epoch(epoch)[1]

    def _of_epoch(self, epoch: int) -> tuple[list[Batches], tuple[StepSchedule, ...]]:
        if self._cut is None or self._cut[0] != epoch:
            steps = self._steps_of(epoch)
            self._cut = epoch, steps, tuple(map(self._schedule_of, steps))
        return self._cut[1:]

    def _steps_of(self, epoch: int) -> list[Batches]:
        drawn = self._order(epoch)
        order = drawn.tolist() if isinstance(drawn, torch.Tensor) else drawn
        effective = self.effective_batch_size if self._keeps_effective else None
        steps = cut_epoch(self._plan, self._lengths, order, self._split, effective)
        if self.shuffle and effective is None:  # or lengths would fall and fall again
            generator = torch.Generator().manual_seed(self.seed + epoch)
            steps = [steps[number] for number in torch.randperm(len(steps), generator=generator).tolist()]
        return steps

    def _schedule_of(self, batches: Batches) -> StepSchedule:
        splits = tuple(map(self._shares_of, batches))
        num_samples = sum(map(len, batches))
        if self._rank is None:
            return StepSchedule(tuple(map(len, batches)), num_samples, splits)
        return StepSchedule(tuple(split[self._rank] for split in splits), num_samples)

    def _shares_of(self, batch: list[int]) -> tuple[int, ...]:
        return shares_of(self._plan, len(batch), self._lengths[batch[0]], self._split)

    def __len__(self) -> int:
        """Count the batches of the epoch."""
        return sum(map(len, self._of_epoch(self.epoch)[0]))

    def __iter__(self) -> Iterator[list[int]]:
        start_step, self._start_step = self._start_step, 0  # spent at the first draw, as in the class above
        for step in self._of_epoch(self.epoch)[0][start_step:]:
            for batch in step:
                yield batch if self._rank is None else self._part_of(batch, self._rank)

    def _part_of(self, batch: list[int], rank: int) -> list[int]:
        ends = [0, *itertools.accumulate(self._shares_of(batch))]
        return batch[ends[rank] : ends[rank + 1]] or batch[-1:]  # which is run, and counts for nothing

    def refuse_single_samples(self, split: Sequence[int], least: int) -> None:  # noqa: ARG002
        """Refuse models that train on no single sample: batches of like length are of any size."""
        if least > 1:
            raise InputError(
                f"the plan's BatchNorms train on no fewer than {least} samples, and batches of like length may have 1; "
                "expected a model without BatchNorms, which would count padding, too; use batch_sampler",
                code="batchnorm-with-lengths",
            )

    def common_facts(self) -> dict[str, Any]:
        """Return the facts about the coming epoch that must be equal on all ranks of a job."""
        if self._digest is None:
            self._digest = hashlib.sha256(repr(self._lengths).encode()).hexdigest()[:16]
        return {**super().common_facts(), "digest of the lengths": self._digest}

    def _order_facts(self) -> dict[str, Any]:
        """Return what the samples of a number of steps depend on: with an effective batch the order alone."""
        facts = super()._order_facts()
        if not self._keeps_effective:
            made_of = repr((self._plan.points, self._split, self._lengths)).encode()
            facts["batches"] = hashlib.sha256(made_of).hexdigest()[:16]
        return facts
