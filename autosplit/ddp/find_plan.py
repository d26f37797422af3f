"""Find the plan of a job: the given plan, or the newest saved plan for this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from autosplit.errors import InputError, PlanError
from autosplit.plan.other_model import difference, parameters_in, warn_of_other_model
from autosplit.plan.plan import Plan
from autosplit.plan.torchrun import NEWEST_VARIABLE, PLAN_VARIABLE, required_ranks, trainable_ranks
from autosplit.profiles.store import KEY_DIGITS
from autosplit.profiles.validity import usable_here
from autosplit.text import printable


def plan_for_job(
    profile: Plan | str | os.PathLike[str] | None, world_size: int | None = None
) -> tuple[Plan, Path | None]:
    """Return the plan of a job, and its file or None.

    This is the given plan, or the plan in the file that AUTOSPLIT_PROFILE names, or the newest saved plan that fits
    this machine and the `world_size` processes. If several fit, rank 0 prints the chosen plan on stderr.
    """
    path: Path | None = None
    if isinstance(profile, Plan):
        plan = profile
    else:
        given = os.environ.get(PLAN_VARIABLE) if profile is None else profile
        plan, path = (Plan.load(given), Path(given)) if given else _newest_plan(world_size)
    trainable_ranks(plan)
    return plan, path


def _newest_plan(world_size: int | None) -> tuple[Plan, Path]:
    usable = _usable_by(world_size)
    found = next(usable, None)
    if found is None:
        if world_size == 1 and next(_usable_by(None), None) is not None:
            raise PlanError(
                "This script runs as one process, but the saved plans for this machine need several. Start it with "
                "autosplit launch SCRIPT.",
                code="launch-missing",
            )
        job = "" if world_size is None else f" and {world_size} process{'es' * (world_size > 1)}"
        raise PlanError(
            f"You named no plan, and autosplit found no saved plan for this machine{job}. Make a plan with autosplit "
            f"tune FILE, or set {PLAN_VARIABLE} to the file that plan.save(path) wrote.",
            code="no-profile-matches",
        )
    plan, path = found
    other = next(usable, None)
    if os.environ.get("RANK", "0") == "0" and other is not None and _job_of(other[0]) != _job_of(plan):
        print_newest(described(plan), path)
    return plan, path


def _job_of(plan: Plan) -> tuple[object, ...]:
    # `tune_best` saves a plan for each precision and each choice of checkpointed layers, and the fastest one last.
    workload = {name: value for name, value in plan.workload.items() if name not in ("checkpointing", "precision")}
    return plan.machine, workload, plan.request


def print_newest(text: str, path: Path) -> None:
    """Print on stderr which of several saved plans is used, because the user named none."""
    key = path.stem[:KEY_DIGITS]
    with suppress(OSError, ValueError):  # stderr may be closed
        sys.stderr.write(
            printable(
                f"autosplit uses the newest of several saved plans for this machine: {key} ({text}). Choose "
                "another plan with autosplit launch --plan KEY. autosplit profiles lists the keys."
            )
            + "\n"
        )


def _usable_by(world_size: int | None) -> Iterator[tuple[Plan, Path]]:
    ranked = ((plan, path) for path, plan in usable_here() if plan.ddp is not None)
    return (found for found in ranked if world_size in (None, len(found[0].devices)))


def names_plan(profile: Plan | str | os.PathLike[str] | None) -> bool:
    """Return whether the user named the plan of this job, in the script or with `autosplit launch --plan`."""
    return profile is not None or (bool(os.environ.get(PLAN_VARIABLE)) and not os.environ.get(NEWEST_VARIABLE))


def is_newest(plan: Plan) -> bool:
    """Return whether `autosplit launch` chose this plan because it is the newest."""
    return bool(os.environ.get(NEWEST_VARIABLE)) and str(plan.path) == os.environ.get(PLAN_VARIABLE)


def check_model(plan: Plan, model: Any, *, is_named: bool, rank: int) -> None:
    """Raise InputError if the newest plan is for another model than this one. Warn on rank 0 if the user named it."""
    found = difference(plan, model)
    if not found or (is_named and rank):
        return
    hint = _hint_for_size(parameters_in(model), len(plan.devices))
    if is_named:
        warn_of_other_model(plan, model, hint=hint)
        return
    raise InputError(
        f"You named no plan, and the newest one is for another model: {found} "
        f"{hint or 'Make a plan for this model with autosplit tune FILE, or name the plan to use with --plan KEY.'}",
        code="newest-plan-of-other-model",
    )


def _hint_for_size(parameters: int | None, world_size: int) -> str:
    for plan, path in _usable_by(world_size):
        if plan.workload.get("parameters") == parameters:
            key = path.stem[:KEY_DIGITS]
            return f"The saved plan {key} is for a model of this size: autosplit launch --plan {key} SCRIPT."
    return ""


def described(plan: Plan) -> str:
    """Describe a plan's model and sizes in a few words."""
    layout = required_ranks(plan)
    model = printable(plan.workload.get("model", "a model"), longest=300)
    count = plan.workload.get("parameters")
    size = f" with {count:,} parameters" if isinstance(count, int) else ""
    return f"{model}{size}, {', '.join(map(str, layout.split))} samples x {layout.accumulation_steps}"
