"""Loops in which the ranks have to tell each other what they hold: other loaders, and losses that count tokens.

rank 0   batch batch batch  counts 40 | the ranks' counts meet: N = 65,  | weights 40 W/65
rank 1   batch batch        counts 25 | and 3 micro-steps for everybody  | weights 25 W/65, the third counts nothing
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed as dist

from autosplit.ddp.device import exchange_device
from autosplit.parallel.batch_counts import check_loader, count_samples, counted
from autosplit.parallel.optimizer_steps import OptimizerStep


class LeftOverWarning(UserWarning):
    """A rank's loader had batches left when another's had ended; they were not trained on."""


def gathered(values: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return every rank's numbers, in the order of the ranks; all of them call it, with equally many."""
    own = torch.tensor(list(values), dtype=torch.int64, device=exchange_device(device))
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [part.tolist() for part in found]


def foreign_steps(
    loader: Iterable[Any],
    micro_steps: int,
    *,
    device: torch.device,
    count: Callable[[Any], int] | None = None,
    has_share: bool = True,
) -> Iterator[OptimizerStep]:
    """Cut a loader of any kind into optimizer steps that all ranks take together.

    A step's micro-batches are held back until the ranks have told each other what theirs count for. A rank that has
    fewer runs its last one again, counting for nothing, and all end when the first has none. A rank without a share
    runs its batches for the others, and they count for nothing, either.
    """
    check_loader(loader)
    batches = iter(loader)
    for index in itertools.count():
        held = list(itertools.islice(batches, micro_steps))
        sizes = [counted(count or count_samples, batch) if has_share else 0 for batch in held]
        samples = [int(has_share)] * len(held)
        everyones = gathered((len(held), sum(sizes)), device)
        most = max(number for number, _ in everyones)
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
        held += [held[-1]] * (most - len(held))
        sizes += [0] * (most - len(sizes))
        samples += [0] * (most - len(samples))
        yield OptimizerStep(held, sizes, index=index, num_samples=total, num_ranks=len(everyones), samples=samples)
