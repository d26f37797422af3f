"""End a rank together with the process that launched it. Linux only."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

STARTER_VARIABLE = "AUTOSPLIT_STARTER"
"""Environment variable with the id of the process that started the ranks, if autosplit started them."""

_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def end_with_launcher() -> None:
    """Let Linux kill this rank when torchrun is killed. Otherwise the rank would train on, and keep its GPU.

    Linux sends the signal when the thread that started this process ends. torchrun starts its ranks in the thread that
    waits for them. Other launchers may not, so nothing is done under them.

    Raises:
        SystemExit: The launcher was killed before this call.
    """
    starter = os.environ.get(STARTER_VARIABLE)
    if sys.platform != "linux" or not (starter or "TORCHELASTIC_RUN_ID" in os.environ):
        return
    if starter in (None, str(os.getppid())):
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    # Check after prctl, which does not notice a parent that is gone already.
    if starter not in (None, str(os.getppid())) and not _runs(starter):
        raise SystemExit(
            f"autosplit: process {starter} started this rank and has ended, so this rank ends. Start the job again, "
            f"or unset {STARTER_VARIABLE} if the rank is in another PID namespace."
        )


def _runs(pid: str) -> bool:
    """Return whether a process runs. A process that has ended has no command line, also if its parent did not wait."""
    try:
        return bool(Path(f"/proc/{int(pid)}/cmdline").read_bytes())
    except (OSError, ValueError):
        return False
