"""Run ``autosplit show``: print a saved plan or a profile."""

from __future__ import annotations

from autosplit.cli.named_plan import named_or_newest, profile_path, shown_by
from autosplit.cli.output import CommandResult, Manner, report_of_plan
from autosplit.plan.plan import Plan
from autosplit.plan.redact import shareable


def show(manner: Manner, *, which: str | None = None) -> CommandResult[Plan]:
    """Load a plan by its file or key. By default, load the newest profile."""
    from autosplit.cli.pasted_code import Origin

    path, plan = named_or_newest(which, manner)
    # JSON may be shared.
    return CommandResult(shareable(plan), report_of_plan(plan, Origin(shown_by(path)), manner))


def show_profile(manner: Manner, *, key: str | None = None) -> CommandResult[Plan]:
    """Load a profile by its key. By default, load the newest profile."""
    return show(manner, which=None if key is None else str(profile_path(key)))
