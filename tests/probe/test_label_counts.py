"""A recorded cross entropy shows what it divides by. A loop without the `count=` of the plan's check is warned of."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from torch import nn
from torch.nn import functional as F

from autosplit.parallel.loss_weights import UnevenLossWarning
from autosplit.probe.check_result import Check
from autosplit.probe.label_counts import CrossEntropies, LabelMean, label_means

WEIGHTS = torch.tensor([0.3, 2.7, 1.0], dtype=torch.float64)


def recorded(batch: Any, loss_of: Any) -> list[LabelMean]:
    with CrossEntropies() as modes:
        loss_of(batch)
    return [*label_means(modes.seen, batch)]


@pytest.mark.parametrize("ignored", [-100, 0, 255])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("is_shifted", [False, True])
def test_what_a_cross_entropy_divides_by_is_counted_in_any_batch(ignored, weights, is_shifted):
    draw = torch.Generator().manual_seed(3)
    labels = torch.randint(1, 3, (4, 5), generator=draw)
    labels[0, 2:] = labels[1, 1] = labels[2, :1] = ignored
    batch = {"x": torch.randn(4, 5, 3, dtype=torch.float64, generator=draw), "targets": labels}
    own = labels[:, 1:] if is_shifted else labels
    logits = batch["x"][:, :-1] if is_shifted else batch["x"]
    loss_of = lambda _: F.cross_entropy(logits.flatten(0, 1), own.flatten(), weights, ignore_index=ignored)
    (mean,) = (one for one in recorded(batch, loss_of) if one.is_shifted == is_shifted)
    kept = own[own != ignored]
    assert mean(batch) == (len(kept) if weights is None else float(weights[kept].sum()))
    assert mean.is_special == (weights is not None or ignored != -100)
    assert mean.is_mean


LABELS = torch.tensor([0, 1, 2, 0, 1, 1])
CALLS: dict[str, tuple[Any, list[tuple[bool, bool]]]] = {
    "a module": (lambda x: nn.CrossEntropyLoss(WEIGHTS)(x, LABELS), [(True, True)]),
    "nll_loss": (lambda x: F.nll_loss(x.log_softmax(1), LABELS, WEIGHTS), [(True, True)]),
    "equal class weights": (lambda x: F.cross_entropy(x, LABELS, weight=WEIGHTS * 0 + 2), [(False, True)]),
    "not reduced": (lambda x: F.cross_entropy(x, LABELS, WEIGHTS, reduction="none").mean(), [(True, False)]),
    "probabilities": (lambda x: F.cross_entropy(x, x.softmax(1)), []),
    "another loss": (lambda x: F.mse_loss(x, x + 1), []),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_recorded(name):
    loss_of, expected = CALLS[name]
    found = recorded((torch.randn(6, 3, dtype=torch.float64), LABELS), lambda batch: loss_of(batch[0]))
    assert [(one.is_special, one.is_mean) for one in found] == expected


COUNT = "float(class_weights[batch[1][batch[1] != -100]].sum())"


@pytest.mark.parametrize(
    ("options", "effective", "warns"),
    [({}, 8, 1), ({"count": lambda batch: 1}, 8, 0), ({}, 4, 0)],
    ids=["no count", "count", "one forward"],
)
def test_a_loop_without_the_plans_count_is_warned_of(options, effective, warns):
    plan = replace(make_plan((4,), effective), checks=(Check("loss", 0.0, 0.4, depends=True, count=COUNT),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.steps([], **options)
    said = [str(one.message) for one in caught if one.category is UnevenLossWarning]
    assert len(said) == warns
    assert all(f"Pass count=lambda batch: {COUNT} to steps()." in text for text in said)


def test_code_in_a_plans_count_is_not_shown():
    found = Check("loss", 0.0, 0.4, depends=True, count="__import__('os').system('true')")
    plan = replace(make_plan((4,), 8), checks=(found,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.steps([])
