"""The cache of plans: what a plan holds for, as a key; finding one again, keeping one, and what has changed since.

A key is a digest of the kind of machine, the workload, and what was asked for; the first two stand in the plan as well,
so that a file is taken only for what it was made for. A file is read as hostile input: what is wrong with it is named
in a note, it is moved aside, and the plan is made anew. What is of another machine or version stays where it is.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosplit.errors import PlanError, PlanVersionError, ProfileError
from autosplit.files import OWNER_ONLY, LargeFileError, make_private_folder, moved_aside, read_bounded, replace_file
from autosplit.plan.plan import Plan
from autosplit.plan.record import MAX_FILE_BYTES, SCHEMA_VERSION

__all__ = [
    "KEY_DIGITS",
    "Found",
    "find",
    "newest",
    "profile_paths",
    "profiles",
    "profiles_folder",
    "read_profile",
    "remove_left_over",
    "remove_profile",
    "store",
    "turn_path",
]

KEY_DIGITS = 12
"""So many of a key's 32 are shown: enough to tell profiles apart."""

LOCK_TIMEOUT_S = 10.0
"""Writing takes milliseconds: whoever holds the lock for longer than this hangs."""

LOCK_SUFFIX = ".lock"
"""Of the file by whose lock those who write a profile take turns."""

TURN_SUFFIX = ".tuning.lock"
"""Of the file by whose lock those who tune for it do."""

BAD_SUFFIX = ".bad"
"""Of what stood in a profile's place and was none; the last one is kept, for whoever wonders."""

NEWER_SUFFIX = ".newer"
"""Of a profile that a later version of autosplit wrote, once this one needs its place."""

_KEY_CHARACTERS = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class Found:
    """The plan that the cache holds under a key.

    Attributes:
        plan: None where there is none that can be used.
        path: Where it is, or would be.
        notes: Why a file that is there was ignored, a sentence each.
        unreadable: The system did not let it be read.
    """

    plan: Plan | None
    path: Path
    notes: tuple[str, ...] = ()
    unreadable: bool = False


def profiles_folder() -> Path:
    """Return where profiles are kept: `AUTOSPLIT_CACHE_DIR`, otherwise the user's cache directory; it may not exist.

    Raises:
        ProfileError: Nobody knows where: the home directory is unknown.
    """
    given = os.environ.get("AUTOSPLIT_CACHE_DIR")
    if given:
        folder = os.path.expanduser(given)  # noqa: PTH111  # pathlib's raises where a home is unknown
        if not folder.startswith("~"):
            return Path(folder).absolute() / "profiles"
    else:
        import platformdirs

        with contextlib.suppress(RuntimeError):  # newer ones raise it without a home; of older ones "~/.cache" is left
            found = Path(platformdirs.user_cache_dir("autosplit", appauthor=False))
            if found.is_absolute():
                return found / "profiles"
    raise ProfileError(
        f"AUTOSPLIT_CACHE_DIR is {given!r} and the home directory is unknown; expected a folder for profiles; set "
        "AUTOSPLIT_CACHE_DIR to one, or HOME"
    )


def _path_of(key: str) -> Path:
    assert key, "a key is by key_of"
    assert _KEY_CHARACTERS.issuperset(key), key
    return profiles_folder() / f"{key}.json"


def turn_path(key: str) -> Path:
    """Return the file by whose lock processes take turns at tuning for a key."""
    return _path_of(key).with_suffix(TURN_SUFFIX)


def find(
    key: str, *, machine: Mapping[str, Any], workload: Mapping[str, Any], request: Mapping[str, Any] | None = None
) -> Found:
    """Look for the plan of a key, or say why a file that is there can't be used; raise nothing for what it holds.

    Args:
        machine: What the plan must be for.
        workload: What the plan must be for.
        request: What must have been asked for, with the name; older files do not tell.
    """
    try:
        path = _path_of(key)
    except ProfileError as error:
        return Found(None, Path(f"{key}.json"), (f"no profile is looked for: {error}",), unreadable=True)

    def judge() -> tuple[Plan | None, ProfileError | None]:
        """Read the profile; if it can't be used here, say why."""
        try:
            plan = _read(path)
            if plan is not None:
                _refuse_foreign(plan, machine, workload, request)
        except ProfileError as error:
            return None, error
        return plan, None

    plan, problem = judge()
    if isinstance(problem, _SpoiledError):
        plan, problem = _moved_if_still_spoiled(path, judge, problem)
    if problem is not None:
        by_system = isinstance(problem.__cause__, OSError) and not isinstance(problem.__cause__, LargeFileError)
        return Found(None, path, (f"the profile {path} is ignored: {problem}",), unreadable=by_system)
    return Found(plan, path)


