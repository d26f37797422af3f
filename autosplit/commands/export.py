"""``autosplit export``: a plan as another tool's settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from autosplit.errors import InputError

if TYPE_CHECKING:
    from autosplit.plan import Plan

__all__ = ["check_before_exporting", "export"]


def check_before_exporting(to: str | None, output: str | None) -> str:
    """Refuse bad flags before a plan is looked for.

    Returns:
        The format.
    """
    from autosplit.export import FORMATS

    if to not in FORMATS:
        given = "--to is missing" if to is None else f"--to {to!r}"
        raise InputError(f"{given}: expected one of {', '.join(FORMATS)}; write it as --to {FORMATS[0]}")
    if output is not None and Path(output).is_dir():
        raise InputError(f"--output {output} is a folder; expected a file; write it as {Path(output) / 'settings'}")
    return to


def export(path: Path, plan: Plan, to: str, *, as_json: bool, output: str | None) -> int:
    """Print a plan's settings, or save them.

    Args:
        path: The plan's file.
        plan: The plan.
        to: The format.
        as_json: Print what there is to know of the settings as JSON, in place of the text to paste.
        output: The file for what would be printed; None for stdout.
    """
    found = plan.export(to, path=path)
    text = found.text
    if as_json:
        known = {"to": to, "exact": found.exact, "lost_share": found.lost_share, "notes": found.notes}
        text = json.dumps({**known, "settings": found.settings, "text": found.text}, indent=2)
    if output is not None:
        found.save(output, text)
    if not as_json and (output is not None or not found.tells_notes):
        sys.stderr.write("".join(f"note: {note}\n" for note in found.notes))
    if output is None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    return 0
