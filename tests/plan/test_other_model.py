"""A plan warns once if it wraps a model of another size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ddp_jobs import make_plan
from raised import raises
from torch import nn

from autosplit.errors import InputError
from autosplit.plan.other_model import OtherModelWarning

WORKLOAD = {"model": "Large", "parameters": 12}


def test_wrapping_warns_of_another_model(recwarn):
    plan = replace(make_plan((4, 2)), workload=WORKLOAD)
    plan.wrap(nn.Linear(3, 3))
    assert not recwarn
    with pytest.warns(
        OtherModelWarning, match="for Large with 12 parameters, but this Linear has 6. The plan's batch sizes"
    ):
        plan.wrap(nn.Linear(2, 2))


def test_a_plan_of_several_models_may_wrap_any(recwarn):
    replace(make_plan((4, 2)), workload={**WORKLOAD, "model": "One, Other"}).wrap(nn.Linear(2, 2))
    assert not recwarn


def test_a_wrapped_model_is_refused():
    """Each device's samples were split again, and the inner wrapper used its own split."""
    plan = make_plan((4, 2))
    wrapped = plan.wrap(nn.Linear(3, 3))
    for model in (wrapped, nn.DataParallel(nn.Linear(3, 3))):
        with raises(InputError):
            plan.wrap(model)
    assert plan.wrap(wrapped.module).module is wrapped.module


def test_what_is_no_model_is_refused():
    with raises(InputError, "None"):
        make_plan((4, 2)).wrap(None)
    with raises(InputError, "Pass Linear(...)"):
        make_plan((4, 2)).wrap(nn.Linear)
