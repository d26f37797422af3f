"""Rebuild a library's loader around a batch sampler that yields one process's part of every micro-batch.

A process without samples in a micro-batch still runs a sample, with weight 0, because the ranks reduce their gradients
there. transformers' Trainer draws batches itself, so each batch contains its number of samples, which is 0 in this
case. The number stays with the batch in worker processes, and when the Trainer skips batches to resume.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from autosplit.errors import InputError
from autosplit.integrations.process_share import Share, Uncounted
from autosplit.rng import kept_rng

MARK = "autosplit_samples"
"""The key of the number of samples in a batch. 0 if the batch has weight 0."""


class _Fetched(list[Any]):
    """Hold the samples of an `Uncounted` micro-batch."""


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
        """Return the batch with its number of samples, which is 0 for an `Uncounted` micro-batch."""
        is_counted = not isinstance(samples, _Fetched)
        number = len(samples)
        batch = self.collate(samples if is_counted else list(samples))
        if is_counted:
            if isinstance(batch, MutableMapping):
                batch[MARK] = number
            return batch
        if not isinstance(batch, Mapping):
            raise InputError(
                f"The collator returned a {type(batch).__name__}. Expected a mapping, because a process without "
                "samples in the short last step has to mark its batch. Return a dict, or set drop_last.",
                code="collator-type",
            )
        return {**batch, MARK: 0}


def taken_mark(batch: Any) -> int | None:
    """Remove the number of samples from a batch and return it. Return None if the batch has no number."""
    number: int | None = batch.pop(MARK, None) if isinstance(batch, MutableMapping) else None
    return number


class SampledOrder:
    """Draw the order of an epoch from the user's own sampler, for example a sampler that groups by length.

    The generators of torch, Python, NumPy and the sampler are seeded, so every process draws the same order. Afterwards
    their states are restored.

    Args:
        sampler: Yields indices of samples, or batches of indices.
        num_samples: The length of the data set.
        seed: The order depends on `seed` plus the epoch.
    """

    def __init__(self, sampler: Any, num_samples: int, seed: int) -> None:
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed

    def __call__(self, epoch: int) -> list[int]:
        """Return the order of an epoch. Raise InputError if it leaves samples out or repeats some."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        order = self._drawn(epoch)
        if order is None:
            raise InputError(
                f"{type(self._sampler).__name__} leaves out or repeats samples in epoch {epoch}. Expected each of "
                f"{self._num_samples} once, because the plan splits the whole epoch. Leave the sampler out.",
                code="sampler-repeats-samples",
            )
        return order

    @property
    def is_sound(self) -> bool:
        """Whether the order contains every sample once, and is the same when drawn twice."""
        order = None if isinstance(self._sampler, Iterator) else self._drawn(0)
        return order is not None and order == self._drawn(0)

    def _drawn(self, epoch: int) -> list[int] | None:
        own = [*_generators_of(self._sampler)]
        with kept_rng(own):
            for generator in (torch.default_generator, *own):
                generator.manual_seed(self._seed + epoch)
            random.seed(self._seed + epoch)
            np.random.seed((self._seed + epoch) % 2**32)  # noqa: NPY002  # samplers use this generator
            parts = itertools.islice(self._sampler, self._num_samples + 1)  # some samplers never end
            try:
                order = [index for part in parts for index in np.atleast_1d(np.asarray(part)).tolist()]
            except (TypeError, ValueError):  # the sampler does not yield numbers
                return None
        return order if sorted(order, key=str) == sorted(range(self._num_samples), key=str) else None


def _generators_of(sampler: Any) -> Iterator[torch.Generator]:
    """Yield the generators of a sampler and of the samplers inside it."""
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def is_shuffled(loader: Any) -> bool | None:
    """Return whether a loader shuffles. Return None if it may leave samples out, repeat some, or use another order."""
    sampler = _sampler_of(loader)
    if type(sampler).__module__.partition(".")[0] not in ("torch", "accelerate"):
        return None  # a user's class, even if it is derived from the classes below
    if isinstance(sampler, DistributedSampler):  # its split over the processes is replaced by the plan's
        return bool(sampler.shuffle)
    if isinstance(sampler, RandomSampler):
        return None if sampler.replacement or sampler.num_samples != len(loader.dataset) else True
    return False if isinstance(sampler, SequentialSampler) else None


def _sampler_of(loader: Any) -> Any:
    """Return the sampler, or the batch sampler, of a loader."""
    drawn = getattr(loader, "batch_sampler", None)
    while (inner := getattr(drawn, "batch_sampler", None)) is not None:
        drawn = inner  # accelerate's batch samplers distribute the batches of this inner batch sampler
    return drawn.sampler if type(drawn) is BatchSampler else drawn


def order_of(loader: Any, seed: int) -> bool | SampledOrder | None:
    """Return `is_shuffled`, or the `SampledOrder` of a user's sampler if it is sound. Return None otherwise."""
    shuffled, sampler = is_shuffled(loader), _sampler_of(loader)
    if shuffled is not None or sampler is None or getattr(sampler, "replacement", False):
        return shuffled
    order = SampledOrder(sampler, len(loader.dataset), seed)
    return order if order.is_sound else None


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
        shuffle: Whether to draw a new order each epoch. Default: the same as the loader.
        seed: The seed of that order.
        drop_last: Whether to drop the epoch's last step if it has fewer samples. Default: the loader's `drop_last`.
        marks: Whether to add the number of samples to each batch, which must then be a mapping. Needed if the library
            draws batches itself, so that autosplit does not know their positions in the schedule.
    """
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"The training loader is a {type(loader).__name__}. Expected a DataLoader of PyTorch. If there are "
            "several, split each one separately, or train with autosplit.ddp, which accepts any loader.",
            code="loader-type",
        )
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"The training data set is a {type(dataset).__name__} without a length. Expected samples by index, "
            "because each process takes its own part of them. Load the whole data set, or train with "
            "autosplit.ddp, which accepts any loader.",
            code="dataset-without-length",
        )
    if loader.batch_sampler is None:
        raise InputError(
            "The training loader's batch_size is None, so the data set makes the batches. Expected a loader that "
            "makes batches of samples, because each process takes its own part of them. Pass any batch size.",
            code="loader-without-batch-size",
        )
    order = order_of(loader, seed)
    if order is None:
        raise InputError(
            f"The training loader uses a {type(_sampler_of(loader)).__name__}. Expected every sample once per "
            "epoch, in the same order on every process, because the plan splits this order. Leave the sampler out, "
            "or train with autosplit.ddp, which accepts any loader.",
            code="loader-sampler",
        )
    return {
        "dataset": MarkingDataset(dataset) if marks else dataset,
        "batch_sampler": share.batch_sampler(
            len(dataset),
            shuffle=bool(order) if shuffle is None else shuffle,
            seed=seed,
            order=order if shuffle is None and isinstance(order, SampledOrder) else None,
            drop_last=getattr(loader.batch_sampler, "drop_last", False) if drop_last is None else drop_last,
        ),
        "collate_fn": MarkingCollate(loader.collate_fn) if marks else loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
