"""The cache of plans (profiles): find, save, list and remove them.

A key is a digest of the machine, the workload and the request. The plan contains all three, so that a file is used only
for its own key. Files are untrusted. An invalid file is renamed with a note, and the plan is tuned again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.errors import AutosplitError, PlanError, ProfileError
from autosplit.files import (
    OWNER_ONLY,
    LargeFileError,
    make_private_folder,
    moved_aside,
    profiles_folder,
    read_bounded,
    replace_file,
)
from autosplit.notes import Note
from autosplit.plan.plan import Plan
from autosplit.plan.record import MAX_FILE_BYTES, with_path

if TYPE_CHECKING:
    from autosplit.profiles.key import ProfileKey

KEY_DIGITS = 12
"""Number of digits of a key (of 32) that are shown."""

NOT_SAVED = "plan-not-saved"
"""The kind of a note on a plan that was not saved as a profile."""

LEFT_OVER_S = 60.0
"""Age in seconds after which a partly written file is removed. Writing takes milliseconds, so its writer died."""

BAD_SUFFIX = ".bad"
"""Suffix of an invalid file after renaming. A later invalid file replaces it."""

_SUFFIXES = (BAD_SUFFIX, ".tuning.lock", ".lock")
"""Suffixes of a profile's other files. autosplit 0.2 and earlier wrote locks."""

_KEY_CHARACTERS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Found:
    """The saved plan of a key.

    Attributes:
        path: The profile's file, which may not exist.
        notes: The reason why the file was not used.
        unreadable: Whether the system refused to read the file.
    """

    plan: Plan | None
    path: Path
    notes: tuple[Note, ...] = ()
    unreadable: bool = False


def _path_of(key: str) -> Path:
    assert key, "a key is by key_of"
    assert _KEY_CHARACTERS.issuperset(key), key
    return profiles_folder() / f"{key}.json"


def find(key: str, wanted: ProfileKey) -> Found:
    """Return the plan of a key, or the reason why its file cannot be used. Invalid content never raises.

    The plan must have the machine, workload and request (with the name) of `wanted`.
    """
    try:
        path = _path_of(key)
    except ProfileError as error:
        note = Note("no-cache", f"autosplit did not look for a profile: {error}")
        return Found(None, Path(f"{key}.json"), (note,), unreadable=True)

    plan: Plan | None = None
    try:
        plan = _read(path)
        if plan is not None:
            _refuse_foreign(plan, wanted)
    except _SpoiledError as error:
        note = Note("profile-ignored", f"The profile {path} was ignored: {str(error).rstrip('.')}. {_put_aside(path)}.")
        return Found(None, path, (note,))
    except ProfileError as error:
        by_system = isinstance(error.__cause__, OSError)
        note = Note("profile-ignored", f"The profile {path} was ignored: {str(error).rstrip('.')}.")
        return Found(None, path, (note,), unreadable=by_system)
    return Found(plan, path)


class _SpoiledError(ProfileError):
    """A profile's file is not a plan, so it can be renamed without loss."""


def _put_aside(path: Path) -> str:
    """Rename an invalid profile. Return a clause with its new name, or with the reason why it can't be renamed."""
    try:
        return f"It was renamed to {moved_aside(path, BAD_SUFFIX).name}"
    except OSError as error:
        return f"It can't be renamed ({error.strerror or error}), so delete it"


def _read(path: Path) -> Plan | None:
    """Read a profile. Return None if there is no file.

    Raises:
        _SpoiledError: The file is not a plan.
        ProfileError: The file can't be read now, or not by this version.
    """
    try:
        content = read_bounded(path, MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):  # there is no file, or the folder's path is a file
        return None
    except LargeFileError as error:
        raise _SpoiledError(f"{error}. Expected a file that autosplit wrote") from error
    except OSError as error:
        raise ProfileError(f"it can't be read ({error.strerror or error}). Expected a file. Delete it") from error
    try:
        return with_path(Plan.from_json(content, source="it"), path)
    except PlanError as error:
        raise _SpoiledError(str(error)) from error


