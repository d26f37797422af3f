"""Walk and rebuild the tree of a batch.

A batch is a tensor, or any nesting of tuples, lists, mappings, dataclasses, namedtuples and `UserDict`-like encodings.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Whole(Generic[T]):
    """Mark a value that every device gets whole, whatever its shape.

        model(tokens, autosplit.Whole(positions))

    Without the marker, a tensor with as many rows as the batch has samples is cut, and so is a list with as many items.

    Args:
        value: Any value that contains no samples: a tensor, a list of sizes, or a container of these.
    """

    value: T


def children_of(tree: Any) -> list[tuple[str, Any]] | None:
    """Return a container's items with their places, such as ``[0]`` or ``.mask``. Return None for a leaf."""
    if isinstance(tree, Whole):
        return None
    if isinstance(tree, PackedSequence):
        # Leave out `batch_sizes`, because torch requires it on the CPU. It has no floating-point numbers to convert.
        return [(f".{name}", getattr(tree, name)) for name in ("data", "sorted_indices", "unsorted_indices")]
    if isinstance(tree, (tuple, list)):
        return [(f"[{index}]", item) for index, item in enumerate(tree)]
    # Check this before dataclasses: a ModelOutput is both a dataclass and an OrderedDict, and is rebuilt as a mapping.
    if isinstance(tree, (Mapping, UserDict)):
        return [(f"[{key!r}]", item) for key, item in tree.items()]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


