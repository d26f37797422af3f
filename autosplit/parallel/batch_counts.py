"""Compute the count of a batch: the divisor of its mean loss, such as the number of samples or of labels.

A loss with class weights w divides by the sum of the weights of its labels, `sum(w[y])`. The gradient of a step is
exact if each micro-batch has the weight `its count / the count of the whole step`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, IterableDataset

from autosplit.errors import InputError, WorkloadError, warn_user
from autosplit.parallel.loss_weights import UnevenLossWarning
from autosplit.workload.batch_layout import read
from autosplit.workload.tree import Node


def check_loader(loader: Any) -> None:
    """Raise InputError if the loader is not iterable, or is a data set, whose items are samples and not batches."""
    is_data_set = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    if is_data_set or not isinstance(loader, Iterable):
        raise InputError(
            f"loader is a {type(loader).__name__}. Expected a DataLoader, or another iterable of batches. Create "
            "one with plan.loader(dataset).",
        )


Count = Callable[[Any], "float | torch.Tensor"]
"""A function that returns the count of a batch: an int, a float, or a tensor of one element."""


def counted(count: Count, batch: Any) -> float:
    """Return the count of a batch as a Python number. Integers stay exact.

    Raises:
        InputError: `count` did not return a finite number of 0 or more.
    """
    return as_count(count(batch), "count(batch)")


def warn_of_missing_count(count: Count | None, expression: str) -> None:
    """Warn if a loop has no `count`, but the plan's gradient check found the divisor of the loss."""
    if count is None and expression:
        warn_user(
            "The plan's gradient check found that the loss is not a mean over samples, but without count= a "
            f"micro-batch is weighted by its samples. Pass count=lambda batch: {expression} to steps().",
            UnevenLossWarning,
        )


def as_count(value: Any, name: str) -> float:
    """Check a number from a user's function, and return it as an int or a float."""
    expected = "a finite number, 0 or more: the samples, labels or weights that the mean loss divides by"
    plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(plain, bool) or not isinstance(plain, numbers.Real) or not math.isfinite(plain) or plain < 0:
        raise InputError(f"{name} returned {value!r:.80}. Expected {expected}.")
    return int(plain) if isinstance(plain, numbers.Integral) else float(plain)


def tidy(total: float) -> float:
    """Return an int if the number is whole. Return other numbers unchanged."""
    return int(total) if float(total).is_integer() else total


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch. If its parts disagree, return the rows of its first tensor."""
    root = Node.of(batch)
    with suppress(WorkloadError):
        return read(root, 0).size
    for node in root.all():
        if isinstance(node.value, PackedSequence):
            return int(node.value.batch_sizes[0])  # `data` has a row for each time step of each sample
        if isinstance(node.value, torch.Tensor) and node.value.dim():
            return node.value.size(0)
    raise InputError(
        f"A batch is a {type(batch).__name__} without a tensor that has dimensions. Expected a tensor with the "
        "samples in its first dimension. Pass count=, a function that returns the samples of a batch.",
    )


def samples_and_count(batch: Any, count: Count | None) -> tuple[int, float]:
    """Return the samples of a batch, and its count. Without a tensor to count samples in, both are the count."""
    if count is None:
        return (samples := count_samples(batch)), samples
    number = counted(count, batch)
    try:
        return count_samples(batch), number
    except InputError:
        return int(number), number


def release(held: list[Any]) -> Iterator[Any]:
    """Yield the batches of a list in order, and remove each from the list to free its memory."""
    held.reverse()
    while held:
        yield held.pop()
