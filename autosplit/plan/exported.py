"""Settings of another tool, as values and as a text to paste."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosplit.errors import InputError
from autosplit.files import READ_BY_ALL, replace_file
from autosplit.solve.even_ranks import EvenRanks


@dataclass(frozen=True)
class Export:
    """A plan as the settings of a tool. `str()` is the text to paste.

    Attributes:
        to: The format: one of `FORMATS`.
        settings: Of `transformers`, `accelerate` and `lightning`: by the name of what takes them, keyword arguments,
            and under ``"command"`` the line that starts the script. Of `torchrun` ``"command"``, a list, and
            ``"variables"``; of `env` the variables; of `json` the plan.
        text: To paste: Python, a command line, ``export`` lines, or JSON.
        exact: The tool does what the plan says. Otherwise the settings are the nearest even plan.
        notes: What the tool can't express, and what else is to be known, a sentence each.
        even: What the tool gives to every rank; None of `torchrun`, `env` and `json`, which have the plan's numbers.
        lost_share: What of the plan's samples/s is lost (0.25 for a quarter), as predicted; None where nobody knows.
    """

    to: str
    settings: Mapping[str, Any]
    text: str
    exact: bool = True
    notes: tuple[str, ...] = ()
    even: EvenRanks | None = None
    lost_share: float | None = None

    def __str__(self) -> str:
        """Return the text to paste."""
        return self.text

    @property
    def tells_notes(self) -> bool:
        """Whether the text has the notes in it, as comments; a line for a shell and JSON have no place for them."""
        return self.to not in ("torchrun", "json")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the text to a file, by atomic replacement.

        Args:
            path: The file, in a folder that is there.

        Raises:
            InputError: It is a folder, or can't be written.
        """
        target = Path(path)
        if target.is_dir():
            raise InputError(
                f"{target} is a folder; expected a file; write it as {target / 'settings'}", code="output-is-folder"
            )
        write(target, self.text + "\n")


def write(path: Path, text: str, called: str = "") -> None:
    """Write a file that is made to be handed on; raise InputError where it can't be, with what it is `called`."""
    try:
        replace_file(path, text, mode=READ_BY_ALL)
    except (OSError, ValueError) as error:  # a name with a null character is no OSError
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{called or path} can't be written ({reason}); expected a file in a folder that is there; name another",
            code="output-not-written",
        ) from error


def comment_lines(notes: Sequence[str]) -> list[str]:
    """Write notes as comments, which Python and shells have in common."""
    return [line for note in notes for line in textwrap.wrap(note, 100, initial_indent="# ", subsequent_indent="#   ")]


class Code(str):
    """Python that stands in an argument as it is."""

    __slots__ = ()


def assignment_lines(name: str, function: str, arguments: Mapping[str, Any]) -> str:
    """Write a call that is assigned, an argument on each line."""
    lines = "".join(f"    {keyword}={_literal(value)},\n" for keyword, value in arguments.items())
    return f"{name} = {function}(\n{lines})"


def _literal(value: object) -> str:
    if isinstance(value, Code):
        return str(value)
    return json.dumps(value) if isinstance(value, str) else repr(value)
