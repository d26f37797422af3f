"""A slow rank is found without another collective, and another split trains as one device does.

A fake clock makes rank 1 slow. It advances by a fixed time for each sample that a rank trains on.
"""

from __future__ import annotations

import itertools
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from autosplit.ddp.rebalance import LEAST_GAIN, planned_s, solved_again, with_split
from ddp_jobs import gradient, make_plan, relative_error, weights
from gpus import KIND
from hypothesis import given
from hypothesis import strategies as st
from ranks import for_workers, found_by, job_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from autosplit import ddp
from autosplit.accelerators import backend
from autosplit.errors import InputError
from autosplit.solve.step_time import Fit, StepTime, TimeCurve
from autosplit.tools import slow_ranks

WINDOW = 8
"""Optimizer steps of a window. Ranks switch after step 14, then after every eighth step."""
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
    seconds: Any = lambda rank, step: 1.0 + rank,
    workers: int = 0,
    waits: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train, where each sample takes `seconds(rank, step)`. Return what the tests compare."""
    found: dict[str, Any] = {"gradients": [], "weights": [], "epochs": [], "splits": []}
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(slow_ranks, "time", clock)
        patch.setattr(slow_ranks, "WINDOW", WINDOW)
        with ddp.setup(make_plan(sizes, effective)) as ctx:
            model = ctx.wrap(make_model())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            sampler = ctx.batch_sampler(number, shuffle=True, seed=7)
            context = for_workers("test_slow_ranks") if workers else None
            loader = DataLoader(
                Samples(number), batch_sampler=sampler, num_workers=workers, multiprocessing_context=context
            )
            while len(found["weights"]) < num_steps:
                found["epochs"].append([])
                for step in ctx.steps(loader, **options):
                    for inputs, targets, indices in step:
                        clock.now_s += seconds(ctx.rank, len(found["weights"])) * len(inputs)
                        with step.attempt():
                            step.backward(F.mse_loss(model(inputs), targets))
                        found["epochs"][-1] += indices.tolist() if step.weight else []
                    found["gradients"].append(gradient(model).clone())
                    clock.now_s += 1.0 if waits else 1000.0
                    optimizer.step()
                    optimizer.zero_grad()
                    found["weights"].append(weights(model))
                    found["splits"].append(tuple(rank.batch_size for rank in ctx.plan.ddp.ranks))
            found["context"] = (ctx.batch_size, ctx.settings.batch_size, ctx.effective_batch_size)
    found["warnings"] = [str(one.message) for one in caught if one.category is slow_ranks.SlowRankWarning]
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


def with_two_loaders() -> list[int]:
    """Switch in one loop, then train on a loader that was made before."""
    used: list[int] = []
    clock = Clock()
    with ddp.setup(make_plan((4, 4), 8)) as ctx, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", slow_ranks.SlowRankWarning)
        patch.setattr(slow_ranks, "time", clock)
        patch.setattr(slow_ranks, "WINDOW", WINDOW)
        model = ctx.wrap(make_model())
        loaders = [DataLoader(Samples(n), batch_sampler=ctx.batch_sampler(n)) for n in (203, 50)]
        for loader in loaders:
            used.clear()
            for step in ctx.steps(loader, rebalance="auto"):
                for inputs, targets, indices in step:
                    clock.now_s += (1 + ctx.rank) * len(inputs)
                    step.backward(F.mse_loss(model(inputs), targets))
                    used += indices.tolist() if step.weight else []
        assert len(used) != 25
        assert ctx.settings.batch_size == loaders[1].batch_sampler.rank_slice.batch_sizes[ctx.rank] != 4
    return used


def recovers(rank: int, step: int) -> float:
    """Rank 1 is slow until step 30."""
    return 1.0 + (rank == 1 and step < 30)


SWITCHING: dict[str, tuple[tuple[int, ...], int, int, int, dict[str, Any]]] = {
    # sizes, effective batch size, samples of the data set, steps, options
    "in the middle of an epoch": ((4, 4), 8, 203, 40, {}),
    "after an epoch's last step": ((4, 4), 8, 14 * 8, 30, {}),
    "with accumulation": ((3, 5), 24, 203, 30, {}),
    "and back": ((4, 4), 8, 203, 60, {"seconds": recovers}),
}
MORE_SWITCHING = {
    "with cuts": ((4, 4), 24, 203, 30, {"on_oom": "cut"}),
    "with counts": ((4, 4), 24, 203, 30, {"count": lambda batch: len(batch[0])}),
    # The workers have loaded batches of the old split ahead when the ranks switch.
    "with workers": ((4, 4), 8, 203, 20, {"workers": 2}),
}


def scenarios(cases: dict[str, Any]) -> dict[str, Any]:
    return {
        name: lambda case=case: trained(*case[:3], num_steps=case[3], rebalance="auto", **case[4])
        for name, case in cases.items()
    }


SLOW_SCENARIOS = scenarios(MORE_SWITCHING)
SCENARIOS = scenarios(SWITCHING)
SCENARIOS["warns"] = lambda: trained((4, 4), 8, 203, num_steps=60)
SCENARIOS["long steps"] = lambda: trained((4, 4), 8, 203, num_steps=40, waits=False, rebalance="auto")
SCENARIOS["two loaders"] = with_two_loaders
SCENARIOS["own time"] = until_other_rank_is_done

jobs = job_of("test_slow_ranks", "SCENARIOS", 2)
more_jobs = job_of("test_slow_ranks", "SLOW_SCENARIOS", 2)


def on_one_device(effective: int, number: int, num_steps: int) -> tuple[list[Any], list[Any]]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    sampler = make_plan((effective,)).batch_sampler(number, shuffle=True, seed=7)
    gradients, followed = [], []
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in sampler:
            F.mse_loss(model(INPUTS[batch]), TARGETS[batch]).backward()
            gradients.append(gradient(model))
            optimizer.step()
            optimizer.zero_grad()
            followed.append(weights(model))
            if len(followed) == num_steps:
                return gradients, followed
    raise AssertionError


def check_follows(both: list[dict[str, Any]], case: tuple[Any, ...]) -> None:
    _, effective, number, num_steps, _ = case
    assert both[0]["splits"] == both[1]["splits"]
    assert len(set(both[0]["splits"])) > 1
    gradients, followed = on_one_device(effective, number, num_steps)
    for found in both:
        assert len(found["weights"]) >= num_steps
        for got, wanted in zip(found["gradients"], gradients, strict=False):
            assert relative_error(got, wanted) < 1e-10
        for got, wanted in zip(found["weights"], followed, strict=False):
            assert float((got - wanted).abs().max()) < 1e-11
    for epochs in zip(*(found["epochs"] for found in both), strict=True):
        assert sorted(itertools.chain(*epochs)) == list(range(number))


@pytest.mark.slow  # the setup of its jobs takes 13 s
@pytest.mark.parametrize("name", SWITCHING)
def test_another_split_trains_as_one_device(jobs, name):
    check_follows(found_by(jobs, name), SWITCHING[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_SWITCHING)
def test_other_loops_train_as_one_device(more_jobs, name):
    check_follows(found_by(more_jobs, name), MORE_SWITCHING[name])


def test_the_slow_rank_gets_fewer_samples(jobs):
    for rank, found in enumerate(found_by(jobs, "in the middle of an epoch")):
        first, last = found["splits"][0], found["splits"][-1]
        assert first == (4, 4)
        assert found["splits"].index(last) == WINDOW * 7 // 4  # noted inside the step after the switch
        assert max(last[0] * 1.0, last[1] * 2.0) == 6.0  # no split of 8 samples is faster
        assert found["context"] == (8, last[rank], 8)


def test_a_rank_that_recovers_gets_its_samples_back(jobs):
    splits = found_by(jobs, "and back")[0]["splits"]
    assert splits[30] != (4, 4)
    assert splits[-1] == (4, 4)


def test_rank_0_warns_once(jobs):
    first, second = found_by(jobs, "warns")
    assert second["warnings"] == []
    (text,) = first["warnings"]
    numbers = [float(number.replace(",", "")) for number in re.findall(r"([\d,.]+) ms", text)]
    assert text.startswith("Rank 1 (cpu:1, a cpu, 4 samples per forward) is slow")
    assert numbers == [8000, 0, 4000]
    assert set(first["splits"]) == {(4, 4)}


def test_each_switch_is_reported(jobs):
    first, second = found_by(jobs, "and back")
    assert second["warnings"] == []
    assert len(first["warnings"]) == len(set(first["splits"]))
    assert "from (4, 4) to" in first["warnings"][0]
    assert first["warnings"][-1].endswith("to (4, 4).")


def test_ranks_that_wait_little_keep_their_split(jobs):
    for found in found_by(jobs, "long steps"):
        assert found["warnings"] == []
        assert set(found["splits"]) == {(4, 4)}


def test_a_loader_from_before_the_switch_follows(jobs):
    assert sorted(itertools.chain(*found_by(jobs, "two loaders"))) == list(range(50))


def test_own_time_ends_before_the_all_reduce(jobs):
    assert found_by(jobs, "own time") == [True, True]


# ---------------------------------------------------------------------------------------------------------- the solver


def fitted(*curves: TimeCurve) -> Fit:
    return Fit(StepTime.bare(curves, 0.0, adds_up=True))


@given(
    own_s=st.tuples(*[st.floats(0.5, 5.0)] * 3),
    caps=st.tuples(*[st.integers(6, 9)] * 3),
    keeps=st.booleans(),
)
def test_no_split_within_the_ceilings_is_faster(own_s, caps, keeps):
    plan = make_plan((5, 4, 3), 12)
    ranks = [
        replace(rank, ceiling=replace(rank.ceiling, batch_size=cap))
        for rank, cap in zip(plan.ddp.ranks, caps, strict=True)
    ]
    plan = replace(plan, ddp=replace(plan.ddp, ranks=tuple(ranks)))
    found = solved_again(plan, 12, own_s, 5.0, keeps_batch=keeps)
    each_s = [seconds / size for seconds, size in zip(own_s, (5, 4, 3), strict=True)]
    longest = {
        split: max(size * seconds for size, seconds in zip(split, each_s, strict=True))
        for split in itertools.product(*(range(1, cap + 1) for cap in caps))
        if sum(split) == 12
    }
    rest_s = 5.0 - max(own_s)
    gain = (max(own_s) + rest_s) / (min(longest.values()) + rest_s)
    if found is None:
        assert gain < 1 + LEAST_GAIN + 1e-9
    elif sum(found.split) == 12:
        assert longest[found.split] == pytest.approx(min(longest.values()))
        assert found.samples_per_s == pytest.approx(12 / (longest[found.split] + rest_s))
    else:  # several forwards of a smaller batch
        assert not keeps
        assert all(size <= cap for size, cap in zip(found.split, caps, strict=True))
        assert found.samples_per_s >= 12 / (min(longest.values()) + rest_s)


def test_a_full_rank_gets_more_forwards():
    """If the fast rank is at its ceiling, only a smaller forward moves work from the slow rank."""
    plan = make_plan((8, 8), 48)
    full = tuple(replace(rank, ceiling=replace(rank.ceiling, batch_size=8)) for rank in plan.ddp.ranks)
    plan = replace(plan, ddp=replace(plan.ddp, ranks=full))
    found = solved_again(plan, 48, (24.0, 48.0), 48.0, keeps_batch=False)
    assert (found.split, found.accumulation_steps, found.effective_batch_size) == ((8, 4), 4, 48)
    assert solved_again(plan, 48, (24.0, 48.0), 48.0, keeps_batch=True) is None
    changed = with_split(plan, found.split, found.accumulation_steps, found.samples_per_s)
    assert [rank.batch_size for rank in changed.ddp.ranks] == [8, 4]
    assert changed.ddp.ranks[1].peak_bytes == 1040


def test_measured_times_scale_the_plan_s_curves():
    curve = TimeCurve(((1, 1.0), (4, 1.6), (8, 2.4)))
    plan = replace(make_plan((4, 4), 8), fit=fitted(curve, curve))
    assert planned_s(plan, 8) == [1.6, 1.6]
    # 3 samples more are split (3, 0), because rank 1 must not have one alone. It runs 1 sample with weight 0.
    assert planned_s(plan, 11) == pytest.approx([1.6 + 1.4, 1.6 + 1.0])
    found = solved_again(plan, 8, (1.6, 3.2), 3.2, keeps_batch=True)
    assert found.split == (7, 1)  # 2.2 s on both, although rank 1 is only half as fast
    assert found.samples_per_s == pytest.approx(8 / 2.2)


def test_a_planned_wait_is_no_complaint():
    slow, fast = TimeCurve(((1, 1.0),)), TimeCurve(((1, 0.5),))
    plan = make_plan((4, 4), 8)
    assert slow_ranks._complaint(plan, 8, [4.0, 2.0], [0.0, 0.0], 4.0) is not None
    plan = replace(plan, fit=fitted(slow, fast))
    assert slow_ranks._complaint(plan, 8, [4.0, 2.0], [0.0, 0.0], 4.0) is None
    assert "The plan expected 4,000 ms for rank 0" in slow_ranks._complaint(plan, 8, [9.0, 2.0], [0.0, 0.0], 9.0)


def test_advice_names_a_slow_loader():
    assert "workers" in slow_ranks._advice([4.0, 2.0], [2.0, 0.1], rebalances=False)
    assert "temperature" in slow_ranks._advice([4.0, 2.0], [0.2, 0.1], rebalances=False)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"rebalance": "on"}, "rebalance-value"),
        ({"rebalance": "auto", "loss_scope": "ranks"}, "loss-scope-combined"),
    ],
)
def test_unsuited_options_are_refused(options, code):
    ctx = ddp.Context(make_plan((4, 4), 8), 0, torch.device("cpu"))
    loader = DataLoader(Samples(16), batch_sampler=ctx.batch_sampler(16))
    with pytest.raises(InputError) as caught:
        ctx.steps(loader, **options)
    assert caught.value.code == code


def test_unsuited_loaders_and_models_are_refused():
    ctx = ddp.Context(make_plan((4, 4), 8), 0, torch.device("cpu"))
    with pytest.raises(InputError, match="no batch sampler of ctx"):
        ctx.steps([torch.zeros(4)], rebalance="auto")
    ctx._models.meet_always = True
    loader = DataLoader(Samples(16), batch_sampler=ctx.batch_sampler(16))
    with pytest.raises(InputError, match="SyncBatchNorm or is sharded"):
        ctx.steps(loader, rebalance="auto")


class Event:
    """A device event. The device reaches an event when `done` is set."""

    done = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms = next(Event.ticks)

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_device_events_are_read_without_a_wait(monkeypatch):
    Event.ticks = itertools.count(step=500)
    monkeypatch.setattr(slow_ranks, "backend", lambda kind: SimpleNamespace(Event=Event))
    clock = slow_ranks._DeviceClock("cuda")
    begin, end = clock.mark(), clock.mark()
    assert clock.seconds(begin, end) is None
    monkeypatch.setattr(Event, "done", True)
    assert clock.seconds(begin, end) == 0.5


class BrokenStore:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("the connection is closed")


def run_steps(ranks: slow_ranks.SlowRanks, number: int, *, rebalances: bool) -> None:
    ranks.begin_loop()
    for _ in range(number):
        ranks.begin_step()
        ranks.draw(True)
        ranks._record_end()
        ranks.end_step(make_plan((4, 4), 8), 8, rebalances=rebalances)


def alone(monkeypatch: pytest.MonkeyPatch, store: Any) -> slow_ranks.SlowRanks:
    """Return rank 0 of two, with the given store."""
    monkeypatch.setattr(slow_ranks, "WINDOW", WINDOW)
    ranks = slow_ranks.SlowRanks(0, 2, torch.device("cpu"))
    ranks.store = store
    return ranks


def test_rank_0_does_not_wait_for_the_times_of_a_late_rank(monkeypatch):
    store = torch.distributed.HashStore()
    ranks = alone(monkeypatch, store)
    run_steps(ranks, 2 * WINDOW, rebalances=True)
    assert store.get("split/1") == b"null"
    assert ranks.agreed is None


def test_a_lost_store_ends_training_only_if_ranks_might_switch(monkeypatch):
    run_steps(alone(monkeypatch, BrokenStore()), 2 * WINDOW, rebalances=False)
    with pytest.raises(RuntimeError):
        run_steps(alone(monkeypatch, BrokenStore()), 2 * WINDOW, rebalances=True)


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
