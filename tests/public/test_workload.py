"""Arguments of a workload, and sample batches from a loader."""

from __future__ import annotations

import collections
import inspect
import itertools
import multiprocessing
import random

import numpy as np
import pytest
import torch
from error_types import WorkloadError
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from autosplit import AutosplitError, Whole, Workload

X = torch.arange(8.0).view(4, 2)
Y = torch.arange(4)


LINEAR = nn.Linear(2, 2)


def test_sample_batch_size_along_its_dimension():
    assert Workload(nn.Linear(2, 2), torch.zeros(7, 3, 2), batch_dim=1).sample_batch_size == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"precision": "fp64"}, "precision is 'fp64'"),
        ({"fits": "evaluation"}, "find_ceiling"),
        ({"loss_reduction": "max"}, "loss_reduction is 'max'"),
        ({"loss_scope": "token"}, "loss_scope is 'token'"),
        ({"loss_fn": len, "step": len}, "loss_fn and step are given"),
        ({"compute_loss": 3}, "compute_loss is 3"),
        ({"loss_fn": nn.CrossEntropyLoss}, "loss_fn is the class CrossEntropyLoss"),
        ({"checkpointing": "Block"}, "checkpointing is 'Block'"),
        ({"make_batch": "x"}, "make_batch is 'x'"),
        ({"batch_dim": -1}, "batch_dim is -1"),
        ({"batch_dim": True}, "batch_dim is True"),
        ({"model": nn.Linear}, r"model is the class Linear, .*'in_features'\)"),
        ({"model": 3}, "model is 3"),
        ({"model": None}, "model is None"),
        ({"model": [LINEAR, LINEAR]}, "Several nn.Modules need step="),
        ({"model": [], "step": len}, r"model is a list of \[\]"),
        ({"model": {"a": 3}, "step": len}, r"model is a dict of \['int'\]"),
        ({"loss_fn": len}, r"the sample batch is a Tensor"),
        ({"sample_batch": [(X[0], 1)] * 3, "loss_fn": len}, r"is a list"),
        (
            {"sample_batch": (X, torch.zeros(5, 7))},
            "disagree on the batch size",
        ),
        ({"sample_batch": DataLoader([X])}, r"is a DataLoader"),
        ({"sample_batch": torch.zeros(0, 2)}, "The batch is empty"),
        ({"model": nn.DataParallel(nn.Linear(2, 2))}, "model is wrapped in DataParallel"),
        (
            {"sample_batch": np.zeros((4, 2))},
            "no tensor with a dimension 0.*",
        ),
        ({"sample_batch": {}}, "no tensor with a dimension 0"),
    ],
)
def test_what_is_no_training_step(arguments, message):
    given = {"model": LINEAR, "sample_batch": X, **arguments}
    with pytest.raises(WorkloadError, match=message) as caught:
        Workload(given.pop("model"), given.pop("sample_batch"), **given)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == AutosplitError.exit_code == 2


def test_a_factory_may_be_a_class():
    assert Workload(lambda: LINEAR, X).model() is LINEAR
    Workload(nn.Flatten, X)


def test_several_models_with_a_step():
    Workload({"generator": LINEAR, "critic": LINEAR}, X, step=lambda *args: None)
    Workload((LINEAR, LINEAR), X, step=lambda *args: None)


def test_options_are_keywords():
    with pytest.raises(TypeError):
        Workload(LINEAR, (X, Y), None, F.cross_entropy)


class Sequences(torch.utils.data.Dataset):
    """Texts of different lengths. The longest is third from the end."""

    lengths = (3, 5, 2, 4, 3, 1, 9, 2, 4)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((self.lengths[index],), index)


class Endless(IterableDataset):
    def __iter__(self):
        return (torch.zeros(2) for _ in itertools.count())


def padded(samples):
    return pad_sequence(samples, batch_first=True)


def loader_of(batch_size=2, **options):
    return DataLoader(Sequences(), batch_size=batch_size, collate_fn=padded, **options)


EMBED = nn.Embedding(16, 4)


