"""Count what comes out of a loader: the samples of a batch, or what its loss averages over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, IterableDataset

from autosplit.errors import InputError
from autosplit.solve.split import whole_number
from autosplit.workload.batch import children_of


def check_loader(loader: Any) -> None:
    """Refuse what has no batches: a data set's items are samples, whose first dimension would be counted."""
    is_data_set = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if is_data_set or not isinstance(loader, Iterable):
        raise InputError(
            f"loader is a {type(loader).__name__}; expected a DataLoader, or another iterable of batches; make one of "
            "a data set with plan.loader(dataset)"
        )


def counted(count: Callable[[Any], int], batch: Any) -> int:
    """Return what a batch counts for: a whole number, or an `InputError` says what it is instead."""
    return whole_number("the count of a batch", count(batch))


def count_samples(batch: Any) -> int:
    """Return the samples of a batch: the first dimension of the first tensor in it."""
    samples = _first_size(batch)
    if samples is None:
        raise InputError(
            f"a batch is a {type(batch).__name__} without a tensor of one or more dimensions; expected one, whose "
            "first dimension is the samples; pass count= to say how many samples a batch has"
        )
    return samples


def _first_size(part: Any) -> int | None:
    """Find the first dimension of the first tensor in a batch that has one."""
    if isinstance(part, torch.Tensor):
        return int(part.size(0)) if part.dim() else None
    if isinstance(part, PackedSequence):
        return int(part.batch_sizes[0])  # its data are all time steps of all samples, one after the other
    found = (_first_size(item) for _, item in children_of(part) or ())
    return next((size for size in found if size is not None), None)
