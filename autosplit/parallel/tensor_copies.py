"""Copies of tensors between the first device of a wrapper, 0, and its others: in a placement, and between GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import comm

from autosplit.devices.transfer import transfer
from autosplit.torch_versions import buckets, copy_each

Grads = Sequence["Tensor | None"]

BUCKET_BYTES = 10 * 2**20
"""Size of what travels as one, where a copy for each would cost a launch for each: that of torch's own broadcast."""


class Copies:
    """The copies within a placement, each tensor by itself. Devices are positions in the wrapper's list."""

    def name_of(self, device: int) -> str:
        """Name a device for a message."""
        return f"device {device}"

    def copy(self, tensor: Tensor, device: int, purpose: str) -> Tensor:
        """Copy a tensor of the first device to another one, differentiably."""
        return transfer(tensor, 0, device, purpose)

    def bring(self, tensor: Tensor, device: int) -> Tensor:
        """Copy a gradient of a device to the first."""
        return transfer(tensor, device, 0, "gradient")

    def spread(self, tensors: Sequence[Tensor], devices: Sequence[int]) -> list[list[Tensor]]:
        """Copy tensors of the first device to each device: for each tensor, one for each; the first's own is a view."""
        return [
            [
                tensor.view_as(tensor) if device == 0 else self.copy(tensor.detach(), device, "parameter")
                for device in devices
            ]
            for tensor in tensors
        ]

    def gathered(self, grads: Sequence[Grads], devices: Sequence[int]) -> list[Tensor | None]:
        """Add up gradients on the first device: for each tensor, of what each device has; None where none has any."""
        return [self._sum_on_first(parts, devices) for parts in grads]

    def _sum_on_first(self, grads: Grads, devices: Sequence[int]) -> Tensor | None:
        total: Tensor | None = None
        owned = False  # a sum of ours is added to in place; the first replica's gradient is autograd's
        for grad, device in zip(grads, devices, strict=True):
            if grad is None:
                continue
            brought = grad if device == 0 else self.bring(grad, device)
            if total is None:
                total, owned = brought, device != 0
            else:
                total, owned = total.add_(brought) if owned else total + brought, True
            del brought  # before the next one comes
        return total


@dataclass(frozen=True)
class GpuCopies(Copies):
    """Between GPUs, on CUDA by what nn.DataParallel stands on; a GPU that is used twice gets copies of its own."""

    devices: tuple[torch.device, ...]

    @property
    def _in_one_go(self) -> bool:
        """Whether small tensors travel together, which torch has for CUDA alone (and tests in host memory)."""
        return self.devices[0].type in {"cuda", "cpu"}

    def name_of(self, device: int) -> str:
        """Name a device for a message."""
        return str(self.devices[device])

    def copy(self, tensor: Tensor, device: int, purpose: str) -> Tensor:  # noqa: ARG002  # the placed copies tell it
        """Copy a tensor of the first device to another one, differentiably."""
        return tensor.to(self.devices[device], non_blocking=True, copy=True)

    def bring(self, tensor: Tensor, device: int) -> Tensor:  # noqa: ARG002  # the tensor knows where it is
        """Copy a gradient of a device to the first."""
        return tensor.to(self.devices[0], non_blocking=True)

    def copy_all_into(self, blocks: Sequence[Tensor], tensors: Sequence[Tensor], device: int) -> None:
        """Copy tensors of the first device into such as are on another already, small ones together."""
        block_of = dict(zip(map(id, tensors), blocks, strict=True))
        for bucket in buckets(tensors, BUCKET_BYTES):
            arrived = _moved([tensor.detach() for tensor in bucket], self.devices[device])
            copy_each([block_of[id(tensor)] for tensor in bucket], arrived)

    def bring_all(self, tensors: Sequence[Tensor], device: int) -> Iterator[tuple[int, Tensor]]:  # noqa: ARG002
        """Copy dense gradients to the first device, small ones together; yield each with its position when there."""
        place_of = {id(tensor): place for place, tensor in enumerate(tensors)}
        for bucket in buckets(tensors, BUCKET_BYTES):
            yield from zip([place_of[id(one)] for one in bucket], _moved(bucket, self.devices[0]), strict=True)

    def spread(self, tensors: Sequence[Tensor], devices: Sequence[int]) -> list[list[Tensor]]:
        """Copy tensors of the first device to each device, small ones together; the first's own is a view."""
        if not self._in_one_go:
            return super().spread(tensors, devices)
        others = [device for device in devices if device != 0]
        # torch copies from the first of its list, so that is there, also when it gets no samples.
        targets = [self.devices[device] for device in (0, *others)]
        found = comm.broadcast_coalesced([tensor.detach() for tensor in tensors], targets) if tensors else []
        by_device = dict(zip((0, *others), found, strict=False))
        return [
            [
                tensor.view_as(tensor) if device == 0 else _as_complex(by_device[device][position], tensor)
                for device in devices
            ]
            for position, tensor in enumerate(tensors)
        ]

    def gathered(self, grads: Sequence[Grads], devices: Sequence[int]) -> list[Tensor | None]:
        """Add up gradients on the first device, small ones together where every device has one."""
        totals: list[Tensor | None] = [None] * len(grads)
        sums = self._in_one_go and 0 in devices and len(devices) > 1
        together = [i for i, parts in enumerate(grads) if sums and all(map(_plain, parts))]
        if together:
            by_device = [[grads[i][position] for i in together] for position in range(len(devices))]
            for i, total in zip(together, comm.reduce_add_coalesced(by_device, self.devices[0]), strict=True):
                totals[i] = total
        for i in set(range(len(grads))) - set(together):
            totals[i] = self._sum_on_first(grads[i], devices)
        return totals


def _moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of one dtype and one device to another as one; what comes are views of it."""
    if len(tensors) == 1:
        return [tensors[0].to(device, non_blocking=True)]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device, non_blocking=True)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _as_complex(copy: Tensor, tensor: Tensor) -> Tensor:
    return torch.view_as_complex(copy) if tensor.is_complex() and not copy.is_complex() else copy


def _plain(grad: Tensor | None) -> bool:
    """Tell whether torch's reduction takes a gradient: there, dense, real, and without a graph of its own."""
    return grad is not None and grad.layout is torch.strided and not grad.is_complex() and not grad.requires_grad
