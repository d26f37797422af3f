"""Find the samples of a batch: how many there are, and which tensors and lists contain them.

# Note [What is cut]
A batch of 4 samples, with batch dimension 0, is split (3, 1) over two devices as follows.

    part of the batch                          first device            second device
    tensor of shape (4, 3, 8, 8)               (3, 3, 8, 8)            (1, 3, 8, 8)
    captions ["a", "b", "c", "d"]              ["a", "b", "c"]         ["d"]
    labels [{...}, {...}, {...}, {...}]        three dicts             one dict
    images of 4 sizes, in a list or tuple      three images            one image
    pair [x, y], each of shape (4, 5)          [x[:3], y[:3]]          [x[3:], y[3:]]
    "auto", 2.0, None, [8, 16], tensor (1, 9)  the same                the same
    Whole(value)                               value                   value
    array or other object of 4 items           refused                 refused
    object that moves itself: `.to(device)`    refused                 refused

A list or tuple of 4 items has one sample in each item. There is one exception: if the first dimension of all its
tensors is 4, too, then its tensors are cut, as nn.DataParallel cuts them. This exception does not apply to a list of
dicts, or to a list of tensors if another list is known to contain samples. The tuple of a call's arguments is never a
list of samples.

# Note [Made batches]
The batches of a user's `make_batch` can have any form. Two small batches show which sizes are the number of samples.
For example, with batches of 2 and 4 graphs:

    batch["x"]           (7, 4) and (14, 4)     all nodes
    batch["edge_index"]  (2, 7) and (2, 14)     all edges
    batch["y"]           (2,) and (4,)          one class for each graph: the rows are the samples
"""

from __future__ import annotations

import dataclasses
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.errors import AutosplitError, WorkloadError, advise, users_errors
from autosplit.rng import kept_rng
from autosplit.workload.tree import Whole, children_of, has_tensors, is_cache, leaves_of, tensors_of


class AmbiguousBatchError(WorkloadError):
    """A list of tensors contains one sample in each item, or the tensors contain the samples in their rows.

    Attributes:
        rows: The number of samples if the rows are the samples, as in nn.DataParallel.
    """

    def __init__(self, message: str, rows: int) -> None:
        super().__init__(message)
        self.rows = rows


@dataclasses.dataclass(frozen=True)
class Layout:
    """Decide which parts of a batch of `size` samples contain samples. See Note [What is cut].

    Args:
        depth: How many of the outermost containers are arguments: 1 for a batch, 2 for a call ``(args, kwargs)``.
        lists_hold: Whether a list of tensors is known to contain samples. Then other lists of tensors do, too.
        structure: The ids of lists and tuples that contain no samples, although they have as many items.
    """

    size: int
    dim: int = 0
    depth: int = 1
    lists_hold: bool = False
    structure: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        tree: Any,
        size: int,
        dim: int = 0,
        depth: int = 1,
        structure: frozenset[int] = frozenset(),
        *,
        lists_hold: bool = False,
    ) -> Layout:
        """Return the layout of a batch. Unless `lists_hold` is given, the batch decides about it."""
        layout = cls(size, dim, depth, lists_hold, structure)
        return dataclasses.replace(layout, lists_hold=any(has_tensors(part) for part in layout.lists(tree)))

    def is_cut(self, leaf: Any) -> bool:
        """Return whether a leaf is a tensor that contains samples."""
        return isinstance(leaf, Tensor) and leaf.dim() > self.dim and leaf.size(self.dim) == self.size

    def is_list(self, node: Any, level: int) -> bool:
        """Return whether a part of a batch is a list or tuple with one item for each sample.

        Args:
            level: The nesting depth of the part.
        """
        if not is_plain_sequence(node) or len(node) != self.size or id(node) in self.structure:
            return False
        if level < self.depth:  # only a batch that is itself a list of dicts, as for detectron2's models
            return level == 0 and self.depth == 1 and type(node) is list and is_records(node)
        tensors = [leaf for leaf in leaves_of(node) if isinstance(leaf, Tensor)]
        if not tensors or is_records(node):
            return True
        return are_similar(node) and (self.lists_hold or not all(map(self.is_cut, tensors)))

    def lists(self, tree: Any) -> Iterator[Any]:
        """Yield the outermost lists and tuples with one item for each sample."""
        return (part for _, part, is_list in self.parts(tree, "") if is_list)

    def parts(self, tree: Any, name: str, level: int = 0) -> Iterator[tuple[str, Any, bool]]:
        """Yield lists of samples and all other leaves: the place, the part, and whether it is a list of samples."""
        is_list = self.is_list(tree, level)
        children = None if is_list else children_of(tree)
        if children is None:
            yield name, tree, is_list
        for place, item in children or ():
            yield from self.parts(item, name + place, level + 1)

    def fits(self, tree: Any) -> bool:
        """Return whether every tensor outside of the lists of samples agrees with the number of samples."""
        leaves = (part for _, part, is_list in self.parts(tree, "") if not is_list)
        return _agree([leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > self.dim], self)


