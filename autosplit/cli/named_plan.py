"""Find a saved plan by its file or by the first digits of a profile's key, and describe it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from autosplit.cli.output import Manner, note
from autosplit.errors import InputError
from autosplit.files import profiles_folder
from autosplit.plan.plan import Plan
from autosplit.profiles.store import KEY_DIGITS, profile_paths, read_profile


def plan_file(which: str) -> Path:
    """Return the file of a plan from a file name or the first digits of a key. A file takes precedence."""
    if which.endswith(".py") or ".py:" in which:
        raise InputError(f"{which} is a Python file, not a plan. Make a plan with autosplit tune {which}.")
    return Path(which) if _is_file(which) else profile_path(which)


def shown_by(path: Path) -> str:
    """Return the shortest name for a plan's file: the first digits of a profile's key, or the path."""
    return path.stem[:KEY_DIGITS] if path.parent == profiles_folder() else str(path)


def _is_file(which: str) -> bool:
    return bool(which) and (Path(which).is_file() or not which.isalnum())


def profile_path(key: str) -> Path:
    """Return the profile whose key begins with these digits. Raise InputError unless there is exactly one."""
    paths = profile_paths()
    matches = [path for path in paths if key and path.stem.startswith(key)]
    if len(matches) == 1:
        return matches[0]
    found = ", ".join(path.stem[:KEY_DIGITS] for path in matches or paths[:5])
    problem = f"{len(matches)} plans begin with {key!r}: {found}." if matches else f"There is no plan {key!r}."
    newest = f" The newest keys are: {found}." if found and not matches else ""
    raise InputError(
        f"{problem}{newest} Name a plan file, or the first digits of a key. autosplit profiles lists the keys."
    )


def named_or_newest(which: str | None, manner: Manner) -> tuple[Path, Plan]:
    """Load a plan by its file or the first digits of a key. By default, load the newest profile and print its name."""
    if which is not None:
        path = plan_file(which)
        return path, Plan.load(path) if _is_file(which) else read_profile(path)
    found = _newest_profile()
    if found is None:
        raise InputError("No plan is saved as a profile. Make one with autosplit tune FILE, or name a plan's file.")
    count = len(profile_paths())
    note(f"plan: {_description(*found)}{f', of {count} in autosplit profiles' if count > 1 else ''}", manner)
    return found


def _newest_profile() -> tuple[Path, Plan] | None:
    interrupted = None
    for path in profile_paths():
        try:
            plan = read_profile(path)
        except InputError:
            continue
        if plan.complete:
            return path, plan
        interrupted = interrupted or (path, plan)
    return interrupted


def _description(path: Path, plan: Plan) -> str:
    devices = " + ".join(f"{count}x {name}" for name, count in Counter(one.name for one in plan.devices).items())
    name = plan.request.get("name")
    parts = [str(plan.workload.get("model") or "a model").rpartition(".")[2], devices]
    parts += [f"name {name}"] if name else []
    parts += ["simulated"] if plan.simulated else []
    parts += [] if plan.complete else ["interrupted: the best plan so far"]
    return f"{path.stem[:KEY_DIGITS]} ({'; '.join(parts)})"
