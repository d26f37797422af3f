"""Losses with memory banks or running means, and losses over the whole batch: named as such, and left unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autosplit

BATCH_SIZE, CLASSES = 16, 8


class Bank(nn.Module):
    """Compare the outputs with those of earlier batches, as CrossBatchMemory of pytorch-metric-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.next, self.is_full = torch.zeros(64, CLASSES), 0, False

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows = (torch.arange(len(outputs)) + self.next) % 64
        self.bank = self.bank.to(outputs.dtype)
        self.bank[rows] = outputs.detach()
        self.next = (self.next + len(rows)) % 64
        return (outputs @ self.bank.T).logsumexp(1).mean() + F.cross_entropy(outputs, targets)


class Centred:
    """Subtract a running mean, as DINO's loss does."""

    def __init__(self) -> None:
        self.centre = torch.zeros(CLASSES)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs - self.centre.to(outputs.dtype), targets)
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return loss


class Noisy:
    """Draw noise from a generator of its own, which no seed resets."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        noise = torch.randn(outputs.shape, generator=self.generator, dtype=torch.float64).to(outputs.dtype)
        return F.cross_entropy(outputs + noise, targets)


def variances(model: nn.Module, batch: Any) -> Tensor:
    """VICReg without its invariance. It does not use the labels."""
    outputs = model(batch[0])
    return F.relu(1 - outputs.var(0, unbiased=False).add(1e-4).sqrt()).mean()


def correlations(model: nn.Module, batch: Any) -> Tensor:
    """Barlow Twins."""
    outputs = model(batch[0])
    outputs = (outputs - outputs.mean(0)) / (outputs.std(0, unbiased=False) + 1e-3)
    return (outputs.T @ outputs / len(outputs) - torch.eye(CLASSES)).square().sum()


def workload_of(**options: Any) -> autosplit.Workload:
    torch.manual_seed(0)
    batch = torch.randn(BATCH_SIZE, 12), torch.randint(CLASSES, (BATCH_SIZE,))
    return autosplit.Workload(nn.Linear(12, CLASSES), batch, optimizer=torch.optim.AdamW, **options)


@pytest.mark.parametrize("loss", [Bank, Centred])
def test_a_loss_that_keeps_values_is_named(loss):
    """The check said that the forward draws random numbers, and did not warn."""
    checks = autosplit.check(workload_of(loss_fn=loss()))
    assert [one.subject for one in checks if one.depends] == ["gradient", "loss"]
    assert "keeps values from one call to the next" in checks[-1].advice
    assert "random" not in checks[0].remark


def test_a_loss_with_random_numbers_of_its_own_is_not_doubted():
    assert not any(one.depends for one in autosplit.check(workload_of(loss_fn=Noisy())))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch warns in a trace
@pytest.mark.parametrize("loss", [Bank, Centred])
def test_a_loss_comes_back_with_its_values(loss):
    """The bank was full of outputs of the copy, and the running mean was a fake tensor that no step could use."""
    loss_fn = loss()
    before = {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(loss_fn).items()}
    autosplit.find_ceiling(workload_of(loss_fn=loss_fn), "cpu:1MiB")
    for name, value in before.items():
        after = vars(loss_fn)[name]
        assert torch.equal(after, value) if isinstance(value, Tensor) else after == value


@pytest.mark.parametrize("loss", [variances, correlations])
def test_a_loss_over_the_batch_that_ignores_the_labels_is_named(loss):
    """The advice was to pass all samples to each device as a table: autosplit.Whole(inputs)."""
    *_, cause = autosplit.check(workload_of(compute_loss=loss))
    assert cause.subject == "loss"
    assert "depends on the whole batch" in cause.advice
    assert "Whole" not in cause.advice
