"""Redact a plan for sharing: remove what identifies its owner or machine, and keep all figures.

Reports and `show --json` end up in chats and issues. Notes, reasons of failures and errors are sentences. They keep
their figures, but lose paths, URLs, UUIDs, and the number and host of a process. The saved plan keeps all of this.
"""

from __future__ import annotations

import re
from dataclasses import replace

from autosplit.notes import Note
from autosplit.plan.record import P
from autosplit.solve.memory import Ceiling

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

    def quiet(ceiling: Ceiling) -> Ceiling:
        return replace(ceiling, notes=clean(ceiling.notes))

    reason = plan.ddp.reason
    return replace(
        plan,
        devices=tuple(replace(one, uuid=None, ceiling=quiet(one.ceiling)) for one in plan.devices),
        ddp=replace(
            plan.ddp,
            reason=reason and redacted(reason),
            ranks=tuple(replace(one, ceiling=quiet(one.ceiling)) for one in plan.ddp.ranks),
        ),
        trials=tuple(replace(one, failure=one.failure and redacted(one.failure)) for one in plan.trials),
        notes=clean(plan.notes),
    )
