"""Print the results of the gradient check."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autosplit.cli.tables import add_row, plain_table, print_bullets, print_plain
from autosplit.probe.check_result import EXACT, Check, changed, error_text
from autosplit.text import counted_text

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
    subjects: dict[str, list[str]] = {}
    for check in checks:
        if check.advice:
            subjects.setdefault(check.advice, []).append(check.subject)
    advice = [f"{' and '.join([of[0], *_others(of)])}: {text}" for text, of in subjects.items()]
    remarks = dict.fromkeys(check.remark for check in checks if check.remark)
    print_bullets([*advice, *remarks], console)


def _others(subjects: Sequence[str]) -> list[str]:
    return [counted_text(len(subjects) - 1, "other")] if len(subjects) > 1 else []


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
    subjects = [check.subject for check in checks]
    return f"{' and '.join([subjects[0], *_others(subjects)])}, up to {most.removesuffix(' off')}"


def check_lines(checks: Sequence[Check]) -> list[str]:
    """Return a line for each check, changed subjects first. Many checks with the same advice share one line."""
    ordered = sorted(checks, key=lambda check: not check.depends)
    lines: list[str] = []
    for _, group in itertools.groupby(ordered, key=lambda check: (check.depends, check.advice)):
        alike = list(group)
        if len(alike) <= _CHECKS_IN_FULL or not alike[0].advice:
            lines.extend(map(str, alike))
        else:
            lines.append(_alike_text(alike))
    return lines


_CHECKS_IN_FULL = 3
"""Largest number of checks with the same advice that get one line each. More checks share one line."""


def _alike_text(alike: Sequence[Check]) -> str:
    split, accumulated = (
        error_text(max((error for error in errors if error is not None), default=None))
        for errors in zip(*((check.split_error, check.accumulation_error) for check in alike), strict=True)
    )
    return (
        f"{alike[0].subject} and {len(alike) - 1} others up to {alike[-1].subject} change if the batch is split. The "
        f"largest changes are {split} over devices and {accumulated} with accumulation. {alike[0].advice}"
    )
