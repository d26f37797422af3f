"""Copy tensors between device 0 of a wrapper and its other devices.

`Copies` works inside a placement (`autosplit.devices.transfer`), and `GpuCopies` on real GPUs.
"""

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
"""Bytes of small tensors that are copied together, to save kernel launches. torch's broadcast uses the same size."""


class Copies:
    """Copy tensors one by one inside a placement. A device is an index into the wrapper's list of devices."""

    def name_of(self, device: int) -> str:
        """Return the name of a device for messages."""
        return f"device {device}"

    def copy(self, tensor: Tensor, device: int, purpose: str) -> Tensor:
        """Copy a tensor from device 0 to another device. Gradients flow back through the copy."""
        return transfer(tensor, 0, device, purpose)

    def bring(self, tensor: Tensor, device: int) -> Tensor:
        """Copy a gradient from a device to device 0."""
        return transfer(tensor, device, 0, "gradient")

    def spread(self, tensors: Sequence[Tensor], devices: Sequence[int]) -> list[list[Tensor]]:
        """Copy tensors from device 0 to each device. Return each tensor's copies. Device 0 gets a view."""
        return [
            [
                tensor.view_as(tensor) if device == 0 else self.copy(tensor.detach(), device, "parameter")
                for device in devices
            ]
            for tensor in tensors
        ]

    def gathered(self, grads: Sequence[Grads], devices: Sequence[int]) -> list[Tensor | None]:
        """Add up each tensor's gradients on device 0, or return None if there are none."""
        return [self._sum_on_first(parts, devices) for parts in grads]

    def _sum_on_first(self, grads: Grads, devices: Sequence[int]) -> Tensor | None:
        total: Tensor | None = None
        owned = False  # never add in place to the gradient of device 0, because it belongs to autograd
        for grad, device in zip(grads, devices, strict=True):
            if grad is None:
                continue
            brought = grad if device == 0 else self.bring(grad, device)
            if total is None:
                total, owned = brought, device != 0
            else:
                total, owned = total.add_(brought) if owned else total + brought, True
            del brought  # free it before the next copy
        return total


@dataclass(frozen=True)
class GpuCopies(Copies):
    """Copy tensors between GPUs. On CUDA this uses the functions behind nn.DataParallel."""

    devices: tuple[torch.device, ...]

    @property
    def _in_one_go(self) -> bool:
        """Whether small tensors are copied together. torch supports this on CUDA and on CPU (for tests)."""
        return self.devices[0].type in {"cuda", "cpu"}

    def name_of(self, device: int) -> str:
        """Return the name of a device for messages."""
        return str(self.devices[device])

    def copy(self, tensor: Tensor, device: int, purpose: str) -> Tensor:  # noqa: ARG002  # only `Copies` needs it
        """Copy a tensor from device 0 to another device. Gradients flow back through the copy."""
        return tensor.to(self.devices[device], non_blocking=True, copy=True)

    def bring(self, tensor: Tensor, device: int) -> Tensor:  # noqa: ARG002  # `tensor` has its device
        """Copy a gradient from a device to device 0."""
        return tensor.to(self.devices[0], non_blocking=True)

    def copy_all_into(self, blocks: Sequence[Tensor], tensors: Sequence[Tensor], device: int) -> None:
        """Copy tensors from device 0 into existing tensors (`blocks`) on another device, small tensors together."""
        block_of = dict(zip(map(id, tensors), blocks, strict=True))
        for bucket in buckets(tensors, BUCKET_BYTES):
            arrived = _moved([tensor.detach() for tensor in bucket], self.devices[device])
            copy_each([block_of[id(tensor)] for tensor in bucket], arrived)

    def bring_all(self, tensors: Sequence[Tensor], device: int) -> Iterator[tuple[int, Tensor]]:  # noqa: ARG002
        """Copy dense gradients to device 0, small tensors together. Yield each with its position in `tensors`."""
        place_of = {id(tensor): place for place, tensor in enumerate(tensors)}
        for bucket in buckets(tensors, BUCKET_BYTES):
            yield from zip([place_of[id(one)] for one in bucket], _moved(bucket, self.devices[0]), strict=True)

    def spread(self, tensors: Sequence[Tensor], devices: Sequence[int]) -> list[list[Tensor]]:
        """Copy tensors from device 0 to each device, small tensors together. Device 0 gets a view."""
        if not self._in_one_go:
            return super().spread(tensors, devices)
        others = [device for device in devices if device != 0]
        # torch copies from the first device of the list, so device 0 must be first even if it has no samples.
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
        """Add up gradients on device 0. Reduce the small gradients together if every device has them."""
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
    """Copy tensors of one dtype to another device as one flat tensor. Return views of it."""
    if len(tensors) == 1:
        return [tensors[0].to(device, non_blocking=True)]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device, non_blocking=True)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _as_complex(copy: Tensor, tensor: Tensor) -> Tensor:
    return torch.view_as_complex(copy) if tensor.is_complex() and not copy.is_complex() else copy


def _plain(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout is torch.strided and not grad.is_complex() and not grad.requires_grad