def is_plain_sequence(node: Any) -> bool:
    """Return whether a value is a list or tuple without named fields. A `torch.Size` is a shape, not a sequence."""
    if not isinstance(node, (tuple, list)) or isinstance(node, torch.Size):
        return False
    return not (hasattr(node, "_fields") or hasattr(node, "n_sequence_fields"))


def is_records(items: Any) -> bool:
    """Return whether all items are mappings or dataclasses with the same names."""
    kinds = {
        (type(item), tuple(place for place, _ in children_of(item) or ()))
        if isinstance(item, (Mapping, UserDict)) or (dataclasses.is_dataclass(item) and not isinstance(item, type))
        else None
        for item in items
    }
    return len(kinds) == 1 and None not in kinds


def are_similar(items: Any) -> bool:
    """Return whether the items have the same types and numbers of dimensions, as samples have."""
    return len({tuple((type(leaf), getattr(leaf, "ndim", 0)) for leaf in leaves_of(item)) for item in items}) == 1


def _agree(tensors: list[Tensor], layout: Layout) -> bool:
    size, dim = layout.size, layout.dim
    others = {1, *_other_sizes(tensors, size, dim)}
    return all(one.size(dim) in (size, 1) or all(extent in others for extent in one.shape) for one in tensors)


def _other_sizes(tensors: Iterable[Tensor], size: int, dim: int) -> set[int]:
    held = [tensor.shape for tensor in tensors if tensor.size(dim) == size]
    return {other for shape in held for other in (*shape[:dim], *shape[dim + 1 :])}


def batch_size_of(
    tree: Any,
    dim: int = 0,
    *,
    may_be_empty: bool = False,
    depth: int = 1,
    structure: frozenset[int] = frozenset(),
    expected: int | None = None,
) -> int:
    """Return the number of samples in a batch.

    This is the size at `dim` that the tensors have in common, or the length of the lists that contain samples. A tensor
    with a different size is accepted if it cannot be a batch: its size at `dim` is 1, or each of its dimensions is a
    size that the batch's tensors have elsewhere (a ``(T, T)`` mask next to ``(n, T)`` tokens).

    Args:
        may_be_empty: Return 0 for a batch without samples instead of raising WorkloadError.
        expected: Decides if both the tensors' size and a list's length could be the number of samples.

    Raises:
        WorkloadError: No number fits all tensors and lists.
        AmbiguousBatchError: Two numbers fit.
    """
    tensors = [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor) and leaf.dim() > dim]
    if not tensors:
        arrays = any(hasattr(leaf, "__array_interface__") for leaf in leaves_of(tree))
        advice = "Convert arrays to tensors with torch.from_numpy." if arrays else "Pass such a batch, or batch_dim=."
        raise WorkloadError(
            f"The batch has no tensor with a dimension {dim} among {shapes_text(tree)}. Expected a tensor with the "
            f"samples in dimension {dim}. {advice}",
        )
    sizes = [size for size, _ in Counter(tensor.size(dim) for tensor in tensors).most_common()]
    by_rows = next((size for size in sizes if _agree(tensors, Layout(size, dim))), None)
    by_lists = _list_lengths(tree, dim, depth, structure)
    found = {*by_lists} if by_rows is None else {by_rows, *by_lists}
    if expected is not None and expected in found:
        return expected
    if len(found) > 1 and by_rows is not None:
        return _one_reading(tree, dim, depth, by_rows, by_lists, structure)
    if len(found) != 1:
        raise WorkloadError(
            f"The tensors of the batch disagree on the batch size: dimension {dim} of {shapes_text(tree)}. Expected "
            "one size. If you passed a single sample, add the batch dimension with sample.unsqueeze(0). If a tensor "
            "has no rows per sample, mark it with autosplit.Whole(tensor). On one device, or with DDP, you can pass "
            "make_batch= instead.",
        )
    size: int = by_rows if by_rows is not None else by_lists[0]
    if size == 0 and not may_be_empty:
        raise WorkloadError(
            f"The batch is empty: dimension {dim} of {shapes_text(tree)} has 0 samples. "
            "Expected at least 1. Pass a sample batch with real samples.",
        )
    return size


