"""Measure how many samples/s a DataLoader loads, and find the settings with which it loads the most."""

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
from autosplit.probe.loader_result import LoaderSettings, MeasuredLoader, TimedLoader
from autosplit.rng import kept_rng
from autosplit.solve.split import whole_number
from autosplit.torch_versions import private
from autosplit.workload.sample_batch import generators_of

GAIN = 1.05
"""Settings that need more of the machine have to load 5 % more: what differs less is within what runs differ by."""

MOST_FRUITLESS = 2
"""Doublings of the workers without a gain that end the search: a first worker often only pays for sending batches."""

PREFETCH_FACTORS = (2, 4, 8)
"""Batches ahead per worker that are tried: torch's default first, and more while they gain."""

ENOUGH_ERROR = 0.02
"""Standard error, as a share of samples/s, at which a setting is known: well under the 5 % that decide."""

SEGMENT_S, LEAST_SEGMENTS, SETTING_LIMIT_S = 0.02, 5, 4.0
"""Seconds of a segment at least, segments of a setting at least, and seconds after which it is taken as it is."""

WINDOW_S, MOST_BATCHES = 1.0, 64
"""Seconds of the first pass, and its batches at most: every setting reads these and no others, again and again."""

COLD = 1.25
"""A second pass that is faster than the first by this much found something kept: the first read from disk."""

COLD_S = 0.1
"""Seconds that a first pass takes at least to say so: one of data in memory takes some ms, its own start among them."""

MEMORY_SHARE = 0.9
"""Of a process's part of the free host memory, the share that workers may take."""

Timer = Callable[[LoaderSettings], TimedLoader]


class _TimeIsUpError(Exception):
    """No other setting is tried."""


def measure_loader(
    loader: DataLoader[Any], *, processes: int | None = None, time_limit_s: float = 60.0
) -> MeasuredLoader:
    """Return the settings with which a DataLoader loads the most samples/s, found by loading its first batches.

    The loader stays as it is, and so do its data set and all random states. What is measured is loading alone: where
    the model is slower than `samples_per_s`, one worker or more hides the loading.

    Args:
        loader: Over a data set with an index; its batches, `collate_fn` and `worker_init_fn` are used as they are.
        processes: How many processes of this machine load at the same time, such as the ranks of DDP. Default:
            ``LOCAL_WORLD_SIZE``, which torchrun sets, else 1.
        time_limit_s: No other setting is tried after this long.

    Raises:
        InputError: It is no DataLoader, has an iterable data set, no batches, or its workers can't load.
        UserCodeError: The data set raised.
    """
    processes = _processes() if processes is None else processes
    whole_number("processes", processes, minimum=1)
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, (int, float)) or not time_limit_s > 0:
        raise InputError(
            f"time_limit_s is {time_limit_s!r}; expected seconds above 0; leave it out for 60", code="time-limit"
        )
    check_loader(loader)
    ends_s = time.monotonic() + time_limit_s
    cores = _cores()
    dataset, notes = _copied(loader.dataset)
    with kept_rng(generators_of(loader)):
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
            f"a cold cache, not a slow loader: the first pass loaded {first_rate:,.0f} samples/s, and the second pass "
            f"over the same samples {tried[0].samples_per_s:,.0f}; a data set that is larger than the free memory is "
            "read that slowly in every epoch"
        )
        notes.append(Note("cold-cache", text))
    if present.num_workers > most:
        text = f"its own {present.num_workers} workers are more than the {most} cores of a process: not measured"
        notes.append(Note("more-workers-than-cores", text))
    if processes > 1:
        text = f"measured with this process's loading alone, on {most} of {cores} cores: others share the disk"
        notes.append(Note("loader-of-one-process", text))
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
    """Time settings: workers by doubling while that gains, then more batches ahead, then pinned memory.

    Args:
        present: The user's own; timed as well, unless it has more than `most_workers`.
        pins: There is a GPU to copy to.
        fits: Tells whether the host's memory holds so many workers, by what the last number of them took.
    """
    tried: list[TimedLoader] = []
    notes: list[Note] = []

    def gains(settings: LoaderSettings) -> bool:
        """Time settings unless they were; tell whether they beat all others by enough."""
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
        text = "the time limit ended before every setting was tried; a larger time_limit_s tries more"
        notes.append(Note("time-limit", text))
    return tried, notes


def _time_workers(
    gains: Callable[[LoaderSettings], bool], most: int, fits: Callable[[int, int], bool], notes: list[Note]
) -> None:
    """Time more workers while they gain, with a note where memory ends that."""
    fruitless, last = 0, 0
    for workers in worker_counts(most):
        if not fits(workers, last):
            text = f"{workers} workers would take more than the host's free memory, judged by what {last} took"
            notes.append(Note("workers-exceed-memory", text))
            return
        gained = gains(LoaderSettings(workers, PREFETCH_FACTORS[0] if workers else None))
        fruitless = 0 if gained else fruitless + 1
        if fruitless == MOST_FRUITLESS:
            return
        last = workers