class _SpoiledError(ProfileError):
    """No plan is in a profile's place, so that nobody loses anything if it is moved out of the way."""


def _moved_if_still_spoiled(
    path: Path, judge: Callable[[], tuple[Plan | None, ProfileError | None]], error: ProfileError
) -> tuple[Plan | None, ProfileError | None]:
    """Move a spoiled profile aside, unless somebody has replaced it by now; where that fails, say so."""
    try:
        with _locked(path):
            plan, now = judge()
            if not isinstance(now, _SpoiledError):
                return plan, now
            aside = moved_aside(path, BAD_SUFFIX)
    except _LockError as failure:
        return None, ProfileError(f"{error}; it can't be moved aside: {failure}")
    except (OSError, NotImplementedError, ProfileError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        return None, ProfileError(f"{error}; it can't be moved aside ({reason}): remove it")
    return None, ProfileError(f"{now}; it is moved aside as {aside.name}")


def _read(path: Path) -> Plan | None:
    """Read a profile; None where there is no file.

    Raises:
        ProfileError: It can't be read now, or by this version; a `_SpoiledError` if it never can.
    """
    try:
        content = read_bounded(path, MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):  # nothing is there, nor in a file at the folder's place
        return None
    except LargeFileError as error:
        raise _SpoiledError(f"{error}; expected a file that autosplit wrote") from error
    except OSError as error:
        raise ProfileError(f"it can't be read ({error.strerror or error}); expected a file; remove it") from error
    try:
        return Plan.from_json(content, source="it").kept_at(path)
    except PlanVersionError as error:
        if error.version < 1:
            raise _SpoiledError(str(error)) from error
        raise ProfileError(str(error)) from error
    except PlanError as error:
        raise _SpoiledError(str(error)) from error


class _LockError(ProfileError):
    """A file in the place of a lock can't be locked; where there is none, the folder is to blame."""


@contextlib.contextmanager
def _locked(path: Path, *, suffix: str = LOCK_SUFFIX, timeout_s: float | None = None) -> Iterator[Path]:
    """Hold the lock of a profile's file, and yield the lock's.

    Raises:
        _LockError: Its file is there and can't be locked.
        OSError: It can't be made; `filelock.Timeout` if another has held it for so long.
        NotImplementedError: The file system has no locks.
    """
    import filelock  # not needed for reading, and slow to import

    lock = path.with_suffix(suffix)
    timeout_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(filelock.FileLock(lock, timeout=timeout_s, mode=OWNER_ONLY, fallback_to_soft=False))
        except filelock.Timeout:
            raise
        except OSError as error:
            if not os.path.lexists(lock):
                raise
            raise _LockError(
                f"{lock} can't be locked ({error.strerror or error}); expected a file to write to, or none; remove it"
            ) from error
        yield lock


def _refuse_foreign(
    plan: Plan, machine: Mapping[str, Any], workload: Mapping[str, Any], request: Mapping[str, Any] | None
) -> None:
    simulated = any(run["kind"] == "sim" for run in machine["devices"])
    if plan.simulated != simulated:
        which = ("real", "simulated")
        raise ProfileError(f"it is for {which[plan.simulated]} devices; expected {which[simulated]} ones; remove it")
    pairs = [("machine", plan.machine, machine), ("workload", plan.workload, workload)]
    if plan.request and request is not None:
        pairs.append(("request", plan.request, dict(request)))
    for what, stored, given in pairs:
        differing = sorted(
            name
            for name in {*stored, *given}
            if name not in stored or name not in given or not _same(stored[name], given[name])
        )
        if differing:
            raise ProfileError(
                f"it is for another {what} ({', '.join(differing)[:200]} differ); "
                f"expected this {what}'s; remove it, or let this run replace it"
            )
    expected = [(run["kind"], run["name"]) for run in machine["devices"] for _ in range(run["count"])]
    if [(device.kind, device.name) for device in plan.devices] != expected:
        raise _SpoiledError("its devices are not those of its machine; expected the same ones")


def _same(stored: Any, given: Any) -> bool:
    try:
        return json.dumps(stored, sort_keys=True) == json.dumps(given, sort_keys=True)
    except (RecursionError, ValueError):
        return False


def store(key: str, plan: Plan) -> Path:
    """Keep a plan, with its `machine` and `workload`, and return its file; a reader sees one plan or the other, whole.

    Raises:
        ProfileError: The cache can't be written, or another process has held the lock for 10 s.
    """
    import filelock  # not needed for reading, and slow to import

    path = _path_of(key)
    lock = path.with_suffix(LOCK_SUFFIX)
    # No lock that is a file's mere presence: it would outlive a process that is killed.
    advice = "set AUTOSPLIT_CACHE_DIR to a folder of yours, or profile='off'"
    try:
        make_private_folder(path.parent)
        with _locked(path):
            _sweep(path)
            _spare_newer(path)
            replace_file(path, plan.to_json() + "\n", mode=OWNER_ONLY)
    except filelock.Timeout:
        raise ProfileError(
            f"{lock} has been held for {LOCK_TIMEOUT_S:g} s; expected it to be free within that; "
            "end the process that hangs, and tune again"
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise ProfileError(f"{path} can't be written ({reason}); expected a folder to write to; {advice}") from error
    except NotImplementedError as error:  # the file system has no locks
        raise ProfileError(f"{lock} can't be locked ({error}); expected a file system with locks; {advice}") from error
    return path


def _sweep(path: Path) -> None:
    """Remove what writers of a profile that were killed have left behind: whoever has the lock is the only one."""
    for left_over in path.parent.glob(f".{path.name}.*"):
        _discard(left_over)


def _discard(path: Path) -> None:
    """Remove a file, where that can be."""
    with contextlib.suppress(OSError):
        path.unlink()


def _spare_newer(path: Path) -> None:
    """Move a profile of a later version out of the way, which that version may want back."""
    try:
        _read(path)
    except ProfileError as error:
        cause = error.__cause__
        if isinstance(cause, PlanVersionError) and cause.version > SCHEMA_VERSION:
            moved_aside(path, NEWER_SUFFIX)


def profile_paths() -> tuple[Path, ...]:
    """Return the files of the cache that are profiles, or are called so, the newest first."""
    named = (path for path in profiles_folder().glob("[!.]*.json") if _KEY_CHARACTERS.issuperset(path.stem))
    dated = sorted(((_written_ns(path), path) for path in named), reverse=True)
    return tuple(path for _, path in dated)


def read_profile(path: Path) -> Plan:
    """Read a file of the cache, as hostile input."""
    plan = _read(path)
    if plan is None:
        raise ProfileError(f"{path} is not there any more; expected a profile; autosplit profiles lists them")
    return plan


def remove_profile(path: Path) -> None:
    """Remove a file of the cache with what stands beside it, and never anything else.

    Locks that somebody holds stay, and so does what a later version of autosplit wrote.
    """
    own = path.parent == profiles_folder() and path.suffix == ".json" and _KEY_CHARACTERS.issuperset(path.stem)
    if not own:
        raise ProfileError(f"{path} is not called as a profile is; expected 32 digits; remove it by hand")
    try:
        path.unlink()
    except FileNotFoundError:
        pass  # by somebody else: it is gone
    except OSError as error:
        raise ProfileError(
            f"{path} can't be removed ({error.strerror or error}); expected a file in a folder that may be written; "
            "remove it by hand"
        ) from error
    _remove_beside(path)


def remove_left_over() -> None:
    """Remove what stands beside profiles that are gone."""
    folder = profiles_folder()
    keys = {path.name.partition(".")[0] for path in folder.glob("[!.]*") if path.suffix in (LOCK_SUFFIX, BAD_SUFFIX)}
    keys |= {path.name.split(".")[1] for path in folder.glob(".*.json.*")}
    for key in filter(_KEY_CHARACTERS.issuperset, keys - {""}):
        if not os.path.lexists(folder / f"{key}.json"):
            _remove_beside(folder / f"{key}.json")


def _remove_beside(path: Path) -> None:
    """Remove the locks of a profile that is gone, what was moved aside for it, and what killed writers have left.

    A lock is removed by who holds it, so that it is nobody else's: who has opened the file by then sees that it is
    gone, and makes another.
    """
    if not path.parent.is_dir():
        return
    for suffix in (LOCK_SUFFIX, TURN_SUFFIX):
        with (
            contextlib.suppress(OSError, NotImplementedError, ProfileError),
            _locked(path, suffix=suffix, timeout_s=0) as lock,
        ):
            if suffix == LOCK_SUFFIX:
                _sweep(path)
                _discard(path.with_suffix(BAD_SUFFIX))
            _discard(lock)


def newest(most: int) -> Iterator[tuple[Path, Plan | None]]:
    """Yield so many profiles of the cache, the newest first, and none where there is no cache."""
    try:
        paths = profile_paths()
    except (OSError, ProfileError):
        return
    for path in paths[:most]:
        yield path, _read_or_none(path)


def profiles() -> tuple[tuple[Path, Plan | None], ...]:
    """Return all profiles of the cache, the newest first; None in place of a plan that can't be read."""
    return tuple((path, _read_or_none(path)) for path in profile_paths())


def _written_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:  # it went away meanwhile
        return 0


def _read_or_none(path: Path) -> Plan | None:
    try:
        return _read(path)
    except PlanError:
        return None
