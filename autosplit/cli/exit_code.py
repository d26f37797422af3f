"""The end of a process: its exit code, which among several torchrun makes 1 whatever happened; a second Ctrl-C.

It imports no torch, which may be half imported when Ctrl-C comes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

OUTCOME_VARIABLE = "AUTOSPLIT_OUTCOME"
"""Names the file in which rank 0 leaves its exit code for who started it."""

STARTER_VARIABLE = "AUTOSPLIT_STARTER"
"""The id of the process that started the ranks."""


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
        if os.environ.get(STARTER_VARIABLE) not in (None, str(os.getppid())):
            os._exit(1)  # it was killed while this process was imported: nobody waits for it any more


_SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def leaves_at_the_second(
    last: Callable[[], int], *, first: Callable[[], object] | None = None, apart_s: float = 0.0
) -> None:
    """Let the second Ctrl-C of this process end it at once, for good; the first stays Python's.

    Python runs handlers between two instructions of the main thread, which may be in a long one, or in a `finally` that
    waits: a thread of its own hears of the signal all the same.

    Args:
        last: Called in that thread, before the end; it returns the exit code.
        first: Called in that thread at the first Ctrl-C; it must not wait for anything, or the second is not heard.
        apart_s: Signals that come closer together than this are of one key.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return  # Windows tells of a signal by sockets only; there the second is Python's, too
    hears, tells = os.pipe()
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)

    def listen() -> None:
        came_s: list[float] = []
        while len(came_s) < 2:
            for number in os.read(hears, 4096):
                if number == signal.SIGINT and (not came_s or time.monotonic() - came_s[-1] >= apart_s):
                    came_s.append(time.monotonic())
                    if first is not None and len(came_s) == 1:
                        first()
        os._exit(last())

    def leave_alone() -> None:
        signal.set_wakeup_fd(-1)  # a fork shares the pipe: its signals are not ours

    os.register_at_fork(after_in_child=leave_alone)
    threading.Thread(target=listen, name="autosplit-interrupts", daemon=True).start()
