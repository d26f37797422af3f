"""A plan for two devices, for tests of what is done with plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpPlan, PlanDevice, RankSettings
from autosplit.probe.check_result import Check
from autosplit.solve.memory import Ceiling
from autosplit.solve.trial import Trial

MIB = 2**20


def plan_device(index: int, share: int, **changes: Any) -> PlanDevice:
    ceiling = Ceiling(f"cpu:{index}", "replica", 9, "memory", -5, 7, 58, 60, steps=3, ooms=1, confirmed=True)
    device = PlanDevice(f"cpu:{index}", "cpu", index, "cpu", 64 * MIB, 64 * MIB, True, share, 40 * MIB, 0.25, ceiling)
    return replace(device, **changes)


def make_plan(**changes: Any) -> Plan:
    """A plan of 2 + 4 samples, 16 in a step, on two cpu devices with budgets."""
    ceiling = plan_device(0, 2).ceiling
    plain: dict[str, Any] = {
        "split": (2, 4),
        "gpu0_bsz": 2,
        "batch_size": 6,
        "accumulation_steps": 3,
        "effective_batch_size": 16,
        "samples_per_s": 12.5,
        "even_samples_per_s": 10.0,
        "ceilings": (5, 9),
        "devices": (plan_device(0, 2), plan_device(1, 4)),
        "trials": (
            Trial(0, 2, 6, 3, (2, 4), 12.5, 0.01, (40, 50)),
            Trial(1, 3, 6, 3, (3, 3), failure="cpu:1 ran out of memory"),
        ),
        "ddp": DdpPlan(
            (RankSettings(0, "cpu:0", 3, 3, ceiling, 44), RankSettings(1, "cpu:1", 3, 3, ceiling, 44)), 11.0
        ),
        "precision": "none",
        "simulated": False,
        "checks": (Check("BatchNorm1d at 1", 0.5, None, depends=True, advice="freeze it"),),
        "notes": ("a sentence — with “Unicode”",),
        "real_steps": 7,
        "real_ooms": 1,
    }
    return Plan(**{**plain, **changes})


def simulated_plan() -> Plan:
    devices = tuple(plan_device(i, n, label=f"sim:{i}", kind="sim", name="RTX3090") for i, n in enumerate((2, 4)))
    return make_plan(simulated=True, devices=devices)
