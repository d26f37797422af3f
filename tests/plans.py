"""A plan for two devices, for tests of plans. It is made from JSON, which is the public way to make one by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ddp_jobs
from handmade import changed_plan, on_devices
from noted import noted

from autosplit import Plan
from autosplit.plan.layout import PlanDevice, Seat
from autosplit.probe.check_result import Check
from autosplit.solve.trial import Trial

MIB = 2**20

_RANKS = ddp_jobs.make_plan((2, 4), 16, capacity_bytes=64 * MIB).main
_BALANCED = replace(_RANKS, strategy="balanced", samples_per_s=12.5, measured=True, even_samples_per_s=10.0)


def plan_device(index: int, **changes: Any) -> PlanDevice:
    """Return a CPU device of a plan, with a budget of 64 MiB."""
    device = replace(_RANKS.devices[0], label=f"cpu:{index}", index=index, name="cpu")
    return replace(device, **changes)


def plan_seat(index: int, samples: int, **changes: Any) -> Seat:
    """Return a seat on a CPU device. `changes` replaces fields of the device."""
    device = plan_device(index, **changes)
    ceiling = replace(_RANKS.seats[0].ceiling, device=device.label)
    return replace(_RANKS.seats[0], device=device, samples=samples, peak_bytes=40 * MIB, ceiling=ceiling)


def make_plan(**changes: Any) -> Plan:
    """Return a plan of 2 + 4 samples, 16 in a step, on two CPU devices with budgets.

    `changes` replaces fields of the plan or of BalancedDataParallel's layout.
    """
    return changed_plan(_PLAN, **changes)


def simulated_plan() -> Plan:
    """Return the same plan for two simulated GPUs."""
    return on_devices(make_plan(), *(plan_device(i, label=f"sim:{i}", kind="sim", name="RTX3090") for i in range(2)))


_PLAN = Plan(
    layouts=(replace(_BALANCED, seats=(plan_seat(0, 2), plan_seat(1, 4))), _RANKS),
    precision="none",
    trials=(
        Trial(0, 2, 6, 3, (2, 4), samples_per_s=12.5, error_share=0.01, peak_bytes=(40, 50)),
        Trial(1, 3, 6, 3, (3, 3), failure="cpu:1 ran out of memory"),
    ),
    checks=(Check("BatchNorm1d at 1", 0.5, None, depends=True, advice="freeze it"),),
    notes=noted("a sentence — with “Unicode”"),
    real_steps=7,
    real_ooms=1,
)
