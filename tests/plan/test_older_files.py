"""Plans of older versions are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autosplit.errors import PlanError
from autosplit.plan.plan import Plan

CEILING = {
    "device": "cpu:0",
    "role": "rank",
    "batch_size": 64,
    "limited_by": "memory",
    "fixed_bytes": 1000,
    "bytes_per_sample": 10,
    "peak_bytes": 1640,
    "capacity_bytes": 2000,
}
REGION = {
    "primary": {"fixed_bytes": 1000.0, "bytes_per_share": 10.0, "bytes_per_batch": 0.0},
    "primary_capacity_bytes": 2000,
    "primary_ceiling": 64,
    "replica_ceilings": [64],
    "max_batch_size": 64,
    "least_share": 2,
}


def device(rank: int, share: int) -> dict[str, Any]:
    facts = {"label": f"cpu:{rank}", "kind": "cpu", "index": rank, "name": "a CPU", "budgeted": True}
    numbers = {"memory_bytes": 2000, "capacity_bytes": 2000, "peak_bytes": 1640, "busy_s": 0.1, "share": share}
    return {**facts, **numbers, "ceiling": CEILING}


def version_2(sizes: tuple[int, ...], effective: int, forwards: int, **changes: Any) -> dict[str, Any]:
    """Return a plan of version 2 whose split is (6, 6), with ranks of these sizes."""
    ranks = [
        {"rank": rank, "device": f"cpu:{rank}", "batch_size": size, "accumulation_steps": forwards, "ceiling": CEILING,
         "peak_bytes": 1640}
        for rank, size in enumerate(sizes)
    ]  # fmt: skip
    plain = {
        "schema_version": 2,
        "split": [6, 6],
        "gpu0_bsz": 6,
        "batch_size": 12,
        "accumulation_steps": -(-effective // 12),
        "effective_batch_size": effective,
        "samples_per_s": 10.0,
        "even_samples_per_s": 9.0,
        "ceilings": [60, 64],
        "devices": [device(0, 6), device(1, 6)],
        "trials": [],
        "ddp": {"ranks": ranks, "samples_per_s": 20.0, "least_batch": 2},
        "precision": "none",
        "simulated": False,
        "region": REGION,
    }
    return {**plain, **changes}


def read(plain: dict[str, Any]) -> Plan:
    return Plan.from_json(json.dumps(plain))


@pytest.mark.parametrize(
    ("sizes", "effective", "forwards", "expected"),
    [((2, 6), 20, 3, 20), ((2, 6), 12, 1, 8), ((2, 6), 20, 2, 16)],
)
def test_the_plan_of_version_2_had_a_split_and_ranks(sizes, effective, forwards, expected):
    """Its ranks had no effective batch size of their own. It followed from their forwards."""
    plan = read(version_2(sizes, effective, forwards))
    assert (plan.split, plan.ceilings, plan.even_samples_per_s, plan.main.least_batch) == ((6, 6), (60, 64), 9.0, 2)
    assert (plan.ddp.split, plan.ddp.accumulation_steps, plan.ddp.effective_batch_size) == (sizes, forwards, expected)
    assert (plan.ddp.samples_per_s, plan.ddp.measured, plan.ddp.least_batch) == (20.0, False, 2)
    assert json.loads(plan.to_json())["schema_version"] == 3
    assert Plan.from_json(plan.to_json()) == plan


def test_one_for_ddp_only_has_one_layout():
    plan = read(version_2((6, 6), 12, 1, region=None))
    assert [layout.strategy for layout in plan.layouts] == ["ddp"]
    assert plan.samples_per_s == 10.0


def test_one_without_ranks_keeps_the_reason():
    plan = read(version_2((), 12, 1, ddp={"ranks": [], "samples_per_s": 0.0, "reason": "no room"}))
    assert (plan.ddp, plan.why_no_ddp) == (None, "no room")


def test_notes_of_version_1_had_no_kind():
    plan = read(version_2((2, 6), 20, 3, schema_version=1, notes=["a note"]))
    assert [(note.kind, note.text) for note in plan.notes] == [("note", "a note")]


@pytest.mark.parametrize(
    "changes",
    [
        {"ddp": None},
        {"ddp": {"ranks": [{}]}},
        {"devices": [1]},
        {"devices": []},
        {"split": 3},
        {"ceilings": ["a", "b"]},
        {"effective_batch_size": "many"},
        {"effective_batch_size": -1},
        {"region": []},
        {"fit": {"step_time": 3}},
    ],
)
def test_what_is_no_plan_of_version_2_is_refused(changes):
    with pytest.raises(PlanError):
        read(version_2((2, 6), 20, 3, **changes))


def test_ranks_with_different_forwards_are_refused():
    plain = version_2((2, 6), 20, 3)
    plain["ddp"]["ranks"][1] = {**plain["ddp"]["ranks"][1], "accumulation_steps": 2}
    with pytest.raises(PlanError):
        read(plain)