def _list_lengths(tree: Any, dim: int, depth: int, structure: frozenset[int]) -> list[int]:
    lengths = dict.fromkeys(len(part) for part in _sequences(tree, depth) if has_tensors(part))
    layouts = (Layout.of(tree, length, dim, depth, structure) for length in lengths)
    return [layout.size for layout in layouts if layout.lists_hold and layout.fits(tree)]


def _sequences(tree: Any, depth: int, level: int = 0) -> Iterator[Any]:
    if is_plain_sequence(tree) and (level >= depth or level == 0 == depth - 1):
        yield tree
    for _, item in children_of(tree) or ():
        yield from _sequences(item, depth, level + 1)


def _one_reading(tree: Any, dim: int, depth: int, by_rows: int, by_lists: list[int], structure: frozenset[int]) -> int:
    """Choose between the tensors' size and a list's length, for example for 8 images of 3 channels."""
    for length in by_lists:
        if any(map(is_records, Layout.of(tree, length, dim, depth, structure).lists(tree))):
            return length
    # A list of one tensor is a container, because a batch of one sample need not be split.
    if by_rows in by_lists or by_lists == [1]:
        return by_rows
    raise AmbiguousBatchError(
        f"The batch has a list of {by_lists[0]} tensors, each with {by_rows} rows: {shapes_text(tree)}. Expected "
        f"either {by_lists[0]} or {by_rows} samples. Stack the samples into one tensor, pass several inputs as "
        "arguments instead of a list, or pass make_batch= to tune().",
        by_rows,
    )


COLLATED = "torch.utils.data.default_collate(samples)"
"""The call that turns a list of samples into a batch, for messages."""


def is_list_of_samples(batch: Any) -> bool:
    """Return whether a batch looks like a list of samples that was not collated."""
    if type(batch) is not list or len(batch) < 2 or any(isinstance(sample, Tensor) for sample in batch):
        return False
    return are_similar(batch)


def uncuttable(tree: Any, name: str, layout: Layout) -> str:
    """Return why a batch cannot be cut, with the place of the part, or an empty string."""
    for place, part, is_list in layout.parts(tree, name):
        if isinstance(part, Tensor) and part.layout is not torch.strided and layout.is_cut(part):
            return (
                f"{place} is a sparse tensor of {layout.size} rows, as many as the batch has samples. Pass a dense "
                "tensor to cut it, or autosplit.Whole(tensor) to give each device all of it."
            )
        if is_cache(type(part)) and part.get_seq_length():
            return f"{place} is a {type(part).__name__} with entries, which autosplit cannot cut. Pass an empty cache."
        if is_list or isinstance(part, (Tensor, Whole, str, bytes, nn.Module, torch.Size)):
            continue
        advice = "Pass tensors, lists or tuples. Mark a value without samples with autosplit.Whole(value)"
        kind = type(part).__name__
        if callable(getattr(part, "to", None)):
            return (
                f"{place} is a {kind}, which autosplit can't cut into samples, because it moves itself to a "
                f"device. {advice}. Or train with DDP (strategy='ddp'), which cuts no batch."
            )
        if hasattr(type(part), "__len__") and layout.size > 1 and _length(part) == layout.size:
            return (
                f"{place} is a {kind} of {layout.size} items, as many as the batch has samples. Expected parts that "
                f"autosplit can cut into samples. {advice}."
            )
    return ""


def _length(part: Any) -> int:
    try:
        return len(part)
    except TypeError:  # an array without dimensions
        return -1


