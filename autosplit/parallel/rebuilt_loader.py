"""Rebuild a user's DataLoader with a plan's batch sampler, and with the same samples and settings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
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
from autosplit.rng import preserved_rng


class SampledOrder:
    """Draw the order of an epoch from the user's own sampler.

    All random generators are seeded, so every process draws the same order. Their states are restored.

    Args:
        seed: The order depends on `seed` plus the epoch.
    """

    def __init__(self, sampler: Any, num_samples: int, seed: int) -> None:
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed

    def __call__(self, epoch: int) -> list[int]:
        """Return the order of an epoch."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        order = self._drawn(epoch)
        if order is None:
            raise InputError(
                f"{type(self._sampler).__name__} skips or repeats samples in epoch {epoch}. Expected each of the "
                f"{self._num_samples} samples once. {_SUBSET_ADVICE}",
            )
        return order

    @property
    def is_sound(self) -> bool:
        """Whether the order contains every sample once, and is the same when drawn twice."""
        order = None if isinstance(self._sampler, Iterator) else self._drawn(0)
        return order is not None and order == self._drawn(0)

    def _drawn(self, epoch: int) -> list[int] | None:
        own = [*_generators_of(self._sampler)]
        with preserved_rng(own):
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
    while sampler is not None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


_SUBSET_ADVICE = (
    "Pass a loader of torch.utils.data.Subset(dataset, indices), without the sampler. Take a SubsetRandomSampler's "
    "indices, or draw them yourself, the same on all ranks. Subset may repeat indices."
)
"""How to train the samples that a sampler chooses, and no others."""


def is_shuffled(loader: Any) -> bool | None:
    """Return whether a loader shuffles. Return None if its sampler may repeat or omit samples, or reorder them."""
    sampler = _sampler_of(loader)
    if type(sampler).__module__.partition(".")[0] not in ("torch", "accelerate"):
        return None  # a user's class, even if it is derived from the classes below
    if isinstance(sampler, DistributedSampler):  # the plan's split replaces its split over the processes
        return bool(sampler.shuffle) if len(sampler.dataset) == len(loader.dataset) else None  # type: ignore[arg-type]
    if not isinstance(sampler, (RandomSampler, SequentialSampler)) or len(sampler) != len(loader.dataset):
        return None
    return None if getattr(sampler, "replacement", False) else isinstance(sampler, RandomSampler)


def _sampler_of(loader: Any) -> Any:
    drawn = getattr(loader, "batch_sampler", None)
    while (inner := getattr(drawn, "batch_sampler", None)) is not None:
        drawn = inner  # accelerate's batch samplers distribute the batches of this inner batch sampler
    return drawn.sampler if type(drawn) is BatchSampler else drawn


def order_of(loader: Any, seed: int) -> bool | SampledOrder | None:
    """Return `is_shuffled`, or the `SampledOrder` of a user's sampler if the order is sound, or None."""
    shuffled, sampler = is_shuffled(loader), _sampler_of(loader)
    if shuffled is not None or sampler is None or getattr(sampler, "replacement", False):
        return shuffled
    order = SampledOrder(sampler, len(loader.dataset), seed)
    return order if order.is_sound else None


@dataclass(frozen=True)
class LoaderParts:
    """The parts of a user's DataLoader.

    Attributes:
        order: Whether the loader shuffles, or the order of the user's own sampler.
        settings: Other arguments of a DataLoader, such as `collate_fn` and `num_workers`.
    """

    dataset: Any
    order: bool | SampledOrder
    drop_last: bool
    settings: dict[str, Any]

    def order_options(self, shuffle: bool | None, drop_last: bool | None) -> dict[str, Any]:
        """Return arguments of a `ScheduledBatchSampler` for this order. The given arguments take precedence."""
        own = self.order if shuffle is None and isinstance(self.order, SampledOrder) else None
        return {
            "shuffle": bool(self.order) if shuffle is None else shuffle,
            "order": own,
            "drop_last": self.drop_last if drop_last is None else drop_last,
        }


_SETTINGS = (
    *("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)


def parts_of(loader: Any, seed: int) -> LoaderParts:
    """Return the parts of a DataLoader.

    Raises:
        InputError: A plan's batch sampler cannot replace the loader's. The loader is no DataLoader, its data set has no
            length or makes its own batches, or its sampler repeats or omits samples.
    """
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"The training loader is a {type(loader).__name__}. Expected a torch.utils.data.DataLoader, whose batch "
            "sampler the plan can replace. plan.steps and ctx.steps take any other loader.",
        )
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"The training data set is a {type(dataset).__name__} without a length. Expected a data set with "
            "__getitem__ and __len__, whose samples the plan can divide. plan.steps and ctx.steps take a loader "
            "of any other data set.",
        )
    if loader.batch_sampler is None:  # the plan would take each batch for a sample
        raise InputError(
            "The training loader has batch_size=None, so its data set makes the batches. Expected a loader that makes "
            "batches of samples. Give it any batch_size: the plan's batch size replaces it.",
        )
    order = order_of(loader, seed)
    if order is None:
        sampler = _sampler_of(loader)
        raise InputError(
            f"The training loader has a {type(sampler).__name__}. Expected a sampler that yields every sample once per "
            f"epoch, in an order that depends only on its seed. {_SUBSET_ADVICE} In one process, plan.steps "
            "also takes the loader, if its batches have the plan's size.",
        )
    drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
    return LoaderParts(dataset, order, drop_last, {name: getattr(loader, name) for name in _SETTINGS})


def loader_around(
    data: Any,
    make_sampler: Any,
    found: dict[str, Any],
    *,
    shuffle: bool | None,
    seed: int,
    drop_last: bool | None,
    options: dict[str, Any],
) -> DataLoader[Any]:
    """Return a DataLoader with a plan's batch sampler.

    Args:
        data: The data set, or the DataLoader whose data set, order and settings are used.
        found: The fastest settings that were measured. They replace the DataLoader's.
        options: Arguments of a DataLoader from the user. They replace all others.
    """
    parts = LoaderParts(data, False, False, {})
    if isinstance(data, DataLoader):
        parts = parts_of(data, seed)
    elif isinstance(data, (tuple, dict)) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise InputError(
            f"loader() got a {type(data).__name__}. Expected a DataLoader, or a data set with __getitem__ and __len__. "
            "Pass the DataLoader itself, not its iterator or a batch. plan.steps takes any iterable of batches.",
        )
    settings = {**parts.settings, **found}
    if options.get("num_workers") == 0:  # torch raises an error for worker settings without workers
        settings = {name: settings[name] for name in settings if name not in ("prefetch_factor", "persistent_workers")}
    sampler = make_sampler(parts.dataset, seed=seed, **parts.order_options(shuffle, drop_last))
    return DataLoader(parts.dataset, batch_sampler=sampler, **{**settings, **options})
