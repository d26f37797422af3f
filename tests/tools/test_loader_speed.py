"""Measuring a loader loads batches, tries few settings, and changes nothing in the loader."""

from __future__ import annotations

import itertools
import json
import random
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loading_time import CACHED_S, SAMPLE_S, TimedSamples, count_loading_time
from noted import kinds
from raised import raises
from torch.utils.data import DataLoader, Dataset, IterableDataset

import autosplit
from autosplit.cli.main import main
from autosplit.errors import InputError, UserCodeError
from autosplit.tools import loader_speed
from autosplit.tools.loader_result import LoaderSettings, TimedLoader
from autosplit.tools.loader_speed import GAIN, fewest_of_the_fastest, rate_of, search, worker_counts

BARE = LoaderSettings()


def searched(rates, most, *, present=BARE, pins=False, fits=lambda *_: True, trials=99):
    """Search with given samples/s for each number of workers."""
    asked = []

    def timer(settings):
        asked.append(settings)
        return TimedLoader(settings, rates(settings), 0.0, 0.0)

    tried, notes = search(timer, most, present, pins=pins, fits=fits, is_over=lambda: len(asked) >= trials)
    assert asked == [one.settings for one in tried]
    assert len(set(asked)) == len(asked), "nothing is measured twice"
    return tried, notes


@given(st.integers(1, 300))
def test_workers_double_up_to_the_most(most):
    counts = worker_counts(most)
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (0, most)
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(counts[1:]))


@given(st.integers(1, 64), st.floats(0.1, 10), st.floats(0, 0.9), st.floats(0.1, 80), st.integers(0, 64), st.booleans())
def test_the_search_reaches_95_percent_where_workers_add_up_to_a_bound(most, alone, sending, bound, present, pins):
    """Workers cost time to send batches, and add up until the disk or bus limits them. This is the usual curve."""

    def rates(settings):
        workers = settings.num_workers
        return (min(workers / (1 + sending), bound) if workers else 1.0) / alone

    tried, _ = searched(rates, most, present=LoaderSettings(present, 2 if present else None), pins=pins)
    found = fewest_of_the_fastest(tried)
    best = max(rates(LoaderSettings(workers)) for workers in range(most + 1))
    assert found.samples_per_s * GAIN >= best * (1 - 1e-9)
    assert found.settings.num_workers <= most
    assert found.settings.pin_memory == pins
    assert len(tried) <= len(worker_counts(most)) + 4


def test_more_batches_ahead_are_kept_where_they_gain():
    tried, _ = searched(lambda one: 1 + one.num_workers + (one.prefetch_factor or 0), 2)
    assert fewest_of_the_fastest(tried).settings == LoaderSettings(2, 8)


def test_workers_that_memory_does_not_hold_are_not_started():
    tried, notes = searched(lambda one: 1 + one.num_workers, 16, fits=lambda workers, _: workers <= 4)
    assert max(one.settings.num_workers for one in tried) == 4
    assert kinds(notes) == ["workers-exceed-memory"]


def test_a_search_that_is_out_of_time_says_so():
    tried, notes = searched(lambda one: 1 + one.num_workers, 16, trials=2)
    assert len(tried) == 2
    assert kinds(notes) == ["time-limit"]


@pytest.mark.parametrize("workers", [0, 8])
@given(batch_s=st.floats(1e-4, 0.5), start_s=st.floats(0, 20))
def test_rounds_of_workers_give_their_rate_whatever_their_start_took(workers, batch_s, start_s):
    """Each worker loads a batch in `batch_s`. After the start, a batch of each worker arrives at the same time."""
    now, side_by_side = [0.0], max(1, workers)

    def arrivals():
        for index in itertools.count():
            if index % side_by_side == 0:
                now[0] += batch_s + (start_s if index == 0 else 0.0)
            yield 16

    rate, error, first_s = rate_of(arrivals(), workers, 2 if workers else 0, lambda: now[0])
    assert rate == pytest.approx(16 * side_by_side / batch_s)
    assert first_s == pytest.approx(start_s + batch_s)
    assert error < 0.02 or start_s + batch_s > 0.5


class Drawing(Dataset):
    """Draws with its own generator, and counts its samples."""

    def __init__(self, samples=64):
        self.random, self.given = random.Random(3), 0
        self.samples = torch.arange(float(samples))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.given += 1
        self.random.random()
        torch.rand(1)
        return self.samples[index]


