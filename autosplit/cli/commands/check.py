"""Run ``autosplit check``: check whether splitting a batch changes the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosplit.cli.check_report import print_checks
from autosplit.cli.json_types import Checks
from autosplit.cli.output import Manner, print_answer, progress
from autosplit.cli.workload_arguments import users_errors


def check(manner: Manner, *, spec: str, model_options: Mapping[str, Any]) -> int:
    """Check a workload, and print the results."""
    from autosplit.cli.workload_spec import workload_of_spec
    from autosplit.probe import gradient_check as checks
    from autosplit.tuning.progress import Progress, fraction_of

    with progress(manner) as report:
        workload = workload_of_spec(spec, **model_options)
        with users_errors(spec):
            report(Progress("checks", "checking gradients", fraction_of("checks")))
            found = checks.check(workload)
    print_answer(Checks(tuple(found)), manner, lambda console: print_checks(found, console))
    return 0
