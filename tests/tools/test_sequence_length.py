"""A workload at another sequence length: only sequences are cropped or repeated."""

from __future__ import annotations

import pytest
import torch
from raised import raises
from torch import nn

from autosplit.errors import UserCodeError, WorkloadError
from autosplit.tools.sequence_length import at_length
from autosplit.workload.tree import Whole
from autosplit.workload.workload import Workload, made_batch


def resized(batch, length, **options):
    return at_length(Workload(nn.Linear(1, 1), batch, **options), length).sample_batch


@pytest.mark.parametrize("length", [3, 15])
def test_sequences_are_cropped_or_repeated_and_labels_of_samples_stay(length):
    tokens, mask, label = torch.arange(12).view(2, 6), torch.ones(2, 1, 6, 6), torch.arange(2)
    found = resized({"tokens": tokens, "mask": mask, "label": label, "name": "x"}, length)
    assert found["tokens"].tolist() == [[row[i % 6] for i in range(length)] for row in tokens.tolist()]
    assert found["mask"].shape == (2, 1, length, length)
    assert found["label"] is label
    assert found["name"] == "x"


def test_tables_of_length_by_length_go_with_it():
    found = resized((torch.zeros(4, 6, 8), Whole(torch.zeros(6, 6)), torch.zeros(6, 6)), 3)
    assert [found[0].shape, found[1].value.shape, found[2].shape] == [(4, 3, 8), (3, 3), (3, 3)]


def test_the_length_comes_first_where_the_batch_comes_second():
    assert resized((torch.zeros(6, 4, 8),), 3, batch_dim=1)[0].shape == (3, 4, 8)


def test_make_batch_may_have_no_longer_samples_than_it_is_asked_for():
    """A test call with twice the length showed whether `make_batch` uses it. Data that ended there raised an error."""
    data = torch.arange(40).view(4, 10)
    assert resized(data, 10, make_batch=lambda n, length: data[:n, :length]).shape == (4, 10)
    assert resized(data, 1, make_batch=lambda n, length: data[:n, :length]).shape == (4, 1)


def test_what_make_batch_raises_is_told_as_its_own():
    def boo(n, length):
        raise ValueError("boo")

    with pytest.raises(UserCodeError, match="make_batch raised ValueError: boo"):
        resized(torch.zeros(4, 5), 3, make_batch=boo)


def test_make_batch_is_asked_for_the_length():
    workload = Workload(
        nn.Linear(1, 1), torch.zeros(2, 6), make_batch=lambda n, length=6: torch.full((n, length + 1), 7.0)
    )
    found = at_length(workload, 3)
    assert found.sample_batch.shape == (2, 4)
    assert made_batch(found, 5).shape == (5, 4)


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (torch.zeros(4), {}),
        (torch.zeros(4, 5), {"make_batch": lambda n: torch.zeros(n, 5)}),
        (torch.zeros(4, 5), {"make_batch": lambda n, length, /: torch.zeros(n, length)}),
    ],
)
def test_what_has_no_length_is_refused(batch, options):
    with raises(WorkloadError):
        resized(batch, 3, **options)
