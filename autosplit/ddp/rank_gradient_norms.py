"""The gradient norms of all ranks, for the noise scale."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.device import exchange_device
from autosplit.errors import InputError
from autosplit.parallel.noise_scale import Sums


def refuse_hook(wrapped: DistributedDataParallel) -> None:
    """Refuse a model whose gradient is not the average of the ranks'.

    Raises:
        InputError: It has a communication hook.
    """
    if wrapped._comm_hooks:  # noqa: SLF001 - no other name
        raise InputError(
            "noise_scale is True, and the wrapped model has a communication hook; expected none, because a step's "
            "gradient has to be the average of the ranks'; leave either out"
        )


def sums_over_ranks(own: Sums, device: torch.device) -> Sums:
    """Add the ranks' sums up; the step's gradient is the same on all, but a rank without a share took no norm."""
    sent = torch.tensor(own, device=exchange_device(device))
    found = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(found, sent)
    weighted, number, squared = torch.stack(found).double().unbind(1)
    return float(weighted.sum()), float(number.sum()), float(squared.max())
