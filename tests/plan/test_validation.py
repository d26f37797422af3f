"""A loaded plan is consistent, and has no values that break other code."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from handmade import changed_plan, made_plan, on_devices

from autosplit.errors import PlanError
from autosplit.plan.layout import MOST_DEVICES, MOST_FORWARDS
from autosplit.plan.plan import Plan
from autosplit.plan.validation import DEEPEST, LARGEST, unsound_part
from autosplit.solve.step_time import Cost, Residual, StepTime, TimeCurve
from autosplit.solve.trial import Trial

CURVES = (TimeCurve(((1, 0.1), (2, 0.2))),) * 2
TIMES = StepTime(CURVES, (0.0, 0.1), (0.0, 0.1), 0.1, adds_up=False)
PLAN = made_plan((100, 156), cost=Cost(TIMES, 0.1, (Residual((100, 156), 2, 0.1, 0.1),)))


def nested(levels: int) -> dict[str, object]:
    inner: object = 1
    for _ in range(levels):
        inner = [inner]
    return {"a": inner}


def with_device(**changes) -> Plan:
    return on_devices(PLAN, replace(PLAN.devices[0], **changes), *PLAN.devices[1:])


def with_times(**changes) -> Plan:
    return changed_plan(PLAN, cost=replace(PLAN.main.cost, step_time=replace(TIMES, **changes)))


def test_a_sound_plan():
    assert unsound_part(PLAN) is None
    assert Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (with_device(memory_bytes=10), "a device's capacity is .* bytes, more than its memory of 10"),
        (changed_plan(PLAN, even_samples_per_s=0.0), r"`float` > 0.0 - at `\$.layouts\[.\].even_samples_per_s`"),
        (replace(PLAN, machine=nested(DEEPEST)), "machine is nested over"),
        (replace(PLAN, trials=(Trial(0, 1, 9, 1, (1, 1), 1.0),)), "batch_size is 9, but its split adds up to 2"),
        (with_times(copies_s=(0.0,)), r"cost has \[1, 2\] entries, but there are 2 devices"),
        (changed_plan(PLAN, cost=Cost(TIMES, 0.1, (Residual((1,), 1, 0.1, 0.1),))), "a residual is not for 2 devices"),
        (
            made_plan((1, 1), effective=4 * MOST_FORWARDS),
            r"`int` <= 1048576 - at `\$.layouts\[.\].accumulation_steps`",
        ),
        (made_plan((1,) * (MOST_DEVICES + 1)), rf"`array` of length <= {MOST_DEVICES} - at `.\.layouts\[.\].seats`"),
    ],
)
def test_an_unsound_plan_is_refused(plan, message):
    with pytest.raises(PlanError, match=message) as caught:
        refuse(plan)
    assert "\n" not in str(caught.value)


def refuse(plan: Plan) -> None:
    """Read a plan again. Values that JSON cannot express are validated directly."""
    try:
        text = plan.to_json()
        json.loads(text)
    except (RecursionError, ValueError, OverflowError):
        raise PlanError(f"{unsound_part(plan)}") from None
    Plan.from_json(text)


def test_simulated_and_real_devices_do_not_mix():
    plan = made_plan((100, 156), kind="sim")
    mixed = on_devices(plan, plan.devices[0], replace(plan.devices[1], kind="cuda"))
    with pytest.raises(PlanError, match="its devices are cuda and sim"):
        Plan.from_json(mixed.to_json())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("real_steps", LARGEST, r"real_steps is 4611686018427387904. Expected a number from 0 to less than 2\^62"),
        ("real_steps", -1, "real_steps is -1. Expected"),
        ("real_steps", 10**400, "is not a plan"),
        ("loader_samples_per_s", 1e300, r"loader_samples_per_s is 1e\+300. Expected"),
    ],
)
def test_a_number_that_no_plan_has_is_refused(name, value, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps({**PLAN.to_dict(), name: value}))


def test_escape_sequences_of_a_file_do_not_reach_the_terminal():
    """The kind of a device was printed unescaped in the traceback."""
    plan = json.loads(PLAN.to_json())
    for layout in plan["layouts"]:
        layout["seats"][1]["device"]["kind"] = "\x1b[31mcpu\x1b[0m\u202e"
    with pytest.raises(PlanError, match=r"\\x1b\[31mcpu") as caught:
        Plan.from_json(json.dumps(plan))
    assert str(caught.value).isprintable()
