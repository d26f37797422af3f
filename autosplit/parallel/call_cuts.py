"""Cut the arguments of a call into one call per device. See Note [What is cut] in `autosplit.workload.samples`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import WorkloadError, warn_user
from autosplit.parallel.arguments import refuse_packed
from autosplit.parallel.gather import AmbiguousBatchWarning
from autosplit.text import listed
from autosplit.workload.batch import chunk
from autosplit.workload.samples import AmbiguousBatchError, Layout, batch_size_of, is_plain_sequence, uncuttable
from autosplit.workload.tree import Whole, children_of, has_tensors, leaves_of, named_leaves, with_children

DEPTH = 2
"""The number of containers around an argument: a call is a pair of a tuple and a dict (keyword arguments)."""


@dataclasses.dataclass
class CallCuts:
    """Count the samples of calls and cut the calls.

    A part of a call is cut if its size is the number of samples. That may be a coincidence. If a part of 8 rows also
    had 8 rows in a batch of a different size, it contains no samples.

    A list of 2 tensors with 1 row each is 2 samples, or 1 sample of two views. So how the first full batch was read
    decides about all later batches.

    Attributes:
        sizes: Sizes of parts that differed from the number of samples, by place and by whether the part is a tensor.
            Training may pass a list of views where an evaluation passes a tensor.
        lists: Whether a list of tensors had one sample in each item in the first full batch, by place.
        cuts_lists: Whether the last call had lists of samples.
    """

    dim: int
    cuts_lists: bool = False
    sizes: dict[tuple[str, bool], int] = dataclasses.field(default_factory=dict)
    lists: dict[str, bool] = dataclasses.field(default_factory=dict)

    def samples(self, call: Any, expected: int | None) -> int | None:
        """Return the number of samples of a call, or None without a tensor to cut.

        Args:
            expected: The number of samples of a full batch. Without gradients, it does not decide about the reading,
                because an evaluation may have batches of any size.
        """
        for place, leaf in named_call(call):
            if isinstance(leaf, Tensor) and leaf.is_nested:
                raise WorkloadError(
                    f"{place} is a nested tensor. autosplit cuts tensors with the batch in one dimension, and lists "
                    "of tensors. Pass leaf.unbind() as a list, or a padded tensor with its lengths.",
                )
        if not any(isinstance(leaf, Tensor) and leaf.dim() > self.dim for leaf in leaves_of(call)):
            return None
        for place, part, length in _sized_parts(call, self.dim):
            if self.lists.get(place) and is_plain_sequence(part) and self._layout(call, length).fits(call):
                return length
        structure, decides = self._structure(call), expected if torch.is_grad_enabled() else None
        try:
            size = batch_size_of(call, self.dim, may_be_empty=True, depth=DEPTH, structure=structure, expected=decides)
        except AmbiguousBatchError as error:
            warn_user(f"{error} It was cut into {error.rows} samples.", AmbiguousBatchWarning)
            return error.rows
        except WorkloadError as error:
            raise WorkloadError(
                f"{self._rows_text(call)}: {error}. A batch that cannot be cut trains on one device or with DDP "
                "(strategy='ddp')",
            ) from error
        if size == expected and not self.lists:
            self._learn(call, size)
        return size

    def _learn(self, call: Any, size: int) -> None:
        layout = self._layout(call, size)
        held = {id(part) for part in layout.lists(call)}
        for place, part, length in _sized_parts(call, self.dim):
            if not is_plain_sequence(part) or not has_tensors(part):
                continue
            self.lists[place] = id(part) in held
            are_equal = len({(item.shape, item.dtype) for item in part if isinstance(item, Tensor)}) == 1
            if not self.lists[place] and length == size > 1 and are_equal and all(map(layout.is_cut, part)):
                warn_user(
                    f"The batch has a list of {size} tensors, each with {size} rows. It was cut into {size} rows, as "
                    "nn.DataParallel does. If each tensor is a sample, stack them. If not, pass them as separate "
                    "arguments.",
                    AmbiguousBatchWarning,
                )

    def lengths(self, call: Any) -> frozenset[int]:
        """Return the tensors' sizes in the dimension after the batch, such as the tokens per sample."""
        after = self.dim + 1
        return frozenset(
            leaf.size(after) for leaf in leaves_of(call) if isinstance(leaf, Tensor) and leaf.dim() > after
        )

    def views(self, call: Any, batch_size: int) -> frozenset[int]:
        """Return the numbers of tensors with samples in each list or tuple, such as the views of each sample."""
        return frozenset(_neighbours(call, self.dim, batch_size))

    def _rows_text(self, call: Any) -> str:
        named = {
            part.size(self.dim): f"{place} has {part.size(self.dim)} rows"
            for place, part in reversed([*named_call(call)])
            if isinstance(part, Tensor) and part.dim() > self.dim
        }
        return listed([*reversed(named.values())], 3)

    def _structure(self, call: Any) -> frozenset[int]:
        """Return the ids of lists of tensors that contain no samples, or whose length did not change with the batch."""
        return frozenset(
            id(part)
            for place, part, size in _sized_parts(call, self.dim)
            if not isinstance(part, Tensor) and has_tensors(part)
            if self.lists.get(place) is False or self.sizes.get((place, False)) == size
        )

    def _layout(self, call: Any, size: int) -> Layout:
        structure, known = self._structure(call), any(self.lists.values())
        return Layout.of(call, size, self.dim, DEPTH, structure, lists_hold=known)

    def cut(self, call: Any, sizes: tuple[int, ...], batch_size: int) -> tuple[list[int], list[Any]]:
        """Return the indices of the devices that have samples, and the call of each.

        Args:
            sizes: Samples of each device.

        Raises:
            WorkloadError: An argument cannot be cut.
        """
        active = [index for index, size in enumerate(sizes) if size] or [0]
        own = tuple(sizes[index] for index in active)
        if len(active) == 1:
            return active, chunk(call, own, self.dim, batch_size)
        inputs, kwargs = call
        refuse_packed((*inputs, *kwargs.values()))
        call, layout = self._remembered(call, batch_size)
        self.cuts_lists = any(True for _ in layout.lists(call))
        for part, name in zip(call, ("inputs", "kwargs"), strict=True):
            if why := uncuttable(part, name, layout):
                raise WorkloadError(why)
        return active, chunk(call, own, self.dim, batch_size, layout=layout)

    def _remembered(self, call: Any, batch_size: int) -> tuple[Any, Layout]:
        """Mark parts as `Whole` if they had the same size in a batch of a different size. Record the other sizes."""
        tables = set()
        for place, part, size in _sized_parts(call, self.dim):
            key = place, isinstance(part, Tensor)
            if size != batch_size:
                self.sizes[key] = size
            elif self.sizes.get(key) == size and (isinstance(part, Tensor) or not has_tensors(part)):
                tables.add(place)
        call = _marked_at(call, tables) if tables else call
        return call, self._layout(call, batch_size)


