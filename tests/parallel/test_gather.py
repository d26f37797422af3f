"""Outputs of replicas are combined, concatenated or rejected, and never changed silently."""

from __future__ import annotations

import enum
import math

import numpy as np
import pytest
import torch
from raised import raises

from autosplit.errors import WorkloadError
from autosplit.parallel.gather import Gathering, Link
from autosplit.parallel.loss_weights import DoubtfulWeights, ReduceWarning
from autosplit.workload.batch_layout import BatchLayout

CPU = Link(torch.device("cpu"))


def joined(*outputs, weights=None, dim=0):
    layout = BatchLayout.of((), 0, dim)
    return Gathering(layout, weights or [1.0 / len(outputs)] * len(outputs), CPU).join(list(outputs))


def tensor_weights(*counts):
    return [torch.tensor(float(count), dtype=torch.float64) / sum(counts) for count in counts]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class TestScalars:
    def test_a_mean_of_nothing_counts_for_nothing(self):
        losses = [torch.tensor(value, requires_grad=True) for value in (math.nan, 3.0)]
        whole = joined(*losses, weights=tensor_weights(0, 5))
        whole.backward()
        assert whole.item() == 3.0
        assert [loss.grad for loss in losses] == [None, 1.0]  # out of the graph: its own 0/0 would be NaN there
        assert joined(math.nan, 3.0, weights=tensor_weights(0, 5)) == 3.0

    def test_doubts_are_said_by_a_loss_only(self):
        weights = DoubtfulWeights([0.5, 0.5], "who knows")
        joined(torch.tensor(3), torch.tensor(4), weights=weights)
        joined(torch.ones(2), torch.ones(1), weights=weights)
        with pytest.warns(ReduceWarning, match="who knows"):
            joined(torch.tensor(1.0), torch.tensor(2.0), weights=weights)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
    def test_the_dtype_stays(self, dtype):
        loss = torch.tensor(2.0, dtype=dtype)
        whole = joined(loss, loss, weights=tensor_weights(1, 2))
        assert whole.dtype == dtype
        torch.testing.assert_close(whole, loss)


class TestPlainValues:
    @pytest.mark.parametrize("value", [Colour.RED, Level.LOW, "text", b"bytes", None, torch.float32, ("a", Level.HIGH)])
    def test_what_is_the_same_stays_what_it_is(self, value):
        whole = joined(value, value)
        assert whole == value
        assert type(whole) is type(value)

    def test_numbers_of_numpy_are_numbers(self):
        assert joined(np.int64(3), np.int64(3)) == 6
        assert joined(np.float32(1.0), np.float32(3.0), weights=[0.25, 0.75]) == 2.5
        assert joined(np.float32(1.0), np.float32(1.0), weights=[1.0, 1.0]) == 2.0

    @pytest.mark.parametrize("shape", [(1,), (1, 1), (3,)])
    def test_arrays_are_refused_even_where_they_agree(self, shape):
        """Each replica returned an array for one sample with the same value. The result had only one sample."""
        with raises(WorkloadError, "values"):
            joined(np.ones(shape), np.ones(shape))


# Caches of transformers


@pytest.fixture(scope="module")
def caches():
    pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
    from transformers import cache_utils

    return cache_utils


def filled(cache, batch_size, layers=2, length=5):
    for layer in range(layers):
        cache.update(torch.randn(batch_size, 2, length, 4), torch.randn(batch_size, 2, length, 4), layer)
    return cache


class TestCaches:
    @pytest.mark.parametrize("dim", [0, 1])
    def test_layers_are_joined_along_the_batch(self, caches, dim):
        parts = [filled(caches.DynamicCache(), size) for size in (1, 3)]
        whole = joined(*parts, dim=dim)
        assert type(whole) is caches.DynamicCache
        assert whole.get_seq_length() == 5
        for index, layer in enumerate(whole.layers):
            for name in ("keys", "values"):
                tensors = [getattr(part.layers[index], name) for part in parts]
                assert torch.equal(getattr(layer, name), torch.cat(tensors))
        assert [part.layers[0].keys.size(0) for part in parts] == [1, 3]
        filled(whole, 4, length=1)
        assert whole.get_seq_length() == 6

    def test_sliding_windows_keep_their_counters(self, caches):
        parts = [filled(caches.DynamicCache(), size, layers=0) for size in (1, 3)]
        for part, size in zip(parts, (1, 3), strict=True):
            part.layers = [caches.DynamicSlidingWindowLayer(sliding_window=4)]
            filled(part, size, layers=1)
        whole = joined(*parts)
        assert whole.layers[0].cumulative_length == 5
        assert whole.layers[0]._sliding_window_tensor.item() == 4
        assert whole.layers[0].keys.shape == (4, 2, 3, 4)

    def test_other_lengths_are_refused(self, caches):
        with raises(WorkloadError, "shapes"):
            joined(filled(caches.DynamicCache(), 1), filled(caches.DynamicCache(), 3, length=4))
        with raises(WorkloadError, "lengths"):
            joined(filled(caches.DynamicCache(), 1), filled(caches.DynamicCache(), 3, layers=1))

    def test_one_that_all_replicas_wrote_into_is_refused(self, caches):
        cache = filled(caches.DynamicCache(), 1)
        with raises(WorkloadError, "2", "DynamicCache"):
            joined(cache, cache)
