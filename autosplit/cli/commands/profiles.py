"""Run ``autosplit profiles``: list profiles, print their paths, and remove them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autosplit.cli.named_plan import profile_path
from autosplit.cli.output import CommandResult, Manner, Place, Problem, collected
from autosplit.cli.stored_profile import Profile, profile_at
from autosplit.cli.tables import add_row, pairs_table, plain_table, print_bullets, print_plain
from autosplit.errors import InputError
from autosplit.files import profiles_folder
from autosplit.profiles.store import KEY_DIGITS, profile_paths, remove_left_over, remove_profile
from autosplit.text import counted_text, rate_text, request_text, short_name, tuple_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MOST_SHOWN = 50
"""Largest number of profiles in the table. The command reads no other files."""

LEAST_FOR_NOTES = 30
"""Smallest width of a column of notes. Terminals that are too narrow for it get lists instead of a table."""

_UNITS = ((60.0, "s"), (60.0, "min"), (24.0, "h"), (365.0, "d"))
_EVERYWHERE = ("key", "model", "devices", "plan", "age")
"""Columns that are always shown, even if they are empty."""


@dataclass(frozen=True)
class Profiles:
    """The profiles in the cache.

    Attributes:
        folder: The folder of the profiles. It may not exist yet.
        profiles: The profiles, newest first.
    """

    folder: str
    profiles: tuple[Profile, ...]


@dataclass(frozen=True)
class Removed:
    """The profiles that were removed.

    Attributes:
        folder: The folder of the profiles.
        removed: The files that were removed.
    """

    folder: str
    removed: tuple[str, ...]


def list_profiles(manner: Manner) -> CommandResult[Profiles]:
    """Return the newest profiles for the table, or all for JSON."""
    paths, folder = profile_paths(), profiles_folder()
    found = tuple(map(profile_at, paths if manner.json else paths[:MOST_SHOWN]))

    def show(console: Console) -> None:
        print_profiles(found, folder, console)
        if len(paths) > len(found):
            older = counted_text(len(paths) - len(found), "older profile")
            print_bullets([f"{older} not shown. autosplit profiles --json lists all."], console)

    return CommandResult(Profiles(str(folder), found), show)


def show_path(_manner: Manner, *, key: str | None = None) -> CommandResult[Place]:
    """Return the folder of the profiles, which may not exist yet, or the file of a profile."""
    path = str(profiles_folder() if key is None else profile_path(key))
    return CommandResult(Place(path), f"{path}\n")


def remove_profiles(
    _manner: Manner, *, keys: Sequence[str] = (), all_: bool = False, yes: bool = False
) -> CommandResult[Removed]:
    """Remove profiles by the first digits of their keys, or all.

    If any key is not found, remove nothing.
    """
    if bool(keys) == all_:
        given = "Keys and --all are both given" if keys else "Neither a key nor --all is given"
        raise InputError(f"{given}. Write autosplit profiles remove KEY, or autosplit profiles remove --all.")
    folder = profiles_folder()
    paths = profile_paths() if all_ else tuple(dict.fromkeys(map(profile_path, keys)))
    if all_ and paths and not yes:
        _confirm(len(paths), folder)
    removed: list[str] = []
    problems: list[Problem] = []
    for path in paths:
        with collected(problems):
            remove_profile(path)
            removed.append(str(path))
    if all_ and paths:
        remove_left_over()
    text = "".join(f"removed {path}\n" for path in removed) or f"nothing to remove in {folder}\n"
    return CommandResult(Removed(str(folder), tuple(removed)), text, problems[:1])


def _confirm(count: int, folder: Path) -> None:
    what = f"{counted_text(count, 'profile')} in {folder}"
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise InputError(
            f"--all removes {what}, but autosplit can't ask for confirmation without a terminal. Add --yes."
        )
    sys.stderr.write(f"remove {what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise InputError(f"You did not answer y, so nothing was removed. Answer y to remove {what}, or name the keys.")


def print_profiles(found: Sequence[Profile], folder: Path, console: Console) -> None:
    """Print the profiles and their folder, or that there are none."""
    from rich.text import Text

    if not found:
        print_plain(
            Text(f"The folder {folder} has no profile. Make a profile with autosplit tune FILE.", overflow="fold"),
            console,
        )
        return
    rows = [_cells(profile) for profile in found]
    shown = [name for name in rows[0] if name in _EVERYWHERE or any(row[name] for row in rows)]
    table = plain_table()
    for name in shown:
        table.add_column(name, overflow="fold", no_wrap=name != "notes")
    for row in rows:
        add_row(table, *(row[name] for name in shown))
    least = {name: max(len(name), *(len(row[name]) for row in rows)) for name in shown}
    least["notes"] = min(least.get("notes", 0), LEAST_FOR_NOTES)  # only notes may wrap
    needed = sum(3 + least[name] for name in shown)
    print_plain(table if needed <= console.width else _blocks(rows), console)


def _blocks(rows: Sequence[dict[str, str]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for row in rows:
        parts.append(Text("\n" * bool(parts) + row["key"], "bold"))
        parts.append(pairs_table([(f"  {name}", text) for name, text in row.items() if text and name != "key"]))
    return Group(*parts)


def _cells(profile: Profile) -> dict[str, str]:
    read = profile.problem is None
    notes = [] if profile.problem is None else [f"can't be read: {profile.problem}"]
    notes += ["simulated"] if profile.simulated else []
    notes += ["incomplete"] if profile.complete is False else []
    return {
        "key": profile.key[:KEY_DIGITS],
        "name": profile.name or "",
        "model": _model_text(profile),
        "devices": _devices_text(profile),
        "asked for": request_text(profile.request or {}),
        "plan": _plan_text(profile) if read else "",
        "age": "?" if profile.age_s is None else _age_text(profile.age_s),
        "notes": ", ".join(notes),
    }


def _model_text(profile: Profile) -> str:
    if profile.model is None:
        return ""
    names = ", ".join(name.rpartition(".")[2] for name in profile.model.split(", "))
    return names if profile.parameters is None else f"{names}, {_amount(profile.parameters)} parameters"


def _amount(count: int) -> str:
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.4g} {name}"
    return f"{count:,}"


def _devices_text(profile: Profile) -> str:
    pairs = zip(profile.devices, profile.device_names, strict=True)
    kinds = itertools.groupby((label.partition(":")[0], short_name(name)) for label, name in pairs)
    texts = []
    for (kind, name), alike in kinds:
        count = len(list(alike))
        label = kind if kind == name else f"{kind} {name}"
        texts.append(label if count == 1 else f"{count}x {label}")
    return ", ".join(texts)


def _plan_text(profile: Profile) -> str:
    batch = f"split {tuple_text(profile.split)}" if len(profile.split) > 1 else f"batch {profile.batch_size}"
    return (
        f"{batch}, {counted_text(profile.accumulation_steps or 0, 'step')}, {rate_text(profile.samples_per_s or 0.0)}"
    )


def _age_text(age_s: float) -> str:
    if age_s < 60:
        return "now"
    amount = age_s
    for size, unit in _UNITS:
        if amount < size:
            return f"{amount:.0f} {unit}"
        amount /= size
    return f"{amount:.0f} years"
