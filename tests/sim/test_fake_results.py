"""Outputs that are made from an earlier call's shapes are those of the operator."""

from __future__ import annotations

import pytest
import torch
import workloads
from torch import nn
from torch.nn import functional as F

from autosplit.runtime.protocol import StepShape
from autosplit.sim.data_dependent import DataDependent
from autosplit.sim.fake_copy import fake_mode
from autosplit.sim.fake_results import FakeResults
from autosplit.sim.trace_tracker import TraceTracker
from autosplit.sim.tracer import Tracer
from autosplit.workload.workload import Workload


class Counted(DataDependent):
    """Count the operators that run."""

    count = 0

    def run(self, func, args, kwargs):
        self.count += 1
        return super().run(func, args, kwargs)


def test_a_known_number_is_not_forgotten():
    """An optimizer reads its step count from a fake tensor with a constant."""
    results = FakeResults()
    with fake_mode(), TraceTracker(1, fake_results=results):
        counts = []
        for number in (1.0, 2.0):
            step = torch.tensor(number)
            counts.append((step + 1).item())
    assert counts == [2.0, 3.0]


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def deep() -> Workload:
    return Workload(Deep(), (torch.randn(4, 8), torch.randn(4, 8)), F.mse_loss, optimizer=torch.optim.Adam)


@pytest.mark.parametrize("like_gpu", [True, False])
@pytest.mark.parametrize("make", [deep, lambda: workloads.char_gpt(width=32, depth=2, heads=2)])
def test_traces_are_the_same_without_known_results(make, like_gpu):
    shapes = [
        StepShape(((4,),)),
        StepShape(((3, 2),)),
        StepShape(((3, 2),), accumulates=True),
        StepShape(((5,),), "rank", num_ranks=2),
        StepShape(((4,),), "eval"),
    ]
    known, plain = (Tracer(make(), fake=True, like_gpu=like_gpu) for _ in range(2))
    plain._fake_results = None
    for shape in shapes:
        one, other = known.trace(shape), plain.trace(shape)
        assert (one.peak_bytes, one.parts, one.entries) == (other.peak_bytes, other.parts, other.entries)
        for phase in ("broadcast", "micro", "reduce", "update"):
            for event, same in zip(one.events(phase), other.events(phase), strict=True):
                assert str(event) == str(same)


def test_a_second_trace_runs_few_operators():
    """A trace of 2,000 parameter tensors took 100 s, because FakeTensorMode ran each operator of each layer."""
    tracer = Tracer(deep(), fake=True, like_gpu=True)
    tracer.data_dependent = counted = Counted()
    tracer.trace(StepShape(((4,),)))
    first = counted.count
    assert first < 120
    counted.count = 0
    tracer.trace(StepShape(((4,),), accumulates=True))
    assert counted.count < 10
