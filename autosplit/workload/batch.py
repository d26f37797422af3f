"""The tree of a batch: walk it, find its batch size, cut it, make one of another size.

A batch is a tensor, or any nesting of tuples, lists, mappings, dataclasses, namedtuples and `UserDict`-like
encodings of them.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from autosplit.devices.transfer import active_placement, transfer
from autosplit.errors import AutosplitError, WorkloadError, advise

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Whole(Generic[T]):
    """A marker: give this value whole to every device, whatever its shape.

        model(tokens, autosplit.Whole(positions))

    Without it, a tensor that has as many rows as the batch has samples is cut. The module gets the value itself.

    Args:
        value: A tensor, or a nesting of them, whose first dimension is not the batch.
    """

    value: T


def children_of(tree: Any) -> list[tuple[str, Any]] | None:
    """Return what a container holds, each with its place in it, as ``[0]`` or ``.mask``; None for a leaf."""
    if isinstance(tree, Whole):
        return None
    if isinstance(tree, (tuple, list)):
        return [(f"[{index}]", item) for index, item in enumerate(tree)]
    # Before dataclasses: a ModelOutput is one and an OrderedDict, and is built as a mapping.
    if isinstance(tree, (Mapping, UserDict)):
        return [(f"[{key!r}]", item) for key, item in tree.items()]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{field.name}", getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Rebuild a tree with each leaf replaced; a `Whole` is a leaf, and containers keep their types."""
    children = children_of(tree)
    if children is None:
        return function(tree)
    return with_children(tree, [map_leaves(function, item) for _, item in children])


def with_children(tree: Any, items: list[Any]) -> Any:
    """Make a container like another one, whose `children_of` are others."""
    if isinstance(tree, (tuple, list)):
        # A namedtuple is built from positional arguments.
        return type(tree)(*items) if hasattr(tree, "_fields") else items if type(tree) is list else type(tree)(items)
    keys = tree if isinstance(tree, (Mapping, UserDict)) else [field.name for field in dataclasses.fields(tree)]
    return rebuilt(tree, dict(zip(keys, items, strict=True)))


def rebuilt(old: Any, items: dict[Any, Any]) -> Any:
    """Make a mapping or dataclass like `old` with other values."""
    if type(old) is dict:
        return items
    if isinstance(old, Mapping) and not isinstance(old, MutableMapping):
        read_only: Any = type(old)
        return read_only(items)
    if not isinstance(old, MutableMapping):
        # Of a dataclass neither the constructor, which may want anything, nor copy.copy, which can't set frozen slots.
        new = object.__new__(type(old))
        for name, item in {**getattr(old, "__dict__", {}), **items}.items():
            object.__setattr__(new, name, item)
        return new
    # Encodings and defaultdicts have constructors of their own: a shallow copy, refilled, needs none.
    new = copy.copy(old)
    if isinstance(new, UserDict):
        new.data = dict(items)
    else:
        for key, item in items.items():
            new[key] = item
    return new


def named_leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree in order, each with its place, as in ``batch[0]['mask']``; a `Whole` is one leaf."""
    children = children_of(tree)
    if children is None:
        yield name, tree
    for place, item in children or ():
        yield from named_leaves(item, name + place)


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree in order; a `Whole` is one leaf."""
    return (leaf for _, leaf in named_leaves(tree, ""))


def marked(tree: Any, positions: set[int]) -> Any:
    """Mark leaves as `Whole`, by their positions among all of them."""
    count = itertools.count()
    return map_leaves(lambda leaf: Whole(leaf) if next(count) in positions else leaf, tree)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree in order, those inside a `Whole` too."""
    for leaf in leaves_of(tree):
        if isinstance(leaf, Whole):
            yield from tensors_of(leaf.value)
        elif isinstance(leaf, Tensor):
            yield leaf


def map_tensors(function: Callable[[Tensor], Any], tree: Any, *, keeps_marks: bool = False) -> Any:
    """Rebuild a tree with `function` applied to each tensor; a `Whole` is unwrapped, unless marks are kept."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Whole):
            inner = map_tensors(function, value.value)
            return Whole(inner) if keeps_marks else inner
        return function(value) if isinstance(value, Tensor) else value

    return map_leaves(leaf, tree)


def batch_size_of(tree: Any, dim: int = 0, *, may_be_empty: bool = False) -> int:
    """Find how many samples a batch holds.

    The batch size is the size at `dim` on which the tensors agree. A tensor of another size is let through as
    one that belongs to no sample only if nothing about it looks like a batch: its size at `dim` is 1, or every
    one of its dimensions is a size that the batch tensors have elsewhere (a `(T, T)` mask beside `(n, T)`
    tokens). What that can't tell apart, `Whole` does.

    Args:
        may_be_empty: Return 0 for a batch without samples instead of refusing it.
    """
    candidates = [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor) and leaf.dim() > dim]
    if not candidates:
        arrays = any(hasattr(leaf, "__array_interface__") for leaf in leaves_of(tree))
        advice = "make tensors of arrays with torch.from_numpy" if arrays else "pass such a batch, or batch_dim="
        raise WorkloadError(
            f"the batch has no tensor with a dimension {dim} among {shapes_text(tree)}; "
            f"expected at least one whose dimension {dim} is the batch; {advice}"
        )
    counts = Counter(tensor.size(dim) for tensor in candidates)
    for size, _ in counts.most_common():
        others = {1, *_other_sizes(candidates, size, dim)}
        if all(one.size(dim) in (size, 1) or all(extent in others for extent in one.shape) for one in candidates):
            if size == 0 and not may_be_empty:
                raise WorkloadError(
                    f"the batch is empty: dimension {dim} of {shapes_text(tree)} has 0 samples; "
                    "expected at least 1; pass a sample batch with real samples in it"
                )
            return size
    raise WorkloadError(
        f"the tensors of the batch disagree on the batch size: dimension {dim} of {shapes_text(tree)}; expected one "
        "size; make a batch of a single sample with sample.unsqueeze(0), "
        "mark what belongs to no sample with autosplit.Whole(tensor), or pass make_batch="
    )


