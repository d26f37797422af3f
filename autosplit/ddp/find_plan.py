"""Find the plan of a job: the given plan, or the only saved plan for this machine."""

from __future__ import annotations

import os
from pathlib import Path

from autosplit.errors import PlanError
from autosplit.plan.plan import Plan
from autosplit.plan.torchrun import PLAN_VARIABLE, refuse_unfit
from autosplit.profiles.key import key_of
from autosplit.profiles.store import KEY_DIGITS
from autosplit.profiles.validity import usable_here
from autosplit.text import listed, printable

_SHOWN = 5
"""The most plans that an error message lists."""


def plan_for_job(
    profile: Plan | str | os.PathLike[str] | None, world_size: int | None = None
) -> tuple[Plan, Path | None]:
    """Return the plan of a job, and its file or None.

    The plan is the given plan, or the plan in the file that the environment variable names. Otherwise it is the only
    plan in the cache that fits this machine and the `world_size` processes.
    """
    path: Path | None = None
    if isinstance(profile, Plan):
        plan = profile
    else:
        given = os.environ.get(PLAN_VARIABLE) if profile is None else profile
        plan, path = (Plan.load(given), Path(given)) if given else _remembered_plan(world_size)
    refuse_unfit(plan)
    return plan, path


def _remembered_plan(world_size: int | None) -> tuple[Plan, Path]:
    """Return the only plan in the cache that this machine and this job can use."""
    ranked = [(plan, path) for path, plan in usable_here() if plan.ddp.ranks]
    usable = _fastest_ways([found for found in ranked if world_size in (None, len(found[0].ddp.ranks))])
    if len(usable) == 1:
        return usable[0]
    job = "" if world_size is None else f" and {world_size} process{'es' * (world_size > 1)}"
    if not usable:
        raise PlanError(
            f"No plan is named, and no saved plan is for this machine{job}. Expected a plan or a plan file. Make "
            f"one with autosplit tune FILE, or set {PLAN_VARIABLE} to a file that plan.save(path) wrote.",
            code="no-profile-matches",
        )
    keys = [f"{path.stem[:KEY_DIGITS]} ({described(plan)})" for plan, path in usable]
    raise PlanError(
        f"No plan is named, and {len(usable)} saved plans are for this machine{job}: "
        f"{listed(keys, _SHOWN, separator='; ', last='; ')}. Expected one. Name its key, as in autosplit launch "
        f"--plan {usable[0][1].stem[:KEY_DIGITS]} train.py, or set {PLAN_VARIABLE} to its file.",
        code="several-profiles-match",
    )


def _fastest_ways(found: list[tuple[Plan, Path]]) -> list[tuple[Plan, Path]]:
    """Return the fastest of all plans that differ only in their checkpointed layers. One tuning made these plans."""
    fastest: dict[str, tuple[Plan, Path]] = {}
    for plan, path in found:
        workload = {name: value for name, value in plan.workload.items() if name != "checkpointing"}
        key = key_of(plan.machine, workload, plan.request, None)
        if key not in fastest or plan.samples_per_s > fastest[key][0].samples_per_s:
            fastest[key] = (plan, path)
    return list(fastest.values())


def described(plan: Plan) -> str:
    """Describe a plan's model and sizes in a few words."""
    sizes = ", ".join(str(settings.batch_size) for settings in plan.ddp.ranks)
    model = printable(plan.workload.get("model", "a model"), longest=300)
    count = plan.workload.get("parameters")
    size = f" with {count:,} parameters" if isinstance(count, int) else ""
    return f"{model}{size}, {sizes} samples x {plan.ddp.ranks[0].accumulation_steps}"