def doubt_of(leaves: Iterable[tuple[str, Any]], size: int, dim: int = 0) -> str:
    """Return advice on tensors that are cut although they may contain no samples, or an empty string.

    A tensor is doubtful if another tensor has the number of samples in another dimension: ``(T, E)`` next to
    ``(n, T)`` if n equals T.
    """
    layout = Layout(size, dim)
    cut = [(place, leaf) for place, leaf in leaves if layout.is_cut(leaf)]
    found = [
        f"{place} of shape {tuple(tensor.shape)}"
        for place, tensor in cut
        if size > 1 and size in _other_sizes([other for _, other in cut if other is not tensor], size, dim)
    ]
    if not found:
        return ""
    return (
        f"If {' or '.join(found)} holds no samples, and only by accident has as many rows as the batch, pass it as "
        "autosplit.Whole(tensor)."
    )


@contextmanager
def doubting(leaves: Iterable[tuple[str, Any]], size: int, dim: int = 0) -> Iterator[None]:
    """Add advice to the module's errors if tensors may have been cut by coincidence."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        doubt = doubt_of(leaves, size, dim)
        if doubt and not isinstance(error, (AutosplitError, torch.OutOfMemoryError)):
            advise(error, doubt)
        raise


def shapes_text(tree: Any) -> str:
    """Return the shapes of a batch's tensors, or its type if it has none."""
    shapes = [str(tuple(tensor.shape)) for tensor in tensors_of(tree)]
    if not shapes:
        return f"a {type(tree).__name__}"
    more = f" and {len(shapes) - MOST_SHAPES} more" if len(shapes) > MOST_SHAPES else ""
    return f"shapes {', '.join(shapes[:MOST_SHAPES])}{more}"


MOST_SHAPES = 12
"""The number of tensor shapes in a message. A list of images could have hundreds."""


# -------------------------------------------------------------------------------------------- batches of `make_batch`

MADE_SIZES = (2, 4)
"""Samples of the two small batches. Both are even, because some batches consist of pairs."""

MADE_SAMPLES = 4
"""Samples of a sample batch that `make_batch` makes."""


@dataclasses.dataclass(frozen=True)
class MadeBatches:
    """Count the samples of batches of one `make_batch`. See Note [Made batches].

    Attributes:
        places: Tensors and lists whose size is the number of samples.
    """

    places: tuple[str, ...]
    dim: int
    is_constant: bool = False

    @classmethod
    def of(cls, make_batch: Callable[[int], Any], dim: int) -> MadeBatches:
        """Make two small batches, and find the sizes that grow with the number of samples."""
        try:
            with kept_rng():
                few, more = (dict(_sizes_in(make_batch(n), dim)) for n in MADE_SIZES)
        except Exception:  # noqa: BLE001  # `make_batch` may not support small batches. A later call shows its error
            return cls((), dim)
        places = (place for place, size in few.items() if (size, more.get(place)) == MADE_SIZES)
        return cls(tuple(places), dim, few == more)

    def count(self, batch: Any) -> int | None:
        """Return the number of samples of a batch, or None if no part shows it."""
        sizes = dict(_sizes_in(batch, self.dim))
        found = next((sizes[place] for place in self.places if place in sizes), None)
        if found is None and self.is_constant:
            return count_or_none(batch, self.dim)
        return found

    def sample_batch(self, make_batch: Callable[[int], Any], given: Any) -> tuple[Any, int, tuple[str, ...]]:
        """Return the sample batch, its number of samples, and notes.

        If the given batch does not show the number of samples, `make_batch` makes the sample batch, with a note.
        """
        size = self.count(given) or count_or_none(given, self.dim)
        if size:
            return given, size, ()
        with users_errors("make_batch"):
            made = make_batch(MADE_SAMPLES)
        note = (
            "autosplit can't detect the number of samples in the sample batch, so it used "
            f"make_batch({MADE_SAMPLES}) instead."
        )
        return made, MADE_SAMPLES, (note,)


def count_or_none(batch: Any, dim: int) -> int | None:
    """Return the number of samples of a batch, or None if its tensors have no size in common."""
    try:
        return batch_size_of(batch, dim)
    except WorkloadError:
        return None


def _sizes_in(tree: Any, dim: int, place: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(tree, Tensor) and tree.dim() > dim:
        yield place, tree.size(dim)
    if place and is_plain_sequence(tree):
        yield f"len({place})", len(tree)
    for key, item in children_of(tree) or ():
        yield from _sizes_in(item, dim, place + key)
