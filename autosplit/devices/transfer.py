"""Copy a tensor differentiably between two devices of a step.

Without GPUs, all devices of a step (`cpu:2GiB,cpu:1GiB`, `sim:...`) are one CPU device for torch, so `.to()` copies
nothing. `transfer` is a separate op that a `Placement` intercepts, to charge the copy to its destination and to time
the link. Its backward is the copy in the other direction. Outside a placement, all CPU devices share one set of
weights.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

HOST = -1
"""The device index of host memory, which belongs to no device of the step."""


class Placement(Protocol):
    """A tracker of a step that records each tensor's device."""

    @property
    def num_devices(self) -> int:
        """Number of devices of the step."""

    def adopt(self, tensor: Tensor, device: int) -> None:
        """Charge an existing tensor to a device. A tensor that already has a device stays there."""

    def device_of(self, tensor: Tensor) -> int:
        """Return a tensor's device, or `HOST` if the tensor was never adopted."""


ACTIVE: ContextVar[Placement | None] = ContextVar("autosplit_placement", default=None)
"""The placement that tracks the running step, or None."""


def active_placement() -> Placement | None:
    """Return the placement that tracks the running step, or None."""
    return ACTIVE.get()


# Do not use `custom_op`: in torch 2.8 its output check rejects sparse tensors.
_LIBRARY = torch.library.Library("autosplit", "FRAGMENT")
_LIBRARY.define("transfer(Tensor tensor, SymInt source, SymInt destination, str purpose) -> Tensor")


def _transfer(tensor: Tensor, source: int, destination: int, purpose: str) -> Tensor:
    return tensor.clone()


_LIBRARY.impl("transfer", _transfer, "CompositeExplicitAutograd")


def _fake(tensor: Tensor, source: int, destination: int, purpose: str) -> Tensor:
    return torch.empty_like(tensor)


torch.library.register_fake("autosplit::transfer", _fake, lib=_LIBRARY)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.source, ctx.destination, ctx.purpose = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return transfer(grad, ctx.destination, ctx.source, ctx.purpose), None, None, None


torch.library.register_autograd("autosplit::transfer", _backward, setup_context=_setup_context, lib=_LIBRARY)

TRANSFER_OP = torch.ops.autosplit.transfer.default
"""The op in a dispatch mode: `(tensor, source, destination, purpose)`."""


@torch.library.custom_op("autosplit::transfer_into", mutates_args=("block",))
def _transfer_into(block: Tensor, tensor: Tensor, source: int, destination: int, purpose: str) -> None:
    block.copy_(tensor)


@_transfer_into.register_fake
def _(block: Tensor, tensor: Tensor, source: int, destination: int, purpose: str) -> None:
    return None


TRANSFER_INTO_OP = torch.ops.autosplit.transfer_into.default
"""The op in a dispatch mode: `(block, tensor, source, destination, purpose)`."""


def transfer_into(block: Tensor, tensor: Tensor, source: int, destination: int, purpose: str) -> None:
    """Copy a tensor into an existing tensor on another device, as a gather does. This copy is not differentiable.

    The block has the tensor's shape and dtype. See `transfer` for the other arguments.
    """
    TRANSFER_INTO_OP(block, tensor, source, destination, purpose)


def transfer(tensor: Tensor, source: int, destination: int, purpose: str) -> Tensor:
    """Copy a tensor from one device of the step to another, differentiably.

    Args:
        source: Index of the tensor's device, or `HOST`.
        destination: Index of the device that receives the copy, or `HOST`.
        purpose: The tensor's role, for the tracker: ``"input"``, ``"parameter"``, ``"buffer"``, ``"output"``,
            ``"scalar"`` or ``"gradient"``.
    """
    copy: Tensor = TRANSFER_OP(tensor, source, destination, purpose)
    return copy


def adopt_module(placement: Placement, module: torch.nn.Module, device: int) -> None:
    """Charge a module's parameters, buffers and gradients to a device. Tied and shared storages count once."""
    for tensor in (*module.parameters(), *module.buffers()):
        placement.adopt(tensor, device)
        if tensor.grad is not None:
            placement.adopt(tensor.grad, device)
