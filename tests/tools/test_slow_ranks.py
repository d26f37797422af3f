"""A slow rank is found without another collective.

A fake clock makes rank 1 slow. It advances by a fixed time for each sample that a rank trains on.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from gpus import KIND
from ranks import found_by, job_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from autosplit import ddp
from autosplit.accelerators import backend
from autosplit.errors import SlowRankWarning
from autosplit.solve.step_time import Cost, StepTime, TimeCurve
from autosplit.tools import slow_ranks

WINDOW = 8
"""Optimizer steps of a window."""
INPUTS = torch.randn(203, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(203, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Samples(Dataset):
    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return INPUTS[index], TARGETS[index], index


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


class Clock:
    """A clock that only `advance` moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


def trained(
    sizes: tuple[int, ...],
    effective: int,
    number: int,
    *,
    num_steps: int,
    waits: bool = True,
) -> dict[str, Any]:
    """Train, where each sample takes 1 s on rank 0 and 2 s on rank 1. Return what the tests compare."""
    found: dict[str, Any] = {"splits": []}
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(slow_ranks, "time", clock)
        patch.setattr(slow_ranks, "WINDOW", WINDOW)
        with ddp.setup(make_plan(sizes, effective)) as ctx:
            model = ctx.wrap(make_model())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            sampler = ctx.batch_sampler(number, shuffle=True, seed=7)
            loader = DataLoader(Samples(number), batch_sampler=sampler)
            while len(found["splits"]) < num_steps:
                for step in ctx.steps(loader):
                    for inputs, targets, _ in step:
                        clock.now_s += (1.0 + ctx.rank) * len(inputs)
                        with step.attempt():
                            step.backward(F.mse_loss(model(inputs), targets))
                    clock.now_s += 1.0 if waits else 1000.0
                    optimizer.step()
                    optimizer.zero_grad()
                    found["splits"].append(ctx.plan.ddp.split)
    found["warnings"] = [str(one.message) for one in caught if one.category is SlowRankWarning]
    return found


def until_other_rank_is_done() -> bool:
    """Hold rank 1's backward until rank 0 has recorded the end of its own time.

    If rank 0 recorded the end after DDP's wait for rank 1, both would wait until the store's time limit.
    """
    with ddp.setup(make_plan((4, 4), 8)) as ctx, pytest.MonkeyPatch.context() as patch:
        store = torch.distributed.distributed_c10d._get_default_store()
        original = slow_ranks.SlowRanks._record_end

        def recorded(self: Any) -> None:
            original(self)
            store.set(f"rank {ctx.rank} is done", "")

        patch.setattr(slow_ranks.SlowRanks, "_record_end", recorded)
        model = ctx.wrap(make_model())
        sampler = ctx.batch_sampler(8)
        for step in ctx.steps(DataLoader(Samples(8), batch_sampler=sampler)):
            for inputs, targets, _ in step:
                outputs = model(inputs)
                if ctx.rank == 1:
                    outputs.register_hook(lambda grad: (store.get("rank 0 is done"), grad)[1])
                step.backward(F.mse_loss(outputs, targets))
        return ctx.rank == 0 or store.check(["rank 0 is done"])


SCENARIOS: dict[str, Any] = {}
SCENARIOS["warns"] = lambda: trained((4, 4), 8, 203, num_steps=60)
SCENARIOS["long steps"] = lambda: trained((4, 4), 8, 203, num_steps=40, waits=False)
SCENARIOS["own time"] = until_other_rank_is_done

jobs = job_of("test_slow_ranks", "SCENARIOS", 2)


def test_rank_0_warns_once(jobs):
    first, second = found_by(jobs, "warns")
    assert second["warnings"] == []
    (text,) = first["warnings"]
    numbers = [float(number.replace(",", "")) for number in re.findall(r"([\d,.]+) ms", text)]
    assert text.startswith("Rank 1 (cpu:1, a cpu, 4 samples per forward) is slow")
    assert numbers == [8000, 0, 4000]
    assert set(first["splits"]) == {(4, 4)}


def test_ranks_that_wait_little_are_no_complaint(jobs):
    for found in found_by(jobs, "long steps"):
        assert found["warnings"] == []
        assert set(found["splits"]) == {(4, 4)}


def test_own_time_ends_before_the_all_reduce(jobs):
    assert found_by(jobs, "own time") == [True, True]


def fitted(*curves: TimeCurve) -> Cost:
    return Cost(StepTime.bare(curves, 0.0, adds_up=True))


def test_a_planned_wait_is_no_complaint():
    slow, fast = TimeCurve(((1, 1.0),)), TimeCurve(((1, 0.5),))
    plan = make_plan((4, 4), 8)
    assert slow_ranks._complaint(plan, 8, [4.0, 2.0], [0.0, 0.0], 4.0) is not None
    plan = make_plan((4, 4), 8, cost=fitted(slow, fast))
    assert slow_ranks._complaint(plan, 8, [4.0, 2.0], [0.0, 0.0], 4.0) is None
    assert "The plan expected 4,000 ms for rank 0" in slow_ranks._complaint(plan, 8, [9.0, 2.0], [0.0, 0.0], 9.0)


class BrokenStore:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("the connection is closed")


def run_steps(ranks: slow_ranks.SlowRanks, number: int) -> None:
    ranks.begin_loop()
    for _ in range(number):
        ranks.begin_step()
        ranks.draw(True)
        ranks._record_end()
        ranks.end_step(make_plan((4, 4), 8), 8)


def alone(monkeypatch: pytest.MonkeyPatch, store: Any) -> slow_ranks.SlowRanks:
    """Return rank 0 of two, with the given store."""
    monkeypatch.setattr(slow_ranks, "WINDOW", WINDOW)
    ranks = slow_ranks.SlowRanks(0, 2, torch.device("cpu"))
    ranks.store = store
    return ranks


def test_a_lost_store_does_not_end_the_training(monkeypatch):
    run_steps(alone(monkeypatch, BrokenStore()), 2 * WINDOW)


@pytest.mark.gpu
def test_the_times_of_a_real_device():
    backend(KIND).set_device(0)
    clock = slow_ranks._DeviceClock(KIND)
    numbers = torch.ones(64, 64, device=f"{KIND}:0")
    begin = clock.mark()
    for _ in range(20):
        numbers = numbers @ numbers / 64
    end = clock.mark()
    backend(KIND).synchronize()
    assert 0 < clock.seconds(begin, end) < 60
