"""A plan for two devices, for tests of plans. It is made from JSON, which is the public way to make one by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import ddp_jobs

from autosplit import Plan

MIB = 2**20


def _trial(number: int, *split: int, **outcome: Any) -> dict[str, Any]:
    sizes = {"gpu0_bsz": split[0], "batch_size": sum(split), "accumulation_steps": 3, "split": split}
    return {"number": number, **sizes, **outcome}


_PLAIN = {
    **ddp_jobs.make_plan((2, 4), 16, capacity_bytes=64 * MIB).to_dict(),
    "samples_per_s": 12.5,
    "even_samples_per_s": 10.0,
    "trials": (
        _trial(0, 2, 4, samples_per_s=12.5, error_share=0.01, peak_bytes=(40, 50)),
        _trial(1, 3, 3, failure="cpu:1 ran out of memory"),
    ),
    "checks": (
        {
            "subject": "BatchNorm1d at 1",
            "split_error": 0.5,
            "accumulation_error": None,
            "depends": True,
            "advice": "freeze it",
        },
    ),
    "notes": ({"kind": "note", "text": "a sentence — with “Unicode”"},),
    "real_steps": 7,
    "real_ooms": 1,
}
_PLAN = Plan.from_json(json.dumps(_PLAIN))


def plan_device(index: int, share: int, **changes: Any) -> Any:
    """Return a CPU device of a plan, with a budget of 64 MiB."""
    label = f"cpu:{index}"
    ceiling = replace(_PLAN.devices[0].ceiling, device=label)
    numbers = {"index": index, "share": share, "peak_bytes": 40 * MIB, "ceiling": ceiling}
    return replace(_PLAN.devices[0], **{"label": label, "name": "cpu", **numbers, **changes})


def make_plan(**changes: Any) -> Plan:
    """Return a plan of 2 + 4 samples, 16 in a step, on two CPU devices with budgets."""
    return replace(_PLAN, **{"devices": (plan_device(0, 2), plan_device(1, 4)), **changes})


def simulated_plan() -> Plan:
    """Return the same plan for two simulated GPUs."""
    devices = tuple(plan_device(i, n, label=f"sim:{i}", kind="sim", name="RTX3090") for i, n in enumerate((2, 4)))
    return make_plan(simulated=True, devices=devices)
