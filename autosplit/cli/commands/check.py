"""Run ``autosplit check``: check whether splitting a batch changes the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autosplit.cli.check_report import print_checks
from autosplit.cli.output import CommandResult, Manner, progress
from autosplit.cli.workload_arguments import users_errors, workload_of_spec
from autosplit.probe.check_result import Check


@dataclass(frozen=True)
class Checks:
    """Whether splitting the batch changes the training.

    Attributes:
        checks: One for each part of the training that was compared.
    """

    checks: tuple[Check, ...]


def check(manner: Manner, *, spec: str, model_options: Mapping[str, Any]) -> CommandResult[Checks]:
    """Check a workload."""
    from autosplit.probe import gradient_check as checks
    from autosplit.tuning.progress import Progress, fraction_of

    with progress(manner) as report:
        workload = workload_of_spec(spec, **model_options)
        with users_errors(spec):
            report(Progress("checks", "checking gradients", fraction_of("checks")))
            found = tuple(checks.check(workload))
    return CommandResult(Checks(found), lambda console: print_checks(found, console))
