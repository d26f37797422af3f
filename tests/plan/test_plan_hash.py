"""Plans are values: equal plans have equal hashes, and a plan may be a dict key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddp_jobs import make_plan
from noted import noted

from autosplit.plan.plan import Plan
from autosplit.plan.record import with_notes, with_path


def test_equal_plans_have_equal_hashes() -> None:
    """hash(plan) raised TypeError: some fields are dicts."""
    plan = make_plan((2, 6), 16)
    other = Plan.from_json(plan.to_json())
    assert plan == other
    assert hash(plan) == hash(other)
    assert len({plan, other, make_plan((2, 6), 24), replace(plan, notes=noted("a note"))}) == 3


def test_a_copy_with_notes_keeps_the_path() -> None:
    plan = with_path(make_plan((2, 6), 16), Path("plan.json"))
    assert with_notes(plan, *noted("a note")).path == Path("plan.json")
    assert replace(plan, notes=()).path is None
