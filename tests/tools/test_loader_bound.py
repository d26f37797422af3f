"""A plan is compared with its DataLoader. The batch is not larger than the loader can feed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from folders import EXAMPLES
from hypothesis import given
from hypothesis import strategies as st
from loading_time import SAMPLE_S, TimedSamples, count_loading_time
from noted import kinds, noted
from raised import raises
from ranks import found_by, run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autosplit
from autosplit.cli.main import main
from autosplit.errors import InputError
from autosplit.plan.plan import Plan
from autosplit.solve.memory import MemoryFit, Region
from autosplit.solve.search_space import Space
from autosplit.solve.solver import Solver
from autosplit.solve.step_time import StepTime, TimeCurve
from autosplit.solve.trial import KNEE_SHARE
from autosplit.tools import loader_bound
from autosplit.tools.loader_bound import bounded_by_loader
from autosplit.tools.loader_result import LoaderSettings, MeasuredLoader
from autosplit.tuning import tune

WORKERS = LoaderSettings(2, 4, persistent_workers=True)


def loads(samples_per_s: float) -> MeasuredLoader:
    """Measurements of a loader without workers."""
    return MeasuredLoader(WORKERS, samples_per_s, LoaderSettings(), None, samples_per_s, 1, 2, (), noted("it is said"))


def tuned(devices: str = "sim:1xRTX3090+1xRTX2080Ti", **options: Any) -> Plan:
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 1))
    batch = torch.randn(8, 64), torch.randn(8, 1)
    options = {"loss_fn": nn.MSELoss(), "profile": "off", "max_batch_size": 4096, **options}
    return autosplit.tune(model, batch, devices=devices, **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return tuned()


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_slow_loader_gets_the_smallest_batch_that_takes_what_it_loads(plan, share):
    rate = share * plan.samples_per_s
    found = bounded_by_loader(plan, [loads(rate)])
    assert found.batch_size < plan.batch_size
    assert found.samples_per_s >= rate
    assert plan.compare_with(split=tuple(n // 2 for n in found.split)).samples_per_s < rate
    assert all(seat.peak_bytes <= seat.device.capacity_bytes for seat in found.main.seats)
    assert (found.loader_settings, found.loader_samples_per_s) == (WORKERS, rate)
    assert found.ddp.samples_per_s >= rate
    assert found.ddp.batch_size < plan.ddp.batch_size
    assert found.explain().reasons()[0].startswith("The loader limits training: the loader delivers ")
    assert found.notes[-1].kind == "loader-bound"
    assert Plan.from_json(found.to_json()) == found


def test_a_fast_loader_leaves_the_plan_as_it_is(plan):
    found = bounded_by_loader(plan, [loads(3 * plan.samples_per_s)])
    assert replace(found, loader_settings=None, loader_samples_per_s=None, notes=plan.notes) == plan
    assert found.explain().reasons() == plan.explain().reasons()
    assert found.explain().sentences()["data"].startswith("The devices limit training: the loader delivers ")
    assert kinds(found.notes[-2:]) == ["note", "loader-of-this-machine"]


def test_an_effective_batch_that_was_asked_for_is_kept():
    plan = tuned(effective_batch_size=1024)
    found = bounded_by_loader(plan, [loads(0.1 * plan.samples_per_s)])
    assert found.split == plan.split
    assert "The loader limits training" in found.explain().sentences()["bounds"]


def test_of_ranks_the_one_that_waits_the_longest_for_its_share_bounds():
    plan = tuned(strategy="ddp", effective_batch_size=1024)
    first, second = plan.split
    found = bounded_by_loader(plan, [loads(10.0 * first), loads(4.0 * second)])
    assert found.loader_samples_per_s == pytest.approx(4.0 * plan.batch_size)


@pytest.mark.slow
@given(
    times=st.lists(st.floats(1e-6, 1e-3), min_size=2, max_size=3),
    fixed_s=st.floats(1e-4, 1e-1),
    share=st.floats(0.01, 1.5),
)
def test_no_smaller_batch_that_was_looked_at_takes_as_much(times, fixed_s, share):
    curves = tuple(TimeCurve.of([(1, fixed_s), (1000, fixed_s + 999 * per_s)]) for per_s in times)
    region = Region(MemoryFit(0.0, 1.0), 1000, 1000, (1000,) * (len(times) - 1), 2000)
    step_time = StepTime.bare(curves, 1e-4, adds_up=False)
    space = Space(region, None, 1)
    best = max(map(Solver(space, step_time).samples_per_s, Solver(space, step_time).ranked()))
    solver = Solver(space, step_time, most_samples_per_s=share * best)
    first, *others = solver.ranked()
    enough = min(share, KNEE_SHARE) * best
    assert solver.samples_per_s(first) >= enough
    assert all(other.batch_size >= first.batch_size for other in others if solver.samples_per_s(other) >= enough)


def test_the_plan_makes_the_loader(plan):
    data = TensorDataset(torch.randn(100, 64), torch.randn(100, 1))
    small = replace(tuned("cpu", effective_batch_size=16, n_trials=1), loader_settings=LoaderSettings(0))
    made = small.loader(data, shuffle=True, seed=3)
    assert [len(inputs) for inputs, _ in made] == [len(batch) for batch in small.batch_sampler(100)]
    made = replace(small, loader_settings=WORKERS).loader(data, num_workers=1)
    assert (made.num_workers, made.prefetch_factor, made.persistent_workers) == (1, 4, True)
    assert plan.loader(data).num_workers == 0


def test_the_old_keyword_names_the_new_function(monkeypatch):
    monkeypatch.setattr(tune, "tune_request", lambda *_: pytest.fail("it was tuned"))
    with raises(InputError, "autosplit.fit_to_loader(plan, loader)"):
        tuned("cpu", loader=DataLoader([torch.zeros(1)]))
    with raises(TypeError, "loaders="):
        tuned("cpu", loaders=[])


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_command_fits_its_plan_to_the_loader(monkeypatch, tmp_path, capsys, plan, interrupted):
    def measured(loader: object) -> MeasuredLoader:
        assert list(loader) == [0, 1]
        if interrupted:
            raise KeyboardInterrupt
        return loads(1.0)

    monkeypatch.setattr(tune, "tune", lambda *_, **keywords: plan if "loader" not in keywords else None)
    monkeypatch.setattr(loader_bound, "measure_loader", measured)
    (tmp_path / "loading.py").write_text("from torch.utils.data import DataLoader\nloader = DataLoader([0, 1])")
    words = ["tune", str(EXAMPLES / "char_gpt.py"), "--devices", "sim:T4", "--loader", f"{tmp_path}/loading.py"]
    assert main([*words, "--json"]) == (4 if interrupted else 0)
    assert json.loads(capsys.readouterr().out)["loader_samples_per_s"] == (None if interrupted else 1.0)


def fitted_by_ranks() -> float | None:
    """Fit a plan to each rank's loader. The second rank's loader takes longer."""
    plan = make_plan((6, 2), effective_batch_size=8, effective_batch_sizes=(8, 8))
    own_rate = (60.0, 8.0)[int(os.environ["RANK"])]
    return autosplit.fit_to_loader(plan, loads(own_rate)).loader_samples_per_s


def fitted_by_too_few_ranks() -> str:
    plan = make_plan((6, 2, 2))
    with pytest.raises(InputError) as caught:
        autosplit.fit_to_loader(plan, loads(1.0))
    return str(caught.value)


SCENARIOS = {"fitted": fitted_by_ranks, "too few": fitted_by_too_few_ranks}


@pytest.mark.slow
def test_ranks_fit_their_plan_together(tmp_path):
    ranks = run_ranks(__name__, "SCENARIOS", 2, tmp_path, limit_s=300)
    assert found_by(ranks, "fitted") == [32.0, 32.0]  # 8 samples/s for 2 of each 8 samples
    assert all("The job has 2 ranks, but the plan has 3" in message for message in found_by(ranks, "too few"))


def test_a_plan_for_a_loader_that_is_measured(monkeypatch, plan):
    loaders = count_loading_time(monkeypatch, cores=2)
    found = autosplit.fit_to_loader(plan, loaders(TimedSamples(), batch_size=16))
    assert found.loader_samples_per_s == pytest.approx(2 / SAMPLE_S)
    assert found.loader_settings == LoaderSettings(2, 2, persistent_workers=True)
    assert found.batch_size < plan.batch_size
    assert found.loader_samples_per_s <= found.samples_per_s < plan.samples_per_s
    assert "The loader limits training" in str(found.explain())
