"""The list of profiles for reading: a table where it fits the terminal, otherwise some lines for each."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.cli.named_plan import KEY_DIGITS
from autosplit.cli.plan_report import request_text
from autosplit.cli.tables import add_row, counted_text, pairs_table, plain_table, print_plain, short_name, tuple_text
from autosplit.text import rate_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Profile", "print_profiles"]

LEAST_FOR_NOTES = 30
"""Columns in which a long note is still legible; with fewer there is no table."""

_UNITS = ((60.0, "s"), (60.0, "min"), (24.0, "h"), (365.0, "d"))
_EVERYWHERE = ("key", "model", "devices", "plan", "age")
"""Columns that stand there whether anything is in them or not."""


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


def print_profiles(found: Sequence[Profile], folder: Path, console: Console) -> None:
    """Print the profiles and their folder; without any, a line says so."""
    from rich.text import Text

    if not found:
        print_plain(Text(f"no plan is remembered in {folder}; autosplit tune FILE makes one", overflow="fold"), console)
        return
    rows = [_cells(profile) for profile in found]
    shown = [name for name in rows[0] if name in _EVERYWHERE or any(row[name] for row in rows)]
    table = plain_table()
    for name in shown:
        table.add_column(name, overflow="fold", no_wrap=name != "notes")
    for row in rows:
        add_row(table, *(row[name] for name in shown))
    needed = sum(3 + max(len(name), *(_least_width(name, row[name]) for row in rows)) for name in shown)
    print_plain(table if needed <= console.width else _blocks(rows), console)


def _least_width(name: str, text: str) -> int:
    """Return how many columns a cell needs: only notes may be broken."""
    return min(len(text), LEAST_FOR_NOTES) if name == "notes" else len(text)


def _blocks(rows: Sequence[dict[str, str]]) -> RenderableType:
    """Put the columns below each other."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for row in rows:
        parts.append(Text("\n" * bool(parts) + row["key"], "bold"))
        parts.append(pairs_table([(f"  {name}", text) for name, text in row.items() if text and name != "key"]))
    return Group(*parts)


def _cells(profile: Profile) -> dict[str, str]:
    """Return what each column says of a profile; nothing where there is nothing to say."""
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
    """Write a model's class without its module: ``Linear, 16 parameters``."""
    if profile.model is None:
        return ""
    names = ", ".join(name.rpartition(".")[2] for name in profile.model.split(", "))
    return names if profile.parameters is None else f"{names}, {_amount(profile.parameters)} parameters"


def _amount(count: int) -> str:
    """Write a number; a large one by its first digits: ``7.25 billion``."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.4g} {name}"
    return f"{count:,}"


def _devices_text(profile: Profile) -> str:
    """Count neighbours that are alike: ``2x sim RTX3090``."""
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
    """Write an age in one unit: ``3 h``; below a minute ``now``."""
    if age_s < 60:
        return "now"
    amount = age_s
    for size, unit in _UNITS:
        if amount < size:
            return f"{amount:.0f} {unit}"
        amount /= size
    return f"{amount:.0f} years"
