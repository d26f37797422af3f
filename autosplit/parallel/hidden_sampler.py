"""Refuse a loader that hides a plan's batch sampler, such as tqdm(loader), map, a generator, a list or a prefetcher.

`steps` reads the schedule from ``loader.batch_sampler``. If another iterable wraps the loader, `steps` would count
samples instead. Then borrowed samples would get a weight, and the sampler would not learn which samples are consumed.
The sampler records its draws outside of `steps`, so `UnscheduledBatches` detects them:

    tqdm, map, a generator      the sampler draws while the wrapper returns a batch
    a prefetching thread        the sampler drew in another thread
    list(loader)                the batches have the sizes of earlier draws
    a data set of batches       the sampler draws in a worker of the outer DataLoader
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, get_worker_info

from autosplit.errors import InputError
from autosplit.parallel.batch_counts import count_samples


@dataclass
class Draws:
    """The draws of a sampler's newest iteration outside of `steps`."""

    num_ranks: int
    thread: int = field(default_factory=threading.get_ident)
    sizes: list[int] = field(default_factory=list)

    def add(self, size: int) -> None:
        """Record one draw of `size` samples."""
        self.sizes.append(size)
        _own.number = _number_of_draws() + 1


_unscheduled: WeakKeyDictionary[Any, Draws] = WeakKeyDictionary()
_newest: deque[Draws] = deque(maxlen=8)  # a list of batches may outlive the sampler that drew them
_own = threading.local()


def _number_of_draws() -> int:
    number: int = getattr(_own, "number", 0)
    return number


def begin_draws(sampler: Any) -> Draws:
    """Begin to record the draws of a sampler that `steps` does not iterate.

    Raises:
        InputError: A worker of a DataLoader draws, and `steps` cannot know these draws.
    """
    if get_worker_info() is not None:
        raise InputError(
            "A plan's batch sampler draws in a worker of a DataLoader, which hides the plan's schedule from steps. "
            "Expected that the loader with this sampler is not inside the data set of another DataLoader. Call "
            "ctx.steps(loader) or plan.steps(loader) with that loader itself.",
        )
    made = _unscheduled[sampler] = Draws(sampler.rank_slice.num_ranks)
    _newest.append(made)
    return made


class UnscheduledBatches(Iterator[Any]):
    """Iterate over the batches of a loader without a plan's batch sampler.

    Raises:
        InputError: The batches come from a plan's batch sampler.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._sizes: list[int] = []

    def __next__(self) -> Any:
        before = _number_of_draws()
        if self._batches is None:
            if isinstance(self._loader, (list, tuple)):
                self._refuse_drawn(sorted(map(_size_of, self._loader)), sorted)
            self._batches = iter(self._loader)
        batch = next(self._batches)
        here = threading.get_ident()
        for draws in list(_unscheduled.values()):
            if draws.sizes and (draws.thread != here or _number_of_draws() != before):
                _refuse(self._loader, draws)
        if _newest and not isinstance(self._loader, DataLoader):
            self._sizes.append(_size_of(batch))
            if len({*self._sizes[-2:]}) > 1:  # equal sizes prove nothing, and a smaller batch is the last one
                self._refuse_drawn(self._sizes, list)
        return batch

    def _refuse_drawn(self, sizes: list[int], ordered: Callable[[list[int]], list[int]]) -> None:
        for draws in list(_newest):
            if draws.sizes and sizes == ordered(draws.sizes):
                _refuse(self._loader, draws)


def _size_of(batch: Any) -> int:
    try:
        return count_samples(batch)
    except InputError:  # the batch has no tensor, so `count=` counts its samples
        return -1


def _refuse(loader: Any, draws: Draws) -> None:
    owner = "ctx" if draws.num_ranks > 1 else "plan"
    raise InputError(
        f"The loader is a {type(loader).__name__} around a loader with a plan's batch sampler, which hides the plan's "
        f"schedule. Expected that loader itself. Call {owner}.steps(loader), and wrap the steps instead: "
        f"`for step in tqdm({owner}.steps(loader)):`. Change the batches in the inner loop or in collate_fn.",
    )
