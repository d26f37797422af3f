"""State that a forward leaves in buffers: memory banks and codebooks lose what the other devices add.

The gradient of the first step is right, because the state is read before it is updated. Later steps were not, and the
check reported nothing for the split.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.probe.check_result import Check
from autosplit.probe.gradient_check import check
from autosplit.workload.workload import Workload


class MemoryBank(nn.Module):
    """MoCo's queue of keys (facebookresearch/moco gathers the keys of all ranks before it stores them)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 32), dim=0))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        query, key = F.normalize(self.query(x), dim=1), F.normalize(self.key(x), dim=1)
        outputs = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        places = (self.position + torch.arange(len(key))) % self.queue.size(1)
        self.queue[:, places] = key.T
        self.position.add_(len(key))
        return outputs


class Codebook(nn.Module):
    """The moving averages of a VQ-VAE's codebook, in a tensor that each forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 8), nn.Linear(8, 40)
        self.register_buffer("uses", torch.ones(5))
        self.codes = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encode(x)
        nearest = torch.cdist(hidden, self.codes).argmin(1)
        self.uses = 0.9 * self.uses + 0.1 * F.one_hot(nearest, 5).sum(0)
        return self.decode(hidden + (self.codes[nearest] - hidden).detach())


class Harmless(nn.Module):
    """Buffers that a split leaves equal: a counter, a power iteration, a cache, and statistics of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.spectral_norm(nn.Linear(4, 8))
        self.norm, self.instance = nn.BatchNorm1d(8), nn.InstanceNorm1d(2, track_running_stats=True)
        self.head = nn.Linear(8, 40)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("positions", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.positions = torch.arange(8.0)
        hidden = self.norm(self.body(x)) + self.positions
        return self.head(self.instance(hidden.view(-1, 2, 4)).flatten(1))


def state_checks(model: nn.Module) -> list[Check]:
    torch.manual_seed(0)
    batch = torch.randn(12, 4), torch.randint(0, 30, (12,))
    found = check(Workload(model, batch, loss_fn=F.cross_entropy))
    return [one for one in found if one.subject.startswith("state in")]


def test_a_memory_bank_gets_the_keys_of_device_0_alone():
    (found,) = state_checks(MemoryBank())
    assert found.subject == "state in queue, position"
    assert found.split_error is not None
    assert found.split_error > 0.3
    assert found.accumulation_error == 0.0  # two micro-batches store the same keys as one batch
    assert "update the buffers after optimizer.step()" in found.advice


def test_a_codebook_counts_the_samples_of_device_0_alone():
    (found,) = state_checks(Codebook())
    assert found.subject == "state in uses"
    assert min(found.split_error or 0.0, found.accumulation_error or 0.0) > 0.01


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_state_that_no_split_changes_is_not_reported():
    assert state_checks(Harmless()) == []


def test_state_that_is_drawn_at_random_is_not_reported():
    class Drawn(Codebook):
        def forward(self, x: Tensor) -> Tensor:
            outputs = super().forward(x)
            self.uses = torch.rand(5)
            return outputs

    assert state_checks(Drawn()) == []
