"""Helpers that compare notes by kind."""

from __future__ import annotations

from collections.abc import Iterable

from autosplit.notes import Note


def kinds(notes: Iterable[Note]) -> list[str]:
    """Return the kind of each note."""
    return [note.kind for note in notes]


def noted(*texts: str) -> tuple[Note, ...]:
    """Return notes with these texts."""
    return tuple(Note("note", text) for text in texts)
