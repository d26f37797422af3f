"""Plans for simulated GPUs: each plan's numbers are consistent, for many pairs of GPUs."""

from __future__ import annotations

import functools

import pytest
import torch
from error_types import DeviceError, DoesNotFitError
from raised import raises
from torch import nn
from torch.nn import functional as F

import autosplit

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("without_workspaces")]  # devices of a few KiB

MACHINES = [
    "sim:1xRTX3090+1xRTX2080Ti",
    "sim:1xH100-80GB+1xT4",
    "sim:1xA100-40GB+1xL4",
    "sim:1xRTX3090@300KiB+1xRTX3060@200KiB",
    "sim:1xRTX3060@200KiB+1xRTX3090@300KiB",
    "sim:3xL4@250KiB",
]
EFFECTIVE = 512


def workload(batch_size: int = 8) -> autosplit.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    batch = (torch.randn(batch_size, 16), torch.randint(0, 4, (batch_size,)))
    return autosplit.Workload(model, batch, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD)


@functools.cache
def tuned(devices: str, **options) -> autosplit.Plan:
    options = {"effective_batch_size": EFFECTIVE, "profile": "off", "n_trials": 3, **options}
    return autosplit.tune(workload(), devices=devices, **options)


@pytest.fixture(scope="module", params=MACHINES)
def plan(request) -> autosplit.Plan:
    return tuned(request.param)


class TestEveryPlan:
    def test_adds_up(self, plan):
        assert sum(plan.split) == plan.batch_size
        assert plan.gpu0_bsz == plan.split[0]
        assert plan.effective_batch_size == EFFECTIVE
        assert plan.accumulation_steps == -(-EFFECTIVE // plan.batch_size)

    def test_keeps_within_its_ceilings(self, plan):
        assert all(size <= ceiling for size, ceiling in zip(plan.split, plan.ceilings, strict=True))

    def test_keeps_within_memory(self, plan):
        assert any(seat.peak_bytes for seat in plan.main.seats)
        assert all(seat.peak_bytes <= seat.device.capacity_bytes for seat in plan.main.seats)
        assert all(rank.peak_bytes <= rank.ceiling.capacity_bytes for rank in plan.ddp.seats)

    def test_ran_nothing_and_wraps_nothing(self, plan):
        assert (plan.simulated, plan.real_steps) == (True, 0)
        with raises(DeviceError):
            plan.wrap(nn.Linear(2, 2))

    def test_is_its_fastest_trial(self, plan):
        rates = [trial.samples_per_s for trial in plan.trials if trial.samples_per_s is not None]
        assert plan.samples_per_s == pytest.approx(max(rates))

    def test_comes_back_from_json(self, plan):
        assert autosplit.Plan.from_json(plan.to_json()) == plan

    def test_has_a_rank_for_each_device(self, plan):
        assert plan.ddp.devices == plan.devices
        assert plan.ddp.accumulation_steps == -(-plan.ddp.effective_batch_size // plan.ddp.batch_size)

    def test_hands_out_the_data_set_once(self, plan):
        batches = list(plan.batch_sampler(2 * EFFECTIVE + 100))
        assert sorted(index for batch in batches for index in batch) == list(range(2 * EFFECTIVE + 100))
        assert len(batches[0]) == plan.batch_size

    def test_predicts_its_own_split(self, plan):
        said = plan.compare_with(plan.split, plan.accumulation_steps)
        assert said.samples_per_s == pytest.approx(plan.samples_per_s, rel=0.15)

    def test_prints_its_split(self, plan):
        assert str(plan).startswith(f"split {plan.split} = {plan.batch_size} samples per forward")
        assert "(simulated)" in str(plan)

    @pytest.mark.parametrize("to", ["env", "json", "transformers", "accelerate", "lightning"])
    def test_is_exported(self, plan, to):
        exported = plan.export(to)
        assert exported.settings
        assert str(exported).strip()


def test_the_same_seed_gives_the_same_plan():
    machine = "sim:1xRTX3090@300KiB+1xRTX3060@200KiB"
    assert tuned(machine).to_dict() == tuned.__wrapped__(machine).to_dict()


@pytest.mark.parametrize(
    ("first", "second"), [("RTX3090@300KiB", "RTX3060@200KiB"), ("H100-80GB@100KiB", "T4@250KiB"), ("L4", "P100")]
)
def test_the_order_of_ranks_changes_no_rank(first, second):
    forth, back = (tuned(f"sim:1x{a}+1x{b}", strategy="ddp") for a, b in ((first, second), (second, first)))
    assert forth.ddp.split == back.ddp.split[::-1]
    assert forth.ddp.samples_per_s == pytest.approx(back.ddp.samples_per_s)


@pytest.mark.parametrize("role", ["rank", "primary", "replica", "eval"])
def test_more_memory_never_lowers_a_ceiling(role):
    found = [
        autosplit.find_ceiling(workload(), f"sim:RTX3090@{size}KiB", role=role).batch_size for size in (40, 80, 160)
    ]
    assert 0 < found[0] < found[1] < found[2]


@pytest.mark.parametrize("memory", ["45KiB", "100KiB"])
def test_a_ceiling_is_the_last_batch_that_fits(memory):
    device = f"sim:RTX3090@{memory}"
    most = autosplit.find_ceiling(workload(), device, role="primary").batch_size
    assert autosplit.measure(workload(), devices=device, split=(most,)).samples_per_s > 0
    with pytest.raises(DoesNotFitError):
        autosplit.measure(workload(), devices=device, split=(most + 1,))


def test_compare_sorts_machines_by_price():
    machines = ["sim:2xL4", "sim:1xH100-80GB"]
    prices = {"2xL4": 1.0, "1xH100-80GB": 100.0}
    dear = autosplit.compare(workload(), devices=machines, prices=prices, effective_batch_size=64)
    assert "2xL4" in str(dear).splitlines()[0]
    cheap = autosplit.compare(
        workload(), devices=machines, prices={**prices, "1xH100-80GB": 0.001}, effective_batch_size=64
    )
    assert "H100" in str(cheap).splitlines()[0]
