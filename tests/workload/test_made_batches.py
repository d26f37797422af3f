"""`make_batch` gives the number of samples. No tensor of the batch has to show it."""

from __future__ import annotations

import pytest
import torch
from ragged_models import RAGGED
from raised import raises
from torch import nn

from autosplit import Workload
from autosplit.errors import UserCodeError, WorkloadError
from autosplit.workload.batch import resize
from autosplit.workload.batch_layout import AmbiguousBatchError, read, read_batch
from autosplit.workload.model_call import assumptions
from autosplit.workload.tree import Node
from autosplit.workload.workload import made_batch


def points(n: int):
    """Return all points of n clouds, 16 each. Nothing has n rows."""
    return torch.zeros(16 * n, 3)


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_sample_batch_is_counted_where_small_batches_grow(name, n):
    workload = RAGGED[name].workload(n)
    assert workload.sample_batch_size == n
    made_batch(workload, 7)


@pytest.mark.parametrize("name", [name for name, ragged in RAGGED.items() if not ragged.is_cut])
def test_without_make_batch_the_advice_is_to_pass_it(name):
    with raises(WorkloadError):
        RAGGED[name].workload(make_batch=None)


@pytest.mark.parametrize("name", [name for name, ragged in RAGGED.items() if ragged.is_cut])
def test_lists_of_samples_are_repeated_without_make_batch(name):
    workload = RAGGED[name].workload(3, make_batch=None)
    assert workload.sample_batch_size == 3
    model, compute_loss = workload.model, workload.compute_loss
    batch = workload.sample_batch
    torch.testing.assert_close(compute_loss(model, resize(batch, 6, 0)), compute_loss(model, batch))


def test_a_batch_that_does_not_show_its_size_is_made_again():
    ragged = torch.zeros(37, 3), torch.zeros(2, 5)
    workload = Workload(nn.Linear(3, 1), ragged, make_batch=lambda n: (points(n), torch.zeros(2, 5)))
    assert workload.sample_batch_size == 4
    assert workload.sample_batch[0].shape == (64, 3)
    assert any("it used make_batch(4) instead" in note.text for note in assumptions(workload))


def test_wrong_numbers_of_samples_are_refused():
    data = torch.zeros(4, 2)
    workload = Workload(nn.Linear(2, 2), data, make_batch=lambda n: data[:n])
    with raises(WorkloadError, "9", "4"):
        made_batch(workload, 9)


def test_errors_of_make_batch_are_its_own():
    def failing(n):
        raise OSError("no such folder")

    with pytest.raises(UserCodeError, match="make_batch raised OSError: no such folder"):
        Workload(nn.Linear(3, 1), (torch.zeros(37, 3), torch.zeros(2, 5)), make_batch=failing)


def test_random_numbers_are_as_before():
    model = nn.Linear(2, 2)
    before = torch.get_rng_state()
    Workload(model, points(1), make_batch=lambda n: torch.randn(n, 2))
    assert torch.equal(before, torch.get_rng_state())


class TestLists:
    def test_channels_are_no_samples(self):
        """Eight images of three channels, with three boxes each, counted as three samples."""
        images = [torch.zeros(3, 16, 16) for _ in range(8)]
        assert read_batch((images, [{"boxes": torch.zeros(3, 4)} for _ in range(8)])).size == 8

    def test_two_readings_are_refused(self):
        images = [torch.zeros(3, 16, 16) for _ in range(8)]
        with raises(AmbiguousBatchError):
            read_batch({"images": images})
        assert read(Node.of({"images": images}), 0, expected=8).size == 8

    def test_a_list_of_dicts_is_a_batch(self):
        """The models of detectron2 take such batches."""
        samples = [{"image": torch.zeros(3, 8 + index, 8), "height": 8} for index in range(5)]
        assert read_batch(samples).size == 5
