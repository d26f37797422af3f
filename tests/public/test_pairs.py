"""Batches of pairs: one sample is a pair. If a pair is two samples, the error shows how to change that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autosplit


class Pairs(nn.Module):
    """Encode both views of each pair, with a batch of shape (n, 2, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 16)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.net(pairs.flatten(0, 1)).view(-1, 2, 16)


def distance(outputs: Tensor) -> Tensor:
    first, second = outputs.unbind(1)
    return (first - second).square().mean()


def checked(model: nn.Module, batch: Tensor) -> Tensor:
    outputs = model(batch)
    assert len(outputs) % 2 == 0
    return distance(outputs.view(-1, 2, 16))


def viewed(model: nn.Module, batch: Tensor) -> Tensor:
    return distance(model(batch).view(-1, 2, 16))


def contrastive(model: nn.Module, batch: Tensor) -> Tensor:
    first, second = F.normalize(model(batch)).chunk(2)
    return F.cross_entropy(first @ second.T, torch.arange(len(first)))


@pytest.mark.parametrize("loss", [checked, viewed, contrastive])
def test_an_odd_batch_that_fails_gets_the_shape_of_pairs(loss):
    """The message was "raised AssertionError; fix it and run again", although the sample batch was right."""
    workload = autosplit.Workload(nn.Linear(32, 16), torch.randn(8, 32), compute_loss=loss)
    with pytest.raises(autosplit.AutosplitError, match=r"it ran with .* samples, but not with 1\. .*\(n, 2, \.\.\.\)"):
        autosplit.tune(workload, devices="cpu:8MiB", profile="off", n_trials=1, max_batch_size=16)


def test_a_ceiling_says_so_too():
    workload = autosplit.Workload(nn.Linear(32, 16), torch.randn(8, 32), compute_loss=contrastive)
    with pytest.raises(autosplit.AutosplitError, match=r"it ran with 8 samples, but not with \d+\. .*\(n, 2, \.\.\.\)"):
        autosplit.find_ceiling(workload, "cpu:64MiB")


def test_pairs_of_that_shape_are_tuned_and_split():
    model, pairs = Pairs(), torch.randn(8, 2, 32)
    workload = autosplit.Workload(model, pairs, compute_loss=lambda model, batch: distance(model(batch)))
    plan = autosplit.tune(
        workload, devices="cpu:8MiB,cpu:8MiB", strategy="balanced", profile="off", n_trials=1, max_batch_size=5
    )
    rows = torch.randn(plan.batch_size, 2, 32)
    torch.testing.assert_close(plan.wrap(model)(rows), model(rows))


def test_a_batch_that_fails_for_another_reason_gets_no_such_advice():
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if len(batch) == 16:
            raise ValueError("no such batch")
        return model(batch).square().mean()

    workload = autosplit.Workload(nn.Linear(32, 16), torch.randn(8, 32), compute_loss=loss)
    with pytest.raises(autosplit.AutosplitError, match="no such batch") as caught:
        autosplit.tune(workload, devices="cpu:8MiB", profile="off", n_trials=1, max_batch_size=16)
    assert "(n, 2, ...)" not in str(caught.value)
