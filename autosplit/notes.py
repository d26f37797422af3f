"""Notes: information about a plan or a measurement that is not an error."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """One note.

    Attributes:
        kind: A stable name of the note's subject, such as ``"no-gpu"``. Programs compare this, never the text.
        text: One or more sentences for the reader.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        """Return the text."""
        return self.text
