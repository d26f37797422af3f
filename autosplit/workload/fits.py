"""Check the names of the tasks that must fit into memory in addition to a training step."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from autosplit.errors import WorkloadError

COPYING = ("resume", "save")
"""Tasks that keep copies on the device during a training step. Ceilings for these tasks have the same names."""

FITS = (*COPYING, "eval")


def checked_fits(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the tasks of a sequence or a comma-separated text, in the order of `FITS`."""
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
    wrong = [name for name in names if name not in FITS] if isinstance(names, (list, tuple)) else [given]
    if wrong:
        near = difflib.get_close_matches(str(wrong[0])[:80], FITS, 1, 0.5)
        hint = f"Did you mean {near[0]!r}?" if near else "Leave other names out."
        raise WorkloadError(f"fits has {wrong[0]!r:.80}. Expected any of {', '.join(FITS)}. {hint}", code="fits-value")
    return tuple(name for name in FITS if name in names)


def copying(fits: str | Sequence[str]) -> tuple[str, ...]:
    """Return the checked tasks that keep copies on the device during a training step."""
    return tuple(name for name in fits if name in COPYING)
