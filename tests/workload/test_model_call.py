"""Calling a model, and computing its loss."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from raised import raises
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit import BalancedDataParallel, Whole, Workload
from autosplit.errors import WorkloadError
from autosplit.workload.model_call import assumptions, loss_rule, training_loss


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
LINEAR = nn.Linear(2, 2)


class TestCallRules:
    @pytest.mark.parametrize(
        ("batch", "args", "kwargs"),
        [
            (X, 1, []),
            ((X, Y), 2, []),
            ({"x": X, "y": Y}, 0, ["x", "y"]),
            (collections.UserDict(x=X), 0, ["x"]),
            (Pair(X, Y), 2, []),
            (Output(X), 1, []),
        ],
        ids=["tensor", "tuple", "dict", "UserDict", "namedtuple", "dataclass"],
    )
    def test_by_the_type_of_the_batch(self, batch, args, kwargs):
        model = Recorder(lambda *args, **kwargs: X)
        training_loss(Workload(model, batch), model, batch)
        assert (len(model.called[0]), list(model.called[1])) == (args, kwargs)

    def test_with_a_loss_function_the_inputs_follow_the_same_rules(self):
        model = Recorder(lambda x, scale: x * scale)
        batch = ({"x": X, "scale": torch.tensor(2.0)}, Y)
        seen = []

        def loss_fn(outputs, targets):
            seen.append(targets)
            return outputs.sum()

        loss = training_loss(Workload(model, batch, loss_fn=loss_fn), model, batch)
        assert loss.item() == 2 * X.sum()
        assert list(model.called[1]) == ["x", "scale"]
        assert torch.equal(seen[0], Y)

    def test_a_plain_model_never_sees_a_mark(self):
        """The sample batch's Whole was passed to the model."""
        model = Recorder(lambda x, mask: x @ mask)
        batch = (X, Whole(torch.eye(2)))
        training_loss(Workload(model, batch), model, batch)
        assert isinstance(model.called[0][1], Tensor)

    def test_nor_does_a_loss_function_or_compute_loss(self):
        seen = []

        def check(first, second):
            seen.append(second)
            return first.sum() if isinstance(first, Tensor) else first(X).sum()

        model = nn.Linear(2, 1)
        batch = (X, {"y": Y, "weights": Whole(torch.ones(3))})
        for workload in (Workload(model, batch, loss_fn=check), Workload(model, batch, compute_loss=check)):
            training_loss(workload, model, batch)
        assert isinstance(seen[0]["weights"], Tensor)
        assert isinstance(seen[1][1]["weights"], Tensor)


class TestLossRules:
    @staticmethod
    def loss_of(function, **kwargs):
        model = Recorder()
        model.forward = lambda x: function(x * model.weight)
        return training_loss(Workload(model, X, **kwargs), model, X).item()

    def test_the_outputs_own_loss(self):
        assert self.loss_of(lambda x: Output(x, x.sum())) == 28
        assert self.loss_of(lambda x: {"logits": x, "loss": x.sum()}) == 28
        assert self.loss_of(lambda x: collections.UserDict(logits=x, loss=x.sum())) == 28

    def test_the_first_of_a_tuple_if_it_is_a_scalar(self):
        """Without labels= as a keyword, models of transformers return (loss, logits). The mean of both was used."""
        assert self.loss_of(lambda x: (x.sum(), x)) == 28

    @pytest.mark.parametrize(
        ("outputs", "rule"),
        [
            (Output(X, X.sum()), "attribute"),
            ({"logits": X, "loss": X.sum()}, "item"),
            ((X.sum(), X), "first"),
            (X.sum(), "scalar"),
            (X, "mean"),
            ((torch.tensor(3), X), "mean"),
            (None, "mean"),
        ],
    )
    def test_where_the_loss_is(self, outputs, rule):
        assert loss_rule(outputs) == rule

    def test_otherwise_the_mean_of_floating_outputs(self):
        assert self.loss_of(lambda x: x) == 3.5
        assert self.loss_of(lambda x: (x, {"other": x + 1, "codes": torch.arange(3)}, "text")) == 4.0
        assert self.loss_of(Output) == 3.5

    def test_a_loss_per_sample_is_refused(self):
        """tune() averaged it, and then `step.backward` rejected it in training."""
        assert self.loss_of(lambda x: Output(x, x.sum().reshape(1))) == 28
        with raises(WorkloadError, "(4,)"):
            self.loss_of(lambda x: Output(x, x.sum(1)))

    def test_the_mean_is_said_and_nothing_else_is(self):
        model = nn.Linear(2, 2)
        plain = Workload(model, X, optimizer=torch.optim.SGD)
        (said,) = assumptions(plain, loss_rule(model(X)))
        assert (said.kind, "Pass loss_fn=" in said.text) == ("loss-assumed", True)
        assert assumptions(plain, loss_rule(Output(X, model(X).sum()))) == ()
        assert assumptions(Workload(model, (X, Y), loss_fn=F.cross_entropy, optimizer=torch.optim.SGD)) == ()

    def test_the_optimizer_is_said(self):
        (said,) = assumptions(Workload(nn.Linear(2, 2), X), "attribute")
        assert (said.kind, "AdamW" in said.text) == ("optimizer-assumed", True)
        assert assumptions(Workload([nn.Linear(2, 2)], X, step=lambda *args: None)) == ()

    def test_nothing_to_take_a_loss_of(self):
        with raises(WorkloadError, "str"):
            self.loss_of(lambda x: "text")
        with raises(WorkloadError, "Tensor"):
            self.loss_of(lambda x: x.long())

    def test_a_loss_that_is_no_tensor(self):
        with raises(WorkloadError, "float"):
            self.loss_of(None, compute_loss=lambda model, batch: 1.0)

    def test_a_loss_of_no_parameter(self):
        with raises(WorkloadError):
            self.loss_of(None, compute_loss=lambda model, batch: torch.tensor(1.0))


