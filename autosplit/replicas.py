"""Replicas of a module on the devices of a placement, and what is carried into and out of replicas.

On GPUs torch's own `replicate` makes them. Inside a placement, where all devices are torch's one CPU, they are made
here by the same protocol, each with its own copies, so that these are accounted where they would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.transfer import transfer

__all__ = ["copy_buffers", "kept_buffers", "replicate_placed", "with_autocast"]


def with_autocast(replica: nn.Module) -> Callable[..., Any]:
    """Carry autocast's dtype into the replica's thread; torch carries only whether it is on."""
    if not torch.is_autocast_enabled("cuda"):
        return replica
    dtype, cached = torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=dtype, cache_enabled=cached):
            return replica(*args, **kwargs)

    return run


class _Broadcast(torch.autograd.Function):
    """Parameters of the first device to each active one; gradients come back in one node, as torch's do.

    No gradient reaches `.grad` before all replicas have finished: their sum stands beside the first replica's
    own gradients, and beside `.grad` while accumulating (torch nn/parallel/_functions.py, Broadcast).
    """

    @staticmethod
    def forward(ctx: Any, devices: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that no replica used keeps a gradient of None
        ctx.devices, ctx.num_tensors = devices, len(tensors)
        copies = [[_broadcast_one(tensor, device) for device in devices] for tensor in tensors]
        fixed = [
            copy
            for tensor_copies, needed in zip(copies, ctx.needs_input_grad[1:], strict=True)
            if not needed
            for copy in tensor_copies
        ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(copy for tensor_copies in copies for copy in tensor_copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.devices)
        sums = [_sum_on_first(grads[i * count : (i + 1) * count], ctx.devices) for i in range(ctx.num_tensors)]
        return (None, *sums)


def _broadcast_one(tensor: Tensor, device: int) -> Tensor:
    return tensor.view_as(tensor) if device == 0 else transfer(tensor.detach(), 0, device, "parameter")


def _sum_on_first(grads: Sequence[Tensor | None], devices: tuple[int, ...]) -> Tensor | None:
    total: Tensor | None = None
    owned = False  # a sum of ours is added to in place; the first replica's gradient is autograd's
    for grad, device in zip(grads, devices, strict=True):
        if grad is None:
            continue
        here = grad if device == 0 else transfer(grad, device, 0, "gradient")
        if total is None:
            total, owned = here, device != 0
        else:
            total, owned = total.add_(here) if owned else total + here, True
        del here  # before the next one comes
    return total


def replicate_placed(module: nn.Module, devices: list[int]) -> list[nn.Module]:
    """Build a replica of the module on each device, by the protocol that nn.DataParallel's replicas follow."""
    spread = _unique((*module.parameters(), *module.buffers()))
    moving = [tensor for tensor in spread if _may_have_gradient(tensor)]
    copies = _Broadcast.apply(tuple(devices), *moving) if moving else ()  # type: ignore[no-untyped-call]
    tables = [
        {id(tensor): copies[i * len(devices) + position] for i, tensor in enumerate(moving)}
        for position in range(len(devices))
    ]
    for tensor in spread:
        if id(tensor) in tables[0]:
            continue
        purpose = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"  # an integer parameter has no gradient
        for table, device in zip(tables, devices, strict=True):
            table[id(tensor)] = tensor if device == 0 else transfer(tensor.detach(), 0, device, purpose)
    return [_replica(module, table) for table in tables]


def _may_have_gradient(tensor: Tensor) -> bool:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return differentiable and (isinstance(tensor, nn.Parameter) or tensor.requires_grad)


def _unique(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _replica(module: nn.Module, table: dict[int, Tensor]) -> nn.Module:
    """Copy a module's structure around tensors that are given, tied ones staying tied."""
    twins: dict[int, nn.Module] = {id(part): part._replicate_for_data_parallel() for part in module.modules()}
    for part in module.modules():
        twin = twins[id(part)]
        for name, child in part._modules.items():
            twin._modules[name] = None if child is None else twins[id(child)]
        for name, parameter in part._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
            else:
                # A plain attribute, not a parameter: it is no leaf. RNNs refresh their flat weights on this.
                setattr(twin, name, table[id(parameter)])
        for name, buffer in part._buffers.items():
            twin._buffers[name] = None if buffer is None else table[id(buffer)]
    return twins[id(module)]


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Let a chunk run on copies of the module's buffers, so that only the first chunk moves them."""
    slots = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    copies: dict[int, Tensor] = {}
    for part, name, buffer in slots:
        if module.training and buffer is not None and not buffer.requires_grad:
            part._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
    try:
        yield
    finally:
        for part, name, buffer in slots:
            part._buffers[name] = buffer


def copy_buffers(replica: nn.Module, module: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
    """Bring the buffers a replica moved back to the module: the first device had no samples to move them with."""
    if not module.training:
        return
    with torch.no_grad():
        for ours, theirs in zip(module.buffers(), replica.buffers(), strict=True):
            if not ours.requires_grad:
                ours.copy_(move(theirs))
