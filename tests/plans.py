"""A plan for two devices, for tests of plans. It is made from JSON, which is the public way to make one by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from autosplit import Plan

MIB = 2**20


def _ceiling(label: str) -> dict[str, Any]:
    return {
        "device": label,
        "role": "replica",
        "batch_size": 9,
        "limited_by": "memory",
        "fixed_bytes": -5,
        "bytes_per_sample": 7,
        "peak_bytes": 58,
        "capacity_bytes": 60,
        "steps": 3,
        "ooms": 1,
        "confirmed": True,
    }


def _device(index: int, share: int) -> dict[str, Any]:
    return {
        "label": f"cpu:{index}",
        "kind": "cpu",
        "index": index,
        "name": "cpu",
        "memory_bytes": 64 * MIB,
        "capacity_bytes": 64 * MIB,
        "budgeted": True,
        "share": share,
        "peak_bytes": 40 * MIB,
        "busy_s": 0.25,
        "ceiling": _ceiling(f"cpu:{index}"),
    }


def _rank(index: int) -> dict[str, Any]:
    return {
        "rank": index,
        "device": f"cpu:{index}",
        "batch_size": 3,
        "accumulation_steps": 3,
        "ceiling": _ceiling("cpu:0"),
        "peak_bytes": 44,
    }


def _trial(number: int, *split: int, **outcome: Any) -> dict[str, Any]:
    sizes = {"gpu0_bsz": split[0], "batch_size": sum(split), "accumulation_steps": 3, "split": split}
    return {"number": number, **sizes, **outcome}


_PLAIN = {
    "schema_version": 1,
    "split": (2, 4),
    "gpu0_bsz": 2,
    "batch_size": 6,
    "accumulation_steps": 3,
    "effective_batch_size": 16,
    "samples_per_s": 12.5,
    "even_samples_per_s": 10.0,
    "ceilings": (5, 9),
    "devices": (_device(0, 2), _device(1, 4)),
    "trials": (
        _trial(0, 2, 4, samples_per_s=12.5, error_share=0.01, peak_bytes=(40, 50)),
        _trial(1, 3, 3, failure="cpu:1 ran out of memory"),
    ),
    "ddp": {"ranks": (_rank(0), _rank(1)), "samples_per_s": 11.0},
    "precision": "none",
    "simulated": False,
    "checks": (
        {
            "subject": "BatchNorm1d at 1",
            "split_error": 0.5,
            "accumulation_error": None,
            "depends": True,
            "advice": "freeze it",
        },
    ),
    "notes": ("a sentence — with “Unicode”",),
    "real_steps": 7,
    "real_ooms": 1,
}
_PLAN = Plan.from_json(json.dumps(_PLAIN))


def plan_device(index: int, share: int, **changes: Any) -> Any:
    """Return a CPU device of a plan, with a budget of 64 MiB."""
    first = _PLAN.devices[0]
    label = f"cpu:{index}"
    ceiling = replace(first.ceiling, device=label)
    return replace(first, **{"label": label, "index": index, "share": share, "ceiling": ceiling, **changes})


def make_plan(**changes: Any) -> Plan:
    """Return a plan of 2 + 4 samples, 16 in a step, on two CPU devices with budgets."""
    return replace(_PLAN, **{"devices": (plan_device(0, 2), plan_device(1, 4)), **changes})


def simulated_plan() -> Plan:
    """Return the same plan for two simulated GPUs."""
    devices = tuple(plan_device(i, n, label=f"sim:{i}", kind="sim", name="RTX3090") for i, n in enumerate((2, 4)))
    return make_plan(simulated=True, devices=devices)
