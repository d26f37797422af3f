"""Build and trace a workload for simulated GPUs, a large one without memory."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from noted import kinds
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from workloads import small

from autosplit.devices.spec import parse_devices
from autosplit.errors import WorkloadError
from autosplit.profiles.key import workload_of
from autosplit.sim import prepare as sim_prepare
from autosplit.sim.prepare import Traced, build_simulated, traced_workload
from autosplit.tuning.tune import tune
from autosplit.workload.workload import Workload

SIM = parse_devices("sim:RTX3090")


def traced(source, devices, closing) -> Traced:
    return traced_workload(build_simulated(source), devices, closing)


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Treat every model as a large model."""
    monkeypatch.setattr(sim_prepare, "SMALL_BYTES", 0)


def test_what_is_small_is_built_once_and_for_real_for_cards_that_are_not_there():
    """A saved plan is then found without waiting for torch's compiler."""
    calls = []
    with ExitStack() as closing:
        found = traced(lambda: calls.append(1) or small(), SIM, closing)
    assert len(calls) == 1
    assert not any(isinstance(parameter, FakeTensor) for parameter in found.workload.model.parameters())
    assert found.tracer.fake
    assert found.rebuild is None


class Masked(nn.Module):
    """A model that keeps tensors and numbers outside of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))
        self.scale, self.positions = 0.5, torch.arange(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize(
    "made",
    [
        small,
        lambda: Workload(Masked(), torch.rand(4, 3, 8), optimizer=torch.optim.SGD),
        lambda: Workload(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.rand(2, 3, 8, 8)),
        lambda: Workload(model := nn.Linear(3, 3), torch.rand(2, 3), optimizer=torch.optim.AdamW(model.parameters())),
    ],
)
def test_it_is_the_same_workload_to_a_profile_however_it_is_built(made, monkeypatch):
    """Otherwise the profile is lost if the model counts as large in another torch version."""
    for_real = build_simulated(made)
    monkeypatch.setattr(sim_prepare, "SMALL_BYTES", 0)
    without_memory = build_simulated(made)
    assert (for_real.fake, without_memory.fake) == (False, True)
    assert workload_of(for_real.workload) == workload_of(without_memory.workload)


@pytest.mark.slow
def test_it_is_the_same_plan_however_it_is_built(monkeypatch):
    plan = tune(small, devices="sim:2xRTX3090", n_trials=2, profile="off")
    monkeypatch.setattr(sim_prepare, "SMALL_BYTES", 0)
    other = tune(small, devices="sim:2xRTX3090", n_trials=2, profile="off")
    assert (plan.split, plan.ceilings, plan.samples_per_s) == (other.split, other.ceilings, other.samples_per_s)


@pytest.mark.usefixtures("nothing_is_small")
def test_a_function_is_built_under_fake_tensors_for_cards_that_are_not_there():
    with ExitStack() as closing:
        found = traced(small, SIM, closing)
    assert all(isinstance(parameter, FakeTensor) for parameter in found.workload.model.parameters())
    assert found.tracer.fake


@pytest.mark.usefixtures("nothing_is_small")
def test_a_function_that_reads_numbers_is_built_for_real_and_said_so():
    def reading() -> Workload:
        workload = small()
        assert workload.model[0].weight.abs().max().item() > 0
        return workload

    with ExitStack() as closing:
        found = traced(reading, SIM, closing)
    assert found.notes[0].kind == "real-tensors"


class Picky(nn.Module):
    """A model whose control flow depends on values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


@pytest.mark.usefixtures("nothing_is_small")
def test_what_can_not_be_traced_is_not_built_where_it_would_fill_this_machine(monkeypatch):
    def picky() -> Workload:
        return Workload(Picky(), torch.rand(4, 3))

    with ExitStack() as closing:
        found = traced(picky, SIM, closing)
    assert "real-tensors" in kinds(found.notes)
    assert "values-from-sample" in kinds(found.notes)
    monkeypatch.setattr(sim_prepare, "available_host_bytes", lambda: 95)
    said = r"\(DataDependentOutputException: .*needs 96 B, "
    with ExitStack() as closing, pytest.raises(WorkloadError, match=said):
        traced(picky, SIM, closing)