def _sized_parts(tree: Any, dim: int, place: str = "", level: int = 0) -> Iterator[tuple[str, Any, int]]:
    if isinstance(tree, Tensor) and tree.dim() > dim:
        yield place, tree, tree.size(dim)
    if level >= DEPTH and is_plain_sequence(tree):
        yield place, tree, len(tree)
    for key, item in children_of(tree) or ():
        yield from _sized_parts(item, dim, place + key, level + 1)


def _neighbours(tree: Any, dim: int, batch_size: int) -> Iterator[int]:
    items = [item for _, item in children_of(tree) or ()]
    if is_plain_sequence(tree):
        yield sum(isinstance(item, Tensor) and item.dim() > dim and item.size(dim) == batch_size for item in items)
    for item in items:
        yield from _neighbours(item, dim, batch_size)


def _marked_at(tree: Any, places: set[str], place: str = "") -> Any:
    if place in places:
        return Whole(tree)
    children = children_of(tree)
    if children is None:
        return tree
    return with_children(tree, [_marked_at(item, places, place + key) for key, item in children])


def named_call(call: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a call with their places, such as ``inputs[0]`` or ``kwargs['mask']``."""
    for part, name in zip(call, ("inputs", "kwargs"), strict=True):
        yield from named_leaves(part, name)
