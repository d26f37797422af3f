"""``autosplit profiles``: what is remembered, where, and forgetting it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from autosplit.cli.named_plan import profile_path
from autosplit.cli.output import Manner, print_json
from autosplit.cli.profile_table import Profile, print_profiles
from autosplit.errors import InputError, PlanError, ProfileError
from autosplit.profiles.store import profile_paths, profiles_folder, read_profile, remove_left_over, remove_profile

__all__ = ["list_profiles", "print_listed", "remove_profiles", "show_path"]


def list_profiles(manner: Manner) -> int:
    """Print what is remembered."""
    if manner.as_json:
        from autosplit.cli.json_types import Profiles

        print_json(Profiles(str(profiles_folder()), _listed()))
    else:
        print_listed()
    return 0


def print_listed() -> None:
    """Print the list for reading."""
    from autosplit.cli.terminal import console_for

    print_profiles(_listed(), profiles_folder(), console_for(sys.stdout))


def _listed() -> tuple[Profile, ...]:
    return tuple(map(_described, profile_paths()))


def _described(path: Path) -> Profile:
    """Tell what there is to tell of a file of the cache, whatever is in it."""
    try:
        written_s: float | None = path.lstat().st_mtime
    except OSError:
        written_s = None
    saved_at = None if written_s is None else _time_text(written_s)
    age_s = None if written_s is None or saved_at is None else max(0.0, time.time() - written_s)
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
        split=plan.split,
        batch_size=plan.batch_size,
        accumulation_steps=plan.accumulation_steps,
        effective_batch_size=plan.effective_batch_size,
        samples_per_s=plan.samples_per_s,
        simulated=plan.simulated,
        complete=plan.complete,
    )


def _time_text(written_s: float) -> str | None:
    """Write a time as ISO 8601; None for one that no calendar has: a file may bear any."""
    try:
        return datetime.fromtimestamp(written_s).astimezone().isoformat("T", "seconds")
    except (ValueError, OverflowError, OSError):
        return None


def show_path(manner: Manner, *, key: str | None = None) -> int:
    """Print the cache's folder, which may not exist yet, or the file of a profile."""
    path = str(profiles_folder() if key is None else profile_path(key))
    if manner.as_json:
        from autosplit.cli.json_types import Place

        print_json(Place(path))
    else:
        sys.stdout.write(f"{path}\n")
    return 0


def remove_profiles(manner: Manner, *, keys: Sequence[str] = (), everything: bool, confirmed: bool) -> int:
    """Remove profiles by the beginnings of their keys, and say which; none is removed unless all are found.

    `everything` takes all of them instead, and `confirmed` asks no question.
    """
    if bool(keys) == everything:
        given = "keys and --all are both given" if keys else "neither a key nor --all is given"
        raise InputError(f"{given}; expected one of them; write it as autosplit profiles remove KEY")
    folder = profiles_folder()
    paths = profile_paths() if everything else tuple(dict.fromkeys(map(profile_path, keys)))
    if everything and paths and not confirmed:
        _confirm(len(paths), folder)
    removed: list[str] = []
    problems: list[ProfileError] = []
    for path in paths:
        try:
            remove_profile(path)
            removed.append(str(path))
        except ProfileError as error:
            problems.append(error)
    if everything and paths:
        remove_left_over()
    if manner.as_json:
        from autosplit.cli.json_types import Removed

        print_json(Removed(str(folder), tuple(removed)))
    else:
        sys.stdout.write("".join(f"removed {path}\n" for path in removed) or f"nothing to remove in {folder}\n")
        sys.stdout.flush()
    if problems:
        raise problems[0]
    return 0


def _confirm(count: int, folder: Path) -> None:
    """Ask before everything is removed; raise InputError where there is nobody to ask, or the answer is no."""
    what = f"{count} profile{'s' * (count > 1)} in {folder}"
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise InputError(f"--all would remove {what}, and there is no terminal to ask at; expected --yes; add it")
    sys.stderr.write(f"remove {what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise InputError(f"nothing was removed of {what}; expected y; answer y, or name the keys")
