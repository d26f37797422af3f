"""Measure how many samples/s a DataLoader loads, and find its fastest settings."""

from __future__ import annotations

import copy
import io
import itertools
import math
import os
import pickle
import statistics
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autosplit.devices.host_memory import available_host_bytes
from autosplit.errors import InputError, from_user_code, one_line
from autosplit.notes import Note
from autosplit.plan.loader_settings import LoaderSettings
from autosplit.rng import preserved_rng
from autosplit.solve.split import whole_number
from autosplit.tools.loader_result import MeasuredLoader, TimedLoader
from autosplit.torch_versions import private
from autosplit.workload.sample_batch import generators_of

GAIN = 1.05
"""Smallest speed-up factor that justifies more resources. Smaller differences are within the noise of runs."""

MOST_FRUITLESS = 2
"""Number of doublings without a gain after which the search ends. One worker is often no faster than no worker."""

PREFETCH_FACTORS = (2, 4, 8)
"""Values of `prefetch_factor` to try. The first is torch's default, and larger values follow while they gain."""

ENOUGH_ERROR = 0.02
"""Relative standard error of samples/s at which a measurement ends. It is well below the 5% of `GAIN`."""

SEGMENT_S, LEAST_SEGMENTS, SETTING_LIMIT_S = 0.02, 5, 4.0
"""Shortest segment in seconds, fewest segments of a setting, and time limit of a setting in seconds."""

WINDOW_S, MOST_BATCHES = 1.0, 64
"""Time limit in seconds and batch limit of the first pass. Every setting loads only these batches, repeatedly."""

COLD = 1.25
"""Speed-up factor of a second pass above which it read cached data, and the first pass read from disk."""

COLD_S = 0.1
"""Shortest first pass, in seconds, for this check. Data in memory takes a few ms, including the start."""

MEMORY_SHARE = 0.9
"""Fraction of the free host memory that workers may use, divided by the number of processes."""

Timer = Callable[[LoaderSettings], TimedLoader]


class _TimeIsUpError(Exception):
    """The time limit ends the search."""


