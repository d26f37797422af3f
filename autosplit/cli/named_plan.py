"""Find a plan that is stored: by the file it was saved to, or by the beginning of a profile's key; describe it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from autosplit.cli.output import Manner, note
from autosplit.errors import InputError, PlanError
from autosplit.plan.plan import Plan
from autosplit.profiles.store import KEY_DIGITS, profile_paths, profiles_folder, read_profile


@dataclass(frozen=True)
class Profile:
    """A file of the cache.

    Attributes:
        key: 32 hexadecimal digits; the beginning of them names it.
        path: The file.
        saved_at: When it was written, as ISO 8601 with the offset from UTC; None where that is unknown.
        age_s: Seconds since then; None where that is unknown.
        problem: Why it can't be read; None where it can. Then all that follows is empty.
        name: By which plans of equal workloads are kept apart; None where none was given.
        model: The model's class, or the function that makes it.
        parameters: How many the model has; None where that is unknown.
        devices: Labels, in order.
        device_names: What their makers call them, in the same order.
        request: What was asked for, by `tune`'s keywords; what was left out is not in it.
        split: Samples per device in one forward.
        batch_size: Samples per forward.
        accumulation_steps: Forwards per optimizer step.
        effective_batch_size: Samples per optimizer step.
        samples_per_s: Throughput.
        simulated: It is for cards that are not here.
        complete: False where the search was interrupted and this is the best so far.
    """

    key: str
    path: str
    saved_at: str | None
    age_s: float | None
    problem: str | None = None
    name: str | None = None
    model: str | None = None
    parameters: int | None = None
    devices: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()
    request: Mapping[str, Any] | None = None
    split: tuple[int, ...] = ()
    batch_size: int | None = None
    accumulation_steps: int | None = None
    effective_batch_size: int | None = None
    samples_per_s: float | None = None
    simulated: bool | None = None
    complete: bool | None = None


def plan_file(which: str) -> Path:
    """Return the file of a plan that somebody named; see `named_or_newest`. A file goes before a key."""
    if which.endswith(".py") or ".py:" in which:
        raise InputError(f"{which} is a Python file; expected a plan; make one with autosplit tune {which}")
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
        f"{'these begin so' if matches else 'the newest keys are'}: {found}"
    )


def named_or_newest(which: str | None, manner: Manner) -> tuple[Path, Plan]:
    """Read a plan by its file or the beginning of a profile's key; without either the newest, and say which it is."""
    if which is not None:
        path = plan_file(which)
        return path, Plan.load(path) if _is_file(which) else read_profile(path)
    found = _newest_profile()
    if found is None:
        raise InputError("no plan is remembered; expected one; make one with autosplit tune FILE, or name its file")
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
    devices = ", ".join(dict.fromkeys(device.name for device in plan.devices))
    name = plan.request.get("name")
    said = [str(plan.workload.get("model") or "a model").rpartition(".")[2], f"{len(plan.devices)}x {devices}"]
    said += [f"name {name}"] if name else []
    said += ["simulated"] if plan.simulated else []
    said += [] if plan.complete else ["interrupted: the best so far"]
    return f"{path.stem[:KEY_DIGITS]} ({'; '.join(said)})"


_NUMBERS = (
    *("split", "batch_size", "accumulation_steps", "effective_batch_size"),
    *("samples_per_s", "simulated", "complete"),
)


def profile_at(path: Path) -> Profile:
    """Tell what there is to tell of a file of the cache, whatever is in it."""
    saved_at: str | None = None
    age_s: float | None = None
    with contextlib.suppress(OSError, ValueError, OverflowError):  # it is gone, or bears a time that no calendar has
        written_s = path.lstat().st_mtime
        saved_at = datetime.fromtimestamp(written_s).astimezone().isoformat("T", "seconds")
        age_s = max(0.0, time.time() - written_s)
    try:
        plan = read_profile(path)
    except PlanError as error:
        return Profile(path.stem, str(path), saved_at, age_s, problem=str(error).split(";", maxsplit=1)[0])
    name, parameters = plan.request.get("name"), plan.workload.get("parameters")
    model = plan.workload.get("model")
    return Profile(
        key=path.stem,
        path=str(path),
        saved_at=saved_at,
        age_s=age_s,
        name=name if isinstance(name, str) else None,
        model=model if isinstance(model, str) else None,
        parameters=parameters if isinstance(parameters, int) else None,
        devices=tuple(device.label for device in plan.devices),
        device_names=tuple(device.name for device in plan.devices),
        request={key: value for key, value in plan.request.items() if value is not None and key != "name"},
        **{name: getattr(plan, name) for name in _NUMBERS},
    )
