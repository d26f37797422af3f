"""The loader that hands out one process's share: a tool's own loader, made again around another batch sampler.

A micro-batch of which this process has no share has to be run (the ranks' gradients are reduced in it) and must not be
counted. If the tool draws batches by itself, as transformers' Trainer does, each batch carries the number of its
samples, which is 0 here. The number travels with the samples: through the workers, and past what skips batches to
resume.
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
"""The key under which a batch carries the number of its samples; 0 if it counts nothing."""


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
        """Return the batch of some samples, marked where they were."""
        is_counted = not isinstance(samples, _Fetched)
        number = len(samples)
        batch = self.collate(samples if is_counted else list(samples))
        if is_counted:
            if isinstance(batch, MutableMapping):
                batch[MARK] = number
            return batch
        if not isinstance(batch, Mapping):
            raise InputError(
                f"the collator returns a {type(batch).__name__}; expected a mapping, as the tool's own does, because "
                "a process without a share of the short last step has to mark it; return a dict, or set drop_last",
                code="collator-type",
            )
        return {**batch, MARK: 0}


def taken_mark(batch: Any) -> int | None:
    """Take the number of samples off a batch, 0 for a batch that counts nothing; None if it has no such mark."""
    number: int | None = batch.pop(MARK, None) if isinstance(batch, MutableMapping) else None
    return number


class SampledOrder:
    """The order of an epoch, drawn by a sampler of the user's own: one that groups by length, for instance.

    The generators of torch, Python and NumPy are seeded for it, and those of torch that it has itself, so that every
    process has the same order; afterwards they are as they were.

    Args:
        sampler: Yields samples, or batches of them.
        num_samples: Of the data set.
        seed: The order depends on it and the epoch.
    """

    def __init__(self, sampler: Any, num_samples: int, seed: int) -> None:
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed

    def __call__(self, epoch: int) -> list[int]:
        """Draw the order of an epoch; raise InputError where samples are left out or repeated in it."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        order = self._drawn(epoch)
        if order is None:
            raise InputError(
                f"{type(self._sampler).__name__} leaves samples out, or repeats some, in epoch {epoch}; expected each "
                f"of {self._num_samples} once, because a plan's shares are parts of that; leave the sampler out",
                code="sampler-repeats-samples",
            )
        return order

    @property
    def is_sound(self) -> bool:
        """Whether it is of every sample once, and the same whenever it is drawn."""
        order = None if isinstance(self._sampler, Iterator) else self._drawn(0)
        return order is not None and order == self._drawn(0)

    def _drawn(self, epoch: int) -> list[int] | None:
        own = [*_generators_of(self._sampler)]
        with kept_rng(own):
            for generator in (torch.default_generator, *own):
                generator.manual_seed(self._seed + epoch)
            random.seed(self._seed + epoch)
            np.random.seed((self._seed + epoch) % 2**32)  # noqa: NPY002  # which is what a sampler draws by
            parts = itertools.islice(self._sampler, self._num_samples + 1)  # there are endless ones
            try:
                order = [index for part in parts for index in np.atleast_1d(np.asarray(part)).tolist()]
            except (TypeError, ValueError):  # no numbers
                return None
        return order if sorted(order, key=str) == sorted(range(self._num_samples), key=str) else None


def _generators_of(sampler: Any) -> Iterator[torch.Generator]:
    """Yield a sampler's own generators, and those of samplers within it."""
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def is_shuffled(loader: Any) -> bool | None:
    """Tell whether a loader draws every sample once in a new order, or in the data set's own; None where neither."""
    sampler = _sampler_of(loader)
    if type(sampler).__module__.partition(".")[0] not in ("torch", "accelerate"):
        return None  # somebody's own, which may be derived from one of these
    if isinstance(sampler, DistributedSampler):  # it deals out, which the shares do in its place
        return bool(sampler.shuffle)
    if isinstance(sampler, RandomSampler):
        return None if sampler.replacement or sampler.num_samples != len(loader.dataset) else True
    return False if isinstance(sampler, SequentialSampler) else None


def _sampler_of(loader: Any) -> Any:
    """Return what draws a loader's samples, or batches of them."""
    drawn = getattr(loader, "batch_sampler", None)
    while (inner := getattr(drawn, "batch_sampler", None)) is not None:
        drawn = inner  # accelerate's own deal the batches of this one out
    return drawn.sampler if type(drawn) is BatchSampler else drawn


def order_of(loader: Any, seed: int) -> bool | SampledOrder | None:
    """Tell as `is_shuffled` does, or return the order that somebody's own sampler draws, if that is a sound one."""
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
            "its shares by itself, or train with autosplit.ddp, whose steps take any loader",
            code="loader-type",
        )
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"the training data set is a {type(dataset).__name__} without a length; expected one with samples by "
            "index, of which each process can take its share; load it whole, or train with autosplit.ddp, whose steps "
            "take any loader",
            code="dataset-without-length",
        )
    if loader.batch_sampler is None:
        raise InputError(
            "the training loader's batch_size is None, by which the data set makes the batches; expected one that is "
            "made of samples, of which each process can take its share; give it a batch size, whatever it is",
            code="loader-without-batch-size",
        )
    order = order_of(loader, seed)
    if order is None:
        raise InputError(
            f"the training loader draws by a {type(_sampler_of(loader)).__name__}; expected every sample once an "
            "epoch, in an order that is the same on every process, because a plan's shares are parts of that; leave "
            "the sampler out, or train with autosplit.ddp, whose steps take any loader",
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
