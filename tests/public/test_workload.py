"""Calling a model, computing its loss, and making a batch."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import multiprocessing
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from error_types import WorkloadError
from hypothesis import given
from hypothesis import strategies as st
from raised import raises
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from autosplit import AutosplitError, BalancedDataParallel, Whole, Workload


class Recorder(nn.Module):
    """Records its arguments."""

    def __init__(self, function=lambda *args, **kwargs: args[0] if args else next(iter(kwargs.values()))):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.function = function
        self.called = None

    def forward(self, *args, **kwargs):
        self.called = (args, kwargs)
        return self.function(*args, **kwargs) * self.weight


@dataclasses.dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


X = torch.arange(8.0).view(4, 2)
Y = torch.arange(4)


class TestCallRules:
    @pytest.mark.parametrize(
        ("batch", "args", "kwargs"),
        [
            (X, 1, []),
            ((X, Y), 2, []),
            ([X, Y], 2, []),
            ({"x": X, "y": Y}, 0, ["x", "y"]),
            (collections.UserDict(x=X), 0, ["x"]),
            (Pair(X, Y), 2, []),
            (Output(X), 1, []),
        ],
        ids=["tensor", "tuple", "list", "dict", "UserDict", "namedtuple", "dataclass"],
    )
    def test_by_the_type_of_the_batch(self, batch, args, kwargs):
        model = Recorder(lambda *args, **kwargs: X)
        Workload(model, batch).loss(model, batch)
        assert (len(model.called[0]), list(model.called[1])) == (args, kwargs)

    def test_with_a_loss_function_the_inputs_follow_the_same_rules(self):
        model = Recorder(lambda x, scale: x * scale)
        batch = ({"x": X, "scale": torch.tensor(2.0)}, Y)
        seen = []

        def loss_fn(outputs, targets):
            seen.append(targets)
            return outputs.sum()

        loss = Workload(model, batch, loss_fn=loss_fn).loss(model, batch)
        assert loss.item() == 2 * X.sum()
        assert list(model.called[1]) == ["x", "scale"]
        assert torch.equal(seen[0], Y)

    def test_compute_loss_replaces_them_all(self):
        model = nn.Linear(2, 1)
        batch = {"odd": X, "targets": Y}
        workload = Workload(model, batch, compute_loss=lambda model, batch: model(batch["odd"]).sum() * 0 + 7)
        assert workload.loss(model, batch).item() == 7

    def test_a_plain_model_never_sees_a_mark(self):
        """The sample batch's Whole was passed to the model."""
        model = Recorder(lambda x, mask: x @ mask)
        batch = (X, Whole(torch.eye(2)))
        Workload(model, batch).loss(model, batch)
        assert isinstance(model.called[0][1], Tensor)

    def test_nor_does_a_loss_function_or_compute_loss(self):
        seen = []

        def check(first, second):
            seen.append(second)
            return first.sum() if isinstance(first, Tensor) else first(X).sum()

        model = nn.Linear(2, 1)
        batch = (X, {"y": Y, "weights": Whole(torch.ones(3))})
        for workload in (Workload(model, batch, loss_fn=check), Workload(model, batch, compute_loss=check)):
            workload.loss(model, batch)
        assert isinstance(seen[0]["weights"], Tensor)
        assert isinstance(seen[1][1]["weights"], Tensor)

    def test_a_wrapper_does(self):
        wrapped = BalancedDataParallel(None, Recorder(lambda x, mask: x @ mask), ["cpu"] * 2, split=(1, 3))
        mask = torch.rand(2, 2)
        torch.testing.assert_close(wrapped(X, Whole(mask)), X @ mask)