def drawn(loader, **options):
    return Workload.from_loader(loader, model=EMBED, **options).sample_batch


class TestFromLoader:
    def test_takes_the_batch_with_the_longest_samples(self):
        workload = Workload.from_loader(loader_of(), model=EMBED, optimizer=torch.optim.SGD, precision="bf16")
        assert workload.sample_batch.tolist() == [[6] * 9, [7, 7, *[0] * 7]]
        assert (workload.model, workload.optimizer, workload.precision) == (EMBED, torch.optim.SGD, "bf16")

    @pytest.mark.parametrize("batches", [1, 2, 3])
    def test_draws_as_many_as_it_is_told(self, batches):
        taken = []

        def passing():
            for batch in loader_of(1):
                taken.append(len(batch))
                yield batch

        drawn(passing(), batches=batches)
        assert len(taken) == batches

    def test_sees_no_more_than_it_draws(self):
        assert drawn(loader_of(), batches=2).shape == (2, 5)

    def test_an_endless_loader(self):
        assert drawn(DataLoader(Endless(), batch_size=3)).shape == (3, 2)
        assert drawn(torch.zeros(2, 5) for _ in itertools.count()).shape == (2, 5)

    def test_a_longer_batch_of_fewer_samples_wins(self):
        assert drawn([torch.zeros(8, 3), torch.zeros(1, 4)]).shape == (1, 4)

    def test_of_two_alike_the_one_with_more_samples(self):
        assert (
            drawn([torch.zeros(2, 3), torch.ones(4, 3), torch.zeros(4, 3), torch.zeros(1, 3)]).tolist() == [[1] * 3] * 4
        )

    def test_batches_of_one(self):
        assert drawn(loader_of(1)).tolist() == [[6] * 9]

    def test_every_tensor_of_a_sample_counts(self):
        short, long = ((torch.zeros(2, 3), torch.zeros(2, n)) for n in (1, 7))
        assert drawn([short, long, short])[1].shape == (2, 7)

    @given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=8))
    def test_no_batch_has_larger_samples(self, shapes):
        batch = drawn([torch.zeros(shape) for shape in shapes])
        assert batch.shape in shapes
        assert batch.size(1) == max(length for _, length in shapes)

    @pytest.mark.parametrize("kind", [dict, collections.UserDict], ids=["dict", "encoding"])
    def test_mappings_with_different_keys(self, kind):
        with_mask = kind(ids=torch.zeros(2, 4), mask=torch.ones(2, 4))
        assert list(drawn([kind(ids=torch.zeros(2, 6)), with_mask])) == ["ids", "mask"]

    def test_what_is_no_tensor_stays(self):
        batch = {"ids": torch.zeros(2, 4), "names": ["a", "b"], "mask": Whole(torch.eye(9))}
        kept = drawn([batch])
        assert kept["names"] == ["a", "b"]
        assert isinstance(kept["mask"], Whole)

    def test_what_belongs_to_no_sample_counts_for_none(self):
        small, large = ((torch.zeros(2, 3), Whole(torch.zeros(size, size))) for size in (1, 50))
        assert drawn([small, large])[1].value.shape == (1, 1)

    def test_another_batch_dimension(self):
        workload = Workload.from_loader([torch.zeros(3, 8), torch.zeros(5, 2)], model=EMBED, batch_dim=1)
        assert (workload.sample_batch_size, workload.sample_batch.shape) == (2, (5, 2))

    def test_a_loader_that_fills_one_buffer_again_and_again(self):
        def buffered():
            buffer = torch.zeros(2, 4)
            for fill, length in ((1, 2), (2, 4), (3, 1)):
                yield buffer.fill_(fill)[:, :length]

        assert drawn(buffered()).tolist() == [[2] * 4] * 2

    def test_batches_without_samples_are_passed_over(self):
        assert drawn([torch.zeros(0, 9), torch.zeros(2, 3)]).shape == (2, 3)


FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12


