"""Return the largest of a few batches from a loader, without side effects on the loader.

A batch is padded to its longest sample. A sample batch with short samples would lead to a batch size that later runs
out of memory.
"""

from __future__ import annotations

import copy
import itertools
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from autosplit.errors import WorkloadError
from autosplit.rng import preserved_rng
from autosplit.workload.batch_layout import read
from autosplit.workload.tree import Node, map_tensors


def largest_batch(loader: Iterable[Any], batches: int, dim: int = 0) -> Any:
    """Draw batches from a loader and return the batch with the most elements per sample.

    If two batches have the same number of elements per sample, return the batch with more samples.

    Args:
        batches: Number of batches to draw.
    """
    if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
        raise WorkloadError(
            f"batches is {batches!r}. Expected the number of batches to draw from the loader, 1 or more.",
        )
    if not isinstance(loader, Iterable) or isinstance(loader, (Tensor, Mapping, UserDict, str)):
        raise WorkloadError(
            f"loader is a {type(loader).__name__}. Expected an iterable of batches. Pass a DataLoader.",
        )
    largest, most, drawn = None, (0, 0), 0
    with preserved_rng(generators_of(loader)), _iterating(loader) as iterator:
        for batch in itertools.islice(iterator, batches):
            size = _extent(batch, drawn, dim)
            if size > most:
                # Copy the tensors, because workers may share their memory, and some loaders reuse their buffers.
                largest = map_tensors(lambda tensor: tensor.detach().clone(), batch, keeps_marks=True)
                most = size
            drawn += 1
    if most == (0, 0):
        raise WorkloadError(
            f"The loader yielded {drawn} batches and no sample. Expected at least one. Pass a loader over a "
            "dataset with samples, not an exhausted iterator.",
        )
    return largest


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that iterating over a DataLoader would advance: the loader's and its samplers'."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, batch_sampler, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())


@contextmanager
def _iterating(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Iterate over a loader. Copy a DataLoader first, because with persistent workers it has only one iterator."""
    if not isinstance(loader, DataLoader):
        yield iter(loader)
        return
    own = copy.copy(loader)
    own._iterator = None  # noqa: SLF001  # the user's loader keeps its persistent workers
    own.pin_memory = False  # nothing is sent to a GPU here
    iterator = iter(own)
    try:
        yield iterator
    finally:
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def _extent(batch: Any, index: int, dim: int) -> tuple[int, int]:
    try:
        layout = read(Node.of(batch), dim)
    except WorkloadError as error:
        where = f"Batch {index} of the loader"
        raise WorkloadError(f"{where}: {error} Pad samples of different lengths in collate_fn.") from error
    elements = sum(node.value.numel() for node in layout.rows.values())
    return (elements // layout.size, layout.size) if layout.size else (0, 0)
