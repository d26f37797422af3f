"""Define notes: information about a plan or a measurement that is not an error."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.text import prose

NOT_FINITE = "gradient-not-finite"
"""Kind of the note, and code of the error, if the loss or its gradient has NaN or infinity."""

TIMES_DISAGREE = "times-disagree"
"""Kind of the note on doubtful times."""


@dataclass(frozen=True)
class Note:
    """A remark on a plan or a measurement.

    Attributes:
        kind: A stable name of the note's subject, such as ``"no-gpu"``. Programs should compare the kind, not the text.
        text: One or more sentences for the reader. Control characters are escaped, because a plan that has one in an
            error's text could not be loaded.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", prose(self.text))

    def __str__(self) -> str:
        return self.text
