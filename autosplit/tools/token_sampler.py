"""Batch samples of similar length, with as many samples per batch as fit on the devices at that length."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autosplit.errors import InputError
from autosplit.parallel.batch_sampler import RankSlice, ScheduledBatchSampler, StepSchedule
from autosplit.solve.length_plan import LengthPlan
from autosplit.tools.padded_length import Batches, checked_lengths, cut_epoch, shares_of


class TokenBatchSampler(ScheduledBatchSampler):
    """Yield batches of samples of similar length.

    Every sample is yielded once per epoch. With an effective batch size, each optimizer step has the same samples as
    with the plan's `batch_sampler`, sorted by length. Otherwise every batch is an optimizer step. The longest sample of
    a batch comes first.

    Args:
        lengths: The length of each sample of the data set, in the unit of the plan's lengths.
        split: Samples of the longest length that each device or rank gets in a full forward.
        keeps_effective: Whether every step has exactly `effective_batch_size` samples.
        rank: The rank whose part to yield. None for the whole batch.

    Raises:
        InputError: A length is not an integer of 1 or more, or is above the longest length of the plan.
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
        self.keeps_effective, self._rank = keeps_effective, rank
        plan.times_at(max(self._lengths))  # raises InputError if a sample is too long
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
        effective = self.effective_batch_size if self.keeps_effective else None
        steps = cut_epoch(self._plan, self._lengths, order, self._split, effective)
        if self.shuffle and effective is None:  # the batches are sorted by length, so shuffle the steps
            generator = torch.Generator().manual_seed((self.seed + epoch) % 2**64)
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
        return sum(map(len, self._of_epoch(self.epoch)[0]))

    def __iter__(self) -> Iterator[list[int]]:
        start_step, self._start_step = self._start_step, 0  # used at the first draw, as in ScheduledBatchSampler
        draws = self._draws_outside_steps()
        for step in self._of_epoch(self.epoch)[0][start_step:]:
            for batch in step:
                part = batch if self._rank is None else self._part_of(batch, self._rank)
                if draws is not None:
                    draws.add(len(part))
                yield part

    def _part_of(self, batch: list[int], rank: int) -> list[int]:
        ends = [0, *itertools.accumulate(self._shares_of(batch))]
        return batch[ends[rank] : ends[rank + 1]] or batch[-1:]  # a rank without samples runs one with weight 0

    def refuse_single_samples(self, split: Sequence[int], least: int) -> None:  # noqa: ARG002
        """Raise InputError if the model cannot train on a single sample, because a batch may have only one sample."""
        if least > 1:
            raise InputError(
                f"The plan's BatchNorms need at least {least} samples on a device, but batches of similar length "
                "may have 1. BatchNorms would also count padding. Use batch_sampler.",
            )

    def common_facts(self) -> dict[str, Any]:
        """Return the facts about the next epoch that must be equal on all ranks of a job."""
        if self._digest is None:
            self._digest = hashlib.sha256(repr(self._lengths).encode()).hexdigest()[:16]
        return {**super().common_facts(), "digest of the lengths": self._digest}

    def _order_facts(self) -> dict[str, Any]:
        """Return the values that determine which samples each step has.

        With an effective batch size, these are the values of the order. Otherwise add a digest of the batches.
        """
        facts = super()._order_facts()
        if not self.keeps_effective:
            made_of = repr((self._plan.points, self._split, self._lengths)).encode()
            facts["batches"] = hashlib.sha256(made_of).hexdigest()[:16]
        return facts
