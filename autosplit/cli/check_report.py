"""Print the results of the gradient check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autosplit.cli.tables import add_row, plain_table, print_bullets, print_plain
from autosplit.probe.check_result import EXACT, Check, changed, error_text

if TYPE_CHECKING:
    from rich.console import Console


def print_checks(checks: Sequence[Check], console: Console) -> None:
    """Print a table of the checks, followed by their advice."""
    figures = ("split over devices", "accumulated")
    table = plain_table("what", *figures, "changes", figures=figures)
    for check in checks:
        errors = (error_text(check.split_error), error_text(check.accumulation_error))
        add_row(table, check.subject, *errors, "yes" if check.depends else "no")
    print_plain(table, console)
    advice = [f"{check.subject}: {check.advice}" for check in checks if check.advice]
    remarks = dict.fromkeys(check.remark for check in checks if check.remark)
    print_bullets([*advice, *remarks], console)


def dependence_line(checks: Sequence[Check]) -> str:
    """Return one line on the largest changes that splitting causes, or an empty string if nothing changes."""
    found = changed(checks)
    if not found:
        return ""
    # The causes of a changed gradient come first.
    causes = [check for check in found if check.subject != "gradient"]
    gradient = [check for check in found if check.subject == "gradient"]
    texts = [_most_text(alike) for alike in (causes, gradient) if alike]
    is_corrected = bool(causes) and all(check.count and (check.split_error or 0.0) <= EXACT for check in causes)
    hint = "autosplit show --code prints a loop that avoids this" if is_corrected else "--details"
    return f"changed by splitting: {'; '.join(texts)} ({hint})"


def _most_text(checks: Sequence[Check]) -> str:
    errors = [error for check in checks for error in (check.split_error, check.accumulation_error)]
    most = error_text(max((error for error in errors if error is not None), default=None))
    return f"{' and '.join(check.subject for check in checks)}, up to {most.removesuffix(' off')}"


def check_lines(checks: Sequence[Check]) -> list[str]:
    """Return a line for each check, changed subjects first."""
    return [str(check) for check in sorted(checks, key=lambda check: not check.depends)]
