"""Find a plan that is stored: by the file it was saved to, or by the beginning of a profile's key; describe it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from autosplit.cli.output import Manner, note
from autosplit.errors import InputError
from autosplit.plan.plan import Plan
from autosplit.profiles.store import KEY_DIGITS, profile_paths, profiles_folder, read_profile


def plan_file(which: str) -> Path:
    """Return the file of a plan that somebody named; see `named_or_newest`. A file goes before a key."""
    if which.endswith(".py") or ".py:" in which:
        raise InputError(
            f"{which} is a Python file; expected a plan; make one with autosplit tune {which}",
            code="plan-is-python-file",
        )
    return Path(which) if _is_file(which) else profile_path(which)


def shown_by(path: Path) -> str:
    """Return what to name a plan by that lies in a file: a profile by the beginning of its key."""
    return path.stem[:KEY_DIGITS] if path.parent == profiles_folder() else str(path)


def _is_file(which: str) -> bool:
    """Tell whether somebody named a file, and not a key."""
    return bool(which) and (Path(which).is_file() or not which.isalnum())


def profile_path(key: str) -> Path:
    """Find the one profile whose key begins so; raise InputError where none does, or several do."""
    paths = profile_paths()
    matches = [path for path in paths if key and path.stem.startswith(key)]
    if len(matches) == 1:
        return matches[0]
    found = ", ".join(path.stem[:KEY_DIGITS] for path in matches or paths[:5]) or "none"
    raise InputError(
        f"{key!r} is neither a file nor the beginning of one profile's key; expected one of them; "
        f"{'these begin so' if matches else 'the newest keys are'}: {found}",
        code="plan-not-found",
    )


def named_or_newest(which: str | None, manner: Manner) -> tuple[Path, Plan]:
    """Read a plan by its file or the beginning of a profile's key; without either the newest, and say which it is."""
    if which is not None:
        path = plan_file(which)
        return path, Plan.load(path) if _is_file(which) else read_profile(path)
    found = _newest_profile()
    if found is None:
        raise InputError(
            "no plan is remembered; expected one; make one with autosplit tune FILE, or name its file",
            code="no-profile",
        )
    count = len(profile_paths())
    note(f"plan: {_told(*found)}{f', of {count} in autosplit profiles' if count > 1 else ''}", manner)
    return found


def _newest_profile() -> tuple[Path, Plan] | None:
    """Return the newest profile that can be read, of an interrupted search only where there is no other."""
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


def _told(path: Path, plan: Plan) -> str:
    """Say in a few words which plan it is, where nobody named it."""
    devices = " + ".join(f"{count}x {name}" for name, count in Counter(one.name for one in plan.devices).items())
    name = plan.request.get("name")
    said = [str(plan.workload.get("model") or "a model").rpartition(".")[2], devices]
    said += [f"name {name}"] if name else []
    said += ["simulated"] if plan.simulated else []
    said += [] if plan.complete else ["interrupted: the best so far"]
    return f"{path.stem[:KEY_DIGITS]} ({'; '.join(said)})"
