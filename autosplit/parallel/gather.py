"""Put the outputs of replicas together: tensors concatenated, scalars combined, the types of what holds them kept."""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.devices.transfer import active_placement, transfer, transfer_into
from autosplit.errors import WorkloadError
from autosplit.parallel.loss_weights import DoubtfulWeights
from autosplit.torch_versions import FakeTensor
from autosplit.workload.batch import children_of, with_children


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
    """Brings outputs to the output device: by torch's gather on CUDA, which has no other, else by copies and `cat`."""

    output_device: torch.device

    def bring(self, tensor: Tensor, position: int) -> Tensor:  # noqa: ARG002  # the placed link needs it
        """Bring a replica's scalar to the output device."""
        return tensor.to(self.output_device)

    def concatenate(self, tensors: list[Tensor], dim: int) -> Tensor:
        """Put the replicas' tensors together on the output device."""
        if len(tensors) == 1:
            return tensors[0].to(self.output_device)
        if self.output_device.type == "cuda":
            # What a replica put on the host comes along: torch's gather takes nothing from there.
            tensors = [tensor if tensor.is_cuda else tensor.to(self.output_device) for tensor in tensors]
            gathered: Tensor = nn.parallel.gather(tensors, self.output_device, dim)
            return gathered
        return torch.cat([tensor.to(self.output_device) for tensor in tensors], dim)