class TestLossRules:
    @staticmethod
    def loss_of(function, **kwargs):
        model = Recorder()
        model.forward = lambda x: function(x * model.weight)
        return Workload(model, X, **kwargs).loss(model, X).item()

    def test_the_outputs_own_loss(self):
        assert self.loss_of(lambda x: Output(x, x.sum())) == 28
        assert self.loss_of(lambda x: {"logits": x, "loss": x.sum()}) == 28
        assert self.loss_of(lambda x: collections.UserDict(logits=x, loss=x.sum())) == 28

    def test_a_scalar(self):
        assert self.loss_of(lambda x: x.max()) == 7

    def test_otherwise_the_mean_of_floating_outputs(self):
        assert self.loss_of(lambda x: x) == 3.5
        assert self.loss_of(lambda x: (x, {"other": x + 1, "codes": torch.arange(3)}, "text")) == 4.0
        assert self.loss_of(Output) == 3.5

    def test_a_loss_per_sample_is_refused(self):
        """tune() averaged it, and then `step.backward` rejected it in training."""
        assert self.loss_of(lambda x: Output(x, x.sum().reshape(1))) == 28
        with raises(WorkloadError, "loss-shape", "(4,)"):
            self.loss_of(lambda x: Output(x, x.sum(1)))

    def test_the_mean_is_said_and_nothing_else_is(self):
        model = nn.Linear(2, 2)
        plain = Workload(model, X, optimizer=torch.optim.SGD)
        (said,) = plain.assumptions(model(X))
        assert (said.kind, "Pass loss_fn=" in said.text) == ("loss-assumed", True)
        assert plain.assumptions(Output(X, model(X).sum())) == ()
        assert Workload(model, (X, Y), loss_fn=F.cross_entropy, optimizer=torch.optim.SGD).assumptions(model(X)) == ()

    def test_the_optimizer_is_said(self):
        (said,) = Workload(nn.Linear(2, 2), X).assumptions(Output(X, X.sum()))
        assert (said.kind, "AdamW" in said.text) == ("optimizer-assumed", True)
        assert Workload([nn.Linear(2, 2)], X, step=lambda *args: None).assumptions() == ()

    def test_nothing_to_take_a_loss_of(self):
        with raises(WorkloadError, "model-output-without-loss", "str"):
            self.loss_of(lambda x: "text")
        with raises(WorkloadError, "model-output-without-loss", "Tensor"):
            self.loss_of(lambda x: x.long())

    def test_a_loss_that_is_no_tensor(self):
        with raises(WorkloadError, "loss-type", "float"):
            self.loss_of(None, compute_loss=lambda model, batch: 1.0)

    def test_a_loss_of_no_parameter(self):
        with raises(WorkloadError, "loss-without-gradient"):
            self.loss_of(None, compute_loss=lambda model, batch: torch.tensor(1.0))


class TestBatches:
    def test_repeats_the_sample(self):
        assert Workload(nn.Linear(2, 2), X).batch(5).tolist() == [*X.tolist(), X[0].tolist()]

    def test_make_batch(self):
        workload = Workload(nn.Linear(2, 2), X, make_batch=lambda n: torch.zeros(n, 2))
        assert workload.batch(9).shape == (9, 2)

    def test_make_batch_of_another_size(self):
        workload = Workload(nn.Linear(2, 2), X, make_batch=lambda n: torch.zeros(4, 2))
        with raises(WorkloadError, "make-batch-size", "9", "4"):
            workload.batch(9)

    def test_sample_batch_size_along_its_dimension(self):
        assert Workload(nn.Linear(2, 2), torch.zeros(7, 3, 2), batch_dim=1).sample_batch_size == 3


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"precision": "fp64"}, "precision is 'fp64'"),
        ({"fits": "evaluation"}, "fits has 'evaluation'"),
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
    Workload(Recorder, X)


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
        assert workload.batch(3).shape == (3, 9)

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
        ([[pack_sequence([X])]], {}, "Batch 0 of the loader has a PackedSequence"),
        (
            [{"x": torch.nested.nested_tensor([X, X], layout=torch.jagged)}],
            {},
            "Batch 0 of the loader has a nested tensor",
        ),
        ([X], {"precision": "fp8"}, "precision is 'fp8'"),
    ],
)
def test_what_is_no_loader(loader, options, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        Workload.from_loader(loader, model=LINEAR, **options)
    assert "\n" not in str(caught.value)


def test_targets_without_a_loss_are_named():
    model = nn.Linear(4, 2)
    workload = Workload(model, (torch.zeros(4, 4), torch.zeros(4, 2)))
    with raises(WorkloadError, "batch-arguments-differ", "tuple", "2", "Linear"):
        workload.loss(model, workload.batch(4))


def test_a_list_of_samples_is_told_to_be_collated():
    samples = [{"x": X[0], "y": 1}, {"x": X[1], "y": 2}]
    workload = Workload(LINEAR, samples, compute_loss=lambda model, batch: model(batch["x"]).mean())
    with pytest.raises(TypeError, match="list indices") as caught:
        workload.loss(LINEAR, workload.sample_batch)
    assert "pass torch.utils.data.default_collate(samples)" in caught.value.autosplit_advice
    with raises(WorkloadError, "batch-arguments-differ", "list", "3", "Linear"):
        Workload(LINEAR, [X[0]] * 3).loss(LINEAR, [X[0]] * 3)


def test_a_model_that_takes_a_part_of_a_mapping_is_told_how_to_pass_it():
    batch = {"image": X, "mask": Y}
    with pytest.raises(TypeError, match="unexpected keyword argument") as caught:
        Workload(LINEAR, batch).loss(LINEAR, batch)
    assert 'compute_loss=lambda model, batch: loss_fn(model(batch["inputs"])' in caught.value.autosplit_advice


def test_a_model_that_takes_a_mapping_as_one_argument_is_told_how_to_pass_it():
    """The message blamed the model, and did not mention that a mapping is passed as keywords."""

    class One(nn.Module):
        def forward(self, batch):
            return batch["x"]

    workload = Workload(One(), ({"x": torch.randn(4, 2)}, torch.zeros(4, 2)), loss_fn=nn.MSELoss())
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        workload.loss(workload.model, workload.sample_batch)
    assert "compute_loss=lambda model, batch" in caught.value.autosplit_advice
