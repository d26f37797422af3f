"""Redact a plan for sharing: remove what identifies its owner or machine, and keep all figures.

Reports and `show --json` end up in chats and issues. Notes, reasons of failures and errors are sentences. They keep
their figures, but lose paths, URLs, UUIDs, and the number and host of a process. The saved plan keeps all of this.
"""

from __future__ import annotations

import re
from dataclasses import replace

from autosplit.notes import Note
from autosplit.plan.layout import Layout
from autosplit.plan.record import P

REMOVED = "[removed]"
"""Replacement of a private part of a sentence."""

_PRIVATE = re.compile(
    r"""
      \b[a-z][a-z0-9+.-]{0,20}://[^\s'"]+                       # a URL
    | \b(?:GPU|MIG)-(?=[\w/-]{0,80}\d)[\w/-]+                   # the UUID of a GPU
    | \b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b
    | \b(?:pid|process)[ ]\d+(?:[ ]on[ ]\S+)?                   # a process and its host
    | (?<=')(?:~|[a-z]:)?[/\\][^'\n]*(?=')                      # a path in quotes
    | (?<=")(?:~|[a-z]:)?[/\\][^"\n]*(?=")
    # an absolute path, whose folders may have blanks: /home/ann/x.py, C:\Users\Ann Smith\x.py
    | (?<![\w/.~+\\])(?:~|\.{1,2}|[a-z]:)?[/\\](?:[^\s'"]|(?<![.,;:)])[ ](?=[^\s'"/\\]+[/\\]))+(?<![.,;:)\]])
    | (?<![\w/.-])[\w.-]+(?:[/\\][\w.-]+)*[/\\][\w.-]+\.[a-z]\w*  # a relative path to a file: nets/net.py
    """,
    re.IGNORECASE | re.VERBOSE,
)


def redacted(text: str) -> str:
    """Return a sentence without paths, URLs, UUIDs, and the number and host of a process."""
    return _PRIVATE.sub(REMOVED, text)


def shareable(plan: P) -> P:
    """Return the plan without UUIDs and without the parts of its sentences that identify its owner or machine."""

    def clean(notes: tuple[Note, ...]) -> tuple[Note, ...]:
        return tuple(replace(note, text=redacted(note.text)) for note in notes)

    def quiet(layout: Layout) -> Layout:
        seats = (
            replace(
                seat,
                device=replace(seat.device, uuid=None),
                ceiling=replace(seat.ceiling, notes=clean(seat.ceiling.notes)),
            )
            for seat in layout.seats
        )
        return replace(layout, seats=tuple(seats))

    return replace(
        plan,
        layouts=tuple(map(quiet, plan.layouts)),
        why_no_ddp=plan.why_no_ddp and redacted(plan.why_no_ddp),
        trials=tuple(replace(one, failure=one.failure and redacted(one.failure)) for one in plan.trials),
        notes=clean(plan.notes),
    )
