"""Average the ranks' gradients after the last backward of a step, not during it, for ``on_oom="cut"``.

DistributedDataParallel sends its buckets in the last backward. A rank may run out of memory there and run the
micro-batch again in parts. The other ranks would then wait forever, or receive some buckets twice. So the ranks send
nothing in a backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.batchnorms import has_synchronised
from autosplit.ddp.device import exchange_device
from autosplit.errors import InputError
from autosplit.torch_versions import buckets, private

BUCKET_BYTES = 25 * 2**20
"""Bytes that are sent at a time, equal to DistributedDataParallel's default `bucket_cap_mb` (25 MiB)."""


def refuse_meeting(wrapped: DistributedDataParallel) -> None:
    """Raise InputError if `average_gradients` cannot replace a model's synchronisation."""
    found = "a SyncBatchNorm" if has_synchronised(wrapped) else "static_graph=True" if wrapped.static_graph else None
    if found is None and private(wrapped, "_comm_hooks"):
        found = "a communication hook"
    if found is not None:
        raise InputError(
            f"on_oom is 'cut', and the wrapped model has {found}. With 'cut', the ranks average their gradients only "
            f"once, after the last backward. Remove {found}, or leave on_oom out.",
        )


@contextmanager
def apart(wrapped: DistributedDataParallel) -> Iterator[None]:
    """Disable DDP's synchronisation of gradients and buffers inside the `with` block."""
    before = wrapped.require_backward_grad_sync
    wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = False
    try:
        yield
    finally:
        wrapped.require_backward_grad_sync = before


def average_gradients(wrapped: DistributedDataParallel, trained: Collection[int] = ()) -> None:
    """Average a model's gradients over the ranks, and broadcast rank 0's buffers. All ranks must call this.

    If a parameter has a gradient on any rank, it has a gradient on all ranks afterwards.

    Args:
        trained: The ids of parameters that are averaged although they may be frozen now, as in a GAN.
    """
    parameters = [one for one in wrapped.module.parameters() if one.requires_grad or id(one) in trained]
    if not parameters:
        return
    device = parameters[0].device
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=exchange_device(device))
    dist.all_reduce(used, dist.ReduceOp.MAX, group=wrapped.process_group)
    grads = [_gradient_of(p) for p, is_used in zip(parameters, used.tolist(), strict=True) if is_used]
    for bucket in buckets(grads, BUCKET_BYTES):
        flat = torch.cat([grad.reshape(-1) for grad in bucket]).div_(dist.get_world_size(wrapped.process_group))
        dist.all_reduce(flat, group=wrapped.process_group)
        for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
    if wrapped.broadcast_buffers:
        for buffer in wrapped.module.buffers():
            dist.broadcast(buffer, 0, group=wrapped.process_group)


def _gradient_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.layout != torch.strided:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def has_graph_to_learn(wrapped: DistributedDataParallel) -> bool:
    """Return whether the next backward must synchronise gradients, because the model has static_graph=True.

    With static_graph, DDP learns the graph in the first backward. If that backward does not synchronise, DDP raises
    "expect_autograd_hooks_ INTERNAL ASSERT FAILED" (torch 2.13), or silently never sends a gradient (PyTorch #143580,
    #187732).
    """
    return wrapped.static_graph and not private(wrapped, "_static_graph_delay_allreduce_enqueued")
