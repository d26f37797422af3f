"""Weigh each micro-batch's backward by its share of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from autosplit.ddp.batchnorms import silenced
from autosplit.parallel.batch_counts import Count, counted
from autosplit.parallel.batch_sampler import ScheduledBatchSampler
from autosplit.parallel.rank_scope import (
    OverRanks,
    normalised_over_ranks,
    refuse_ranks_without_samples,
    refuse_uncounted_scope,
)
from autosplit.solve.split import micro_batch_sizes


class Weighed(NamedTuple):
    """A micro-batch with its weight and place.

    Attributes:
        batch: As the loader made it.
        weight: What its loss is multiplied by: its part of the optimizer step, or 1 of a sum, times the processes,
            whose gradients are averaged.
        number: Of it within the epoch.
        position: In its optimizer step, from 0.
        length: The micro-batches of that step.
        size: Samples that it counts for in this process; 0 where it has no share.
        total: What the optimizer step counts for, over all processes.
    """

    batch: Any
    weight: float
    number: int
    is_last: bool
    position: int
    length: int
    size: int
    total: float

    @property
    def ends_step(self) -> bool:
        """Whether the optimizer steps after it."""
        return self.position == self.length - 1


def weighed(
    loader: Iterable[Any],
    sampler: ScheduledBatchSampler,
    *,
    count: Count | None = None,
    sums: bool = False,
    spans_ranks: bool = False,
    over_processes: OverRanks = list,
    begin: int = 0,
    end: int | None = None,
) -> Iterator[Weighed]:
    """Walk a loader of shares by its sampler's schedule.

    An optimizer step of which only a part is walked is a step of that part: its weights add up all the same.

    Args:
        count: Return what a batch's mean loss divides by; None for its samples. With a function, a step's micro-batches
            are held back until all are counted.
        sums: The loss is a sum, so each part has the weight 1.
        spans_ranks: The loss is normalised over the processes already, see `normalised_over_ranks`.
        over_processes: Adds each of a list of numbers up over the processes.
        begin: The micro-batch of the epoch to begin with, in the step that the sampler begins with.
        end: How many of the epoch there are; None for all.
    """
    start, schedule = sampler.start_step, sampler.schedule
    first = batches_of(sampler, start)
    end = min(len(sampler), len(sampler) if end is None else end)
    num_ranks = sampler.rank_slice.num_ranks
    if spans_ranks:
        refuse_uncounted_scope(max((len(step.micro_batch_sizes) for step in schedule), default=0), count)
        zeros = sum(not size for step in schedule for size in step.micro_batch_sizes)
        refuse_ranks_without_samples(*over_processes([zeros]))
    batches = iter(loader)  # workers begin to draw here, which spends the sampler's start
    for step in schedule[start:]:
        if first >= end:
            return
        last = min(first + len(step.micro_batch_sizes), end)
        numbers = range(max(first, min(begin, last)), last)
        part = slice(numbers.start - first, last - first)
        sizes: list[float] = list(step.micro_batch_sizes[part])
        everyones: list[float] = list(micro_batch_sizes(step.num_samples, sampler.batch_size)[part])
        total: float = sum(everyones)
        drawn: Any = islice(batches, part.start, part.stop)
        if count is not None:
            drawn = list(drawn)
            # Where there is no share, a sample is run that counts for nothing.
            sizes = [counted(count, one) if size else 0 for one, size in zip(drawn, sizes, strict=True)]
            everyones = over_processes(sizes if spans_ranks else [sum(sizes)])
            total = sum(everyones)
        if spans_ranks:
            sizes, total = normalised_over_ranks(everyones, num_ranks)
        shares = step.micro_batch_sizes[part]
        for position, (batch, size) in enumerate(zip(drawn, sizes, strict=True)):
            weight = num_ranks * (float(size > 0) if sums else size / total if total else 0.0)
            number = numbers[position]
            yield Weighed(batch, weight, number, number == end - 1, position, len(shares), shares[position], total)
        first += len(step.micro_batch_sizes)
    next(batches, None)  # a loader's workers finish in order


def batches_of(sampler: ScheduledBatchSampler, steps: int) -> int:
    """Count the micro-batches of an epoch's first optimizer steps."""
    return sum(len(step.micro_batch_sizes) for step in sampler.schedule[:steps])


def weighted_backward(
    backward: Callable[..., Any], loss: torch.Tensor, weight: float, models: Iterable[nn.Module], **kwargs: Any
) -> None:
    """Run a backward on a weighted loss.

    One of weight 0 sends zeros, whatever its loss is: a mean over no labels is 0/0, and 0 times that is no zero. It has
    to run all the same, because the processes' gradients meet in it.
    """
    if weight:
        backward(loss * weight, **kwargs)
        return
    with silenced(models):
        backward(loss * 0.0, **kwargs)
