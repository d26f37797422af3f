"""The parts of the key in which the newest profile differs are logged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_plan

from autosplit.plan.plan import Plan
from autosplit.profiles.key import ProfileKey
from autosplit.profiles.store import store
from autosplit.tuning.recall import _log_newest

MACHINE = {"devices": [{"kind": "cuda", "name": "NVIDIA A100", "memory_gib": 40, "count": 2}], "torch": "2.12.0"}
WORKLOAD = {"model": "Net", "optimizer": "aa", "sample_batch_size": 4, "precision": None}
REQUEST = {"strategy": "auto", "effective_batch_size": 256, "name": None}
KEY = ProfileKey(MACHINE, WORKLOAD, REQUEST)
PLAN = make_plan(machine=MACHINE, workload=WORKLOAD, request=REQUEST)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"machine": {**MACHINE, "torch": "2.13.0"}}, {"machine": ["torch"]}),
        ({"machine": {**MACHINE, "ranks_per_machine": [1, 1]}}, {"machine": ["ranks_per_machine"]}),
        ({"workload": {**WORKLOAD, "precision": "bf16", "optimizer": "bb"}}, {"workload": ["optimizer", "precision"]}),
        ({"request": {"strategy": "auto", "name": "a"}}, {"request": ["effective_batch_size", "name"]}),
    ],
)
def test_each_part_that_differs_is_named(changes, found):
    assert KEY.differences(replace(PLAN, **changes)) == found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(max_size=8), JSON))
def test_a_file_may_contain_anything(facts):
    found = KEY.differences(replace(PLAN, machine=facts))
    assert set(found["machine"]) == {*facts, *MACHINE}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    def log(*plans: Plan) -> list[str]:
        for number, plan in enumerate(plans):
            os.utime(store(f"{number}bcdef0123456789", plan), (number + 1, number + 1))
        with caplog.at_level(logging.INFO, logger="autosplit"):
            _log_newest(KEY)
        return caplog.messages

    return log


def test_the_log_has_the_differences_of_the_newest_profile(logged):
    older = replace(PLAN, request={**REQUEST, "strategy": "ddp"})
    newest = replace(PLAN, machine={**MACHINE, "torch": "2.11.0"}, request={**REQUEST, "effective_batch_size": 1})
    differs = "differs in machine: torch; request: effective_batch_size"
    assert logged(older, newest) == [f"no profile matches. The newest, 1bcdef012345, {differs}"]


def test_the_log_of_a_hostile_file_is_one_short_line(logged):
    assert logged(replace(PLAN, machine={**MACHINE, "\x1b[31m\n": 1})) == []
    (said,) = logged(replace(PLAN, machine={**MACHINE, "x" * 10**6: 1}))
    assert len(said) < 500
