"""Put the outputs of replicas together: tensors concatenated, scalars combined, the types of what holds them kept."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.batches import is_namedtuple, rebuilt
from autosplit.errors import WorkloadError
from autosplit.transfer import active_placement, transfer, transfer_into

__all__ = ["Gathering", "Link", "PlacedLink"]


class _GatherPlaced(torch.autograd.Function):
    """Concatenate the devices' outputs on the first: one block of the whole size, filled chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, devices: tuple[int, ...], dim: int, *tensors: Tensor) -> Tensor:
        ctx.devices, ctx.dim, ctx.sizes = devices, dim, [tensor.size(dim) for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(ctx.sizes)
        placement = active_placement()
        assert placement is not None
        # Not new_empty: that would be on the device of its first argument.
        whole = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
        placement.adopt(whole, 0)
        start = 0
        for tensor, device, size in zip(tensors, devices, ctx.sizes, strict=True):
            block = whole.narrow(dim, start, size)
            if device == 0:
                block.copy_(tensor)
            else:
                transfer_into(block, tensor, device, 0, "output")
            start += size
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pieces = grad.split(ctx.sizes, ctx.dim)
        moved = [
            piece if device == 0 else transfer(piece, 0, device, "output")
            for piece, device in zip(pieces, ctx.devices, strict=True)
        ]
        return (None, None, *moved)


@dataclasses.dataclass(frozen=True)
class PlacedLink:
    """Brings outputs to the first device inside a placement."""

    devices: tuple[int, ...]

    def bring(self, tensor: Tensor, position: int) -> Tensor:
        """Bring a replica's scalar to the first device."""
        device = self.devices[position]
        return tensor if device == 0 else transfer(tensor, device, 0, "scalar")

    def concatenate(self, tensors: list[Tensor], dim: int) -> Tensor:
        """Put the replicas' tensors together on the first device."""
        if self.devices == (0,):
            return tensors[0]
        gathered: Tensor = _GatherPlaced.apply(self.devices, dim, *tensors)  # type: ignore[no-untyped-call]
        return gathered


@dataclasses.dataclass(frozen=True)
class Link:
    """Brings outputs to the output device: torch's gather on GPUs, nothing but `cat` on the CPU."""

    output_device: torch.device

    def bring(self, tensor: Tensor, position: int) -> Tensor:  # noqa: ARG002  # the placed link needs it
        """Bring a replica's scalar to the output device."""
        return tensor.to(self.output_device)

    def concatenate(self, tensors: list[Tensor], dim: int) -> Tensor:
        """Put the replicas' tensors together on the output device."""
        if self.output_device.type == "cuda":
            gathered: Tensor = nn.parallel.gather(tensors, self.output_device, dim)
            return gathered
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


@dataclasses.dataclass(frozen=True)
class Gathering:
    """Put the outputs of the replicas together, keeping the types of what holds them."""

    dim: int
    weights: list[float]
    link: Link | PlacedLink

    def join(self, outputs: list[Any]) -> Any:
        """Join outputs of one structure, one per active device."""
        first = outputs[0]
        if any(type(output) is not type(first) for output in outputs):
            raise _cannot_join("types", [type(output).__name__ for output in outputs])
        if isinstance(first, Tensor):
            return self._join_tensors(outputs)
        if isinstance(first, (Mapping, UserDict)):
            return self._join_keyed(first, [dict(output.items()) for output in outputs])
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            names = [field.name for field in dataclasses.fields(first)]
            return self._join_keyed(first, [{name: getattr(output, name) for name in names} for output in outputs])
        if isinstance(first, (tuple, list)):
            if len({len(output) for output in outputs}) != 1:
                raise _cannot_join("lengths", [len(output) for output in outputs])
            items = [self.join(list(column)) for column in zip(*outputs, strict=True)]
            return type(first)(*items) if is_namedtuple(first) else type(first)(items)
        return self._join_plain(outputs)

    def _join_keyed(self, first: Any, outputs: list[dict[Any, Any]]) -> Any:
        if any(output.keys() != outputs[0].keys() for output in outputs):
            raise _cannot_join("keys", [list(output) for output in outputs])
        return rebuilt(first, {key: self.join([output[key] for output in outputs]) for key in outputs[0]})

    def _join_tensors(self, tensors: list[Tensor]) -> Tensor:
        if tensors[0].dim() > 0:
            return self._concatenated(tensors)
        brought = [self.link.bring(tensor, position) for position, tensor in enumerate(tensors)]
        if brought[0].dtype == torch.bool:
            return torch.stack(brought).all()
        if not (brought[0].is_floating_point() or brought[0].is_complex()):
            return torch.stack(brought).sum()
        weighted = [
            tensor if weight == 1.0 else tensor * weight for tensor, weight in zip(brought, self.weights, strict=True)
        ]
        total = weighted[0]
        for tensor in weighted[1:]:
            total = total + tensor
        return total

    def _concatenated(self, tensors: list[Tensor]) -> Tensor:
        if tensors[0].dim() <= self.dim:
            raise WorkloadError(
                f"an output of the replicas has the shape {tuple(tensors[0].shape)}; expected one with a dimension "
                f"{self.dim}, along which the batch is split; give it that dimension, or return a scalar"
            )
        shapes = {tuple(s for d, s in enumerate(tensor.shape) if d != self.dim % tensor.dim()) for tensor in tensors}
        if len(shapes) != 1:
            raise _cannot_join("shapes", [tuple(tensor.shape) for tensor in tensors])
        return self.link.concatenate(tensors, self.dim)

    def _join_plain(self, values: list[Any]) -> Any:
        # By type, never by whether the values happen to agree: two counts of 3 are 6, as 3 and 4 are 7.
        first = values[0]
        if isinstance(first, bool):
            return all(values)
        if isinstance(first, int):
            return sum(values)
        if isinstance(first, float):
            return sum(weight * value for weight, value in zip(self.weights, values, strict=True))
        if all(_is_same(value, first) for value in values):
            return first
        raise _cannot_join("values", values)


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    try:
        return bool(value == other)
    except (TypeError, ValueError):  # an array compares element by element, and is neither true nor false
        return False


def _cannot_join(what: str, values: list[Any]) -> WorkloadError:
    shown = " ".join(f"{values}"[:200].split())  # arrays and texts of many lines, too, on one
    return WorkloadError(
        f"the replicas' outputs have different {what}: {shown}; expected the same from each; "
        "return per-sample tensors of one shape, or combine them inside the module"
    )
