"""Count the samples of batches that a user's `make_batch` made. The batches can have any form.

Two small batches show which sizes are the number of samples. For example, with batches of 2 and 4 graphs:

    batch["x"]           (7, 4) and (14, 4)     all nodes
    batch["edge_index"]  (2, 7) and (2, 14)     all edges
    batch["y"]           (2,) and (4,)          one class for each graph: the rows are the samples
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autosplit.errors import WorkloadError, users_errors
from autosplit.rng import kept_rng
from autosplit.workload.samples import batch_size_of, is_plain_sequence
from autosplit.workload.tree import children_of

SIZES = (2, 4)
"""Samples of the two small batches. Both are even, because some batches consist of pairs."""

SAMPLES = 4
"""Samples of a sample batch that `make_batch` makes."""


@dataclass(frozen=True)
class MadeBatches:
    """Count the samples of batches of one `make_batch`.

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
                few, more = (dict(_sizes_in(make_batch(n), dim)) for n in SIZES)
        except Exception:  # noqa: BLE001  # `make_batch` may not support small batches. A later call shows its error
            return cls((), dim)
        places = (place for place, size in few.items() if (size, more.get(place)) == SIZES)
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
            made = make_batch(SAMPLES)
        note = (
            "autosplit can't detect the number of samples in the sample batch, so it used "
            f"make_batch({SAMPLES}) instead."
        )
        return made, SAMPLES, (note,)


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
