"""Replicate a module on the devices of a wrapper, as nn.DataParallel does.

Inside a placement (`autosplit.devices.transfer`), replicas also have copies, so each copy is charged to the right
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.parallel.tensor_copies import Copies
from autosplit.torch_versions import default_device


def carried(replica: nn.Module, device: torch.device) -> Callable[..., Any]:
    """Return a function that runs a replica with the autocast dtype, inference mode and default device of this thread.

    These settings are thread-local. torch's `parallel_apply` copies only grad mode and whether autocast is on to the
    threads of the replicas (torch nn/parallel/parallel_apply.py).

    Args:
        device: The device of the replica.
    """
    inference = torch.is_inference_mode_enabled()
    default = default_device()
    own = device if default.type == device.type else default
    autocasts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)
    ]
    cached = torch.is_autocast_cache_enabled()

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as contexts:
            if inference:  # inference_mode(False) would enable gradients
                contexts.enter_context(torch.inference_mode())
            if own != default_device():
                contexts.enter_context(own)
            for kind, dtype in autocasts:
                contexts.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            return replica(*args, **kwargs)

    return run


class _Broadcast(torch.autograd.Function):
    """Broadcast parameters from device 0 to each active device. One autograd node reduces all gradients.

    `.grad` gets no gradient before all replicas finish. Until then, the sum needs memory in addition to the
    first replica's gradients, and to an accumulated `.grad` (torch nn/parallel/_functions.py, Broadcast). Unlike
    torch's node, this node does not fill in zeros, so an unused parameter keeps `grad=None` and a sparse gradient stays
    sparse.
    """

    @staticmethod
    def forward(ctx: Any, copies: Copies, devices: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that no replica used keeps grad=None
        ctx.copies, ctx.devices, ctx.num_tensors = copies, devices, len(tensors)
        spread = copies.spread(tensors, devices)
        return tuple(copy for tensor_copies in spread for copy in tensor_copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.devices)
        parts = [grads[i * count : (i + 1) * count] for i in range(ctx.num_tensors)]
        del grads
        return (None, None, *ctx.copies.gathered(parts, ctx.devices))


class _Same(torch.autograd.Function):
    """Return the tensor from a new autograd node. The node of a plain view would reject sparse gradients."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


def here(tensor: Tensor) -> Tensor:
    """Return a module's tensor for the replica on device 0, with an autograd node if it can have a gradient."""
    if not may_have_gradient(tensor):
        return tensor
    same: Tensor = _Same.apply(tensor)  # type: ignore[no-untyped-call]
    return same


def may_have_gradient(tensor: Tensor) -> bool:
    """Return whether a module's tensor can have a gradient. A parameter counts even while it is frozen."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return differentiable and (isinstance(tensor, nn.Parameter) or tensor.requires_grad)


def unique(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in order, without the duplicates of tied parameters."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def replicate(module: nn.Module, devices: Sequence[int], copies: Copies) -> list[nn.Module]:
    """Create a replica of the module on each device, with the structure of nn.DataParallel's replicas."""
    tensors = unique((*module.parameters(), *module.buffers()))
    moving = [tensor for tensor in tensors if tensor.requires_grad]
    fixed = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and not tensor.requires_grad]
    flat = _Broadcast.apply(copies, tuple(devices), *moving) if moving else ()  # type: ignore[no-untyped-call]
    count = len(devices)
    spread: dict[int, Sequence[Tensor]] = {id(t): flat[i * count : (i + 1) * count] for i, t in enumerate(moving)}
    spread.update(zip(map(id, fixed), copies.spread(fixed, devices), strict=True))
    for buffer in (tensor for tensor in tensors if id(tensor) not in spread):
        own = (buffer if device == 0 else copies.copy(buffer.detach(), device, "buffer") for device in devices)
        spread[id(buffer)] = [*own]
    return [replica_of(module, {key: own[place] for key, own in spread.items()}) for place in range(count)]


def replica_of(module: nn.Module, table: dict[int, Tensor]) -> nn.Module:
    """Copy a module's structure, with other tensors in it.

    Args:
        table: The new tensors, by the `id` of the module's tensor that each replaces.
    """
    twins: dict[int, nn.Module] = {id(part): part._replicate_for_data_parallel() for part in module.modules()}
    for part in module.modules():
        twin = twins[id(part)]
        # `object.__setattr__` takes 0.2 us, `nn.Module.__setattr__` 2.2 us. RNNs override it to refresh flat weights.
        assign = object.__setattr__ if type(part).__setattr__ is nn.Module.__setattr__ else setattr
        for name, child in part._modules.items():
            twin._modules[name] = None if child is None else twins[id(child)]
        for name, parameter in part._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
            else:
                assign(twin, name, table[id(parameter)])  # not a leaf, so it cannot be an nn.Parameter
        for name, buffer in part._buffers.items():
            twin._buffers[name] = None if buffer is None else table[id(buffer)]
    return twins[id(module)]


def moving_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the buffers that a forward may update: all if a submodule is in training mode, else none."""
    slots = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and not buffer.requires_grad
    ]
    return slots if slots and any(part.training for part in module.modules()) else []


class BufferCopies:
    """Replace a module's `moving_buffers` with copies while a chunk runs, so only the first updates the module."""

    def __init__(self, slots: list[tuple[nn.Module, str, Tensor]]) -> None:
        self._slots = slots
        copies = {id(buffer): buffer.clone() for _, _, buffer in slots}
        self._copies = [(part, name, copies[id(buffer)]) for part, name, buffer in slots]

    def __enter__(self) -> None:
        for part, name, copy in self._copies:
            part._buffers[name] = copy

    def __exit__(self, *exc: object) -> None:
        for part, name, buffer in self._slots:
            part._buffers[name] = buffer


def copy_buffers(replica: nn.Module, module: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
    """Copy the buffers that a replica updated to the module, if device 0 had no samples."""
    if not moving_buffers(module):
        return
    with torch.no_grad():
        theirs = dict(replica.named_buffers())
        for name, ours in module.named_buffers():
            if not ours.requires_grad and name in theirs:
                ours.copy_(move(theirs[name]))
