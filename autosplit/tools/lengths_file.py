"""Read the lengths of samples from a text file, for ``autosplit tune --lengths``."""

from __future__ import annotations

from autosplit.errors import InputError, shown
from autosplit.files import read_bounded
from autosplit.tools.padded_length import checked_lengths

_MOST_BYTES_OF_LENGTHS = 2**30
"""Largest file of lengths in bytes: about 200 million samples."""


def lengths_in(path: str) -> list[int]:
    """Read the lengths of samples from a file with one number per line. Raise InputError for other contents."""
    try:
        words = read_bounded(path, _MOST_BYTES_OF_LENGTHS).decode("utf-8-sig").split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--lengths {path} can't be read ({reason}). Name a text file.",
        ) from error
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise InputError(
            f"--lengths {path} contains {shown(wrong)}, which is not a whole number. Write one length per line.",
        )
    return checked_lengths([*map(int, words)], f"the lengths in {path}")
