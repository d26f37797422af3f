"""Outputs that are made from an earlier call's shapes are those of the operator."""

from __future__ import annotations

import pytest
import torch
import workloads
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.runtime.data_dependent import DataDependent
from autosplit.runtime.fake_copy import fake_mode
from autosplit.runtime.fake_results import FakeResults
from autosplit.runtime.memory_tracker import Tracker
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracer import Tracer
from autosplit.torch_versions import FakeTensor
from autosplit.workload.workload import Workload


class Counted(DataDependent):
    """Count the operators that run."""

    count = 0

    def run(self, func, args, kwargs):
        self.count += 1
        return super().run(func, args, kwargs)


def described(value):
    if isinstance(value, Tensor):
        assert type(value) is FakeTensor
        storage = value.untyped_storage().nbytes()
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, storage
    return tuple(map(described, value)) if isinstance(value, (tuple, list)) else value


CALLS = {
    "a new tensor": (lambda x: x * 2, True),
    "an integer and a float": (lambda x: (x.int() * 2, x.int() * 2.0), True),
    "a product in channels-last": (
        lambda x: F.conv2d(x.to(memory_format=torch.channels_last), torch.ones(3, 4, 1, 1)),
        False,
    ),
    "views": (lambda x: (x.view(-1), x.transpose(0, 1), x[1:], x.expand(2, *x.shape)), True),
    "in place": (lambda x: x.clone().add_(1).mul_(2), True),
    "several outputs": (lambda x: F.max_pool2d(x, 2, return_indices=True), True),
    "a split": (lambda x: x.split(2), False),
    "a loss that keeps its input's memory": (lambda x: F.mse_loss(x, x + 1), False),
    "rows by values": (lambda x: x[x > 0], False),
    "a resize": (lambda x: x.clone().resize_(2, 2), False),
    "dropout": (lambda x: F.dropout(x, 0.5), True),
}


@pytest.mark.parametrize(("call", "is_known"), CALLS.values(), ids=list(CALLS))
@pytest.mark.parametrize("grad", [False, True])
def test_a_repeated_call_returns_what_the_operator_returns(call, is_known, grad):
    counted, results = Counted(), FakeResults()
    with fake_mode(), torch.set_grad_enabled(grad):
        inputs = [torch.empty(4, 4, 8, 8) for _ in range(3)]
        counts, found = [], []
        for number, values in enumerate(inputs):
            before = counted.count
            with Tracker(
                ["device 0"], [None], data_dependent=counted, fake_results=results if number else None
            ) as tracker:
                tracker.adopt(values, 0)
                outputs = call(values)
                found.append((described(outputs), tracker.peak_bytes, tracker.live_bytes))
            counts.append(counted.count - before)
    assert found[0] == found[1] == found[2]
    assert (counts[2] == 0) is is_known


def test_a_known_number_is_not_forgotten():
    """An optimizer reads its step count from a fake tensor with a constant."""
    results = FakeResults()
    with fake_mode(), Tracker(["device 0"], [None], fake_results=results):
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
