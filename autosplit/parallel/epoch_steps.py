"""Iterate over an epoch by optimizer steps, with the schedule of a plan's batch sampler or by counting samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from autosplit.errors import InputError, warn_user
from autosplit.parallel.batch_counts import Count, check_loader, counted, release, samples_and_count
from autosplit.parallel.batch_sampler import ScheduledBatchSampler
from autosplit.parallel.forgotten_calls import ForgottenCalls
from autosplit.parallel.hidden_sampler import UnscheduledBatches
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.parallel.parts import Cuts
from autosplit.parallel.rank_scope import (
    OverRanks,
    normalised_over_ranks,
    refuse_ranks_without_samples,
    refuse_uncounted_scope,
)
from autosplit.parallel.step_listener import Consumption, NoiseEstimate, Sums, checked_estimate
from autosplit.solve.split import accumulation_steps, micro_batch_sizes, whole_number
from autosplit.text import counted_text

_MISSING = object()


class EffectiveBatchWarning(UserWarning):
    """The size of the loader's optimizer steps differs from the plan's effective batch size."""


def warn_of_short_dataset(num_samples: int, expected: int) -> None:
    """Warn if a data set has fewer samples than the plan's effective batch size."""
    if num_samples < expected:
        found = counted_text(num_samples, "sample")
        warn_user(
            f"The data set has {found}, but the plan has {expected} per optimizer step. So each epoch is one step of "
            f"{found}. To train as planned, tune with effective_batch_size={num_samples} or less.",
            EffectiveBatchWarning,
        )


def compared(made: Iterator[OptimizerStep], expected: int) -> Iterator[OptimizerStep]:
    """Yield the steps. Warn once if a step's size differs from the plan's effective batch size.

    The last step of an epoch may be smaller, unless it is the only one.
    """
    before: float | None = None
    has_warned = False
    for step in made:
        found = step.num_samples if before is None or step.num_samples > expected else before
        before = step.num_samples
        if not has_warned and found != expected:
            has_warned = True
            warn_user(
                f"The optimizer steps have {found} samples, but the plan's have {expected}. Use "
                "plan.loader(dataset) or ctx.loader(dataset), or choose a different batch size in the loader. To train "
                f"with {found}, tune with effective_batch_size={found}.",
                EffectiveBatchWarning,
            )
        yield step


class Steps(Iterator[OptimizerStep]):
    """Iterate over the optimizer steps of one epoch.

        for step in tqdm(plan.steps(loader)):

    `len()` returns the number of steps from the position where the epoch begins or resumes. It raises TypeError if the
    loader has no batch sampler of a plan, because the number is not known then.
    """

    def __init__(self, made: Iterator[OptimizerStep], sampler: ScheduledBatchSampler | None) -> None:
        self._made, self._sampler = made, sampler
        self._number: int | None = None
        self._has_ended = False

    def __iter__(self) -> Steps:
        if self._has_ended:
            raise InputError(
                "The steps of this epoch are over. Expected new steps for each epoch. Write `for step in "
                "plan.steps(loader)` (or ctx.steps) inside of the loop over the epochs.",
            )
        return self

    def __next__(self) -> OptimizerStep:
        if self._number is None and self._sampler is not None:
            self._number = self._sampler.steps_ahead()
        try:
            return next(self._made)
        except StopIteration:
            self._has_ended = True
            raise

    def __len__(self) -> int:
        if self._sampler is None:
            raise TypeError(
                "the number of optimizer steps is not known, because the loader has no plan's batch sampler"
            )
        return self._sampler.steps_ahead() if self._number is None else self._number

    def close(self) -> None:
        """End the loop early. Further calls of `next` raise StopIteration."""
        self._made.close()  # type: ignore[attr-defined]  # a generator


def steps(
    loader: Iterable[Any],
    *,
    batch_size: int,
    effective_batch_size: int,
    count: Count | None = None,
    over_ranks: OverRanks | None = None,
    spans_ranks: bool = False,
    cuts: Cuts | None = None,
    noise_scale: NoiseEstimate | None = None,
    sums_over_ranks: Callable[[Sums], Sums] | None = None,
    device: torch.device | str | int | None = None,
) -> Steps:
    """Return the optimizer steps of one epoch of a loader. See `Plan.steps`.

    If the loader has a `ScheduledBatchSampler`, its schedule gives the sizes, and batches are not examined. With other
    loaders, batches are buffered until they have `effective_batch_size` samples or the loader ends, because the weights
    depend on the total. If `count` is given, a step of such a loader has ``accumulation_steps(effective_batch_size,
    batch_size)`` micro-batches.

    Args:
        over_ranks: Sums each number of a list over the ranks. Needed for `count` if the loader yields one rank's part.
        spans_ranks: Whether losses are already normalised over all ranks. See `normalised_over_ranks`.
        sums_over_ranks: Adds up the ranks' sums of gradient norms. None in a single process.
    """
    check_loader(loader)
    batch_size = whole_number("batch_size", batch_size, minimum=1)
    effective_batch_size = whole_number("effective_batch_size", effective_batch_size, minimum=1)
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, ScheduledBatchSampler):
        sampler.check_sizes(batch_size, effective_batch_size)
        sampler.check_dataset(getattr(loader, "dataset", None))
        if sampler.keeps_effective:
            warn_of_short_dataset(sampler.num_samples, effective_batch_size)
        if count is not None and over_ranks is None and sampler.rank_slice.num_ranks > 1:
            raise InputError(
                f"count is given, but the loader's batch sampler is for one of {sampler.rank_slice.num_ranks} "
                "ranks. plan.steps does not know the counts of the other ranks. Use ctx.steps(loader, count=...).",
            )
        made = _scheduled_steps(loader, sampler, count, over_ranks or list, spans_ranks)
    elif count is not None:
        made = _held_steps(loader, count, most_batches=accumulation_steps(effective_batch_size, batch_size))
    else:
        made = _held_steps(loader, None, enough=effective_batch_size)
    made = checked(made, cuts, noise_scale, sums_over_ranks, device=device)
    return Steps(made, sampler if isinstance(sampler, ScheduledBatchSampler) else None)