def measure_loader(
    loader: DataLoader[Any], *, processes: int | None = None, time_limit_s: float = 60.0
) -> MeasuredLoader:
    """Find the settings with which a DataLoader has the highest samples/s, by loading its first batches.

    The loader, its dataset and all random states are unchanged. Only loading is measured. If the model processes fewer
    samples/s than the result, one or more workers hide the loading time.

    Args:
        loader: A DataLoader with a map-style dataset. Its batches, `collate_fn` and `worker_init_fn` are used.
        processes: Number of processes of this machine that load at the same time, such as the ranks of DDP. Default:
            ``LOCAL_WORLD_SIZE``, which torchrun sets, or 1.
        time_limit_s: No further settings are tried after this time.

    Raises:
        InputError: It is not a DataLoader, its dataset is iterable, it has no batches, or its workers can't load.
        UserCodeError: The dataset raised.
    """
    processes = _processes() if processes is None else processes
    whole_number("processes", processes, minimum=1)
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, (int, float)) or not time_limit_s > 0:
        raise InputError(f"time_limit_s is {time_limit_s!r}. Expected seconds above 0. Leave it out for 60.")
    check_loader(loader)
    ends_s = time.monotonic() + time_limit_s
    cores = _cores()
    dataset, notes = _copied(loader.dataset)
    with preserved_rng(generators_of(loader)):
        batches, first_rate = _first_pass(loader, dataset)
        free_bytes = available_host_bytes() // processes
        used: dict[int, int] = {}

        def timer(settings: LoaderSettings) -> TimedLoader:
            before = available_host_bytes()
            found, left = _timed(_with(loader, dataset, _Repeated(batches), settings), settings, batches)
            used[settings.num_workers] = max(0, before - left)
            return found

        def fits(workers: int, last: int) -> bool:
            return not last or used[last] / last * workers <= MEMORY_SHARE * free_bytes

        most = max(1, cores // processes)
        prefetch = (loader.prefetch_factor or PREFETCH_FACTORS[0]) if loader.num_workers else None
        present = LoaderSettings(loader.num_workers, prefetch, loader.pin_memory and torch.cuda.is_available())
        tried, stopped = search(
            timer, most, present, pins=torch.cuda.is_available(), fits=fits, is_over=lambda: time.monotonic() > ends_s
        )
    best = fewest_of_the_fastest(tried)
    settings = replace(best.settings, persistent_workers=best.settings.num_workers > 0)
    present_rate = next((one.samples_per_s for one in tried if one.settings == present), None)
    if first_rate * COLD < tried[0].samples_per_s and sum(map(len, batches)) >= COLD_S * first_rate:
        text = (
            f"The first pass loaded {first_rate:,.0f} samples/s, because the samples were not in the disk cache. The "
            f"second pass loaded {tried[0].samples_per_s:,.0f}. If the data set is larger than the free memory, every "
            "epoch is as slow as the first pass."
        )
        notes.append(Note("cold-cache", text))
    notes += _notes_on_cores(present.num_workers, most, cores, processes)
    return MeasuredLoader(
        settings,
        best.samples_per_s,
        replace(present, persistent_workers=loader.persistent_workers),
        present_rate,
        first_rate,
        processes,
        cores,
        tuple(tried),
        (*notes, *stopped),
    )


def _notes_on_cores(num_workers: int, most: int, cores: int, processes: int) -> list[Note]:
    """Return notes on workers that were not measured, and on processes that did not load.

    Args:
        num_workers: The loader's own number of workers.
        most: Cores of this process.
        cores: Cores of the machine.
        processes: Processes that load in training.
    """
    notes = []
    if num_workers > most:
        text = f"The loader's {num_workers} workers are more than the {most} cores of this process, so they were not "
        notes.append(Note("more-workers-than-cores", f"{text}measured."))
    if processes > 1:
        text = f"Only this process loaded, on {most} of {cores} cores. In training, the other processes use the same "
        notes.append(Note("loader-of-one-process", f"{text}disk."))
    return notes


# ----------------------------------------------------------------------------------------------------------- search


def search(
    timer: Timer,
    most_workers: int,
    present: LoaderSettings,
    *,
    pins: bool,
    fits: Callable[[int, int], bool],
    is_over: Callable[[], bool],
) -> tuple[list[TimedLoader], list[Note]]:
    """Time settings: double the workers while that gains, then raise the prefetch factor, then pin memory.

    Args:
        present: The user's settings. They are timed too, unless they have more than `most_workers`.
        pins: Whether there is a GPU to copy to.
        fits: Function that returns whether host memory is enough for a number of workers, given the last measured
            number.
    """
    tried: list[TimedLoader] = []
    notes: list[Note] = []

    def gains(settings: LoaderSettings) -> bool:
        if any(one.settings == settings for one in tried):
            return False
        if tried and is_over():
            raise _TimeIsUpError
        best = max((one.samples_per_s for one in tried), default=0.0)
        tried.append(timer(settings))
        return tried[-1].samples_per_s > GAIN * best

    try:
        _time_workers(gains, most_workers, fits, notes)
        best = fewest_of_the_fastest(tried).settings
        for prefetch in PREFETCH_FACTORS[1:] if best.num_workers else ():
            if not gains(replace(best, prefetch_factor=prefetch)):
                break
        if present.num_workers <= most_workers:
            gains(present)
        if pins:
            gains(replace(fewest_of_the_fastest(tried).settings, pin_memory=True))
    except _TimeIsUpError:
        text = "The time limit ended before every setting was tried. Raise time_limit_s to try more."
        notes.append(Note("time-limit", text))
    return tried, notes


def _time_workers(
    gains: Callable[[LoaderSettings], bool], most: int, fits: Callable[[int, int], bool], notes: list[Note]
) -> None:
    fruitless, last = 0, 0
    for workers in worker_counts(most):
        if not fits(workers, last):
            text = (
                f"{workers} workers would need more memory than the host has free. This is estimated from {last} "
                "workers."
            )
            notes.append(Note("workers-exceed-memory", text))
            return
        gained = gains(LoaderSettings(workers, PREFETCH_FACTORS[0] if workers else None))
        fruitless = 0 if gained else fruitless + 1
        if fruitless == MOST_FRUITLESS:
            return
        last = workers


def worker_counts(most: int) -> list[int]:
    """Return the worker counts to time: 0, the powers of two below `most`, and `most`."""
    return [0, *(2**power for power in range(most.bit_length()) if 2**power < most), most]


def fewest_of_the_fastest(tried: Sequence[TimedLoader]) -> TimedLoader:
    """Return the settings with the fewest resources among those within 5% of the fastest. Prefer pinned memory.

    Pinned memory costs little here, and then copies to the GPU can overlap with kernels.
    """
    fastest = max(one.samples_per_s for one in tried)
    near = [one for one in tried if one.samples_per_s * GAIN >= fastest]
    return min(
        near, key=lambda one: (not one.settings.pin_memory, one.settings.num_workers, one.settings.prefetch_factor or 0)
    )


# ----------------------------------------------------------------------------------------------------------- timing


def rate_of(
    arrivals: Iterator[int], workers: int, ahead: int, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Return samples/s of running workers, its relative standard error, and the time to the first batch in seconds.

    Batches arrive in rounds of one batch per worker, so whole rounds are timed. The first rounds are left out, because
    the workers loaded these batches in advance.

    Args:
        ahead: Batches that each worker loads in advance. 0 without workers.
    """
    began = clock()
    next(arrivals)
    start_s = clock() - began
    per_round = max(1, workers)
    for _ in range(per_round * (1 + ahead) - 1):
        next(arrivals)
    first = mark = clock()
    total = since = 0
    rates: list[float] = []
    while True:
        since += sum(itertools.islice(arrivals, per_round))
        now = clock()
        if now - mark < SEGMENT_S:
            continue
        rates.append(since / (now - mark))
        total, since, mark = total + since, 0, now
        mean = total / (now - first)
        error = statistics.stdev(rates) / math.sqrt(len(rates)) / mean if len(rates) > 1 else 1.0
        known = len(rates) >= LEAST_SEGMENTS and error <= ENOUGH_ERROR
        if known or now - began >= SETTING_LIMIT_S:
            return mean, error, start_s


def _timed(own: DataLoader[Any], settings: LoaderSettings, batches: Sequence[Sequence[Any]]) -> tuple[TimedLoader, int]:
    iterator: Any = None
    try:
        iterator = iter(own)
        sizes = map(len, itertools.cycle(batches))
        arrivals = (size for size, _ in zip(sizes, iterator, strict=False))
        found = rate_of(arrivals, settings.num_workers, settings.prefetch_factor or 0, time.perf_counter)
        return TimedLoader(settings, *found), available_host_bytes()
    except Exception as error:
        if not settings.num_workers:
            raise
        raise InputError(
            f"{settings.num_workers} workers raised {one_line(error)}, but the same batches load without workers. Fix "
            "the data set for use in workers, or keep num_workers=0.",
        ) from error
    finally:
        if settings.num_workers and iterator is not None:
            private(iterator, "_shutdown_workers")()  # stop now instead of at garbage collection


def _first_pass(loader: DataLoader[Any], dataset: Any) -> tuple[list[Sequence[Any]], float]:
    sampler = copy.copy(loader.batch_sampler)
    assert sampler is not None, "`check_loader` requires a batch sampler"
    if hasattr(sampler, "sampler"):
        sampler.sampler = copy.copy(sampler.sampler)
    batches: list[Sequence[Any]] = [list(batch) for batch in itertools.islice(sampler, MOST_BATCHES)]
    batches = [batch for batch in batches if batch]
    if not batches:
        raise InputError("The loader has no batch. Expected at least one. Pass a data set with samples.")
    began = time.perf_counter()
    read = 0
    try:
        for _ in _with(loader, dataset, batches, LoaderSettings()):
            read += 1
            if time.perf_counter() - began >= WINDOW_S and read > 1:
                break
    except Exception as error:
        raise from_user_code(error, f"the data set, for batch {read} of the loader,") from error
    return batches[:read], sum(map(len, batches[:read])) / (time.perf_counter() - began)


class _Repeated:
    def __init__(self, batches: Sequence[Sequence[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return itertools.cycle(self.batches)


# ----------------------------------------------------------------------------------------------------------- loader


def _with(
    loader: DataLoader[Any], dataset: Any, batches: Iterable[Sequence[Any]], settings: LoaderSettings
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_sampler=batches,  # type: ignore[arg-type]  # the loader only iterates over it
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        multiprocessing_context=loader.multiprocessing_context if settings.num_workers else None,
        timeout=loader.timeout if settings.num_workers else 0,
        **settings.to_dict(),
    )


def check_loader(loader: Any) -> None:
    """Raise InputError if the speed of a loader can't be measured."""
    if not isinstance(loader, DataLoader):
        raise InputError(f"loader is a {type(loader).__name__}. Expected a torch.utils.data.DataLoader.")
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            f"The loader's data set {type(loader.dataset).__name__} is iterable, so the data set itself divides its "
            "samples among workers. Expected a data set with an index. Measure this loader yourself, with the number "
            "of workers that it was written for.",
        )
    if loader.batch_sampler is None or not isinstance(loader.dataset, Sized):
        raise InputError(
            "The loader makes no batches, or its data set has no length. Expected batch_size or batch_sampler, and "
            "a data set with __len__.",
        )


class _Pickler(pickle.Pickler):
    """Copy an object graph except tensors, arrays, functions and classes, which the copy shares with the original."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.values: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        array = type(value).__module__ == "numpy" and type(value).__name__ in ("ndarray", "memmap")
        atoms = (torch.Tensor, type, types.FunctionType, types.ModuleType, bytes, str)
        if not array and not isinstance(value, atoms):
            return None
        self.values.append(value)
        return len(self.values) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, values: list[Any]) -> None:
        super().__init__(file)
        self.values = values

    def persistent_load(self, number: int) -> Any:
        return self.values[number]


def _copied(dataset: Any) -> tuple[Any, list[Note]]:
    """Copy a dataset without its samples, so that the user's counters, caches and generators stay unchanged."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(dataset)
        file.seek(0)
        return _Unpickler(file, pickler.values).load(), []
    except Exception as error:  # noqa: BLE001  # parts of the data set may raise anything
        text = (
            f"autosplit can't copy the data set ({one_line(error)}), so the measurement may change its caches and "
            "counters."
        )
        return dataset, [Note("dataset-not-copied", text)]


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # missing on some systems
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _processes() -> int:
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) else 1
