"""Rebuild a library's loader with a batch sampler that yields one process's part of every micro-batch.

A process without samples in a micro-batch still runs a sample, with weight 0, because the ranks reduce their gradients
there. transformers' Trainer draws batches itself, so each batch contains its number of samples, or 0 in this case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from autosplit.errors import InputError
from autosplit.integrations.process_share import Share, Uncounted
from autosplit.parallel.rebuilt_loader import parts_of

MARK = "autosplit_samples"
"""The key of a batch's number of samples, which is 0 if the batch has weight 0."""


class _Fetched(list[Any]):
    """The samples of an `Uncounted` micro-batch."""


class MarkingDataset:
    """Return the samples of an `Uncounted` micro-batch in a list type that `MarkingCollate` recognises."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # missing while a worker unpickles this object, so avoid infinite recursion
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        several = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[index] for index in indices] if several is None else several(list(indices))
        return _Fetched(samples) if isinstance(indices, Uncounted) else samples


class MarkingCollate:
    """Collate samples, and add the number of samples to the batch under the key `MARK`."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return the batch with its number of samples, 0 for `Uncounted`."""
        is_counted = not isinstance(samples, _Fetched)
        number = len(samples)
        batch = self.collate(samples if is_counted else list(samples))
        if is_counted:
            if isinstance(batch, MutableMapping):
                batch[MARK] = number
            return batch
        if not isinstance(batch, Mapping):
            raise InputError(
                f"The collator returned a {type(batch).__name__}. Expected a mapping, because autosplit marks the "
                "batches of processes without samples. Return a dict, or set drop_last.",
            )
        return {**batch, MARK: 0}


def taken_mark(batch: Any) -> int | None:
    """Remove the number of samples from a batch and return it, or None."""
    number: int | None = batch.pop(MARK, None) if isinstance(batch, MutableMapping) else None
    return number


def loader_options(
    loader: Any,
    share: Share,
    *,
    shuffle: bool | None = None,
    seed: int,
    drop_last: bool | None = None,
    marks: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a DataLoader that yields this process's part of another loader's data.

    Args:
        marks: Whether to add the number of samples to each batch, which must then be a mapping. Needed if the library
            draws batches itself, so their positions are unknown.
    """
    parts = parts_of(loader, seed)
    return {
        **parts.settings,
        "dataset": MarkingDataset(parts.dataset) if marks else parts.dataset,
        "batch_sampler": share.batch_sampler(len(parts.dataset), seed=seed, **parts.order_options(shuffle, drop_last)),
        **({"collate_fn": MarkingCollate(loader.collate_fn)} if marks else {}),
    }