def test_targets_without_a_loss_are_named():
    model = nn.Linear(4, 2)
    workload = Workload(model, (torch.zeros(4, 4), torch.zeros(4, 2)))
    with raises(WorkloadError, "tuple", "2", "Linear"):
        training_loss(workload, model, workload.sample_batch)


def test_a_list_of_samples_is_told_to_be_collated():
    samples = [{"x": X[0], "y": 1}, {"x": X[1], "y": 2}]
    workload = Workload(LINEAR, samples, compute_loss=lambda model, batch: model(batch["x"]).mean())
    with pytest.raises(TypeError, match="list indices") as caught:
        training_loss(workload, LINEAR, workload.sample_batch)
    assert "pass torch.utils.data.default_collate(samples)" in caught.value.autosplit_advice
    with raises(WorkloadError, "list", "3", "Linear"):
        training_loss(Workload(LINEAR, [X[0]] * 3), LINEAR, [X[0]] * 3)


def test_a_model_that_takes_a_mapping_as_one_argument_is_told_how_to_pass_it():
    """The message blamed the model, and did not mention that a mapping is passed as keywords."""

    class One(nn.Module):
        def forward(self, batch):
            return batch["x"]

    workload = Workload(One(), ({"x": torch.randn(4, 2)}, torch.zeros(4, 2)), loss_fn=nn.MSELoss())
    with pytest.raises(TypeError, match="unexpected keyword") as caught:
        training_loss(workload, workload.model, workload.sample_batch)
    assert "compute_loss=lambda model, batch" in caught.value.autosplit_advice


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, source, target, scale=1.0):
        return self.layer(source + target) * scale


def test_a_model_of_two_inputs_is_told_both_ways_to_pass_them():
    """The error named only the missing argument."""
    for model in (Two(), BalancedDataParallel(None, Two(), ["cpu", "cpu"], split=(2, 2))):
        workload = Workload(Two(), (torch.randn(4, 2), torch.zeros(4, 2)), loss_fn=nn.MSELoss())
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'target'") as caught:
            training_loss(workload, model, workload.sample_batch)
        said = "forward() needs source, target, but the batch has one input before the targets. Pass a batch "
        assert said + "((source, target), targets), or compute_loss=" in caught.value.autosplit_advice


def test_a_batch_on_another_device_names_both_devices():
    workload = Workload(nn.Linear(2, 2), torch.randn(4, 2))
    with pytest.raises(RuntimeError) as caught:
        training_loss(workload, workload.model, torch.randn(4, 2, device="meta"))
    said = "the batch is on meta, but the model is on cpu. Pass autosplit.to_device(batch, 'cpu')"
    assert caught.value.autosplit_advice == said
