"""What a head's code says about its loss; what it does not say stays open."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss, MSELoss

from autosplit.parallel.transformers_loss import HeadLoss, head_of, loss_of, parameters_of

LABELS = torch.zeros(4, 5, dtype=torch.long)


def ForCausalLMLoss(logits, labels, **_):
    """Stand in for the function of transformers that has this name."""


def ForCTCLoss(logits, labels, **_):
    """As above."""


class PreTrainedModel(nn.Module):
    """Stand in for the base of every model of transformers."""

    function = staticmethod(ForCausalLMLoss)

    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(num_labels=3, problem_type=None, **config)
        self.config.get_text_config = lambda: self.config

    @property
    def loss_function(self):
        return self.function


for _item in (PreTrainedModel, ForCausalLMLoss, ForCTCLoss):
    _item.__module__ = "transformers.of_a_test"


class ByFunction(PreTrainedModel):
    def forward(self, logits, labels=None, **kwargs):
        return self.loss_function(logits=logits, labels=labels, **kwargs)


class Deaf(PreTrainedModel):
    def forward(self, logits, labels=None, **kwargs):
        return self.loss_function(logits, labels.to(logits.device))


class Shifted(PreTrainedModel):
    def forward(self, logits, labels=None, **kwargs):
        return self.loss_function(logits=logits, labels=None, shift_labels=labels[:, 1:], **kwargs)


class ShiftedByUser(PreTrainedModel):
    def forward(self, logits, labels=None, **kwargs):
        return self.loss_function(logits=logits, labels=labels, shift_labels=labels, **kwargs)


class Twice(PreTrainedModel):
    def forward(self, logits, labels=None, other_labels=None):
        return self.loss_function(logits, labels) + self.loss_function(logits, other_labels)


class Cut(PreTrainedModel):
    def forward(self, logits, labels=None, **kwargs):
        labels = labels[labels > 0]
        return self.loss_function(logits, labels)


class Overwritten(PreTrainedModel):
    def forward(self, logits, labels=None, **kwargs):
        labels[labels == 0] = -100
        return self.loss_function(logits, labels)


class Routed(PreTrainedModel):
    def forward(self, logits, labels=None, output_router_logits=None):
        loss = self.loss_function(logits, labels)
        if output_router_logits:
            loss += load_balancing_loss_func(logits)  # noqa: F821  # it is read, not run
        return loss


class ByCriterion(PreTrainedModel):
    def forward(self, logits, labels=None):
        labels = labels.to(logits.device)
        loss_fct = CrossEntropyLoss(ignore_index=self.config.ignored)
        return loss_fct(logits.view(-1, 3), labels.view(-1))


class ByKeptCriterion(PreTrainedModel):
    def __init__(self, criterion):
        super().__init__()
        self.loss_fct = criterion

    def forward(self, logits, labels=None):
        return self.loss_fct(logits, labels)


class Weighted(PreTrainedModel):
    def forward(self, logits, labels=None):
        loss_fct = CrossEntropyLoss(weight=torch.ones(3))
        return loss_fct(logits, labels)


class Masked(PreTrainedModel):
    def forward(self, logits, labels=None, attention_mask=None):
        loss_fct = CrossEntropyLoss()
        return loss_fct(logits[attention_mask], labels[attention_mask])


class ByProblem(PreTrainedModel):
    def forward(self, logits, labels=None):
        if self.config.problem_type == "regression":
            loss_fct = MSELoss()
            return loss_fct(logits.squeeze(), labels.squeeze())
        if self.config.problem_type == "single_label_classification":
            loss_fct = CrossEntropyLoss()
            return loss_fct(logits.view(-1, self.config.num_labels), labels.view(-1))
        loss_fct = BCEWithLogitsLoss()
        return loss_fct(logits, labels)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (ByFunction(), HeadLoss("next labels", divides=True)),
        (Deaf(), HeadLoss("next labels")),
        (ShiftedByUser(), HeadLoss("labels", divides=True)),
        (Routed(), HeadLoss("next labels")),
        (Routed(output_router_logits=True), HeadLoss("next labels", adds_router_loss=True)),
        (ByCriterion(ignored=255), HeadLoss("labels", ignored=255)),
        (ByKeptCriterion(CrossEntropyLoss(ignore_index=0)), HeadLoss("labels", ignored=0)),
        (ByProblem(), HeadLoss("labels")),
    ],
)
def test_what_the_code_says(head, expected):
    assert loss_of(head, {"labels": LABELS}) == expected


@pytest.mark.parametrize(
    "head",
    [
        Shifted(),
        Twice(),
        Cut(),
        Overwritten(),
        ByCriterion(ignored=None),
        ByKeptCriterion(CrossEntropyLoss(reduction="sum")),
        ByKeptCriterion(CrossEntropyLoss(weight=torch.ones(3))),
        ByKeptCriterion(nn.Linear(3, 3)),
        Weighted(),
        Masked(),
        PreTrainedModel(),
    ],
)
def test_what_the_code_leaves_open(head):
    assert loss_of(head, {"labels": LABELS}) is None


def test_a_loss_function_of_the_user_s_own_says_nothing():
    head = ByFunction()
    head.function = lambda logits, labels: logits.sum()
    assert loss_of(head, {"labels": LABELS}) is None


@pytest.mark.parametrize(("reduction", "over"), [("mean", "samples"), ("sum", "sum")])
def test_ctc(reduction, over):
    head = ByFunction(ctc_loss_reduction=reduction)
    head.function = ForCTCLoss
    assert loss_of(head, {"labels": LABELS}) == HeadLoss(over)


def test_the_problem_decides():
    head = ByProblem()
    assert loss_of(head, {"labels": torch.zeros(4, 3)}) == HeadLoss("samples")
    head.config.problem_type = "multi_label_classification"
    assert loss_of(head, {"labels": LABELS}) == HeadLoss("samples")
    head.config.problem_type, head.config.num_labels = None, 1
    assert loss_of(head, {"labels": LABELS[:, 0]}) == HeadLoss("samples")


@pytest.mark.parametrize("named", [{}, {"labels": None}, {"labels": [{"boxes": LABELS}]}])
def test_no_labels_no_answer(named):
    assert loss_of(ByFunction(), named) is None
    assert loss_of(ByProblem(), named) is None


def test_a_call_may_ask_for_the_routers_loss():
    assert loss_of(Routed(), {"labels": LABELS, "output_router_logits": True}).adds_router_loss
    head = Routed(output_router_logits=True)
    assert not loss_of(head, {"labels": LABELS, "output_router_logits": False}).adds_router_loss


def test_code_that_can_not_be_read_says_nothing():
    namespace = {"PreTrainedModel": PreTrainedModel}
    body = "def forward(self, logits, labels):\n        return self.loss_function(1, labels)"
    exec(f"class Unread(PreTrainedModel):\n    {body}", namespace)
    head = namespace["Unread"]()
    assert loss_of(head, {"labels": LABELS}) is None
    assert parameters_of(head) == ()


def test_names_of_positional_arguments():
    assert parameters_of(ByFunction()) == ("logits", "labels")


class HandsOn(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, *args, **kwargs):
        return self.inner.forward(*args, **kwargs)


class Keeps(HandsOn):
    def forward(self, logits, labels, **kwargs):
        return self.inner(logits) + labels.sum()


class Relabels(HandsOn):
    def forward(self, logits, labels, **kwargs):
        labels = labels.clamp(min=0)
        return self.inner(logits, labels=labels, **kwargs)


class WithTeacher(HandsOn):
    def __init__(self, model):
        super().__init__(model)
        self.teacher = nn.Linear(2, 2)


class TestHeads:
    def test_a_model_is_its_own(self):
        head = ByFunction()
        assert head_of(head) is head

    def test_one_behind_wrappers_that_hand_on(self):
        head = ByFunction()
        assert head_of(HandsOn(HandsOn(head))) is head

    @pytest.mark.parametrize("wrapper", [Keeps, Relabels, WithTeacher])
    def test_not_behind_a_module_that_does_more(self, wrapper):
        assert head_of(wrapper(ByFunction())) is None

    def test_other_modules_have_none(self):
        assert head_of(nn.Linear(2, 2)) is None
        assert head_of(HandsOn(nn.Linear(2, 2))) is None
