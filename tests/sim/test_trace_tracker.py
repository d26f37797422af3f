"""A tracker of fake tensors counts what the tracker of real tensors counts, and what a GPU's kernels need."""

from __future__ import annotations

import pytest
import torch
import workloads
from marks import for_release
from torch import nn
from torch.nn import functional as F

from autosplit.runtime.memory_tracker import Tracker, rounded
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import run_placed
from autosplit.sim.fake_copy import fake_mode
from autosplit.sim.fake_trainee import fake_training_copy
from autosplit.sim.trace_tracker import BoundedEntry, TraceTracker
from autosplit.sim.tracer import Tracer
from autosplit.workload.workload import Workload


def char_gpt() -> Workload:
    return workloads.char_gpt(width=32, depth=2, heads=2)


def mlp() -> Workload:
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.LayerNorm(50), nn.Dropout(0.1), nn.Linear(50, 10))
    return Workload(model, (torch.randn(4, 20), torch.randint(0, 10, (4,))), loss_fn=F.cross_entropy)


def lstm() -> Workload:
    return Workload(workloads.Recurrent(nn.LSTM), torch.randn(4, 6, 16))


def frozen_first() -> Workload:
    workload = mlp()
    workload.model[0].requires_grad_(False)
    return workload


@pytest.fixture(params=[True, False], ids=["onednn", "native"])
def _onednn(request, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", request.param)


def peaks_of_two_steps(trainee, splits, tracker_for) -> list[tuple[int, ...]]:
    shape = StepShape(splits)
    return [run_placed(trainee, shape, tracker_for(len(splits[0])), lambda phase: None) for _ in range(2)]


def assert_fake_is_real(make, splits):
    real_tracker = lambda count: Tracker([f"cpu:{index}" for index in range(count)], [None] * count)
    real = peaks_of_two_steps(training_copy(make()), splits, real_tracker)
    assert peaks_of_two_steps(fake_training_copy(make(), fake_mode()), splits, TraceTracker) == real
    assert real[0][0] <= real[1][0]  # the second step has the optimizer's state from the start


@pytest.mark.usefixtures("_onednn")
@pytest.mark.parametrize("make", [for_release(char_gpt), mlp, lstm])
@pytest.mark.parametrize("splits", [((5,),), ((2, 3),), ((0, 5, 2),), ((3, 4), (3, 4))], ids=str)
def test_fake_peaks_are_real_peaks_to_the_byte(make, splits):
    assert_fake_is_real(make, splits)


@pytest.mark.parametrize("splits", [((5,),), ((2, 3),), ((3, 4), (3, 4))], ids=str)
def test_what_is_frozen_has_neither_gradient_nor_optimizer_state(splits):
    assert_fake_is_real(frozen_first, splits)
    tracer = Tracer(frozen_first(), fake=True, like_gpu=False)
    parts = tracer.trace(StepShape(splits)).parts[0]
    parameters = list(tracer.trainee.models.given.parameters())
    trained = [p for p in parameters if p.requires_grad]
    assert 0 < len(trained) < len(parameters)
    frozen_bytes = sum(rounded(p.nbytes) for p in parameters if not p.requires_grad)
    trained_bytes = sum(rounded(p.nbytes) for p in trained)
    assert frozen_bytes > 0
    assert parts.parameters_bytes >= frozen_bytes + trained_bytes
    assert parts.optimizer_bytes == 2 * trained_bytes  # AdamW's two moments
    assert {id(p) for p in trained} == {id(p) for p in tracer._with_gradient}


def test_a_peak_is_told_by_the_kinds_of_its_storages():
    with TraceTracker(1) as tracker:
        weight = torch.zeros(100)
        tracker.adopt(weight, 0)
        tracker.classify(weight, "parameters")
        product = weight.expand(2, 100) * 2
        del product
        total = weight.sum()  # after the peak
        assert tracker.peak_account(0) == {"parameters": 512, "activations": 1024}
        assert tracker.peak_bytes == [sum(tracker.peak_account(0).values())]
        del total
    assert tracker.bounded_entries() == (
        BoundedEntry("parameters", 0, 400, block=0),
        BoundedEntry("activations", 0, 800, block=1),
        BoundedEntry("activations", 0, -800, block=1),
        BoundedEntry("activations", 0, 4, block=2),
        BoundedEntry("activations", 0, -4, block=2),
    )


def test_what_an_update_allocates_is_charged_again():
    with TraceTracker(1) as tracker:
        weight = torch.zeros(100)
        tracker.adopt(weight, 0)
        repeat = tracker.repeatable(lambda: weight.mul(2))
        assert repeat is not None
    with TraceTracker(1) as other:
        repeat(other)
        assert other.peak_bytes == [512]
        assert other.live_bytes == [0]
        assert [entry.nbytes for entry in other.bounded_entries()] == [400, -400]


def test_an_update_that_frees_gradients_is_not_repeated():
    with TraceTracker(1) as tracker:
        gradients = [torch.zeros(100)]
        tracker.adopt(gradients[0], 0)
        tracker.classify(gradients[0], "gradients")
        assert tracker.repeatable(gradients.clear) is None


def test_a_parameters_first_gradient_is_noted():
    linear = nn.Linear(3, 2)
    inputs = torch.ones(4, 3)
    with TraceTracker(1) as tracker:
        for tensor in (linear.weight, linear.bias, inputs):
            tracker.adopt(tensor, 0)
        linear(inputs).sum().backward()
        assert [(arrival.nbytes, arrival.is_copy) for arrival in tracker.arrivals].count((24, False)) == 1
        linear(inputs).sum().backward()  # added to the first gradients
        assert len(tracker.arrivals) == 2
        linear.zero_grad(set_to_none=True)
