"""Properties that distinguish workloads."""

from __future__ import annotations

import torch
from torch import nn

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
