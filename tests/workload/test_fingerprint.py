"""Properties that distinguish workloads."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autosplit.profiles.key import workload_of
from autosplit.workload.workload import Workload


def described(*, frozen: bool, training: bool = True):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).train(training)
    model[1].train(training and not frozen)
    return workload_of(Workload(model, torch.randn(4, 4)))


def test_a_part_in_evaluation_mode_counts_in_a_model_that_trains():
    """A model with a frozen BatchNorm got the plan of a model without, whose checks did not apply."""
    assert described(frozen=True) != described(frozen=False)


def test_a_model_that_was_left_in_evaluation_mode_is_trained_all_the_same():
    assert described(frozen=False, training=False) == described(frozen=False)


class Own(torch.optim.AdamW):
    """An optimizer of the user. torch wraps its `step` when the first one is made."""

    def step(self, closure=None):
        return super().step(closure)


def test_the_hooks_of_a_process_do_not_count():
    """A hook that counted the updates of all optimizers gave each tuning another key."""
    updates, batch = [], (torch.randn(4, 2), torch.randn(4, 2))

    def description():
        model = nn.Linear(2, 2)
        given = Workload(model, batch, loss_fn=nn.MSELoss(), optimizer=Own(model.parameters()))
        return workload_of(given)["optimizer"]

    before = description()
    hook = register_optimizer_step_post_hook(lambda *_: updates.append(1))
    try:
        assert description() == before
        updates.append(1)
        assert description() == before
    finally:
        hook.remove()
