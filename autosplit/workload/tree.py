"""Walk and rebuild the tree of a batch.

A batch is a tensor, or any nesting of tuples, lists, mappings, dataclasses, namedtuples and `UserDict`-like encodings.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

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


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree in order with their places, such as ``batch[0]['mask']``. A `Whole` is a leaf."""
    children = children_of(tree)
    if children is None:
        yield name, tree
    for place, item in children or ():
        yield from named_leaves(item, name + place)


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree in order. A `Whole` is a leaf."""
    return (leaf for _, leaf in named_leaves(tree, ""))


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree in order, including tensors inside a `Whole`."""
    for leaf in leaves_of(tree):
        if isinstance(leaf, Whole):
            yield from tensors_of(leaf.value)
        elif isinstance(leaf, Tensor):
            yield leaf


def has_tensors(tree: Any) -> bool:
    """Return whether a tree has a tensor outside `Whole` markers."""
    return any(isinstance(leaf, Tensor) for leaf in leaves_of(tree))


def map_tensors(function: Callable[[Tensor], Any], tree: Any, *, keeps_marks: bool = False) -> Any:
    """Rebuild a tree with `function` applied to each tensor. Remove `Whole` markers, unless `keeps_marks`."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Whole):
            inner = map_tensors(function, value.value)
            return Whole(inner) if keeps_marks else inner
        return function(value) if isinstance(value, Tensor) else value

    return map_leaves(leaf, tree)


def is_cache(kind: type) -> bool:
    """Return whether a class is a cache of transformers, without importing transformers."""
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in kind.__mro__)