def _refuse_foreign(plan: Plan, wanted: ProfileKey) -> None:
    for part, names in wanted.differences(plan).items():
        raise ProfileError(
            f"it is for another {part} ({', '.join(names)[:200]} differ). Expected this {part}'s. "
            "Delete it, or let this run replace it",
        )
    expected = [(run["kind"], run["name"]) for run in wanted.machine["devices"] for _ in range(run["count"])]
    if [(device.kind, device.name) for device in plan.devices] != expected:
        raise _SpoiledError("its devices differ from its machine's. Expected equal ones")


def stored(key: ProfileKey, plan: Plan) -> tuple[Path | None, tuple[Note, ...]]:
    """Save a plan, and return its file and notes. A plan of an interrupted search does not replace a complete plan."""
    there = None if plan.complete else find(key.digest, key).plan
    if there is not None and there.complete:
        text = "The plan is not saved, because its search was interrupted."
        return None, (Note(NOT_SAVED, text),)
    try:
        return store(key.digest, plan), ()
    except ProfileError as error:
        return None, (Note(NOT_SAVED, f"The plan is not saved: {error}"),)


def amend(key: str, plan: Plan, changes: Mapping[str, Any]) -> None:
    """Change the saved profile of a plan.

    If the plan was solved again for less memory, its profile has another split and is not changed.
    """
    with contextlib.suppress(AutosplitError, OSError):  # the profile is valid without the changes
        saved = Plan.load(_path_of(key))
        if saved.split == plan.split:
            store(key, replace(saved, **changes))


def store(key: str, plan: Plan) -> Path:
    """Save a plan atomically, and return its file.

    Raises:
        ProfileError: The cache cannot be written.
    """
    path = _path_of(key)
    try:
        make_private_folder(path.parent)
        _sweep(path)
        replace_file(path, plan.to_json() + "\n", mode=OWNER_ONLY)
    except OSError as error:
        raise ProfileError(
            f"{path} can't be written ({error.strerror or error}). Expected a writable folder. Set AUTOSPLIT_CACHE_DIR "
            "to one, or pass profile='off'.",
        ) from error
    return path


def _sweep(path: Path, least_s: float = LEFT_OVER_S) -> None:
    for left_over in path.parent.glob(f".{path.name}.*"):
        if time.time_ns() - _written_ns(left_over) >= least_s * 1e9:
            _discard(left_over)


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def profile_paths() -> tuple[Path, ...]:
    """Return the profile files of the cache, the newest first."""
    named = (path for path in profiles_folder().glob("[!.]*.json") if _KEY_CHARACTERS.issuperset(path.stem))
    dated = sorted(((_written_ns(path), path) for path in named), reverse=True)
    return tuple(path for _, path in dated)


def read_profile(path: Path) -> Plan:
    """Read a profile from untrusted input.

    Raises:
        ProfileError: The file does not exist or can't be read.
    """
    plan = _read(path)
    if plan is None:
        raise ProfileError(
            f"The profile {path} does not exist any more. autosplit profiles lists all profiles.",
        )
    return plan


def remove_profile(path: Path) -> None:
    """Remove a profile with its other files.

    Raises:
        ProfileError: The file can't be deleted.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ProfileError(
            f"{path} can't be deleted ({error.strerror or error}). Check the permissions of its folder, and delete "
            "it yourself.",
        ) from error
    _remove_next_to(path)


def remove_left_over() -> None:
    """Remove renamed files and partly written files of removed profiles, and locks of autosplit 0.2."""
    folder = profiles_folder()
    keys = {path.name.partition(".")[0] for path in folder.glob("[!.]*") if path.suffix in (".lock", BAD_SUFFIX)}
    keys |= {path.name.split(".")[1] for path in folder.glob(".*.json.*")}
    for key in filter(_KEY_CHARACTERS.issuperset, keys - {""}):
        if not os.path.lexists(folder / f"{key}.json"):
            _remove_next_to(folder / f"{key}.json")


def _remove_next_to(path: Path) -> None:
    """Remove the other files of a removed profile: the renamed invalid file, and partly written files."""
    _sweep(path, 0.0)
    for suffix in _SUFFIXES:
        _discard(path.with_suffix(suffix))


def _written_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:  # another process has removed it
        return 0


def read_or_none(path: Path) -> Plan | None:
    """Read a profile. Return None if it does not exist or can't be read."""
    try:
        return _read(path)
    except PlanError:
        return None
