"""Walk a batch once, count its samples, and find the tensors and lists that contain them.

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
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from autosplit.errors import AutosplitError, WorkloadError, advise
from autosplit.workload.tree import Node, Whole, is_cache, shapes_text, unmarked, with_children


class AmbiguousBatchError(WorkloadError):
    """A list of tensors contains one sample in each item, or the tensors contain the samples in their rows.

    Attributes:
        rows: The number of samples if the rows are the samples, as in nn.DataParallel.
    """

    def __init__(self, message: str, rows: int) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass
class EarlierBatches:
    """Facts from the earlier batches of a model, by the key of a part.

    A part is cut if its size is the number of samples. That may be a coincidence. If a part of 8 rows also had 8 rows
    in a batch of a different size, it contains no samples.

    A list of 2 tensors with 1 row each is 2 samples, or 1 sample of two views. So how the first full batch was read
    decides about all later batches.

    Attributes:
        sizes: Sizes of parts that differed from the number of samples.
        lists: Whether a list of tensors had one sample in each item in the first full batch.
    """

    sizes: dict[tuple[str, bool], int] = field(default_factory=dict)
    lists: dict[tuple[str, bool], bool] = field(default_factory=dict)

    def is_constant(self, node: Node, size: int) -> bool:
        """Return whether a part of this size is known to contain no samples."""
        return self.lists.get(node.key) is False or self.sizes.get(node.key) == size

    def record(self, layout: BatchLayout) -> None:
        """Record the sizes that differ from the number of samples."""
        for node in layout.root.all():
            extent = node.extent(layout.dim)
            if extent is not None and extent != layout.size:
                self.sizes[node.key] = extent


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """The parts of a batch of `size` samples, and which of them contain samples. See Note [What is cut]."""

    root: Node
    size: int
    dim: int = 0
    earlier: EarlierBatches = field(default_factory=EarlierBatches)

    @classmethod
    def of(cls, batch: Any, size: int, dim: int = 0) -> BatchLayout:
        """Return the layout of a batch whose number of samples is known."""
        return cls(Node.of(batch), size, dim)

    def is_cut(self, node: Node) -> bool:
        """Return whether a part is a tensor that contains samples."""
        if not isinstance(node.value, Tensor) or node.extent(self.dim) != self.size:
            return False
        return not self.earlier.is_constant(node, self.size)

    @cached_property
    def outermost(self) -> list[tuple[Node, bool]]:
        """The lists of samples, and all leaves outside of them. True for a list."""
        known = any(self.earlier.lists.values())
        found = [*self._outermost(self.root, known)]
        if not known and any(node.tensors for node, is_list in found if is_list):
            return [*self._outermost(self.root, True)]
        return found

    def _outermost(self, node: Node, lists_hold: bool) -> Iterator[tuple[Node, bool]]:
        is_list = node.children is not None and self._is_list(node, lists_hold)
        if is_list or node.children is None:
            yield node, is_list
        else:
            for child in node.children:
                yield from self._outermost(child, lists_hold)

    def _is_list(self, node: Node, lists_hold: bool) -> bool:
        """Return whether a container has one item for each sample.

        Args:
            lists_hold: Whether a list of tensors is known to contain samples. Then other lists of tensors do, too.
        """
        if not node.is_sequence or len(node.value) != self.size or self.earlier.is_constant(node, self.size):
            return False
        if node.level < 1:  # only a batch that is itself a list of dicts, as for detectron2's models
            return type(node.value) is list and node.has_records
        tensors = node.tensors
        if not tensors or node.has_records:
            return True
        return node.has_similar_items and (lists_hold or not all(map(self.is_cut, tensors)))

    @cached_property
    def lists(self) -> dict[str, Node]:
        """The outermost lists and tuples with one item for each sample, by place."""
        return {node.place: node for node, is_list in self.outermost if is_list}

    @cached_property
    def rows(self) -> dict[str, Node]:
        """The tensors that are cut, by place."""
        return {node.place: node for node, is_list in self.outermost if not is_list and self.is_cut(node)}

    @property
    def lengths(self) -> set[int | None]:
        """The tensors' sizes in the dimension after the batch, such as the tokens per sample."""
        return {node.extent(self.dim + 1) for node in self.root.tensors}

    @property
    def views(self) -> set[int]:
        """The numbers of tensors with samples in each list or tuple, such as the views of each sample."""
        return {sum(map(self.is_cut, node.children or ())) for node in self.root.all() if node.is_sequence}

    def fits(self) -> bool:
        """Return whether lists of tensors contain samples, and all other tensors agree with the number of samples."""
        others = [node.value for node, is_list in self.outermost if not is_list and isinstance(node.value, Tensor)]
        lists = any(node.tensors for node in self.lists.values())
        return lists and _agree([tensor for tensor in others if tensor.dim() > self.dim], self.size, self.dim)

    def map(
        self,
        of_tensor: Callable[[Tensor], Tensor],
        of_items: Callable[[list[Any]], list[Any]],
        of_others: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """Rebuild the batch with a function applied to each tensor and to each list of samples.

        Args:
            of_others: Applied to tensors without samples, and to the values of `Whole` markers.
        """

        def rebuilt(node: Node) -> Any:
            value = node.value
            if node.children is None:
                if isinstance(value, Whole):
                    return of_others(value.value)
                if node.place in self.rows:
                    return of_tensor(value)
                return of_others(value) if isinstance(value, Tensor) else value
            if node.place in self.lists:
                items = of_items(list(value))
                return items if type(value) is list else type(value)(items)
            return with_children(value, [rebuilt(child) for child in node.children])

        return rebuilt(self.root)

    def cut(self, sizes: tuple[int, ...]) -> list[Any]:
        """Cut the batch into one batch per size. Tensors are views. Each batch contains all parts without samples.

        Raises:
            WorkloadError: A part of the batch cannot be cut.
        """
        if len(sizes) == 1:
            return [unmarked(self.root.value)]
        assert sum(sizes) == self.size, (sizes, self.size)
        self._refuse_uncuttable()
        return [
            self.map(
                lambda tensor, end=end, n=n: tensor.narrow(self.dim, end - n, n),  # type: ignore[misc]
                lambda items, end=end, n=n: items[end - n : end],  # type: ignore[misc]
            )
            for end, n in zip(itertools.accumulate(sizes), sizes, strict=True)
        ]

    def _refuse_uncuttable(self) -> None:
        for node, is_list in self.outermost:
            # In a call, also look inside of lists, because nothing would move their objects to another device.
            for leaf in node.leaves if self.root.level < 0 or not is_list else ():
                if why := self._why_uncuttable(leaf, is_list):
                    raise WorkloadError(
                        f"{leaf.place or 'The batch'} is {why}. autosplit can't cut it into samples. Pass dense "
                        "tensors, lists, tuples, or an empty cache. Mark a value without samples with "
                        "autosplit.Whole(value). Or train with DDP (strategy='ddp'), which cuts no batch.",
                    )

    def _why_uncuttable(self, leaf: Node, is_in_list: bool) -> str:
        value, kind = leaf.value, f"a {type(leaf.value).__name__}"
        if isinstance(value, Tensor):
            is_sparse = value.layout is not torch.strided and leaf.place in self.rows
            return f"a sparse tensor of {self.size} rows, as many as the batch has samples" if is_sparse else ""
        if isinstance(value, (Whole, str, bytes, nn.Module)):
            return ""
        if callable(getattr(value, "to", None)):
            return f"{kind}, which moves itself to a device"
        if is_in_list:
            return ""
        if is_cache(type(value)) and value.get_seq_length():
            return f"{kind} with entries"
        has_items = self.size > 1 and length_hint(value, -1) == self.size
        return f"{kind} of {self.size} items, as many as the batch has samples" if has_items else ""

    def doubt(self) -> str:
        """Return advice on tensors that are cut although they may contain no samples, or an empty string.

        A tensor is doubtful if another tensor has the number of samples in another dimension: ``(T, E)`` next to
        ``(n, T)`` if n equals T.
        """
        tensors = {place: node.value for place, node in self.rows.items()} if self.size > 1 else {}
        found = [
            f"{place} of shape {tuple(tensor.shape)}"
            for place, tensor in tensors.items()
            if self.size in _other_sizes([other for other in tensors.values() if other is not tensor], self.dim)
        ]
        if not found:
            return ""
        return (
            f"If {' or '.join(found)} holds no samples, and only by accident has as many rows as the batch, pass it "
            "as autosplit.Whole(tensor)."
        )

    def advise(self, error: Exception) -> None:
        """Add advice to an error of the module if tensors may have been cut by coincidence."""
        if not isinstance(error, (AutosplitError, torch.OutOfMemoryError)) and (doubt := self.doubt()):
            advise(error, doubt)


def _agree(tensors: list[Tensor], size: int, dim: int) -> bool:
    elsewhere = {1, *_other_sizes([tensor for tensor in tensors if tensor.size(dim) == size], dim)}
    return all(tensor.size(dim) in (size, 1) or elsewhere.issuperset(tensor.shape) for tensor in tensors)


def _other_sizes(tensors: Iterable[Tensor], dim: int) -> set[int]:
    return {size for tensor in tensors for other, size in enumerate(tensor.shape) if other != dim}


def read_batch(batch: Any, dim: int = 0) -> BatchLayout:
    """Return the layout of a batch with at least one sample. See `read`."""
    layout = read(Node.of(batch), dim)
    if layout.size == 0:
        raise WorkloadError(
            f"The batch is empty: dimension {dim} of {shapes_text(batch)} has 0 samples. "
            "Expected at least 1. Pass a sample batch with real samples.",
        )
    return layout


def read(root: Node, dim: int, earlier: EarlierBatches | None = None, expected: int | None = None) -> BatchLayout:
    """Count the samples of a batch, and return its layout.

    The number of samples is the size at `dim` that the tensors have in common, or the length of the lists that contain
    samples. A tensor with a different size is accepted if it cannot be a batch: its size at `dim` is 1, or each of its
    dimensions is a size that the batch's tensors have elsewhere (a ``(T, T)`` mask next to ``(n, T)`` tokens).

    Args:
        expected: Decides if both the tensors' size and a list's length could be the number of samples.

    Raises:
        WorkloadError: No number fits all tensors and lists.
        AmbiguousBatchError: Two numbers fit.
    """
    earlier = EarlierBatches() if earlier is None else earlier
    _refuse_ragged(root)
    tensors = [node.value for node in root.tensors if node.value.dim() > dim]
    if not tensors:
        arrays = any(hasattr(node.value, "__array_interface__") for node in root.all())
        advice = "Convert arrays to tensors with torch.from_numpy." if arrays else "Pass such a batch, or batch_dim=."
        raise WorkloadError(
            f"The batch has no tensor with a dimension {dim} among {shapes_text(root.value)}. Expected a tensor with "
            f"the samples in dimension {dim}. {advice}",
        )
    lists = [node for node in root.all() if (node.level > 0 or type(node.value) is list) and node.is_sequence]
    layouts = {
        length: BatchLayout(root, length, dim, earlier)
        for length in dict.fromkeys(len(node.value) for node in lists if node.tensors)
    }
    by_lists = [layout for layout in layouts.values() if layout.fits()]
    for node in lists:
        if earlier.lists.get(node.key) and (known := layouts.get(len(node.value))) in by_lists:
            return known
    sizes = [size for size, _ in Counter(tensor.size(dim) for tensor in tensors).most_common()]
    by_rows = next((size for size in sizes if _agree(tensors, size, dim)), None)
    size = _chosen(root, dim, by_rows, by_lists, expected)
    return layouts.get(size) or BatchLayout(root, size, dim, earlier)


def _refuse_ragged(root: Node) -> None:
    for node in root.all():
        is_nested = isinstance(node.value, Tensor) and node.value.is_nested
        if is_nested or isinstance(node.value, PackedSequence):
            kind = "nested tensor" if is_nested else "PackedSequence"
            raise WorkloadError(
                f"{node.place or 'The batch'} is a {kind}, which autosplit can't cut into samples. Pass a padded "
                "tensor with its lengths, and pack it inside the model.",
            )


def _chosen(root: Node, dim: int, by_rows: int | None, by_lists: list[BatchLayout], expected: int | None) -> int:
    """Choose between the tensors' size and a list's length, for example for 8 images of 3 channels."""
    found = [layout.size for layout in by_lists if layout.size != by_rows]
    sizes = found if by_rows is None else [by_rows, *found]
    if expected in sizes or len(sizes) == 1:
        return expected if expected in sizes else sizes[0]
    if by_rows is None:
        raise WorkloadError(
            f"The tensors of the batch disagree on the batch size: dimension {dim} of {shapes_text(root.value)}. "
            "Expected one size. If you passed a single sample, add the batch dimension with sample.unsqueeze(0). If a "
            "tensor has no rows per sample, mark it with autosplit.Whole(tensor). On one device, or with DDP, you can "
            "pass make_batch= instead.",
        )
    for layout in by_lists:
        if any(node.has_records for node in layout.lists.values()):
            return layout.size
    # A list of one tensor is a container, because a batch of one sample need not be split.
    if len(found) < len(by_lists) or found == [1]:
        return by_rows
    raise AmbiguousBatchError(
        f"The batch has a list of {found[0]} tensors, each with {by_rows} rows: {shapes_text(root.value)}. Expected "
        f"either {found[0]} or {by_rows} samples. Stack the samples into one tensor, pass several inputs as "
        "arguments instead of a list, or pass make_batch= to tune().",
        by_rows,
    )
