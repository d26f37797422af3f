"""An unknown keyword of `tune` or `measure` raises an error that names the right keyword."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from folders import ROOT
from raised import raises
from torch import nn

import autosplit
from autosplit.errors import ArgumentError
from autosplit.tuning.keywords import _MEANT

MODEL = nn.Linear(4, 2)
BATCH = (torch.zeros(8, 4), torch.zeros(8, 2))


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        (
            "batch_size",
            "Use effective_batch_size (samples per optimizer step) or max_batch_size (samples per forward).",
        ),
        ("criterion", "Use loss_fn."),
        ("n_trial", "Use n_trials."),
        ("loss_scope", "pass Workload(model, sample_batch, loss_scope=...)."),
        ("sample_batch_size", "Use sample_batch."),  # a Workload computes it, and takes no such argument
    ],
)
def test_tune_names_the_keyword_that_was_meant(keyword, meant):
    with raises(ArgumentError, f"{keyword}= is not an argument of tune().", meant):
        autosplit.tune(MODEL, BATCH, **{keyword: 4})


def test_measure_names_it_too():
    with raises(TypeError, "gpus= is not an argument of measure(). Use devices."):
        autosplit.measure(MODEL, BATCH, gpus=2)


def test_what_resembles_nothing_gets_the_list():
    with raises(ArgumentError, "It has model_or_workload, sample_batch, loss_fn"):
        autosplit.tune(MODEL, BATCH, xyzzy=2)


@pytest.mark.whole
def test_the_table_names_keywords_that_exist():
    known = {*inspect.signature(autosplit.tune).parameters}
    assert [
        meant
        for meant in _MEANT.values()
        if (name := re.split(r"[( ,]", meant)[0]) not in known
        and not hasattr(autosplit, name.removeprefix("autosplit."))
        and name != "plan.trials"
    ] == []


@pytest.mark.parametrize("name", ["tune", "measure"])
def test_the_signature_has_types_and_only_the_arguments(name):
    """The page of `tune` ended with `**unknown`, and its signature had no types."""
    parameters = inspect.signature(getattr(autosplit, name)).parameters.values()
    assert [one.name for one in parameters if one.kind is one.VAR_KEYWORD or one.annotation is one.empty] == []
    assert "show_signature_annotations: true" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_loss_is_the_third_argument():
    loss = nn.MSELoss()
    assert autosplit.Workload(MODEL, BATCH, loss).loss_fn is loss
    for call in (autosplit.tune, autosplit.measure):
        assert [*inspect.signature(call).parameters][:3] == ["model_or_workload", "sample_batch", "loss_fn"]
