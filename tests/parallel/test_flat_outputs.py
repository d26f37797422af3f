"""Outputs with several rows for each sample, and inputs that cannot be cut.

Mixtral's router logits have a row for each token. Time-first outputs look similar: `(6, 3, 5)` for 3 samples.
"""

from __future__ import annotations

import pytest
import torch
from raised import raises
from torch import Tensor, nn

from autosplit.errors import WorkloadError
from autosplit.parallel.balanced import BalancedDataParallel


class Routed(nn.Module):
    """Logits for each sample, and a router's logits for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(10, 4), nn.Linear(4, 5)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(tokens)
        return hidden.mean(1), self.router(hidden.flatten(0, 1))


class TimeFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


def wrap(module: nn.Module, *split: int) -> BalancedDataParallel:
    return BalancedDataParallel(None, module, ["cpu"] * len(split), split=split)


@pytest.mark.parametrize("split", [(4, 4), (5, 3)], ids=str)
def test_rows_of_tokens_are_joined_in_the_order_of_the_samples(split):
    module, tokens = Routed(), torch.randint(10, (8, 6))
    for ours, theirs in zip(wrap(module, *split)(tokens), module(tokens), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("split", [(3, 3), (4, 2)], ids=str)
def test_time_first_outputs_are_refused_if_the_times_are_a_multiple_of_the_samples(split):
    with raises(WorkloadError, "0", "output.transpose(0, 1)"):
        wrap(TimeFirst(), *split)(torch.randn(6, 12, 5))


def test_a_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    with raises(WorkloadError, "inputs[0]"):
        wrap(nn.Linear(3, 3), 1, 1)(nested)


def test_a_sparse_tensor_of_as_many_rows_is_refused():
    with pytest.raises(WorkloadError, match=r"inputs\[0\] is a sparse tensor of 4 rows.*Whole"):
        wrap(nn.Linear(4, 3), 3, 1)(torch.eye(4).to_sparse())


def test_a_filled_cache_is_refused():
    """Each device got the entries of all samples."""
    transformers = pytest.importorskip("transformers")

    class Cached(nn.Module):
        def forward(self, x: Tensor, cache: object) -> Tensor:
            return x

    cache = transformers.DynamicCache()
    wrap(Cached(), 3, 1)(torch.randn(4, 2), cache)
    cache.update(torch.randn(4, 2, 5, 3), torch.randn(4, 2, 5, 3), 0)
    with pytest.raises(WorkloadError, match=r"inputs\[1\] is a DynamicCache with entries.*or an empty cache"):
        wrap(Cached(), 3, 1)(torch.randn(4, 2), cache)
