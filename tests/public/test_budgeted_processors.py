"""Budgeted CPU devices: every ceiling is the last batch that runs, and a plan trains within its budgets."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from error_types import DoesNotFitError
from raised import raises
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autosplit

INPUTS = torch.randn(200, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(2))
MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)),
    "deep": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 4)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 16)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(56, 4)
    ),
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def workload(model: str = "mlp", optimizer: str = "sgd") -> autosplit.Workload:
    torch.manual_seed(0)
    batch = (INPUTS[:4], TARGETS[:4])
    return autosplit.Workload(MODELS[model](), batch, loss_fn=F.cross_entropy, optimizer=OPTIMIZERS[optimizer])


def runs(model: str, optimizer: str, budget: str, samples: int) -> bool:
    """Return whether a training step with this many samples fits the budget."""
    try:
        autosplit.measure(workload(model, optimizer), devices=f"cpu:{budget}", split=(samples,))
    except DoesNotFitError:
        return False
    return True


@pytest.mark.parametrize(
    ("model", "optimizer", "budget"),
    [
        ("mlp", "sgd", "40KiB"),
        ("mlp", "adamw", "40KiB"),
        ("deep", "sgd", "30KiB"),
        ("deep", "adamw", "50KiB"),
        ("convolution", "sgd", "30KiB"),
        ("convolution", "adamw", "60KiB"),
    ],
)
def test_a_ceiling_is_the_last_batch_that_runs(model, optimizer, budget):
    ceiling = autosplit.find_ceiling(workload(model, optimizer), f"cpu:{budget}", role="primary")
    assert ceiling.confirmed
    assert ceiling.peak_bytes <= ceiling.capacity_bytes
    assert runs(model, optimizer, budget, ceiling.batch_size)
    assert not runs(model, optimizer, budget, ceiling.batch_size + 1)


@pytest.mark.parametrize("role", ["rank", "primary", "replica", "eval", "resume", "save"])
def test_a_larger_budget_holds_more(role):
    small, large = (autosplit.find_ceiling(workload(), f"cpu:{size}KiB", role=role) for size in (30, 60))
    assert 0 < small.batch_size < large.batch_size


@pytest.mark.parametrize("role", ["rank", "primary", "replica", "eval"])
def test_a_batch_that_is_never_to_be_exceeded_bounds_a_ceiling(role):
    ceiling = autosplit.find_ceiling(workload(), "cpu:60KiB", role=role, max_batch_size=10)
    assert (ceiling.batch_size, ceiling.limited_by) == (10, "max_batch_size")


@functools.cache
def tuned(devices: str) -> autosplit.Plan:
    return autosplit.tune(
        workload(), devices=devices, effective_batch_size=150, n_trials=2, profile="off", isolate=False
    )


@pytest.fixture(scope="module", params=["cpu:60KiB,cpu:40KiB", "cpu:40KiB,cpu:60KiB", "cpu:50KiB"])
def plan(request) -> autosplit.Plan:
    return tuned(request.param)


def with_room(plan: autosplit.Plan, room_bytes: int) -> autosplit.Plan:
    """Return the plan with larger budgets."""
    devices = (replace(one, capacity_bytes=one.capacity_bytes + room_bytes) for one in plan.devices)
    pairs = zip(plan.main.seats, devices, strict=True)
    return replace(plan, layouts=(replace(plan.main, seats=tuple(replace(seat, device=one) for seat, one in pairs)),))


class TestPlans:
    def test_ran_real_steps_within_the_budgets(self, plan):
        assert plan.real_steps > 0
        assert not plan.simulated
        assert all(seat.peak_bytes <= seat.device.capacity_bytes for seat in plan.main.seats)

    def test_adds_up(self, plan):
        assert sum(plan.split) == plan.batch_size
        assert (plan.effective_batch_size, plan.accumulation_steps) == (150, -(-150 // plan.batch_size))

    def test_trains_within_its_budgets_as_one_device_does(self, plan):
        model, reference = workload().model, workload().model
        wrapped = plan.wrap(model)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
        loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_sampler=plan.batch_sampler(len(INPUTS)))
        # This loop keeps its batch's targets and a loss, up to 2 KiB for this model. The tuned step does not.
        with with_room(plan, 2048).budgets() as tracker:
            for step in plan.steps(loader):
                for inputs, targets in step:
                    step.backward(F.cross_entropy(wrapped(inputs), targets))
                optimizers[0].step()
                optimizers[0].zero_grad()
        for part in (slice(0, 150), slice(150, 200)):
            F.cross_entropy(reference(INPUTS[part]), TARGETS[part]).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        peaks = zip(tracker.peak_bytes, plan.devices, strict=True)
        assert all(peak <= device.capacity_bytes + 2048 for peak, device in peaks)

    def test_a_gradient_inside_a_step_is_that_of_the_whole_batch(self, plan):
        """VQGAN's adaptive weight needs it while the replicas of an optimizer step are kept."""
        model, reference = workload().model, workload().model
        wrapped, batch = plan.wrap(model), slice(0, plan.batch_size)
        with with_room(plan, 2**20).budgets(), wrapped.no_sync():
            loss = F.cross_entropy(wrapped(INPUTS[batch]), TARGETS[batch])
            found = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
            loss.backward()
        expected_loss = F.cross_entropy(reference(INPUTS[batch]), TARGETS[batch])
        expected = torch.autograd.grad(expected_loss, [*reference.parameters()])
        torch.testing.assert_close(found, expected)
        wrapped.synchronize()
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*expected])

    def test_a_batch_above_its_ceilings_is_refused(self, plan):
        wrapped = plan.wrap(workload().model)
        with raises(autosplit.AutosplitError):
            wrapped.split_of(sum(plan.ceilings) + 1)

    def test_a_step_that_exceeds_a_budget_names_the_device(self, plan):
        wrapped = plan.wrap(workload().model)
        wrapped.ceilings = None
        inputs = INPUTS.repeat(40, 1)
        with pytest.raises(autosplit.OutOfMemoryError, match=r"^cpu:\d is out of memory"), plan.budgets():
            wrapped(inputs).sum().backward()
