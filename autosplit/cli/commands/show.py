"""``autosplit show``: a plan that was saved or remembered."""

from __future__ import annotations

import sys
from pathlib import Path

from autosplit.cli.commands.profiles import print_listed
from autosplit.cli.named_plan import newest_profile, profile_path, shown_by, stored_plan
from autosplit.cli.output import Manner, print_plan
from autosplit.cli.workload_arguments import quoted
from autosplit.errors import InputError
from autosplit.plan.plan import Plan
from autosplit.plan.redact import shareable
from autosplit.profiles.store import profile_paths, read_profile

__all__ = ["show", "show_profile"]


def show(manner: Manner, *, which: str | None = None) -> int:
    """Print the plan of a file or of a key's beginning; without either the newest profile, below a list of them."""
    found = _newest(manner) if which is None else stored_plan(which)
    if found is not None:
        _print(*found, manner)
    return 0


def show_profile(manner: Manner, *, key: str | None = None) -> int:
    """Print a remembered plan; None for the newest."""
    if key is None:
        return show(manner)
    path = profile_path(key)
    _print(path, read_profile(path), manner)
    return 0


def _print(path: Path, plan: Plan, manner: Manner) -> None:
    from autosplit.cli.plan_report import Origin

    if manner.as_json:  # it is made to be shared
        plan = shareable(plan)
    origin = Origin(f"autosplit.Plan.load({quoted(str(path))})", path=str(path), shown_by=shown_by(path))
    print_plan(plan, origin, manner)


def _newest(manner: Manner) -> tuple[Path, Plan] | None:
    """List the profiles, and return the newest that can be read."""
    alone = manner.as_json or manner.code
    if not alone:
        if profile_paths():
            print_listed()
            sys.stdout.write("\n")
        else:
            sys.stdout.write("no plan is remembered yet; autosplit tune FILE makes one\n")
    found = newest_profile()
    if alone and found is None:
        raise InputError("no plan is remembered; expected one to print; make one with autosplit tune FILE")
    return found
