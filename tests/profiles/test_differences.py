"""Messages about why no profile matches, for each part of the key."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_plan

from autosplit.plan.plan import Plan
from autosplit.profiles.differences import differences, log_differences
from autosplit.profiles.key import ProfileKey
from autosplit.profiles.store import store

GPUS = {"kind": "cuda", "name": "NVIDIA A100", "memory_gib": 40, "count": 2}
MACHINE = {"devices": [GPUS], "torch": "2.12.0", "cuda": "12.6", "autosplit": "1.0"}
DIGESTED = ("model_tree", "model_tensors", "model_text", "sample_batch", "optimizer")
WORKLOAD = {
    "model": "Net",
    "parameters": 72,
    **dict.fromkeys(DIGESTED, "aa"),
    "model_factory": None,
    "sample_batch_size": 4,
    "loss_fn": "aa",
    "compute_loss": None,
    "step": None,
    "make_batch": None,
    "precision": None,
    "loss_reduction": "mean",
    "loss_scope": "sample",
    "batch_dim": 0,
}
REQUEST = {
    "devices": ["cuda:0", "cuda:1"],
    "reserve": None,
    "strategy": "auto",
    "effective_batch_size": 256,
    "max_batch_size": None,
    "name": None,
}
KEY = ProfileKey(MACHINE, WORKLOAD, REQUEST)
PLAN = make_plan(machine=MACHINE, workload=WORKLOAD, request=REQUEST)


def told_of(
    plan: Plan = PLAN, *, machine: Any = MACHINE, workload: Any = WORKLOAD, request: Any = REQUEST
) -> list[str]:
    return differences(plan, ProfileKey(machine, workload, request))


def test_what_is_equal_is_not_told():
    assert told_of() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch": "2.13.0"}, "tuned with torch 2.12.0, now 2.13.0"),
        ({"cuda": "12.8"}, "tuned with CUDA 12.6, now 12.8"),
        ({"cuda": None}, "tuned with CUDA 12.6, now none"),
        ({"autosplit": "1.1"}, "tuned with autosplit 1.0, now 1.1"),
        ({"ranks_per_machine": [1, 1]}, "the ranks per machine were those of one, now 1:1"),
        ({"devices": [{**GPUS, "count": 1}]}, "tuned for 2 devices NVIDIA A100 with 40 GiB, now 1"),
        (
            {"devices": [{**GPUS, "memory_gib": 80}]},
            "tuned for 2x NVIDIA A100 with 40 GiB, now 2x NVIDIA A100 with 80 GiB",
        ),
        (
            {"devices": [{"kind": "sim", "name": "RTX3090", "capacity_bytes": 2**30, "count": 1, "card": "aa"}]},
            "tuned for 2x NVIDIA A100 with 40 GiB, now 1x simulated RTX3090 with 1 GiB",
        ),
        (
            {"devices": [{"kind": "cpu", "name": "cpu", "processors": 8, "architecture": "x86_64", "count": 1}]},
            "tuned for 2x NVIDIA A100 with 40 GiB, now 1x cpu with 8 cores (x86_64)",
        ),
        ({"devices": [{**GPUS, "card": "bb"}]}, "2x NVIDIA A100 with 40 GiB with other values in gpus.toml than now"),
    ],
)
def test_each_part_of_the_machine(changes, said):
    (told,) = told_of(machine={**MACHINE, **changes})
    assert told.endswith(said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parameters": 144, "model_tensors": "bb"}, "the model had 72 parameters, now 144"),
        ({"model_tree": "bb"}, "the model is different: the classes, code or settings of its modules differ"),
        ({"sample_batch_size": 8, "sample_batch": "bb"}, "the sample batch had 4 samples, now 8"),
        ({"sample_batch": "bb"}, "the sample batch has a different structure, shape or dtype"),
        ({"optimizer": "bb"}, "the optimizer or its options are different"),
        ({"loss_fn": "bb"}, "loss_fn is different"),
        ({"loss_fn": None}, "there was a loss_fn, now there is none"),
        ({"make_batch": "bb"}, "there was no make_batch"),
        ({"precision": "bf16"}, "precision was none, now bf16"),
        ({"loss_scope": "batch"}, "loss_scope was sample, now batch"),
    ],
)
def test_each_part_of_the_workload(changes, said):
    assert told_of(workload={**WORKLOAD, **changes}) == [said]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"effective_batch_size": 512}, "effective_batch_size was 256, now 512"),
        ({"effective_batch_size": [256, 1024]}, "effective_batch_size was 256, now 256:1024"),
        ({"effective_batch_size": None}, "effective_batch_size was 256, now none"),
        ({"max_batch_size": 32}, "max_batch_size was none, now 32"),
        ({"reserve": "5%"}, "reserve was none, now 5%"),
        ({"strategy": "ddp"}, "strategy was auto, now ddp"),
        ({"name": "mine"}, "name was none, now mine"),
        ({"devices": ["cuda:1", "cuda:2"]}, "devices was cuda:0, cuda:1, now cuda:1, cuda:2"),
    ],
)
def test_each_part_of_the_request(changes, said):
    assert told_of(request={**REQUEST, **changes}) == [said]


@pytest.fixture
def logged(caplog):
    def log(*plans: Plan) -> list[str]:
        for number, plan in enumerate(plans):
            os.utime(store(f"{number}bcdef0123456789", plan), (number + 1, number + 1))
        with caplog.at_level(logging.INFO, logger="autosplit"):
            log_differences(KEY)
        return caplog.messages

    return log


def test_the_log_has_each_difference_to_the_newest_profile(logged):
    older = replace(PLAN, request={**REQUEST, "strategy": "ddp"})
    newest = replace(PLAN, machine={**MACHINE, "torch": "2.11.0"}, request={**REQUEST, "effective_batch_size": 1})
    (said,) = logged(older, newest)
    assert said.startswith("no profile matches. The newest, 1bcdef012345: tuned with torch 2.11.0, now 2.12.0; ")
    assert "effective_batch_size was 1, now 256" in said


def test_the_log_has_nothing_of_another_model_or_without_a_profile(logged):
    assert logged() == []
    assert logged(replace(PLAN, workload={**WORKLOAD, "model": "Other"})) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(sorted({*MACHINE, *WORKLOAD, *REQUEST})), JSON), st.lists(JSON, max_size=2))
def test_whatever_a_file_holds_one_printable_line_comes_of_it(parts, devices):
    plan = replace(
        PLAN,
        machine={**MACHINE, **parts, "devices": devices},
        workload={**WORKLOAD, **parts, "model": "Net"},
        request={**REQUEST, **parts},
    )
    assert "; ".join(differences(plan, KEY)).isprintable()


@pytest.mark.parametrize("value", ["\x1b[31m\n" * 1000, "x" * 10**6], ids=["codes", "text"])
def test_what_would_fill_the_screen_or_steer_it_is_cut(value):
    said = "; ".join(differences(replace(PLAN, machine={**MACHINE, "torch": value}), KEY))
    assert said.isprintable()
    assert len(said) < 400
