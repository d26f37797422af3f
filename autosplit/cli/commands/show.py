"""Run ``autosplit show``: print a saved plan or a profile."""

from __future__ import annotations

from pathlib import Path

from autosplit.cli.named_plan import named_or_newest, profile_path, shown_by
from autosplit.cli.output import Manner, print_plan
from autosplit.plan.plan import Plan
from autosplit.plan.redact import shareable
from autosplit.profiles.store import read_profile


def show(manner: Manner, *, which: str | None = None) -> int:
    """Print a plan by its file or key. By default, print the newest profile."""
    _print(*named_or_newest(which, manner), manner)
    return 0


def show_profile(manner: Manner, *, key: str | None = None) -> int:
    """Print a profile by its key. By default, print the newest profile."""
    if key is None:
        return show(manner)
    path = profile_path(key)
    _print(path, read_profile(path), manner)
    return 0


def _print(path: Path, plan: Plan, manner: Manner) -> None:
    from autosplit.cli.pasted_code import Origin

    if manner.as_json:  # JSON may be shared
        plan = shareable(plan)
    print_plan(plan, Origin(shown_by(path)), manner)
