"""Add to a plan what was found out about it later; its profile holds that, too."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from autosplit.errors import AutosplitError
from autosplit.plan.plan import Plan
from autosplit.profiles.store import store
from autosplit.tuning.job import Job

__all__ = ["amended"]


def amended(plan: Plan, job: Job, **changes: Any) -> Plan:
    """Return a plan with changes, which its profile gets as well.

    A plan that was solved again for less memory is not what its profile holds, which then stays as it is.
    """
    if plan.path is not None and job.is_first_of_machine:
        with contextlib.suppress(AutosplitError, OSError):  # the profile is whole without them
            kept = Plan.load(plan.path)
            if kept.split == plan.split:
                store(plan.path.stem, replace(kept, **changes))
    return replace(plan, **changes).kept_at(plan.path)
