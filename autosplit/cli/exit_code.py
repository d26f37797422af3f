"""End the process with the right exit code, even at a second Ctrl-C and under torchrun.

torchrun's own exit code is always 1. This module does not import torch, which may be half imported when Ctrl-C comes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

OUTCOME_VARIABLE = "AUTOSPLIT_OUTCOME"
"""Environment variable with the file for rank 0's exit code. The process that started the ranks reads it."""


def reported(exit_code: int) -> int:
    """Return this process's exit code. Under torchrun it is 0, and rank 0 writes the real code to a file."""
    path = os.environ.get(OUTCOME_VARIABLE)
    if not path:
        return exit_code
    if os.environ.get("RANK") == "0":
        Path(path).write_text(str(exit_code), encoding="utf-8")
    return 0


def exit_at_second_ctrl_c(
    last: Callable[[], int], *, first: Callable[[], object] | None = None, apart_s: float = 0.0
) -> None:
    """End this process at the second Ctrl-C. Python handles the first Ctrl-C.

    Python runs signal handlers between two instructions of the main thread. The main thread may be in a long
    instruction, or wait in a `finally`. So a separate thread listens for the signal.

    Args:
        last: Function that is called in that thread before the process ends. It returns the exit code.
        first: Function that is called in that thread at the first Ctrl-C. It must not wait, or the second Ctrl-C has no
            effect.
        apart_s: Time in seconds within which signals belong to the same key press.
    """
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return  # on Windows this needs sockets, so Python handles the second Ctrl-C, too
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def listen() -> None:
        came_s: list[float] = []
        while len(came_s) < 2:
            for number in os.read(read_end, 4096):
                if number == signal.SIGINT and (not came_s or time.monotonic() - came_s[-1] >= apart_s):
                    came_s.append(time.monotonic())
                    if first is not None and len(came_s) == 1:
                        first()
        os._exit(last())

    # A fork shares the pipe, but its signals are not for us.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=listen, name="autosplit-interrupts", daemon=True).start()
