"""``autosplit check``: what of the training changes with the split."""

from __future__ import annotations

import sys

from autosplit.commands.saying import Manner, print_json, progress
from autosplit.commands.workloads import users_errors
from autosplit.terminal import stdout_kept_clean

__all__ = ["check"]


def check(spec: str, manner: Manner) -> int:
    """Check a workload, and print what was found."""
    from autosplit import checks
    from autosplit.loading import load_workload
    from autosplit.progress import Progress

    with stdout_kept_clean():
        workload = load_workload(spec)
        with users_errors(spec), progress(manner) as tell:
            if tell is not None:
                tell(Progress("checks", "the gradient of the sample batch, whole and cut", 0.0))
            found = checks.check(workload)
    if manner.as_json:
        from autosplit.commands.answers import Checks

        print_json(Checks(tuple(found)))
    else:
        from autosplit.report import print_checks
        from autosplit.terminal import console_for

        print_checks(found, console_for(sys.stdout))
    return 0