@dataclasses.dataclass(frozen=True)
class Gathering:
    """Put the outputs of the replicas together, keeping the types of what holds them.

    Args:
        weights: What each replica's scalars count for: numbers, or scalar tensors on whatever device.
        shares: Samples of each replica, to tell a loss in one element from an output of one sample.
        losses: Which outputs, by their places, were seen to be losses in one element, or not to be. With one sample on
            each replica they can't be told apart, and are what they were.
    """

    dim: int
    weights: Sequence[float | Tensor]
    link: Link | PlacedLink
    shares: tuple[int, ...] = ()
    losses: dict[str, bool] = dataclasses.field(default_factory=dict)

    def join(self, outputs: list[Any], place: str = "") -> Any:
        """Join outputs of one structure, one per active device; `place` is theirs in what the module returns."""
        first = outputs[0]
        if any(type(output) is not type(first) for output in outputs):
            raise _cannot_join("types", [type(output).__name__ for output in outputs])
        if isinstance(first, Tensor):
            return self._join_tensors(outputs, place)
        if _is_cache(type(first)):
            return self._join_caches(outputs)
        if children_of(first) is None:
            return self._join_plain(outputs)
        return self._join_children(outputs, lambda column, key: self.join(column, place + key))

    def _join_children(self, outputs: list[Any], join: Callable[[list[Any], str], Any]) -> Any:
        first = outputs[0]
        parts = [dict(children_of(output) or ()) for output in outputs]
        if any(part.keys() != parts[0].keys() for part in parts):
            if isinstance(first, (tuple, list)):
                raise _cannot_join("lengths", [len(output) for output in outputs])
            raise _cannot_join("keys", [list(output) for output in outputs])
        return with_children(first, [join([part[key] for part in parts], key) for key in parts[0]])

    def _join_tensors(self, tensors: list[Tensor], place: str) -> Tensor:
        if len({tensor.dim() for tensor in tensors}) != 1:
            raise _cannot_join("shapes", [tuple(tensor.shape) for tensor in tensors])
        if tensors[0].dim() == 1 and tensors[0].is_floating_point() and self._are_losses(tensors, place):
            return self._join_tensors([tensor.reshape(()) for tensor in tensors], place).reshape(1)
        if tensors[0].dim() > 0:
            return self._concatenated(tensors, self.dim)
        brought = [self.link.bring(tensor, position) for position, tensor in enumerate(tensors)]
        if brought[0].dtype == torch.bool:
            return torch.stack(brought).all()
        if not (brought[0].is_floating_point() or brought[0].is_complex()):
            return torch.stack(brought).sum()
        self._say_doubts()
        weighted = [self._weighted(tensor, weight) for tensor, weight in zip(brought, self.weights, strict=True)]
        total = weighted[0]
        for tensor in weighted[1:]:
            total = total + tensor
        return total.to(brought[0].dtype)

    def _are_losses(self, tensors: list[Tensor], place: str) -> bool:
        """Tell losses in one element each, nn.DataParallel's idiom, from one sample's outputs."""
        if any(share > 1 for share in self.shares):
            self.losses[place] = all(tensor.shape == (1,) for tensor in tensors)
        return self.losses.get(place, False) and all(tensor.shape == (1,) for tensor in tensors)

    def _weighted(self, tensor: Tensor, weight: float | Tensor) -> Tensor:
        if not isinstance(weight, Tensor):
            return tensor if weight == 1.0 else tensor * weight
        # A mean over nothing is NaN, and NaN × 0 as well: a replica that counts for nothing is left out instead. Out
        # of the graph, too, where that can be known without waiting for a GPU: a mean of the module's own divides by 0.
        if weight.device.type == "cpu" and not isinstance(weight, FakeTensor) and not weight:
            return torch.zeros_like(tensor)
        here = weight.to(tensor.device, non_blocking=True)
        return (tensor * here).masked_fill(here == 0, 0.0)

    def _say_doubts(self) -> None:
        if isinstance(self.weights, DoubtfulWeights):
            self.weights.say()

    def _concatenated(self, tensors: list[Tensor], dim: int) -> Tensor:
        if tensors[0].dim() <= dim:
            raise WorkloadError(
                f"an output of the replicas has the shape {tuple(tensors[0].shape)}; expected one with a dimension "
                f"{dim}, along which the batch is split; give it that dimension, or return a scalar"
            )
        shapes = {tuple(s for d, s in enumerate(tensor.shape) if d != dim % tensor.dim()) for tensor in tensors}
        if len(shapes) != 1:
            raise _cannot_join("shapes", [tuple(tensor.shape) for tensor in tensors])
        return self.link.concatenate(tensors, dim)

    def _join_plain(self, values: list[Any]) -> Any:
        # By type, never by whether the values happen to agree: two counts of 3 are 6, as 3 and 4 are 7. A member of an
        # enumeration is no count, though it may be an int.
        first = values[0]
        if isinstance(first, bool):
            return all(values)
        if isinstance(first, numbers.Integral) and not isinstance(first, enum.Enum):
            return sum(values)
        if isinstance(first, numbers.Complex) and not isinstance(first, enum.Enum):
            self._say_doubts()
            weights = [float(weight) for weight in self.weights]  # waits for the device: a plain number has to
            counted = [item for item in zip(weights, values, strict=True) if item[0] != 0.0]
            return sum(weight * value for weight, value in counted)
        if all(_is_same(value, first) for value in values):
            return first
        raise _cannot_join("values", values)

    def _join_caches(self, caches: list[Any]) -> Any:
        """Join what transformers models keep of keys and values: objects with tensors in them, one entry per layer."""
        if len({id(cache) for cache in caches}) != len(caches):
            raise WorkloadError(
                f"{len(caches)} replicas returned one and the same {type(caches[0]).__name__}; expected one from each; "
                "pass use_cache=False, and no past_key_values, where the batch is split"
            )
        return self._join_state(caches)

    def _join_state(self, values: list[Any], key: str = "") -> Any:
        first = values[0]
        if key == "['batch_size']":
            return sum(values)
        if any(type(value) is not type(first) for value in values):
            raise _cannot_join("types", [type(value).__name__ for value in values])
        if isinstance(first, Tensor):
            # The batch comes first, whatever the wrapper's dim; counters, and what is not filled yet, have none.
            return self._concatenated(values, 0) if first.dim() > 1 else self.link.bring(first, 0)
        if children_of(first) is not None:
            return self._join_children(values, self._join_state)
        if any(kind.__module__.startswith("transformers.") for kind in type(first).__mro__):
            new = copy.copy(first)
            new.__dict__.update(self._join_children([vars(value) for value in values], self._join_state))
            return new
        if isinstance(first, (bool, int, float, str)) and any(value != first for value in values):
            raise _cannot_join("values", values)
        return first


def _is_same(value: Any, other: Any) -> bool:
    # An array is per sample, as a tensor is: that the replicas' are equal is an accident.
    if value is other:
        return True
    if hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0:
        return False
    try:
        return bool(value == other)
    except (TypeError, ValueError):  # compares element by element, and is neither true nor false
        return False


def _cannot_join(what: str, values: list[Any]) -> WorkloadError:
    shown = " ".join(f"{values}"[:200].split())  # arrays and texts of many lines, too, on one
    return WorkloadError(
        f"the replicas' outputs have different {what}: {shown}; expected the same from each; "
        "return per-sample tensors of one shape, or combine them inside the module"
    )


def _is_cache(kind: type) -> bool:
    """Tell whether a class is one of transformers' caches, without importing it."""
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in kind.__mro__)
