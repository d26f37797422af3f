"""Gather a tensor from all ranks, for losses that compare samples of different ranks (contrastive losses).

# Note [Gradients of a gather]

Rank r has n_r of the N samples of a micro-batch, and its loss l_r is a mean over them. `step.backward` multiplies l_r
by n_r W / N, and DDP averages the gradients of the W ranks. So the result is the gradient of

    L = sum over ranks of (n_r / N) l_r        the mean over all N samples

Each l_r depends on the tensors of all ranks. The backward of the gather adds up the gradients of all losses with
respect to one rank's rows. They contain the weights n_r W / N already.

    rank 0   rows z0 (5)  --gather--> [z0 z1]   l_0 * 5 W / 8      gradient of z0: 5 W / 8 dl_0/dz0 + 3 W / 8 dl_1/dz0
    rank 1   rows z1 (3)  --gather--> [z0 z1]   l_1 * 3 W / 8      gradient of z1: 5 W / 8 dl_0/dz1 + 3 W / 8 dl_1/dz1
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from autosplit.ddp.device import exchange_device, gathered, gathered_objects
from autosplit.errors import InputError


@dataclass(frozen=True, eq=False)
class Gathered:
    """The gathered rows of all ranks.

    Attributes:
        tensor: All rows, in the order of the ranks.
        offset: The position of this rank's first row in `tensor`.
        sizes: The number of rows of each rank.
    """

    tensor: Tensor
    offset: int
    sizes: tuple[int, ...]


def gather_rows(own: Tensor, *, counts: bool) -> Gathered:
    """Gather the rows of all ranks. See `Context.all_gather`.

    Args:
        counts: Whether this rank's rows have a weight. If not, only this rank gets them, at the end of `tensor`, so the
            indices in its loss are valid.
    """
    if dist.get_world_size() == 1:
        return Gathered(own, 0, (len(own),))
    rows = own if counts else own[:0]
    sizes = _sizes_of_all(rows)
    rank = dist.get_rank()
    gathered: Tensor = _AllGatherRows.apply(rows, sizes, rank)  # type: ignore[no-untyped-call]
    if counts:
        return Gathered(gathered, sum(sizes[:rank]), sizes)
    return Gathered(torch.cat([gathered, own]), sum(sizes), sizes)


def _sizes_of_all(rows: Tensor) -> tuple[int, ...]:
    needs_gradient = rows.requires_grad and torch.is_grad_enabled()
    facts = f"{tuple(rows.shape[1:])} of {rows.dtype}{' with gradients' if needs_gradient else ''}"
    own = torch.tensor([len(rows), zlib.crc32(facts.encode())], device=exchange_device(rows.device))
    numbers = torch.stack(gathered(own)).tolist()
    if len({code for _, code in numbers}) > 1:
        held = ", ".join(f"{theirs} on rank {rank}" for rank, theirs in enumerate(gathered_objects(facts)))
        raise InputError(
            f"all_gather received different rows on the ranks: {held}. Expected the same shape, dtype and gradients "
            "on all ranks.",
        )
    return tuple(size for size, _ in numbers)


class _AllGatherRows(torch.autograd.Function):
    """Gather unequal numbers of rows. The backward adds up all ranks' gradients. See Note [Gradients of a gather]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
        ctx.sizes, ctx.rank = sizes, rank
        most, bytes_per_row = max(sizes), math.prod(rows.shape[1:]) * rows.element_size()
        # Send bytes, because a backend need not support every dtype. Pad them, because gloo aborts on unequal sizes.
        own = torch.zeros(most * bytes_per_row, dtype=torch.uint8, device=exchange_device(rows.device))
        if rows.numel():
            own[: len(rows) * bytes_per_row] = rows.detach().contiguous().view(-1).view(torch.uint8).to(own.device)
        parts = [part[: size * bytes_per_row] for part, size in zip(gathered(own), sizes, strict=True)]
        return torch.cat(parts).to(rows.device).view(rows.dtype).view(sum(sizes), *rows.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Add up in single precision. Half precision would round the sum, and not every backend supports it.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(exchange_device(gradient.device), wide, memory_format=torch.contiguous_format, copy=True)
        if not ctx.sizes[ctx.rank]:
            total.zero_()  # the loss of samples with weight 0 may be NaN
        dist.all_reduce(total)
        begin = sum(ctx.sizes[: ctx.rank])
        return total[begin : begin + ctx.sizes[ctx.rank]].to(gradient.device, gradient.dtype), None, None
