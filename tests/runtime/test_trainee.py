"""A copy is trained. The live model and optimizer stay identical to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from raised import raises
from torch import nn
from torch.nn import functional as F
from training_copies import BATCH, OPTIMIZERS, CopyTests, gan, live, net, same, snapshot, workload
from workloads import small

from autosplit.errors import WorkloadError
from autosplit.rng import preserved_rng
from autosplit.runtime.memory_tracker import Tracker
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import run_placed
from autosplit.workload.workload import Workload


def real_step(trainee, n: int = 6) -> None:
    trainee.step(trainee.models, [trainee.batch(n)], [n])


class TestRealCopies(CopyTests):
    def copied(self, given):
        return training_copy(given)

    def tracker(self, num_devices):
        return Tracker([f"device {index}" for index in range(num_devices)], [None] * num_devices)

    def test_live_optimizers(self):
        given = gan()
        optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in given.model.items()}
        given = Workload(given.model, given.sample_batch, step=given.step, optimizer=optimizers)
        before = snapshot(given.model, optimizers.values())
        with preserved_rng():
            self.run(self.copied(given), (2, 2))
        assert same(before, snapshot(given.model, optimizers.values()))

    def test_meta_is_for_simulated_devices(self):
        with torch.device("meta"):
            model = net()
        with raises(WorkloadError, "0.weight"):
            self.copied(workload(model))


class TestNothingIsTouched:
    def test_random_states(self):
        numpy = pytest.importorskip("numpy")
        before = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist())
        with preserved_rng():
            torch.rand(3), random.random(), numpy.random.rand()
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


class TestTwins:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_steps_as_the_live_optimizer_would(self, name):
        model, optimizer = live(name)
        model.eval()
        trainee = training_copy(workload(model, optimizer=optimizer))
        trainee.models.given.eval()
        real_step(trainee)
        optimizer._optimizer_step_post_hooks = {}
        optimizer.zero_grad()
        F.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
        for ours, theirs in zip(trainee.models.given.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


class TestEvaluation:
    def test_calls_the_model_as_compute_loss_does(self):
        """The batch of a compute_loss was passed to the model. Only compute_loss understands it."""
        given = Workload(net(), BATCH, compute_loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        trainee = training_copy(given)
        loss = trainee.evaluate(trainee.models, trainee.batch(5))
        assert loss.dim() == 0
        assert not loss.requires_grad

    def test_restores_mixed_modes(self):
        model = net()
        model[1].eval()
        trainee = training_copy(workload(model))
        trainee.evaluate(trainee.models, trainee.batch(5))
        assert trainee.models.given.training
        assert not trainee.models.given[1].training


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulated_steps_are_one_step(reduction):
    def loss_fn(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction=reduction)

    model = nn.Linear(4, 3).double()
    batch = (torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,)))
    results = []
    for splits in (((6,),), ((4,), (2,))):
        given = Workload(
            model, batch, loss_fn=loss_fn, loss_reduction=reduction, optimizer=lambda p: torch.optim.SGD(p, 0.1)
        )
        trainee = training_copy(given)
        whole = trainee.batch(6)
        batches = [whole] if len(splits) == 1 else [tuple(t[:4] for t in whole), tuple(t[4:] for t in whole)]
        trainee.step(trainee.models, batches, [sum(split) for split in splits])
        results.append(trainee.models.given.weight)
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_gradients_in_buckets_train_as_others_do(num_ranks):
    """A rank's gradients are moved into its buckets for all dtypes."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.single, self.double_ = nn.Linear(4, 3), nn.Linear(3, 2).double()

        def forward(self, x):
            return self.double_(self.single(x).double())

    def loss(module, inputs):
        return module(inputs).square().mean()

    model = Model()

    trainee = training_copy(Workload(model, torch.randn(4, 4), compute_loss=loss, optimizer=torch.optim.SGD))
    before = [parameter.clone() for parameter in trainee.parameters()]
    shape = StepShape(((4,),), "rank", num_ranks)
    run_placed(trainee, shape, Tracker(["device 0"], [None]), lambda _phase: None)
    loss(model, trainee.batch(4)).backward()
    for parameter, old, given in zip(trainee.parameters(), before, model.parameters(), strict=True):
        assert torch.allclose(parameter, old - 1e-3 * given.grad)
        assert not torch.equal(parameter, old)
        assert parameter.grad is None


@pytest.mark.parametrize("factor", [1.0, 1e6, float("inf")])
def test_fp16_has_the_optimizers_state_from_the_first_step(factor):
    """GradScaler skips the optimizer if a gradient overflows, as in the first fp16 steps with scale 65536.

    So there was no state to measure, 8 bytes per parameter, and the ceiling was too high by that.
    """
    loss = lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) * factor
    trainee = training_copy(small(loss_fn=loss, precision="fp16"), device=torch.device("cpu"))
    trainee.step(trainee.models, [trainee.batch(4)], [4])
    states = trainee.optimizers.given.state.values()
    assert len(states) == len(trainee.parameters())
    assert all({"exp_avg", "exp_avg_sq"} <= state.keys() for state in states)
