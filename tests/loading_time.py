"""DataLoaders on a clock that counts loading time, so that their measured speed is the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from autosplit.tools import loader_speed

SAMPLE_S, CACHED_S = 0.002, 0.00002
"""Time in seconds that a process needs for a sample, and for a sample in its cache."""


class TimedSamples(Dataset):
    """A dataset of 64 samples. Each sample is the number of the worker that loads it, and its loading time in seconds.

    Args:
        caches: Whether a process that has loaded a sample loads it faster again.
    """

    def __init__(self, *, caches: bool = False) -> None:
        self.caches, self.kept = caches, set()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        seconds = CACHED_S if index in self.kept else SAMPLE_S
        if self.caches:
            self.kept.add(index)
        worker = get_worker_info()
        return torch.tensor([0.0 if worker is None else worker.id, seconds], dtype=torch.float64)


def count_loading_time(monkeypatch: pytest.MonkeyPatch, *, cores: int) -> type[DataLoader]:
    """Let `measure_loader` read a clock that counts the loading time of `TimedSamples`. Return its kind of DataLoader.

    Real workers load. Each worker loads its batches one after the other, and all workers load at the same time. The
    measuring process only waits for batches.
    """
    now_s = 0.0

    class OnTheClock(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            began_s, iterator = now_s, super().__iter__()
            ends_s: dict[int, float] = {}
            load = iterator._next_data

            def arrived() -> torch.Tensor:
                nonlocal now_s
                batch: torch.Tensor = load()
                worker = int(batch[0, 0])
                ends_s[worker] = ends_s.get(worker, began_s) + float(batch[:, 1].sum())
                now_s = max(now_s, ends_s[worker])
                return batch

            iterator._next_data = arrived
            return iterator

    clock = SimpleNamespace(perf_counter=lambda: now_s, monotonic=lambda: now_s)
    monkeypatch.setattr(loader_speed, "time", clock)
    monkeypatch.setattr(loader_speed, "DataLoader", OnTheClock)
    monkeypatch.setattr(loader_speed, "_cores", lambda: cores)
    monkeypatch.setattr(loader_speed, "available_host_bytes", lambda: 2**30)
    return OnTheClock
