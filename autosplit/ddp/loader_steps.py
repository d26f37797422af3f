"""Exchange counts and settings between the ranks, and form steps from loaders without a plan's batch sampler.

rank 0   batch batch batch  count 40 | the ranks exchange counts: N = 65  | weights 40 W/65
rank 1   batch batch        count 25 | all ranks run 3 micro-steps        | weights 25 W/65, the third has weight 0
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from autosplit.ddp.device import exchange_device, gathered, gathered_objects
from autosplit.errors import InputError, shown, warn_user
from autosplit.parallel.batch_counts import Count, check_loader, samples_and_count, tidy
from autosplit.parallel.batch_sampler import ScheduledBatchSampler
from autosplit.parallel.hidden_sampler import UnscheduledBatches
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.parallel.rank_scope import normalised_over_ranks, refuse_ranks_without_samples, refuse_uncounted_scope
from autosplit.parallel.step_listener import Sums
from autosplit.text import listed
from autosplit.torch_versions import private


class LeftOverWarning(UserWarning):
    """A rank's loader had batches left when another rank's loader ended. They are not trained on."""


def _gathered(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return a row of numbers for each rank, in double precision. All ranks must pass the same number of values.

    Send the bits as int64, because some accelerators do not have float64.
    """
    bits = torch.tensor(values, dtype=torch.float64, device="cpu").view(torch.int64)
    return torch.stack(gathered(bits.to(exchange_device(device)))).cpu().view(torch.float64)


def totals_over_ranks(own: Sequence[float], device: torch.device) -> list[float]:
    """Return each number's sum over the ranks. All ranks must pass the same number of values."""
    sums: list[float] = _gathered(own, device).sum(0).tolist()
    return [tidy(total) for total in sums]


def sums_over_ranks(own: Sums, device: torch.device) -> Sums:
    """Combine the ranks' gradient norms of a step: sum the first two numbers, and take the maximum of the third.

    The third number is the squared norm of the step's gradient. Only ranks with samples measure it, with equal results.
    """
    weighted, number, squared = _gathered(own, device).unbind(1)
    return float(weighted.sum()), float(number.sum()), float(squared.max())


class Settings(NamedTuple):
    """The settings of a loop over a loader.

    Attributes:
        common: Settings that must be equal on all ranks, by name.
        chosen: A digest of the samples that a SubsetRandomSampler chooses. It must differ between the ranks.
    """

    common: dict[str, Any]
    chosen: str | None = None


def settings_of(loader: Any, **options: Any) -> Settings:
    """Return the settings of a loop over a loader."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, ScheduledBatchSampler):
        return Settings({"loader": "a loader without ctx.batch_sampler", **options}, _chosen_samples(loader))
    dataset: Any = getattr(loader, "dataset", None)
    size = {"data set size": len(dataset)} if hasattr(dataset, "__len__") else {}
    return Settings({"loader": "a loader with ctx.batch_sampler", **sampler.common_facts(), **size, **options})


def _chosen_samples(loader: Any) -> str | None:
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, SubsetRandomSampler):
        return None
    return hashlib.sha256(repr(sorted(map(int, sampler.indices))).encode()).hexdigest()


def require_equal_settings(settings: Settings) -> None:
    """Raise InputError on all ranks if the common settings differ, or if two ranks chose the same samples."""
    found = gathered_objects(tuple(settings))
    everyones, choices = [common for common, _ in found], [chosen for _, chosen in found if chosen is not None]
    if len(set(choices)) < len(choices):
        raise InputError(
            "The loader has a SubsetRandomSampler with the same samples on several ranks, so each rank would train on "
            "all of them. Expected only this rank's part. Pass ctx.loader(Subset(dataset, sampler.indices)).",
        )
    for rank, one in enumerate(everyones):
        name = next((name for name in {**everyones[0], **one} if one.get(name) != everyones[0].get(name)), None)
        if name is not None:
            values = f"{shown(everyones[0].get(name))} on rank 0, {shown(one.get(name))} on rank {rank}"
            raise InputError(
                f"The ranks' settings of this loop differ: {name} is {values}. Expected equal settings, data sets and "
                "checkpoints on all ranks. The sampler divides the whole data set among the ranks.",
            )


def refuse_hook(wrapped: DistributedDataParallel) -> None:
    """Raise InputError if a communication hook changes the average of a model's gradients, for the noise scale."""
    if private(wrapped, "_comm_hooks"):
        raise InputError(
            "noise_scale is given, and the wrapped model has a communication hook. A step's gradient must be the "
            "average of the ranks' gradients. Leave one of the two out.",
        )


