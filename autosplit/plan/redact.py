"""Redact a plan for sharing: keep its numbers, and remove everything that identifies its owner or machine.

Reports and `show --json` end up in chats and issues. So they omit UUIDs of GPUs, and text that may contain paths,
processes, hosts or URLs (notes, and errors of failed trials). The saved plan keeps all of this.
"""

from __future__ import annotations

from dataclasses import replace

from autosplit.notes import Note
from autosplit.plan.record import P
from autosplit.solve.memory import Ceiling
from autosplit.solve.trial import Trial

LEFT_OUT = Note("notes-left-out", "The notes are left out. autosplit show prints the notes of the saved plan.")
FAILED = "failed (the saved plan has the reason)"


def shareable(plan: P) -> P:
    """Return the plan without UUIDs and text that identify its owner or machine."""

    def quiet(ceiling: Ceiling) -> Ceiling:
        return replace(ceiling, notes=())

    def failure_of(trial: Trial) -> str | None:
        if trial.failure is None or trial.failed_device is None:
            return trial.failure and FAILED
        return f"{plan.devices[trial.failed_device].label} ran out of memory"

    return replace(
        plan,
        devices=tuple(replace(one, uuid=None, ceiling=quiet(one.ceiling)) for one in plan.devices),
        ddp=replace(plan.ddp, ranks=tuple(replace(one, ceiling=quiet(one.ceiling)) for one in plan.ddp.ranks)),
        trials=tuple(replace(one, failure=failure_of(one)) for one in plan.trials),
        fits=plan.fits and replace(plan.fits, evaluation=tuple(map(quiet, plan.fits.evaluation))),
        notes=(LEFT_OUT,) if plan.notes else (),
    )