def test_the_fastest_workers_are_found_and_nothing_changes(monkeypatch):
    """Real workers load batches. Their rates are given, because measured rates depend on other load on the machine."""

    def rate(arrivals, workers, _ahead, _clock):
        assert sum(itertools.islice(arrivals, 5)) == 20
        return 400.0 * max(1, workers), 0.01, 0.1

    monkeypatch.setattr(loader_speed, "_cores", lambda: 4)
    monkeypatch.setattr(loader_speed, "rate_of", rate)
    dataset = Drawing()
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)

    def states():
        tensors = torch.get_rng_state().tolist(), generator.get_state().tolist()
        return tensors, random.getstate(), dataset.random.getstate()

    before = states()
    found = autosplit.measure_loader(loader, processes=2)
    assert states() == before
    assert dataset.given == 0
    assert found.settings.num_workers == 2, "four cores of two processes"
    assert found.settings.persistent_workers
    assert (found.samples_per_s, found.present_samples_per_s) == (800.0, 400.0)
    assert "loader-of-one-process" in kinds(found.notes)
    made = DataLoader(dataset, batch_size=4, **found.settings.to_dict())
    assert made.num_workers == 2


def test_a_cold_cache_is_told_from_a_slow_loader(monkeypatch):
    loaders = count_loading_time(monkeypatch, cores=1)
    cold = autosplit.measure_loader(loaders(TimedSamples(caches=True), batch_size=4), time_limit_s=0.1)
    slow = autosplit.measure_loader(loaders(TimedSamples(), batch_size=4), time_limit_s=0.1)
    told = [str(note) for note in cold.notes if note.kind == "cold-cache"]
    assert [text.startswith("The first pass loaded 500 samples/s") for text in told] == [True]
    assert "because the samples were not in the disk cache. The second pass loaded 50,000." in told[0]
    assert cold.first_pass_samples_per_s == pytest.approx(1 / SAMPLE_S)
    assert cold.tried[0].samples_per_s == pytest.approx(1 / CACHED_S)
    assert "cold-cache" not in kinds(slow.notes)
    assert slow.tried[0].samples_per_s == pytest.approx(slow.first_pass_samples_per_s)


def test_data_in_memory_has_no_cold_cache(monkeypatch):
    """The first pass takes a few milliseconds, and half of that is its start. autosplit took that for a slow disk."""
    times_s = itertools.chain([0.0], itertools.count(0.005, 0.0001))  # the first batch takes 5 ms, the others 0.1 ms
    clock = SimpleNamespace(perf_counter=lambda: next(times_s), monotonic=time.monotonic)
    monkeypatch.setattr(loader_speed, "time", clock)
    dataset = torch.utils.data.TensorDataset(torch.randn(600, 64))
    found = autosplit.measure_loader(DataLoader(dataset, batch_size=32), time_limit_s=0.1)
    assert found.tried[0].samples_per_s > 2 * found.first_pass_samples_per_s
    assert "cold-cache" not in kinds(found.notes)


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.count()


class Unsendable(Drawing):
    def __getitem__(self, index):
        if torch.utils.data.get_worker_info() is not None:
            raise OSError("the file is open elsewhere")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "loader",
    [
        [1, 2],
        DataLoader(Endless(), batch_size=2),
        DataLoader(Drawing(2), batch_size=4, drop_last=True),
        DataLoader(Unsendable(), batch_size=4),
    ],
)
def test_what_cannot_be_measured_is_refused(loader):
    with raises(InputError):
        autosplit.measure_loader(loader)


def test_a_data_set_that_raises_is_the_users_own_error():
    with pytest.raises(UserCodeError, match=r"the data set, for batch 0 of the loader, raised ZeroDivisionError"):
        autosplit.measure_loader(DataLoader(range(8), batch_size=4, collate_fn=lambda _batch: 1 / 0))


@pytest.mark.parametrize("keywords", [{"processes": 0}, {"time_limit_s": -1}])
def test_numbers_are_checked(keywords):
    with raises(InputError):
        autosplit.measure_loader(DataLoader(Drawing(), batch_size=4), **keywords)


FILE = """
import torch
from torch.utils.data import DataLoader

def made():
    return DataLoader(torch.zeros(64, 3), batch_size=8)

loader = made()
broken = DataLoader([1, 2, 3, 4], batch_size=2, collate_fn=lambda batch: 1 / 0)
"""


@pytest.mark.slow
def test_the_command_measures_the_loader_of_a_file(tmp_path, capsys):
    file = tmp_path / "data.py"
    file.write_text(FILE)
    assert main(["loader", f"{file}:made", "--time-limit-s", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "num_workers=0" in said
    assert "samples/s" in said
    assert main(["loader", str(file), "--time-limit-s", "0.1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["num_workers"] == 0
    assert main(["loader", f"{file}:nothing"]) == 2
    assert "expected a DataLoader of that name" in capsys.readouterr().err.replace("Expected", "expected")
    assert main(["loader", f"{file}:broken"]) == 5
    assert "1 / 0" in capsys.readouterr().err