class Node(NamedTuple):
    """A container or a leaf of a batch.

    Attributes:
        place: Where the node is, such as ``inputs[0]['mask']``.
        level: 0 for a batch, for the arguments of a call, and for its keyword arguments. -1 for the whole call.
        children: The nodes in a container. None for a leaf.
    """

    place: str
    value: Any
    level: int = 0
    children: tuple[Node, ...] | None = None

    @classmethod
    def of(cls, value: Any, place: str = "", level: int = 0) -> Node:
        """Walk a batch."""
        children = children_of(value)
        if children is None:
            return cls(place, value, level)
        return cls(place, value, level, tuple([cls.of(item, place + key, level + 1) for key, item in children]))

    @classmethod
    def of_call(cls, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """Walk the arguments of a call."""
        return cls("", (inputs, kwargs), -1, (cls.of(inputs, "inputs"), cls.of(kwargs, "kwargs")))

    def all(self) -> Iterator[Node]:
        """Yield this node and all nodes inside it, in order."""
        yield self
        for child in self.children or ():
            yield from child.all()

    @property
    def leaves(self) -> list[Node]:
        """The leaves in order. A `Whole` is a leaf."""
        return [node for node in self.all() if node.children is None]

    @property
    def tensors(self) -> list[Node]:
        """The tensors outside of `Whole` markers."""
        return [node for node in self.all() if isinstance(node.value, Tensor)]

    @property
    def key(self) -> tuple[str, bool]:
        """The place, and whether a tensor is there. An evaluation may pass a tensor instead of a list of tensors."""
        return self.place, isinstance(self.value, Tensor)

    @property
    def is_sequence(self) -> bool:
        """Whether the node is a list or tuple without named fields. A `torch.Size` is a shape, not a sequence."""
        if not isinstance(self.value, (tuple, list)) or isinstance(self.value, torch.Size):
            return False
        return not (hasattr(self.value, "_fields") or hasattr(self.value, "n_sequence_fields"))

    def extent(self, dim: int) -> int | None:
        """Return the size that may be the number of samples: of a tensor at `dim`, or of a list in the batch."""
        if isinstance(self.value, Tensor):
            return self.value.size(dim) if self.value.dim() > dim else None
        return len(self.value) if self.level > 0 and self.is_sequence else None

    @property
    def has_records(self) -> bool:
        """Whether all items are mappings or dataclasses with the same names."""
        items = self.children or ()
        if any(item.children is None or isinstance(item.value, (tuple, list)) for item in items):
            return False
        names = {tuple(child.place[len(item.place) :] for child in item.children or ()) for item in items}
        return len({type(item.value) for item in items}) == len(names) == 1

    @property
    def has_similar_items(self) -> bool:
        """Whether the items have the same types and numbers of dimensions, as samples have."""
        leaves = ([leaf.value for leaf in item.leaves] for item in self.children or ())
        return len({tuple((type(leaf), getattr(leaf, "ndim", 0)) for leaf in item) for item in leaves}) == 1


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Rebuild a tree with each leaf replaced. Containers keep their types."""
    children = children_of(tree)
    if children is None:
        return function(tree)
    return with_children(tree, [map_leaves(function, item) for _, item in children])


def with_children(tree: Any, items: list[Any]) -> Any:
    """Return a container like `tree` with other items, in the order of `children_of`."""
    if isinstance(tree, PackedSequence):
        data, *indices = items
        return PackedSequence(data, tree.batch_sizes, *indices)
    if isinstance(tree, (tuple, list)):
        # A namedtuple is built from positional arguments.
        return type(tree)(*items) if hasattr(tree, "_fields") else items if type(tree) is list else type(tree)(items)
    keys = tree if isinstance(tree, (Mapping, UserDict)) else [field.name for field in dataclasses.fields(tree)]
    return rebuilt(tree, dict(zip(keys, items, strict=True)))


def rebuilt(old: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping or dataclass like `old` with other values."""
    if type(old) is dict:
        return items
    if isinstance(old, Mapping) and not isinstance(old, MutableMapping):
        read_only: Any = type(old)
        return read_only(items)
    if not isinstance(old, MutableMapping):
        # A dataclass's constructor may require other arguments, and copy.copy can't set frozen slots.
        new = object.__new__(type(old))
        for name, item in {**getattr(old, "__dict__", {}), **items}.items():
            object.__setattr__(new, name, item)
        return new
    # Encodings and defaultdicts have other constructors. Refilling a shallow copy calls no constructor.
    new = copy.copy(old)
    if isinstance(new, UserDict):
        new.data = dict(items)
    else:
        for key, item in items.items():
            new[key] = item
    return new


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree in order, including tensors inside a `Whole`."""
    for leaf in Node.of(tree).leaves:
        if isinstance(leaf.value, Whole):
            yield from tensors_of(leaf.value.value)
        elif isinstance(leaf.value, Tensor):
            yield leaf.value


def map_tensors(function: Callable[[Tensor], Any], tree: Any, *, keeps_marks: bool = False) -> Any:
    """Rebuild a tree with `function` applied to each tensor. Remove `Whole` markers, unless `keeps_marks`."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Whole):
            inner = map_tensors(function, value.value)
            return Whole(inner) if keeps_marks else inner
        return function(value) if isinstance(value, Tensor) else value

    return map_leaves(leaf, tree)


def unmarked(tree: Any) -> Any:
    """Return a batch without `Whole` markers, for a plain module."""
    if not any(isinstance(leaf.value, Whole) for leaf in Node.of(tree).leaves):
        return tree
    return map_tensors(lambda tensor: tensor, tree)


MOST_SHAPES = 12
"""The number of tensor shapes in a message. A list of images could have hundreds."""


def shapes_text(tree: Any) -> str:
    """Return the shapes of a batch's tensors, or its type if it has none."""
    shapes = [str(tuple(tensor.shape)) for tensor in tensors_of(tree)]
    if not shapes:
        return f"a {type(tree).__name__}"
    more = f" and {len(shapes) - MOST_SHAPES} more" if len(shapes) > MOST_SHAPES else ""
    return f"shapes {', '.join(shapes[:MOST_SHAPES])}{more}"


def is_cache(kind: type) -> bool:
    """Return whether a class is a cache of transformers, without importing transformers."""
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in kind.__mro__)
