"""Join the outputs of replicas.

# Note [Joined outputs]
Two devices ran 2 samples each:

    output of each device                        joined output
    tensor of shape (2, 5)                       (4, 5)
    scalar tensor, Python float (a loss)         one scalar, weighted by `reduce`
    integer (a count)                            the sum
    list of 2 strings, numbers or dicts          a list of 4
    (logits, hidden), each of shape (2, 5)       (logits, hidden), each of shape (4, 5)
    dict, dataclass, list of other length        the same container, its items joined
    None, strings, flags outside lists           the same value, if all devices return it
    tensor of shape (6, 5)                       (12, 5) if each sample has 3 tokens, such as a router's logits
    tensor of shape (6, 5), call with 3 views    WorkloadError: `torch.cat` puts the views first, not the samples
    another tensor                               WorkloadError: it has neither rows for its samples nor one value

A list of 2 items has one item for each sample, or it is a container of 2 outputs. If the devices ran 2 and 3 samples,
the lengths decide, and `SeenOutputs` remembers the result. Otherwise the types of the items decide. If the types leave
a doubt, `Gathering` warns or raises an error.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.devices.transfer import active_placement, transfer, transfer_into
from autosplit.errors import WorkloadError, warn_user
from autosplit.parallel.loss_weights import DoubtfulWeights
from autosplit.torch_versions import FakeTensor
from autosplit.workload.batch_layout import BatchLayout
from autosplit.workload.tree import Node, is_cache, map_tensors, with_children


class AmbiguousBatchWarning(UserWarning):
    """A tensor or list may contain no samples, although its size is the number of samples."""


class _GatherPlaced(torch.autograd.Function):
    """Concatenate the devices' outputs on device 0. Allocate the result once and copy chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, devices: tuple[int, ...], dim: int, *tensors: Tensor) -> Tensor:
        ctx.devices, ctx.dim, ctx.sizes = devices, dim, [tensor.size(dim) for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(ctx.sizes)
        placement = active_placement()
        assert placement is not None
        # `new_empty` would charge the memory to the device of the first tensor in the placement.
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
    """Copy outputs to device 0 inside a placement (`autosplit.devices.transfer`)."""

    devices: tuple[int, ...]

    def bring(self, tensor: Tensor, position: int) -> Tensor:
        """Copy a replica's tensor to device 0."""
        device = self.devices[position]
        return tensor if device == 0 else transfer(tensor, device, 0, "output" if tensor.dim() else "scalar")

    def concatenate(self, tensors: list[Tensor], dim: int) -> Tensor:
        """Concatenate the replicas' tensors on device 0."""
        if self.devices == (0,):
            return tensors[0]
        gathered: Tensor = _GatherPlaced.apply(self.devices, dim, *tensors)  # type: ignore[no-untyped-call]
        return gathered


@dataclasses.dataclass(frozen=True)
class Link:
    """Copy outputs to the output device. Use torch's gather on CUDA, the only device type that it supports."""

    output_device: torch.device

    def bring(self, tensor: Tensor, position: int) -> Tensor:  # noqa: ARG002  # the placed link needs it
        """Copy a replica's tensor to the output device."""
        return tensor.to(self.output_device)

    def concatenate(self, tensors: list[Tensor], dim: int) -> Tensor:
        """Concatenate the replicas' tensors on the output device."""
        if len(tensors) == 1:
            return tensors[0].to(self.output_device)
        if self.output_device.type == "cuda":
            # torch's gather refuses CPU tensors, so first move tensors that a replica put on the CPU.
            tensors = [tensor if tensor.is_cuda else tensor.to(self.output_device) for tensor in tensors]
            gathered: Tensor = nn.parallel.gather(tensors, self.output_device, dim)
            return gathered
        return torch.cat([tensor.to(self.output_device) for tensor in tensors], dim)


@dataclasses.dataclass
class SeenOutputs:
    """Facts about a module's outputs, by place, from earlier batches.

    Attributes:
        losses: Whether a tensor of one element is a loss. Unknown with one sample per device.
        lists: Whether a list has one item for each sample. Unknown from batches with an equal split.
        flat: Tensors that have several rows for each sample. Unknown from batches with an equal split.
        rows: Tensors that have one row for each sample.
    """

    losses: dict[str, bool] = dataclasses.field(default_factory=dict)
    lists: dict[str, bool] = dataclasses.field(default_factory=dict)
    flat: set[str] = dataclasses.field(default_factory=set)
    rows: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Gathering:
    """Join the outputs of the replicas, in containers of the same types. See Note [Joined outputs].

    Args:
        layout: The layout of the call. If lists in the call were cut, lists in the outputs may contain samples.
        weights: The weight of each replica's scalars: a number, or a scalar tensor on any device.
        shares: Samples of each replica. If empty, sizes are not checked.
        seen: Facts from earlier batches.
    """

    layout: BatchLayout
    weights: Sequence[float | Tensor]
    link: Link | PlacedLink
    shares: tuple[int, ...] = ()
    seen: SeenOutputs = dataclasses.field(default_factory=SeenOutputs)

    @property
    def dim(self) -> int:
        """The batch dimension."""
        return self.layout.dim

    def join(self, outputs: list[Any]) -> Any:
        """Join the outputs of all active devices."""
        return self._join([Node.of(output) for output in outputs])

    def _join(self, nodes: list[Node]) -> Any:
        first, place, values = nodes[0].value, nodes[0].place, [node.value for node in nodes]
        if any(type(value) is not type(first) for value in values):
            raise _cannot_join("types", [type(value).__name__ for value in values], place)
        if isinstance(first, Tensor):
            return self._join_tensors(values, place)
        if is_cache(type(first)):
            return self._join_caches(values)
        if nodes[0].children is None:
            return self._join_plain(values, place)
        if nodes[0].is_sequence and self._hold_samples(nodes):
            return self._join_lists(values)
        return self._join_children(nodes, self._join)

    def _join_children(self, nodes: list[Node], join: Callable[[list[Node]], Any]) -> Any:
        values, place = [node.value for node in nodes], nodes[0].place
        named = [{child.place: child for child in node.children or ()} for node in nodes]
        if any(children.keys() != named[0].keys() for children in named):
            if isinstance(values[0], (tuple, list)):
                raise _cannot_join("lengths", [*map(len, values)], place)
            raise _cannot_join("keys", [*map(list, values)], place)
        return with_children(values[0], [join([children[key] for children in named]) for key in named[0]])

    def _join_lists(self, outputs: list[Any]) -> Any:
        items = [
            map_tensors(partial(self.link.bring, position=position), item)
            for position, output in enumerate(outputs)
            for item in output
        ]
        return items if type(outputs[0]) is list else type(outputs[0])(items)

    def _hold_samples(self, nodes: list[Node]) -> bool:
        place, lengths = nodes[0].place, tuple(len(node.value) for node in nodes)
        if len(self.shares) < 2:
            return False
        if lengths != self.shares:
            if len(set(lengths)) == 1:
                self.seen.lists[place] = False
            return False
        if len(set(lengths)) > 1:
            self.seen.lists[place] = True
        return self.seen.lists[place] if place in self.seen.lists else self._likely_hold_samples(nodes)

    def _likely_hold_samples(self, nodes: list[Node]) -> bool:
        first, place, size = nodes[0].value, nodes[0].place, len(nodes[0].value)
        tensors = [tensor.value for node in nodes for tensor in node.tensors]
        if not tensors:
            constant = all(node.value == first for node in nodes)
            # A tuple may be a constant, such as the size of an image, or counts: `return correct, total`.
            single = isinstance(first, tuple) and (constant or all(isinstance(item, numbers.Number) for item in first))
            if constant or single:
                self._warn_of_list(first, place, "values of the whole batch" if single else "samples")
            return not single
        if not nodes[0].has_similar_items and not nodes[0].has_records:
            return False
        if all(leaf.dim() == 0 for leaf in tensors):
            return self._are_scalars_of_samples(first, place)
        rows = [_rows(leaf, self.dim) for leaf in tensors if leaf.dim() > 0]
        if any(row != size for row in rows):  # the rows are not samples, so the tensors cannot be concatenated
            return bool(self.layout.lists) or not any(size in leaf.shape for leaf in tensors)
        if isinstance(first, tuple):
            return False
        if self.layout.lists:
            raise self._ambiguous(f"a list of {size} items whose tensors have {size} rows", place, "a tuple")
        self._warn_of_list(first, place, "a container of tensors with the batch first")
        return False

    def _are_scalars_of_samples(self, first: Any, place: str) -> bool:
        if isinstance(first, tuple):
            return False
        if not self.layout.lists:
            raise self._ambiguous(f"a list of {len(first)} scalars", place, "a tuple or dict of losses")
        self._warn_of_list(first, place, "samples")
        return True

    def _ambiguous(self, what: str, place: str, container: str) -> WorkloadError:
        return WorkloadError(
            f"The output{place} is {what} on each device. All devices have the same number of samples, so "
            "autosplit can't detect whether the items are samples. If they are, return torch.stack(items). If not, "
            f"return {container}. Or give the devices different numbers of samples in the first batch.",
        )

    def _warn_of_list(self, first: Any, place: str, taken: str) -> None:
        warn_user(
            f"The output{place} is a {type(first).__name__} of {len(first)} items on each device. All devices have "
            f"the same number of samples, so autosplit assumed {taken}. If that is wrong, return a tensor or a "
            "dict, or give the devices different numbers of samples in the first batch.",
            AmbiguousBatchWarning,
        )

    def _join_tensors(self, tensors: list[Tensor], place: str) -> Tensor:
        if len({tensor.dim() for tensor in tensors}) != 1:
            raise _cannot_join("shapes", [tuple(tensor.shape) for tensor in tensors], place)
        if tensors[0].dim() == 1 and tensors[0].is_floating_point() and self._are_losses(tensors, place):
            return self._join_tensors([tensor.reshape(()) for tensor in tensors], place).reshape(1)
        if tensors[0].dim() == 0 and place in self.seen.rows and {*self.shares} == {1}:
            tensors = [tensor.reshape(1) for tensor in tensors]  # the module squeezes its output, also of one sample
        if tensors[0].dim() > 0:
            self._check_rows(tensors, place)
            return self._concatenated(tensors, self.dim, place)
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
        if any(share > 1 for share in self.shares):
            self.seen.losses[place] = all(tensor.shape == (1,) for tensor in tensors)
        return self.seen.losses.get(place, False) and all(tensor.shape == (1,) for tensor in tensors)

    def _weighted(self, tensor: Tensor, weight: float | Tensor) -> Tensor:
        if not isinstance(weight, Tensor):
            return tensor if weight == 1.0 else tensor * weight
        # A mean over no labels is NaN, and NaN * 0 is NaN. So use zeros as the loss of a replica with weight 0. If the
        # weight is on the CPU, also drop the replica from the graph, because its backward divides by 0.
        if weight.device.type == "cpu" and not isinstance(weight, FakeTensor) and not weight:
            return torch.zeros_like(tensor)
        here = weight.to(tensor.device, non_blocking=True)
        return (tensor * here).masked_fill(here == 0, 0.0)

    def _say_doubts(self) -> None:
        if isinstance(self.weights, DoubtfulWeights):
            self.weights.say()

    def _check_rows(self, tensors: list[Tensor], place: str) -> None:
        rows = tuple(_rows(tensor, self.dim) for tensor in tensors)
        if rows == self.shares and max(self.shares, default=0) > 1:
            self.seen.rows.add(place)
        if len(self.shares) < 2 or None in rows or rows == self.shares or not any(rows):
            return
        each = (rows[0] or 0) // self.shares[0]
        if rows == tuple(each * share for share in self.shares):
            lengths = self.layout.lengths
            if each > 1 and each in self.layout.views - lengths:
                raise WorkloadError(
                    f"The output{place} has {each} rows for each sample, and the call has {each} tensors for each "
                    "sample. Expected one row for each sample: joined parts of torch.cat(views) are in another order. "
                    "Return torch.stack(views, 1), and call output.transpose(0, 1).flatten(0, 1) on the joined output.",
                )
            others = [size for dim, size in enumerate(tensors[0].shape) if dim != self.dim]
            if len(set(self.shares)) > 1 or (each in lengths and self.shares[0] not in others):
                self.seen.flat.add(place)  # `each` rows for each sample, for example one for each token
            if place in self.seen.flat:
                return
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise WorkloadError(
            f"The output{place} has the shapes {shapes} on devices with {', '.join(map(str, self.shares))} samples. "
            f"Expected the samples in dimension {self.dim}. Return tensors with the batch in dimension {self.dim} (for "
            "example output.transpose(0, 1)), return a scalar, or compute the loss inside the module.",
        )

    def _concatenated(self, tensors: list[Tensor], dim: int, place: str = "") -> Tensor:
        shapes = {tuple(s for d, s in enumerate(tensor.shape) if d != dim % tensor.dim()) for tensor in tensors}
        if len(shapes) != 1:  # in a placement, copying would broadcast
            raise _cannot_join("shapes", [tuple(tensor.shape) for tensor in tensors], place)
        return self.link.concatenate(tensors, dim)

    def _join_plain(self, values: list[Any], place: str) -> Any:
        # Decide by type. Equal values may be a coincidence: counts of 3 and 3 add up to 6, as 3 and 4 add up to 7.
        # A member of an enumeration is not a count, although it may be an int.
        first = values[0]
        if isinstance(first, bool):
            return all(values)
        if isinstance(first, numbers.Integral) and not isinstance(first, enum.Enum):
            return sum(values)
        if isinstance(first, numbers.Complex) and not isinstance(first, enum.Enum):
            self._say_doubts()
            weights = [float(weight) for weight in self.weights]  # waits for the device
            counted = [item for item in zip(weights, values, strict=True) if item[0] != 0.0]
            return sum(weight * value for weight, value in counted)
        if all(_is_same(value, first) for value in values):
            return first
        raise _cannot_join("values", values, place)

    def _join_caches(self, caches: list[Any]) -> Any:
        if len({id(cache) for cache in caches}) != len(caches):
            raise WorkloadError(
                f"{len(caches)} replicas returned the same {type(caches[0]).__name__} object. Expected a separate "
                "cache from each. Pass use_cache=False and no past_key_values if the batch is split.",
            )
        return self._join_state([Node.of(cache) for cache in caches])

    def _join_state(self, nodes: list[Node]) -> Any:
        first, values = nodes[0].value, [node.value for node in nodes]
        if nodes[0].place == "['batch_size']":
            return sum(values)
        if any(type(value) is not type(first) for value in values):
            raise _cannot_join("types", [type(value).__name__ for value in values])
        if isinstance(first, Tensor):
            # Caches have the batch in dimension 0, for any `dim`. Counters and empty caches have no batch.
            return self._concatenated(values, 0) if first.dim() > 1 else self.link.bring(first, 0)
        if nodes[0].children is not None:
            return self._join_children(nodes, self._join_state)
        if any(kind.__module__.startswith("transformers.") for kind in type(first).__mro__):
            new = copy.copy(first)
            new.__dict__.update(self._join_children([Node.of(vars(value)) for value in values], self._join_state))
            return new
        if isinstance(first, (bool, int, float, str)) and any(value != first for value in values):
            raise _cannot_join("values", values)
        return first


def _is_same(value: Any, other: Any) -> bool:
    # An array has rows for samples, as a tensor does, so two equal arrays are not the same value.
    if value is other:
        return True
    if hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0:
        return False
    try:
        return bool(value == other)
    except (TypeError, ValueError):  # the comparison returned an array, which has no truth value
        return False


def _rows(tensor: Tensor, dim: int) -> int | None:
    return tensor.size(dim) if tensor.dim() > dim else None


def _cannot_join(what: str, values: list[Any], place: str = "") -> WorkloadError:
    shown = " ".join(f"{values}"[:200].split())  # join the lines of arrays and strings
    return WorkloadError(
        f"The replicas' outputs{place} have different {what}: {shown}. Expected the same on each. Return per-sample "
        "tensors of one shape, or combine them inside the module.",
    )