class TestFromLoaderLeavesNothing:
    def test_random_states(self):
        class Augmented(Sequences):
            def __getitem__(self, index):
                np.random.rand()  # noqa: NPY002  # what a user's dataset does
                return super().__getitem__(index) + int(torch.rand(1) * random.random())

        def states():
            return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002

        before = states()
        drawn(DataLoader(Augmented(), batch_size=2, collate_fn=padded, shuffle=True))
        assert states() == before

    def test_the_loaders_own_generator(self):
        generator = torch.Generator().manual_seed(3)
        loader = loader_of(shuffle=True, generator=generator)
        before = generator.get_state()
        drawn(loader)
        assert torch.equal(generator.get_state(), before)

    def test_a_samplers_own_generator(self):
        generator = torch.Generator().manual_seed(3)
        loader = loader_of(sampler=torch.utils.data.RandomSampler(Sequences(), generator=generator))
        before = generator.get_state()
        drawn(loader)
        assert torch.equal(generator.get_state(), before)

    def test_the_first_epoch_is_what_it_would_have_been(self):
        torch.manual_seed(5)
        expected = [batch.tolist() for batch in loader_of(shuffle=True)]
        torch.manual_seed(5)
        loader = loader_of(shuffle=True)
        drawn(loader, batches=2)
        assert [batch.tolist() for batch in loader] == expected

    @FORKS
    @pytest.mark.parametrize("persistent", [False, True])
    def test_workers_are_ended(self, persistent):
        before = multiprocessing.active_children()
        loader = loader_of(num_workers=1, persistent_workers=persistent, multiprocessing_context="fork")
        assert drawn(loader, batches=2).shape == (2, 5)
        assert multiprocessing.active_children() == before
        assert loader._iterator is None

    @FORKS
    def test_an_epoch_in_progress_goes_on(self):
        """Iterating over a loader with persistent workers resets its only iterator."""
        loader = loader_of(num_workers=1, persistent_workers=True, multiprocessing_context="fork")
        epoch = iter(loader)
        first = next(epoch)
        drawn(loader, batches=1)
        rest = list(epoch)
        assert [batch.tolist() for batch in [first, *rest]] == [batch.tolist() for batch in loader_of()]
        epoch._shutdown_workers()

    @FORKS
    def test_workers_of_a_dataset_that_raises(self):
        before = multiprocessing.active_children()

        class Broken(Sequences):
            def __getitem__(self, index):
                raise KeyError("no such file")

        loader = DataLoader(Broken(), num_workers=1, multiprocessing_context="fork")
        with pytest.raises(KeyError, match="no such file"):
            drawn(loader)
        assert multiprocessing.active_children() == before


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {}, "The loader yielded 0 batches and no sample"),
        ([torch.zeros(0, 2)], {}, "The loader yielded 1 batches and no sample"),
        ([X], {"batches": 0}, "batches is 0"),
        ([X], {"batches": True}, "batches is True"),
        ([X], {"batches": 1.5}, "batches is 1.5"),
        (3, {}, "loader is a int"),
        (Sequences(), {}, "loader is a Sequences"),
        (X, {}, "loader is a Tensor"),
        ({"x": X}, {}, "loader is a dict"),
        ([X, "text"], {}, "Batch 1 of the loader: The batch has no tensor.*"),
        ([[torch.zeros(3, 2), torch.zeros(5, 7)]], {}, "Batch 0 of the loader: The tensors of the batch disagree"),
        ([[pack_sequence([X])]], {}, r"Batch 0 of the loader: \[0\] is a PackedSequence"),
        (
            [{"x": torch.nested.nested_tensor([X, X], layout=torch.jagged)}],
            {},
            r"Batch 0 of the loader: \[.x.\] is a nested tensor",
        ),
        ([X], {"precision": "fp8"}, "precision is 'fp8'"),
    ],
)
def test_what_is_no_loader(loader, options, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        Workload.from_loader(loader, model=LINEAR, **options)
    assert "\n" not in str(caught.value)


def test_a_workload_has_few_public_members():
    public = {name for name in dir(Workload(LINEAR, X)) if not name.startswith("_")}
    assert public - {*inspect.signature(Workload).parameters} == {
        *("from_loader", "from_name", "sample_batch_size", "made"),
    }
