"""Make batches of other sizes: repeat the samples of a batch, or call the user's `make_batch`.

# Note [Made batches]
The batches of a user's `make_batch` can have any form. Two small batches show which sizes are the number of samples.
For example, with batches of 2 and 4 graphs:

    batch["x"]           (7, 4) and (14, 4)     all nodes
    batch["edge_index"]  (2, 7) and (2, 14)     all edges
    batch["y"]           (2,) and (4,)          one class for each graph: the rows are the samples
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosplit.devices.transfer import active_placement, transfer
from autosplit.errors import WorkloadError, users_errors
from autosplit.rng import preserved_rng
from autosplit.workload.batch_layout import read_batch
from autosplit.workload.tree import Node, Whole, map_tensors


def placed_on(device: int, tree: Any) -> Any:
    """Move a batch to a device of the active placement, and remove its `Whole` markers."""
    placement = active_placement()
    assert placement is not None

    def move(tensor: Tensor) -> Tensor:
        source = placement.device_of(tensor)
        return tensor if source == device else transfer(tensor, source, device, "input")

    return map_tensors(move, tree)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def resize(tree: Any, n: int, dim: int = 0) -> Any:
    """Return a batch of `n` samples that repeats the samples of a sample batch in order.

    Tensors without samples are marked as `Whole`, because at a different size, a ``(T, T)`` mask may look like a batch.
    """
    layout = read_batch(tree, dim)

    def repeat(tensor: Tensor) -> Tensor:
        index = torch.arange(n, device=tensor.device).remainder_(layout.size)
        repeated = tensor.detach().index_select(dim, index)
        memory_format = _CHANNELS_LAST.get(tensor.dim()) if tensor.layout is torch.strided else None
        if memory_format is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=memory_format):
            return repeated
        return repeated.contiguous(memory_format=memory_format)  # the memory format decides which kernels run

    return layout.map(repeat, lambda items: [items[i % layout.size] for i in range(n)], Whole)


COLLATED = "torch.utils.data.default_collate(samples)"
"""The call that turns a list of samples into a batch, for messages."""


def is_list_of_samples(batch: Any) -> bool:
    """Return whether a batch looks like a list of samples that was not collated."""
    if type(batch) is not list or len(batch) < 2 or any(isinstance(sample, Tensor) for sample in batch):
        return False
    return Node.of(batch).has_similar_items


MADE_SIZES = (2, 4)
"""Samples of the two small batches. Both are even, because some batches consist of pairs."""

MADE_SAMPLES = 4
"""Samples of a sample batch that `make_batch` makes."""


@dataclass(frozen=True)
class MadeBatches:
    """Count the samples of batches of one `make_batch`. See Note [Made batches].

    Attributes:
        keys: The tensors and lists whose size is the number of samples.
    """

    keys: tuple[tuple[str, bool], ...]
    dim: int
    is_constant: bool = False

    @classmethod
    def of(cls, make_batch: Callable[[int], Any], dim: int) -> MadeBatches:
        """Make two small batches, and find the sizes that grow with the number of samples."""
        try:
            with preserved_rng():
                few, more = (_sizes_in(make_batch(n), dim) for n in MADE_SIZES)
        except Exception:  # noqa: BLE001  # `make_batch` may not support small batches. A later call shows its error
            return cls((), dim)
        keys = (key for key, size in few.items() if (size, more.get(key)) == MADE_SIZES)
        return cls(tuple(keys), dim, few == more)

    def count(self, batch: Any) -> int | None:
        """Return the number of samples of a batch, or None if no part shows it."""
        sizes = _sizes_in(batch, self.dim)
        found = next((sizes[key] for key in self.keys if key in sizes), None)
        return _count_or_none(batch, self.dim) if found is None and self.is_constant else found

    def sample_batch(self, make_batch: Callable[[int], Any], given: Any) -> tuple[Any, int, tuple[str, ...]]:
        """Return the sample batch, its number of samples, and notes.

        If the given batch does not show the number of samples, `make_batch` makes the sample batch, with a note.
        """
        size = self.count(given) or _count_or_none(given, self.dim)
        if size:
            return given, size, ()
        with users_errors("make_batch"):
            made = make_batch(MADE_SAMPLES)
        note = (
            "autosplit can't detect the number of samples in the sample batch, so it used "
            f"make_batch({MADE_SAMPLES}) instead."
        )
        return made, MADE_SAMPLES, (note,)


def _count_or_none(batch: Any, dim: int) -> int | None:
    """Return the number of samples of a batch, or None if its tensors have no size in common."""
    try:
        return read_batch(batch, dim).size
    except WorkloadError:
        return None


def _sizes_in(batch: Any, dim: int) -> dict[tuple[str, bool], int]:
    sizes = ((node.key, node.extent(dim)) for node in Node.of(batch).all())
    return {key: size for key, size in sizes if size is not None}
