"""Shared plans have the plan's numbers, and nothing about their owner."""

from __future__ import annotations

import json
from dataclasses import replace

from handmade import made_plan
from noted import noted

from autosplit.cli.main import main
from autosplit.plan.plan import Plan
from autosplit.plan.redact import FAILED, LEFT_OUT, shareable

UUID = "3f2a91c0-1a2b-4c3d-8e4f-0123456789ab"
PRIVATE = f"/home/ann/x of GPU-{UUID}, pid 4711, redis://:secret@host"


def private_plan() -> Plan:
    plan = made_plan((100, 156))
    ceiling = replace(plan.devices[0].ceiling, notes=noted(PRIVATE))
    return replace(
        plan,
        devices=tuple(
            replace(device, uuid=f"GPU-odd_{i}", driver="580", ceiling=ceiling) for i, device in enumerate(plan.devices)
        ),
        trials=(*plan.trials[:1], replace(plan.trials[1], failure=PRIVATE)),
        ddp=replace(plan.ddp, ranks=tuple(replace(rank, ceiling=ceiling) for rank in plan.ddp.ranks)),
        notes=noted(PRIVATE, "cuda:0 is GPU-odd_1"),
    )


def assert_shared(text: str) -> None:
    assert not [one for one in ("ann", UUID, "odd_", "4711", "secret", "host") if one in text]


def test_a_plan_keeps_its_numbers_alone():
    plan = private_plan()
    shared = shareable(plan)
    assert_shared(shared.to_json())
    assert (shared.split, shared.ceilings, shared.trials[0]) == (plan.split, plan.ceilings, plan.trials[0])
    assert (shared.machine, shared.workload, shared.checks) == (plan.machine, plan.workload, plan.checks)
    assert shared.trials[1].failure == FAILED
    ooms = replace(plan, trials=tuple(replace(trial, failed_device=1) for trial in plan.trials))
    assert [trial.failure for trial in shareable(ooms).trials] == [None, "cuda:1 ran out of memory"]
    assert shared.notes == (LEFT_OUT,)
    assert [device.driver for device in shared.devices] == ["580", "580"]
    assert shareable(shared) == shared
    assert plan == private_plan()
    assert Plan.from_json(shared.to_json()) == shared


def test_a_plan_without_any_stays_as_it_is():
    plan = replace(made_plan((100, 156)), notes=())
    plan = replace(plan, trials=tuple(trial for trial in plan.trials if not trial.failure))
    assert shareable(plan) == plan


def test_show_as_json_is_made_to_be_shared(tmp_path, capsys):
    path = tmp_path / "plan.json"
    private_plan().save(path)
    assert main(["show", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert_shared(out)
    assert json.loads(out) == shareable(private_plan()).to_dict()
    assert UUID in path.read_text()
