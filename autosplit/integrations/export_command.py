"""Run ``autosplit export``: convert a plan to another tool's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from autosplit.cli.named_plan import named_or_newest
from autosplit.cli.output import CommandResult, Manner, json_text, note
from autosplit.errors import InputError
from autosplit.files import what_stands_at


@dataclass(frozen=True)
class Exported:
    """A plan as the settings of another tool.

    Attributes:
        to: The tool or the format.
        exact: Whether the tool trains exactly as the plan does.
        lost_share: The predicted loss of samples/s, as a share of the plan's. None if it is unknown.
        notes: Limits of the tool, one sentence each.
        settings: The settings by the tool's own names.
        text: The text to paste.
    """

    to: str
    exact: bool
    lost_share: float | None
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    text: str


def export(
    manner: Manner, *, which: str | None = None, to: str | None = None, output: str | None = None, force: bool = False
) -> CommandResult[Exported] | int:
    """Convert a plan to another tool's settings, and save them if an output was given."""
    to = _checked(to, output, force=force)
    path, plan = named_or_newest(which, manner)
    found = plan.export(to, path=path)
    value = msgspec.convert(found, Exported, from_attributes=True)
    if not manner.json and (output is not None or not found.text_has_notes):
        for one in found.notes:
            note(f"note: {one}", manner)
    if output is None:
        return CommandResult(value, found.text + "\n")
    replace(found, text=json_text(value) if manner.json else found.text).save(output)
    return 0


def _checked(to: str | None, output: str | None, *, force: bool) -> str:
    from autosplit.integrations.export import FORMATS

    if to not in FORMATS:
        given = "--to is missing" if to is None else f"--to {to!r} is not an export format"
        raise InputError(f"{given}. Choose one of {', '.join(FORMATS)}, as in --to {FORMATS[0]}.")
    if output is None:
        return to
    stands = what_stands_at(output)
    if stands is not None:
        raise InputError(
            f"--output {output} is {stands}, not a file. "
            + (f"Write --output {Path(output) / 'settings'}." if stands == "a folder" else "Choose another name.")
        )
    if not force and os.path.lexists(output):
        raise InputError(f"--output {output} exists. Choose another name, or replace it with --force.")
    return to
