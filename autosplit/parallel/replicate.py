"""Replicas of a module on the devices of a wrapper, and what is carried into and out of them.

They follow the protocol of nn.DataParallel's replicas, on GPUs and, where all devices are torch's one CPU, inside a
placement, each with its own copies, so that these are accounted where they would be.
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
    """Carry into a replica's thread what torch leaves behind there.

    torch's `parallel_apply` carries grad mode and whether autocast is on. Left behind are autocast's dtype, inference
    mode and the default device (torch nn/parallel/parallel_apply.py: the three are thread-local).

    Args:
        device: The replica's; a default device of its kind becomes this one in its thread.
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
            if inference:  # not inference_mode(False): that would turn gradients on
                contexts.enter_context(torch.inference_mode())
            if own != default_device():
                contexts.enter_context(own)
            for kind, dtype in autocasts:
                contexts.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            return replica(*args, **kwargs)

    return run


class _Broadcast(torch.autograd.Function):
    """Broadcast parameters of the first device to each active one; gradients come back in one node, as torch's do.

    No gradient reaches `.grad` before all replicas have finished: their sum stands beside the first replica's
    own gradients, and beside `.grad` while accumulating (torch nn/parallel/_functions.py, Broadcast). Unlike torch's
    it makes no zeros where a replica has no gradient: an unused parameter stays without, a sparse one sparse.
    """

    @staticmethod
    def forward(ctx: Any, copies: Copies, devices: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that no replica used keeps a gradient of None
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
    """A tensor as it is. A view would not do: no sparse gradient passes one."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


def here(tensor: Tensor) -> Tensor:
    """Return a tensor as the first device's replica has it: a plain attribute, no parameter; a node of its own."""
    if not may_have_gradient(tensor):
        return tensor
    same: Tensor = _Same.apply(tensor)  # type: ignore[no-untyped-call]
    return same


def may_have_gradient(tensor: Tensor) -> bool:
    """Tell whether a module's tensor takes part in the gradient, whether or not it does at the moment."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return differentiable and (isinstance(tensor, nn.Parameter) or tensor.requires_grad)


def unique(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in order, each once: tied parameters come once for each name."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def replicate(module: nn.Module, devices: Sequence[int], copies: Copies) -> list[nn.Module]:
    """Build a replica of the module on each device, by the protocol that nn.DataParallel's replicas follow."""
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
    """Copy a module's structure around tensors given by the `id` of its own, tied ones staying tied."""
    twins: dict[int, nn.Module] = {id(part): part._replicate_for_data_parallel() for part in module.modules()}
    for part in module.modules():
        twin = twins[id(part)]
        # RNNs refresh their flat weights in their own `__setattr__`. That of nn.Module takes 2.2 us, `object`'s 0.2.
        assign = object.__setattr__ if type(part).__setattr__ is nn.Module.__setattr__ else setattr
        for name, child in part._modules.items():
            twin._modules[name] = None if child is None else twins[id(child)]
        for name, parameter in part._parameters.items():
            if parameter is None:
                twin._parameters[name] = None
            else:
                assign(twin, name, table[id(parameter)])  # a plain attribute, because it is no leaf
        for name, buffer in part._buffers.items():
            twin._buffers[name] = None if buffer is None else table[id(buffer)]
    return twins[id(module)]


def moving_buffers(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the buffers that a forward may move: all of a module that trains in some part, none in evaluation."""
    slots = [
        (part, name, buffer)
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and not buffer.requires_grad
    ]
    return slots if slots and any(part.training for part in module.modules()) else []


class BufferCopies:
    """Copies of `moving_buffers`, in their place while a chunk runs: only the first moves the module's own."""

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
    """Bring the buffers a replica moved back to the module: the first device had no samples to move them with."""
    if not moving_buffers(module):
        return
    with torch.no_grad():
        theirs = dict(replica.named_buffers())
        for name, ours in module.named_buffers():
            if not ours.requires_grad and name in theirs:
                ours.copy_(move(theirs[name]))