def worker_counts(most: int) -> list[int]:
    """Return 0, 1 and its doublings up to `most`, with `most` itself as the last."""
    return [0, *(2**power for power in range(most.bit_length()) if 2**power < most), most]


def fewest_of_the_fastest(tried: Sequence[TimedLoader]) -> TimedLoader:
    """Return the one that takes least of the machine among those within 5 % of the fastest; pinned, if such is one.

    Pinned memory is worth more than it can cost here: copies to the GPU then run beside the kernels.
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
    """Return samples/s once the workers run, its standard error as a share, and the seconds to the first batch.

    Batches of workers arrive in rounds, one of each worker, so time is taken of whole rounds. The first ones are left
    out: workers that started early have loaded ahead by then.

    Args:
        ahead: Batches that each worker loads ahead; 0 without workers.
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
    """Return the samples/s of a loader that never ends, and the free host memory while its workers run."""
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
            f"{settings.num_workers} workers raised {one_line(error)}, where the process itself loads the same; "
            "expected a data set that workers can load; mend that, or keep num_workers=0",
            code="loader-workers-failed",
        ) from error
    finally:
        if settings.num_workers and iterator is not None:
            private(iterator, "_shutdown_workers")()  # now, and not when garbage is collected


def _first_pass(loader: DataLoader[Any], dataset: Any) -> tuple[list[Sequence[Any]], float]:
    """Load the first batches as they come; return their indices, and the samples/s."""
    sampler = copy.copy(loader.batch_sampler)
    assert sampler is not None, "looked at before"
    if hasattr(sampler, "sampler"):
        sampler.sampler = copy.copy(sampler.sampler)
    batches: list[Sequence[Any]] = [list(batch) for batch in itertools.islice(sampler, MOST_BATCHES)]
    batches = [batch for batch in batches if batch]
    if not batches:
        raise InputError(
            "the loader has no batch; expected one at least; give it a data set with samples in it", code="loader-empty"
        )
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
    """Batches of indices over and over, as a batch sampler."""

    def __init__(self, batches: Sequence[Sequence[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return itertools.cycle(self.batches)


# ----------------------------------------------------------------------------------------------------------- loader


def _with(
    loader: DataLoader[Any], dataset: Any, batches: Iterable[Sequence[Any]], settings: LoaderSettings
) -> DataLoader[Any]:
    """Return a loader like the user's that loads these batches of indices by other settings."""
    return DataLoader(
        dataset,
        batch_sampler=batches,  # type: ignore[arg-type]  # it is iterated over, and no more
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        multiprocessing_context=loader.multiprocessing_context if settings.num_workers else None,
        timeout=loader.timeout if settings.num_workers else 0,
        **settings.to_dict(),
    )


def check_loader(loader: Any) -> None:
    """Raise InputError if the speed of a loader cannot be measured."""
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"loader is a {type(loader).__name__}; expected a torch.utils.data.DataLoader; pass one", code="loader-type"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            f"the loader's data set {type(loader.dataset).__name__} is iterable; expected one with an index: how an "
            "iterable one is shared out to workers is its own affair; time it with the workers that it is made for",
            code="loader-iterable",
        )
    if loader.batch_sampler is None or not isinstance(loader.dataset, Sized):
        raise InputError(
            "the loader makes no batches of its own, or its data set has no length; expected batch_size or "
            "batch_sampler, and a data set with __len__; pass a loader with them",
            code="loader-without-batches",
        )


class _Pickler(pickle.Pickler):
    """Copies what a data set holds but for tensors, arrays, functions and classes, which stay the same ones."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.kept: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of what is not copied; None for what is."""
        array = type(value).__module__ == "numpy" and type(value).__name__ in ("ndarray", "memmap")
        atoms = (torch.Tensor, type, types.FunctionType, types.ModuleType, bytes, str)
        if not array and not isinstance(value, atoms):
            return None
        self.kept.append(value)
        return len(self.kept) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self.kept = kept

    def persistent_load(self, number: int) -> Any:
        return self.kept[number]


def _copied(dataset: Any) -> tuple[Any, list[Note]]:
    """Copy a data set without its samples, so that its own keeps what it counts, caches and draws by."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(dataset)
        file.seek(0)
        return _Unpickler(file, pickler.kept).load(), []
    except Exception as error:  # noqa: BLE001  # whatever its parts raise
        text = f"the data set cannot be copied ({one_line(error)}): what it caches or counts itself may change"
        return dataset, [Note("dataset-not-copied", text)]


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _processes() -> int:
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) else 1
