"""Plans are values: equal plans have equal hashes, and a plan may be a dict key."""

from __future__ import annotations

from dataclasses import replace

from ddp_jobs import make_plan
from noted import noted

from autosplit.plan.plan import Plan


def test_equal_plans_have_equal_hashes() -> None:
    """hash(plan) raised TypeError: some fields are dicts."""
    plan = make_plan((2, 6), 16)
    other = Plan.from_json(plan.to_json())
    assert plan == other
    assert hash(plan) == hash(other)
    assert len({plan, other, make_plan((2, 6), 24), replace(plan, notes=noted("a note"))}) == 3