def checked(
    made: Iterator[OptimizerStep],
    cuts: Cuts | None = None,
    noise_scale: NoiseEstimate | None = None,
    sums_over_ranks: Callable[[Sums], Sums] | None = None,
    *,
    device: torch.device | str | int | None = None,
) -> Iterator[OptimizerStep]:
    """Set `cuts`, `noise_scale` and `device` on each step, and yield it. Raise InputError if a step is unfinished."""
    checked_estimate(noise_scale)
    forgotten = ForgottenCalls()
    for step in made:
        forgotten.watch(step)
        step.cuts, step.noise_scale, step.device = cuts, noise_scale, device
        if noise_scale is not None:
            step.listeners.append(noise_scale.begin_step(sums_over_ranks))
        yield step
        step.check_finished()


def _scheduled_steps(
    loader: Iterable[Any],
    sampler: ScheduledBatchSampler,
    count: Count | None,
    over_ranks: OverRanks,
    spans_ranks: bool = False,
) -> Iterator[OptimizerStep]:
    num_ranks = sampler.rank_slice.num_ranks
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise InputError(
            "The loader has in_order=False, so its batches come in another order than the schedule of their weights. "
            "Expected in_order=True. Leave it out.",
        )
    if spans_ranks:
        refuse_uncounted_scope(max((len(one.micro_batch_sizes) for one in sampler.schedule), default=0), count)
        refuse_ranks_without_samples(
            *over_ranks([sum(not size for one in sampler.schedule for size in one.micro_batch_sizes)])
        )
    sampler.begin_epoch()
    start_step = sampler.start_step  # read it before iter(), because workers then start to draw and reset it
    schedule = sampler.schedule
    sampler.samples_consumed = sum(step.num_samples for step in schedule[:start_step])
    batches = iter(loader)
    for index, step in enumerate(schedule[start_step:], start_step):
        drawn: Iterator[Any] = batches
        counts: list[float] = [*step.micro_batch_sizes]
        total: float = step.num_samples
        if spans_ranks and count is None:
            counts, total = normalised_over_ranks(micro_batch_sizes(step.num_samples, sampler.batch_size), num_ranks)
        if count is not None:
            held = list(itertools.islice(batches, len(step.micro_batch_sizes)))
            # A rank without samples runs a sample of another rank with weight 0, so its count is 0.
            parts = zip(held, step.micro_batch_sizes, strict=False)
            counts = [counted(count, batch) if samples else 0 for batch, samples in parts]
            counts += [0] * (len(step.micro_batch_sizes) - len(held))
            if spans_ranks:
                counts, total = normalised_over_ranks(over_ranks(counts), num_ranks)
            else:
                (total,) = over_ranks([sum(counts)])
            drawn = release(held)
        made = OptimizerStep(
            drawn,
            counts,
            index=index,
            count=total,
            num_samples=step.num_samples,
            num_ranks=num_ranks,
            samples=step.micro_batch_sizes,
            splits=step.splits,
        )
        made.listeners.append(Consumption(sampler, step.num_samples, made.awaited))
        yield made
        sampler.settle()
    # Draw past the end, so that the loader's workers can shut down normally.
    if next(batches, _MISSING) is not _MISSING:
        raise InputError(
            "The loader returned more batches than its sampler planned. Expected one batch per micro-batch. Pass a "
            "loader that does not repeat or add batches.",
        )


def _held_steps(
    loader: Iterable[Any], count: Count | None, *, most_batches: int | None = None, enough: int | None = None
) -> Iterator[OptimizerStep]:
    held: list[Any] = []
    sizes: list[tuple[int, float]] = []
    index = 0

    def made() -> OptimizerStep:
        samples, counts = zip(*sizes, strict=True)
        return OptimizerStep(release(held), counts, index=index, samples=samples)

    for batch in UnscheduledBatches(loader):
        held.append(batch)
        del batch  # `held` frees each batch when the loop has run it
        sizes.append(samples_and_count(held[-1], count))
        if len(held) == most_batches or (enough is not None and sum(samples for samples, _ in sizes) >= enough):
            yield made()
            held, sizes, index = [], [], index + 1
    if held:
        yield made()
