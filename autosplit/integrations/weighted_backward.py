"""Weight each micro-batch's backward by its part of the optimizer step."""

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
    """A micro-batch with its weight and position.

    Attributes:
        weight: The factor of its loss: its part of the optimizer step (1 for a sum) times the number of processes,
            because their gradients are averaged.
        number: The index within the epoch.
        size: This process's samples. 0 if this process runs another process's samples with weight 0.
        total: The count of the whole optimizer step, over all processes.
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
        """Whether this is the last micro-batch of its optimizer step."""
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
    """Yield the micro-batches of a loader with their weights. The schedule of its sampler determines the weights.

    If only a part of an optimizer step runs (`begin`, `end`), the part is weighted as if it were the whole step.

    Args:
        count: Returns the divisor of a batch's mean loss. None for its samples. With `count`, a step's micro-batches
            are buffered until all are counted.
        sums: Whether the loss is a sum, so each micro-batch has the weight 1.
        spans_ranks: Whether losses are already normalised over the processes. See `normalised_over_ranks`.
        over_processes: Sums each number of a list over the processes.
        begin: The first micro-batch to yield. It must be in the sampler's first step.
        end: The number of micro-batches in the epoch. None for all.
    """
    start, schedule = sampler.start_step, sampler.schedule
    first = batches_of(sampler, start)
    end = min(len(sampler), len(sampler) if end is None else end)
    num_ranks = sampler.rank_slice.num_ranks
    if spans_ranks:
        refuse_uncounted_scope(max((len(step.micro_batch_sizes) for step in schedule), default=0), count)
        zeros = sum(not size for step in schedule for size in step.micro_batch_sizes)
        refuse_ranks_without_samples(*over_processes([zeros]))
    batches = iter(loader)  # read `start_step` before this line, because workers start to draw and reset it
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
            # A process without samples runs a sample of another process, with weight 0.
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
    next(batches, None)  # draw past the end, so that the loader's workers can shut down normally


def batches_of(sampler: ScheduledBatchSampler, steps: int) -> int:
    """Return the number of micro-batches in an epoch's first optimizer steps."""
    return sum(len(step.micro_batch_sizes) for step in sampler.schedule[:steps])


def weighted_backward(
    backward: Callable[..., Any], loss: torch.Tensor, weight: float, models: Iterable[nn.Module], **kwargs: Any
) -> None:
    """Run a backward on a weighted loss.

    With weight 0, the gradients become 0, even if the loss is NaN (0/0 for a mean over no labels). The backward must
    run anyway, because the processes reduce their gradients in it.
    """
    if weight:
        backward(loss * weight, **kwargs)
        return
    with silenced(models):
        backward(loss * 0.0, **kwargs)