COLLATED = "torch.utils.data.default_collate(samples)"
"""What a list of samples, which is no batch yet, is to be made."""


def is_list_of_samples(batch: Any) -> bool:
    """Tell whether a batch looks like what a dataset has, one after the other: a list of containers that are alike."""
    if type(batch) is not list or len(batch) < 2 or any(isinstance(sample, Tensor) for sample in batch):
        return False
    return len({tuple((type(leaf), getattr(leaf, "ndim", 0)) for leaf in leaves_of(sample)) for sample in batch}) == 1


def doubt_of(leaves: Iterable[tuple[str, Any]], size: int, dim: int = 0) -> str:
    """Say which tensors are cut that may hold no samples: that they have as many rows may be an accident.

    So it may be where another tensor has that size in another dimension, too: ``(T, E)`` beside ``(n, T)``, and n = T.
    """
    cut = [(place, leaf) for place, leaf in leaves if _is_cut(leaf, size, dim)]
    found = [
        f"{place} of shape {tuple(tensor.shape)}"
        for place, tensor in cut
        if size > 1 and size in _other_sizes([other for _, other in cut if other is not tensor], size, dim)
    ]
    if not found:
        return ""
    return (
        f"if {' or '.join(found)} holds no samples, and has as many rows as the batch by accident, pass it as "
        "autosplit.Whole(tensor)"
    )


@contextmanager
def doubting(leaves: Iterable[tuple[str, Any]], size: int, dim: int = 0) -> Iterator[None]:
    """Let what a module raises of its inputs say which of them may have been cut by accident."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        doubt = doubt_of(leaves, size, dim)
        if doubt and not isinstance(error, (AutosplitError, torch.OutOfMemoryError)):
            advise(error, doubt)
        raise


def _is_cut(leaf: Any, size: int, dim: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.size(dim) == size


def _other_sizes(tensors: list[Tensor], size: int, dim: int) -> set[int]:
    """Return the sizes that the tensors with `size` at `dim` have in their other dimensions."""
    held = [tensor.shape for tensor in tensors if tensor.size(dim) == size]
    return {other for shape in held for other in (*shape[:dim], *shape[dim + 1 :])}


def shapes_text(tree: Any) -> str:
    """Name the shapes of a batch's tensors, or what it is where there are none."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(tree))
    return f"shapes {shapes}" if shapes else f"a {type(tree).__name__}"


def unmarked(tree: Any) -> Any:
    """Return a batch without its `Whole` marks, as a plain module takes it; the very same where it has none."""
    if not any(isinstance(leaf, Whole) for leaf in leaves_of(tree)):
        return tree
    return map_tensors(lambda tensor: tensor, tree)


def _map_batched(
    function: Callable[[Tensor], Tensor], tree: Any, size: int, dim: int, shared: Callable[[Any], Any] = lambda it: it
) -> Any:
    """Apply `function` to the tensors that hold samples, and `shared` to those that hold none."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Whole):
            return shared(value.value)
        if not isinstance(value, Tensor):
            return value
        return function(value) if _is_cut(value, size, dim) else shared(value)

    return map_leaves(leaf, tree)


def chunk(tree: Any, sizes: tuple[int, ...], dim: int = 0, size: int | None = None) -> list[Any]:
    """Cut a batch into one tree per size, of views of its tensors; what holds no samples goes whole into each."""
    size = batch_size_of(tree, dim) if size is None else size
    assert sum(sizes) == size, (sizes, size)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        _map_batched(lambda tensor, a=start, n=n: tensor.narrow(dim, a, n), tree, size, dim)  # type: ignore[misc]
        for start, n in zip(starts, sizes, strict=True)
    ]


def placed_on(device: int, tree: Any) -> Any:
    """Move a batch to a device of the active placement, without its `Whole` marks."""
    placement = active_placement()
    assert placement is not None

    def move(tensor: Tensor) -> Tensor:
        source = placement.device_of(tensor)
        return tensor if source == device else transfer(tensor, source, device, "input")

    return map_tensors(move, tree)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def resize(tree: Any, n: int, dim: int = 0, *, mark: bool = False) -> Any:
    """Make a batch of `n` samples by repeating those of a sample batch in order.

    Args:
        mark: Put what holds no samples into a `Whole`: at another size, a ``(T, T)`` mask may look like a batch.

    Returns:
        A tree like the given one; tensors that hold no samples are the very same.
    """
    size = batch_size_of(tree, dim)

    def repeat(tensor: Tensor) -> Tensor:
        index = torch.arange(n, device=tensor.device).remainder_(size)
        repeated = tensor.detach().index_select(dim, index)
        layout = _CHANNELS_LAST.get(tensor.dim()) if tensor.layout is torch.strided else None
        if layout is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=layout):
            return repeated
        return repeated.contiguous(memory_format=layout)  # kernels go by how images lie

    return _map_batched(repeat, tree, size, dim, *([Whole] if mark else []))
