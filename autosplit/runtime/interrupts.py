"""Ctrl-C, held back where it would break something: torch ends the process that meets it inside fake tensors."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the context (a second or so); in other threads Python delivers none.

    A KeyboardInterrupt inside the callbacks of torch's dispatcher reaches C++ code without a handler for it, which ends
    the process ("terminate called").
    """
    ours = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if ours else None
    if not callable(handler):  # ignored, left to the system, or set by something else than Python
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:  # not by a signal: that would be counted as another Ctrl-C
            handler(came[0], None)
