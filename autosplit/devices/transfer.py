"""The one differentiable copy of a tensor between two devices of a step.

On a machine without GPUs the devices of a step (`cpu:2GiB,cpu:1GiB`, `sim:...`) are all torch's one CPU, so `.to()`
moves nothing and leaves no trace. `transfer` is an op of its own: a `Placement`, which follows the step, sees it,
charges the copy to its destination, and clocks the link. Its backward is the copy back.

Outside a placement all CPU devices share one set of weights and nothing has to be copied.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

HOST = -1
"""The device index of memory that belongs to no device of the step."""


class Placement(Protocol):
    """A follower of a step that knows which device a tensor is on."""

    @property
    def num_devices(self) -> int:
        """The number of devices of the step."""

    def adopt(self, tensor: Tensor, device: int) -> None:
        """Charge a tensor that exists already to a device; one that was adopted stays where it is."""

    def device_of(self, tensor: Tensor) -> int:
        """Return the device a tensor is on, `HOST` where it was never adopted."""


ACTIVE: ContextVar[Placement | None] = ContextVar("autosplit_placement", default=None)
"""What follows the running step; None outside of one."""


def active_placement() -> Placement | None:
    """Return the placement that follows the running step, or None outside of one."""
    return ACTIVE.get()


# Not `custom_op`: in torch 2.8 its check of the outputs refuses sparse tensors.
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
"""The op as a dispatch mode sees it: `(tensor, source, destination, purpose)`."""


@torch.library.custom_op("autosplit::transfer_into", mutates_args=("block",))
def _transfer_into(block: Tensor, tensor: Tensor, source: int, destination: int, purpose: str) -> None:
    block.copy_(tensor)


@_transfer_into.register_fake
def _(block: Tensor, tensor: Tensor, source: int, destination: int, purpose: str) -> None:
    return None


TRANSFER_INTO_OP = torch.ops.autosplit.transfer_into.default
"""The op as a dispatch mode sees it: `(block, tensor, source, destination, purpose)`."""


def transfer_into(block: Tensor, tensor: Tensor, source: int, destination: int, purpose: str) -> None:
    """Copy a tensor into memory that another device holds already, as a gather does; not differentiable.

    The block has the tensor's shape and dtype; the rest is as for `transfer`.
    """
    TRANSFER_INTO_OP(block, tensor, source, destination, purpose)


def transfer(tensor: Tensor, source: int, destination: int, purpose: str) -> Tensor:
    """Copy a tensor from one device of the step to another, differentiably.

    Args:
        source: Index of the device it is on, `HOST` for none.
        destination: Index of the device that gets the copy, `HOST` for none.
        purpose: What travels, for whoever follows: ``"input"``, ``"parameter"``, ``"buffer"``, ``"output"``,
            ``"scalar"`` or ``"gradient"``.
    """
    copy: Tensor = TRANSFER_OP(tensor, source, destination, purpose)
    return copy


def adopt_module(placement: Placement, module: torch.nn.Module, device: int) -> None:
    """Charge a module's parameters, buffers and gradients to a device; tied and shared storages count once."""
    for tensor in (*module.parameters(), *module.buffers()):
        placement.adopt(tensor, device)
        if tensor.grad is not None:
            placement.adopt(tensor.grad, device)
