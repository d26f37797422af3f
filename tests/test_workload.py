"""How a model is called, a loss taken, and a batch made."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.balanced import BalancedDataParallel
from autosplit.batches import Whole
from autosplit.errors import AutosplitError, WorkloadError
from autosplit.workload import Workload, call_model


class Recorder(nn.Module):
    """Remembers what it was called with."""

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
        """The sample batch's own Whole went into the model as it was."""
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
        torch.testing.assert_close(call_model(wrapped, (X, Whole(mask))), X @ mask)


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

    def test_a_loss_per_sample_is_averaged(self):
        assert self.loss_of(lambda x: Output(x, x.sum(1))) == 7

    def test_the_mean_is_said_and_nothing_else_is(self):
        model = nn.Linear(2, 2)
        plain = Workload(model, X, optimizer=torch.optim.SGD)
        (said,) = plain.assumptions(model(X))
        assert said.startswith("no loss given: the mean of the model's floating-point outputs is used; pass loss_fn=")
        assert plain.assumptions(Output(X, model(X).sum())) == ()
        assert Workload(model, (X, Y), loss_fn=F.cross_entropy, optimizer=torch.optim.SGD).assumptions(model(X)) == ()

    def test_the_optimizer_is_said(self):
        (said,) = Workload(nn.Linear(2, 2), X).assumptions(Output(X, X.sum()))
        assert "AdamW is assumed" in said
        assert Workload([nn.Linear(2, 2)], X, step=lambda *args: None).assumptions() == ()

    def test_nothing_to_take_a_loss_of(self):
        with pytest.raises(WorkloadError, match=r"returned a str.*expected one of them; pass loss_fn="):
            self.loss_of(lambda x: "text")
        with pytest.raises(WorkloadError, match="returned a Tensor without"):
            self.loss_of(lambda x: x.long())

    def test_a_loss_that_is_no_tensor(self):
        with pytest.raises(WorkloadError, match="the loss is a float; expected a tensor; return the tensor itself"):
            self.loss_of(None, compute_loss=lambda model, batch: 1.0)

    def test_a_loss_of_no_parameter(self):
        with pytest.raises(WorkloadError, match=r"depends on no trainable parameter.*check requires_grad"):
            self.loss_of(None, compute_loss=lambda model, batch: torch.tensor(1.0))


class TestBatches:
    def test_repeats_the_sample(self):
        assert Workload(nn.Linear(2, 2), X).batch(5).tolist() == [*X.tolist(), X[0].tolist()]

    def test_make_batch(self):
        workload = Workload(nn.Linear(2, 2), X, make_batch=lambda n: torch.zeros(n, 2))
        assert workload.batch(9).shape == (9, 2)

    def test_make_batch_of_another_size(self):
        workload = Workload(nn.Linear(2, 2), X, make_batch=lambda n: torch.zeros(4, 2))
        with pytest.raises(WorkloadError, match=r"make_batch\(9\) returned 4 samples; expected 9; return exactly"):
            workload.batch(9)

    def test_sample_batch_size_along_its_dimension(self):
        assert Workload(nn.Linear(2, 2), torch.zeros(7, 3, 2), batch_dim=1).sample_batch_size == 3


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'; expected one of 'none', 'bf16', 'fp16'"),
        ({"loss_reduction": "max"}, "loss_reduction is 'max'; expected one of 'mean', 'sum'"),
        ({"loss_scope": "token"}, "loss_scope is 'token'; expected one of 'sample', 'batch'"),
        ({"loss_fn": len, "step": len}, "loss_fn and step are given; expected at most one of them; leave"),
        ({"compute_loss": 3}, "compute_loss is 3; expected a function; pass one, or leave it out"),
        ({"make_batch": "x"}, "make_batch is 'x'; expected a function; pass one, or leave it out"),
        ({"batch_dim": -1}, "batch_dim is -1; expected a dimension, 0 or more"),
        ({"batch_dim": True}, "batch_dim is True; expected a dimension, 0 or more"),
        ({"model": 3}, "model is 3; expected an nn.Module, or a function that returns one; pass the model"),
        ({"model": None}, "model is None; expected an nn.Module"),
        ({"model": [LINEAR, LINEAR]}, "expected several nn.Modules only together with step="),
        ({"model": [], "step": len}, r"model is a list of \[\]; expected several nn.Modules"),
        ({"model": {"a": 3}, "step": len}, r"model is a dict of \['int'\]; expected several nn.Modules"),
        ({"loss_fn": len}, r"the sample batch is a Tensor; expected a pair \(inputs, targets\); pass such a pair"),
        ({"sample_batch": (X, torch.zeros(5, 7))}, "disagree on the batch size.*expected one size; mark"),
        ({"sample_batch": torch.zeros(0, 2)}, "the batch is empty.*expected at least 1; pass"),
        ({"sample_batch": {}}, "no tensor with a dimension 0.*expected at least one.*pass such a batch"),
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
        Workload(LINEAR, (X, Y), F.cross_entropy)
