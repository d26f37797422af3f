"""Store settings for another tool, as values and as text to paste."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosplit.errors import InputError
from autosplit.files import write_for_all
from autosplit.integrations.even_ranks import EvenRanks


@dataclass(frozen=True)
class Export:
    """A plan as the settings of a tool. `str()` is the text to paste.

    Attributes:
        to: The format, one of `FORMATS`.
        settings: For `transformers`, `accelerate` and `lightning`: keyword arguments by class name, and the command
            line that starts the script under ``"command"``. For `torchrun`: ``"command"``, a list, and ``"variables"``.
            For `slurm`: ``"machines"``. For `trainjob`: ``"manifests"``. For `skypilot`: the task. For `env`: the
            variables. For `json`: the plan.
        text: The text to paste: Python, a command line, ``export`` lines, or JSON.
        exact: Whether the tool trains as the plan does. Otherwise the settings are the nearest even plan.
        notes: Sentences about settings that the tool can't express, and other remarks.
        even: The settings of every rank. None for formats other than `transformers`, `accelerate` and `lightning`,
            which use the plan's numbers.
        lost_share: Predicted fraction of the plan's samples/s that is lost (0.25 for a quarter). None if unknown.
    """

    to: str
    settings: Mapping[str, Any]
    text: str
    exact: bool = True
    notes: tuple[str, ...] = ()
    even: EvenRanks | None = None
    lost_share: float | None = None

    def __str__(self) -> str:
        return self.text

    @property
    def text_has_notes(self) -> bool:
        """Whether the text contains the notes as comments. A command line and JSON can't contain comments."""
        return self.to not in ("torchrun", "json")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the text to a file. Replace the file atomically.

        Args:
            path: The file, in an existing folder.

        Raises:
            InputError: The path is a folder, or can't be written.
        """
        target = Path(path)
        if target.is_dir():
            raise InputError(f"{target} is a folder, not a file. Write to {target / 'settings'}.")
        write_for_all(target, self.text + "\n")
