"""The loader that hands out one process's share: a tool's own loader, made again around another batch sampler.

A micro-batch of which this process has no share has to be run (the ranks' gradients meet there) and must not be
counted. Where the tool draws batches by itself, as transformers' Trainer does, it comes with a mark that says so. The
mark travels with the samples: through the workers, and past what skips batches to resume.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
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
from torch.utils.data.dataloader import default_collate

from autosplit.errors import InputError
from autosplit.integrations.process_share import Share, Uncounted
from autosplit.rng import kept_rng

__all__ = ["loader_options", "order_of", "taken_mark"]

MARK = "autosplit_uncounted"
"""A key of a batch, there where it counts for nothing."""


class _Fetched(list[Any]):
    """The samples of an `Uncounted` micro-batch."""


class MarkingDataset:
    """A data set whose samples say whether they count."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet, while a worker unpickles it
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        several = getattr(self.dataset, "__getitems__", None)
        samples = [self.dataset[index] for index in indices] if several is None else several(list(indices))
        return _Fetched(samples) if isinstance(indices, Uncounted) else samples


class MarkingCollate:
    """A collator that puts the mark on the batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, _Fetched):
            return self.collate(samples)
        batch = self.collate(list(samples))
        if not isinstance(batch, Mapping):
            raise InputError(
                f"the collator returns a {type(batch).__name__}; expected a mapping, as the tool's own does, because "
                "a process without a share of the short last step has to mark it; return a dict, or set drop_last"
            )
        return {**batch, MARK: True}


def taken_mark(batch: Any) -> bool:
    """Tell whether a batch counts for nothing, and take the mark off."""
    return bool(batch.pop(MARK, False)) if isinstance(batch, dict) else False


class SampledOrder:
    """The order of an epoch, drawn by a sampler of the user's own: one that groups by length, for instance.

    Whatever the sampler draws by is seeded, so that every process has the same order, and put back afterwards.

    Args:
        sampler: Yields samples, or batches of them.
        seed: The order depends on it and the epoch.
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler, self._seed = sampler, seed

    def __call__(self, epoch: int) -> list[int]:
        """Draw the order of an epoch."""
        own = [one for one in (getattr(self._sampler, "generator", None),) if isinstance(one, torch.Generator)]
        with kept_rng(own):
            for generator in (torch.default_generator, *own):
                generator.manual_seed(self._seed + epoch)
            random.seed(self._seed + epoch)
            np.random.seed((self._seed + epoch) % 2**32)  # noqa: NPY002  # which is what a sampler draws by
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            drawn = [*self._sampler]
        return [int(one) for part in drawn for one in (part if isinstance(part, (list, tuple)) else [part])]

    def is_of(self, num_samples: int) -> bool:
        """Tell whether it is of every sample of a data set, once each."""
        return sorted(self(0)) == [*range(num_samples)]


def order_of(loader: Any, seed: int = 0) -> bool | SampledOrder | None:
    """Tell whether a loader draws every sample once in a new order, or in the data set's own.

    Returns:
        True, False, or the order where a sampler of the user's own draws it; None where samples are left out or
        repeated.
    """
    drawn = getattr(loader, "batch_sampler", None)
    while (inner := getattr(drawn, "batch_sampler", None)) is not None:
        drawn = inner  # accelerate's own deal the batches of this one out
    sampler = drawn.sampler if type(drawn) is BatchSampler else drawn
    if isinstance(sampler, DistributedSampler):  # it deals out, which the shares do in its place
        return bool(sampler.shuffle)
    if isinstance(sampler, RandomSampler):
        return None if sampler.replacement or sampler.num_samples != len(loader.dataset) else True
    if isinstance(sampler, SequentialSampler):
        return False
    if sampler is None or getattr(sampler, "replacement", False):
        return None
    order = SampledOrder(sampler, seed)
    return order if order.is_of(len(loader.dataset)) else None


def loader_options(
    loader: Any,
    share: Share,
    *,
    shuffle: bool | None = None,
    seed: int,
    drop_last: bool | None = None,
    marks: bool = False,
) -> dict[str, Any]:
    """Return what a DataLoader is made of that gives this process's share of what another one would.

    Args:
        shuffle: Draw in a new order each epoch. Default: as the loader does.
        seed: Of that order.
        drop_last: Leave out the epoch's last step where it is short of samples. Default: if the loader leaves out a
            batch that is.
        marks: Put a mark on batches that count for nothing, which have to be mappings; for a tool that draws batches
            where nobody knows their place in the schedule.
    """
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"the training loader is a {type(loader).__name__}; expected a DataLoader of PyTorch; give each of several "
            "its shares by itself, or train with autosplit.ddp, whose steps take any loader"
        )
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"the training data set is a {type(dataset).__name__} without a length; expected one with samples by "
            "index, of which each process can take its share; load it whole, or train with autosplit.ddp, whose steps "
            "take any loader"
        )
    if loader.batch_sampler is None:
        raise InputError(
            "the training loader's batch_size is None, by which the data set makes the batches; expected one that is "
            "made of samples, of which each process can take its share; give it a batch size, whatever it is"
        )
    order = order_of(loader, seed)
    if order is None:
        raise InputError(
            f"the training loader draws by a {_drawn_by(loader)}; expected every sample once an epoch, in any "
            "order, because a plan's shares are parts of that; leave the sampler out, or train with autosplit.ddp, "
            "whose steps take any loader"
        )
    workers = loader.num_workers
    collate = loader.collate_fn or default_collate
    return {
        "dataset": MarkingDataset(dataset) if marks else dataset,
        "batch_sampler": share.batch_sampler(
            len(dataset),
            shuffle=bool(order) if shuffle is None else shuffle,
            seed=seed,
            order=order if shuffle is None and isinstance(order, SampledOrder) else None,
            drop_last=getattr(loader.batch_sampler, "drop_last", False) if drop_last is None else drop_last,
        ),
        "collate_fn": MarkingCollate(collate) if marks else collate,
        "num_workers": workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": None,
        "prefetch_factor": loader.prefetch_factor if workers else None,
        "persistent_workers": loader.persistent_workers,
    }


def _drawn_by(loader: DataLoader[Any]) -> str:
    drawn: Any = loader.batch_sampler
    while hasattr(drawn, "batch_sampler"):
        drawn = drawn.batch_sampler
    return type(drawn.sampler if type(drawn) is BatchSampler else drawn).__name__
