"""The exit code of several processes that were started together: torchrun's own is 1, whatever happened.

It imports no torch, which may be half imported when Ctrl-C comes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

__all__ = ["OUTCOME_VARIABLE", "end_with_parent", "reported"]

OUTCOME_VARIABLE = "AUTOSPLIT_OUTCOME"
"""Names the file in which rank 0 leaves its exit code for who started it."""


def reported(exit_code: int) -> int:
    """Return what to exit with: among several processes 0, for torchrun; rank 0 leaves its exit code in a file."""
    path = os.environ.get(OUTCOME_VARIABLE)
    if not path:
        return exit_code
    if os.environ.get("RANK") == "0":
        Path(path).write_text(str(exit_code), encoding="utf-8")
    return 0


def end_with_parent() -> None:
    """Let the system end this process when the one that started it is killed, where it can: on Linux."""
    if os.environ.get(OUTCOME_VARIABLE) and sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""