def refuse_unplanned(loader: Any, rank: int, planned: Sequence[int]) -> None:
    """Raise InputError if a loader draws the whole data set on each rank, or does not divide it as the plan does.

    A rank without samples may have any batch size, because its batches have weight 0.

    Args:
        planned: Samples per micro-batch of each rank.
    """
    if len(planned) > 1 and draws_everything(loader):
        raise InputError(
            f"The loader draws the whole data set on each of {len(planned)} ranks. Expected rank {rank}'s part. "
            "Pass a loader with batch_sampler=ctx.batch_sampler(len(dataset)), without a wrapper around it.",
        )
    if not isinstance(loader, DataLoader) or not planned[rank]:
        return
    if loader.batch_size not in (None, planned[rank]):
        raise InputError(
            f"The DataLoader has batch_size={loader.batch_size}, but the plan's micro-batches have {planned[rank]} "
            "samples here. Call ctx.steps(ctx.loader(loader)), which uses the plan's sizes. For an IterableDataset, "
            f"pass batch_size=ctx.seat.samples ({planned[rank]}).",
        )
    if isinstance(loader.sampler, DistributedSampler) and len({*planned}) > 1:
        raise InputError(
            "The DataLoader's DistributedSampler gives each rank the same number of samples, but the plan has "
            f"{listed([*map(str, planned)], 4)}. Call ctx.steps(ctx.loader(loader)), which divides the data set as the "
            "plan does.",
        )


def foreign_steps(
    loader: Iterable[Any],
    micro_steps: int,
    *,
    device: torch.device,
    count: Count | None = None,
    has_share: bool = True,
    spans_ranks: bool = False,
) -> Iterator[OptimizerStep]:
    """Form the same number of optimizer steps on all ranks, from a loader without a plan's batch sampler.

    The ranks exchange their counts at each step. Until then, the step's micro-batches are buffered. A rank with fewer
    micro-batches runs its last one again with weight 0. All ranks end when the shortest loader ends.

    Args:
        has_share: Whether the plan has samples for this rank.
        spans_ranks: Whether losses are already normalised over all ranks. See `normalised_over_ranks`.
    """
    check_loader(loader)
    if spans_ranks:
        refuse_uncounted_scope(micro_steps, count)
    batches = UnscheduledBatches(loader)
    for index in itertools.count():
        held = list(itertools.islice(batches, micro_steps))
        sizes = [samples_and_count(batch, count) if has_share else (0, 0) for batch in held]
        samples, counts = [size for size, _ in sizes], [number for _, number in sizes]
        everyones = _gathered((len(held), sum(samples), sum(counts)), device).tolist()
        numbers = [int(number) for number, _, _ in everyones]
        if not all(numbers):
            if held:
                warn_user(
                    f"Another rank's loader has ended, and this rank's loader has at least {len(held)} batches "
                    "left. They are not trained on. Give the ranks loaders of equal length, or use "
                    "ctx.batch_sampler.",
                    LeftOverWarning,
                )
            return
        most = max(numbers)
        total = sum(number for _, _, number in everyones)
        if spans_ranks:
            refuse_ranks_without_samples(sum(most - number for number in numbers))
            counts, total = normalised_over_ranks(totals_over_ranks(counts, device), len(everyones))
        missing = most - len(held)
        yield OptimizerStep(
            held + [held[-1]] * missing,
            counts + [0] * missing,
            index=index,
            count=tidy(total),
            num_samples=int(sum(size for _, size, _ in everyones)),
            num_ranks=len(everyones),
            samples=samples + [0] * missing,
        )


def draws_everything(loader: object) -> bool:
    """Return whether a loader draws the whole data set, with PyTorch's sampler for a single process."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and type(batches) is not BatchSampler:
        return False  # a DataLoader with the user's batch sampler has a SequentialSampler, which it does not use
    return isinstance(getattr(loader, "sampler", None), (SequentialSampler, RandomSampler))
