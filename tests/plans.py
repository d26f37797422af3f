"""A plan for two devices, for tests of plans. It is made from JSON, which is the public way to make one by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import ddp_jobs
from ddp_jobs import changed_plan

from autosplit import Plan

MIB = 2**20


def _trial(number: int, *split: int, **outcome: Any) -> dict[str, Any]:
    sizes = {"gpu0_bsz": split[0], "batch_size": sum(split), "accumulation_steps": 3, "split": split}
    return {"number": number, **sizes, **outcome}


_PLAIN = ddp_jobs.make_plan((2, 4), 16, capacity_bytes=64 * MIB).to_dict()
_RANKS = _PLAIN["layouts"][0]
_BALANCED = {"strategy": "balanced", "samples_per_s": 12.5, "measured": True, "even_samples_per_s": 10.0}
_PLAIN |= {
    "layouts": [{**_RANKS, **_BALANCED}, _RANKS],
    "trials": [
        _trial(0, 2, 4, samples_per_s=12.5, error_share=0.01, peak_bytes=(40, 50)),
        _trial(1, 3, 3, failure="cpu:1 ran out of memory"),
    ],
    "checks": [
        {
            "subject": "BatchNorm1d at 1",
            "split_error": 0.5,
            "accumulation_error": None,
            "depends": True,
            "advice": "freeze it",
        }
    ],
    "notes": [{"kind": "note", "text": "a sentence — with “Unicode”"}],
    "real_steps": 7,
    "real_ooms": 1,
}
_PLAN = Plan.from_json(json.dumps(_PLAIN))


def plan_device(index: int, **changes: Any) -> Any:
    """Return a CPU device of a plan, with a budget of 64 MiB."""
    return replace(_PLAN.devices[0], **{"label": f"cpu:{index}", "index": index, "name": "cpu", **changes})


def plan_seat(index: int, samples: int, **changes: Any) -> Any:
    """Return a seat on a CPU device. `changes` replaces fields of the device."""
    device, seat = plan_device(index, **changes), _PLAN.main.seats[0]
    ceiling = replace(seat.ceiling, device=device.label)
    return replace(seat, device=device, samples=samples, peak_bytes=40 * MIB, ceiling=ceiling)


def make_plan(**changes: Any) -> Plan:
    """Return a plan of 2 + 4 samples, 16 in a step, on two CPU devices with budgets.

    `changes` replaces fields of the plan or of BalancedDataParallel's layout.
    """
    return changed_plan(_PLAN, **{"seats": (plan_seat(0, 2), plan_seat(1, 4)), **changes})


def simulated_plan() -> Plan:
    """Return the same plan for two simulated GPUs."""

    def simulated(layout: Any) -> Any:
        devices = (plan_device(i, label=f"sim:{i}", kind="sim", name="RTX3090") for i in range(2))
        pairs = zip(layout.seats, devices, strict=True)
        return replace(layout, seats=tuple(replace(seat, device=device) for seat, device in pairs))

    plan = make_plan()
    return replace(plan, layouts=tuple(map(simulated, plan.layouts)))
