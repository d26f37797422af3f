"""Tell the other ranks of a loop what this one holds: what another loader gave, tokens that count, gradient norms.

rank 0   batch batch batch  counts 40 | the ranks' counts meet: N = 65,  | weights 40 W/65
rank 1   batch batch        counts 25 | and 3 micro-steps for everybody  | weights 25 W/65, the third counts nothing
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from autosplit.ddp.device import exchange_device, keep_for_gloo
from autosplit.errors import InputError
from autosplit.parallel.batch_counts import Count, check_loader, count_samples, counted, tidy
from autosplit.parallel.noise_estimate import Sums
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.parallel.rank_scope import normalised_over_ranks, refuse_ranks_without_samples, refuse_uncounted_scope
from autosplit.torch_versions import private


class LeftOverWarning(UserWarning):
    """A rank's loader had batches left when another's had ended; they were not trained on."""


def _gathered(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Return a row of numbers for each rank, in double precision; every rank calls it with equally many numbers.

    The numbers travel as their 64 bits: some accelerators have int64, but no float64.
    """
    bits = torch.tensor(values, dtype=torch.float64, device="cpu").view(torch.int64)
    own = bits.to(exchange_device(device))
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    keep_for_gloo([own, *found])
    return torch.stack(found).cpu().view(torch.float64)


def totals_over_ranks(own: Sequence[float], device: torch.device) -> list[float]:
    """Return the sum over the ranks of each number in a list; every rank calls it with equally many numbers."""
    sums: list[float] = _gathered(own, device).sum(0).tolist()
    return [tidy(total) for total in sums]


def sums_over_ranks(own: Sums, device: torch.device) -> Sums:
    """Add the ranks' sums up; the step's gradient is the same on all, but a rank without a share took no norm."""
    weighted, number, squared = _gathered(own, device).unbind(1)
    return float(weighted.sum()), float(number.sum()), float(squared.max())


def refuse_hook(wrapped: DistributedDataParallel) -> None:
    """Refuse a model whose gradient is not the average of the ranks', for the noise scale."""
    if private(wrapped, "_comm_hooks"):
        raise InputError(
            "noise_scale is given, and the wrapped model has a communication hook; expected none, because a step's "
            "gradient has to be the average of the ranks'; leave either out",
            code="noise-scale-hook",
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
    """Cut a loader of any kind into optimizer steps that all ranks take together.

    A step's micro-batches are held back until the ranks have told each other what theirs count for. A rank that has
    fewer runs its last one again, counting for nothing, and all end when the first has none. A rank without a share
    runs its batches for the others, and they count for nothing, either.

    Args:
        spans_ranks: The loss of a micro-batch is normalised over all ranks already, see `normalised_over_ranks`.
    """
    check_loader(loader)
    if spans_ranks:
        refuse_uncounted_scope(micro_steps, count)
    batches = iter(loader)
    for index in itertools.count():
        held = list(itertools.islice(batches, micro_steps))
        sizes = [counted(count or count_samples, batch) if has_share else 0 for batch in held]
        samples = [int(has_share)] * len(held)
        everyones = _gathered((len(held), sum(sizes)), device).tolist()
        most = int(max(number for number, _ in everyones))
        if not all(number for number, _ in everyones):
            if held:
                warnings.warn(
                    f"another rank's loader has ended, and {len(held)} batches or more of this one's are left; they "
                    "are not trained on; give the ranks loaders of one length, or ctx.batch_sampler",
                    LeftOverWarning,
                    stacklevel=2,
                )
            return
        total = sum(size for _, size in everyones)
        if spans_ranks:
            refuse_ranks_without_samples(sum(most - number for number, _ in everyones))
            sizes, total = normalised_over_ranks(totals_over_ranks(sizes, device), len(everyones))
        held += [held[-1]] * (most - len(held))
        sizes += [0] * (most - len(sizes))
        samples += [0] * (most - len(samples))
        total = tidy(total)
        yield OptimizerStep(held, sizes, index=index, num_samples=total, num_ranks=len(everyones), samples=samples)


def draws_everything(loader: object) -> bool:
    """Tell whether a loader is PyTorch's own for one process, over a data set with a length."""
    whole = isinstance(getattr(loader, "sampler", None), (SequentialSampler, RandomSampler))
    return whole and not isinstance(getattr(loader, "dataset", None), IterableDataset)
