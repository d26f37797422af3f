"""Delay Ctrl-C while torch runs fake tensors, because an interrupt there would end the process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the end of the context (about a second). In other threads, Python delivers no Ctrl-C.

    A KeyboardInterrupt inside the callbacks of torch's dispatcher reaches C++ code that does not catch it, which ends
    the process ("terminate called").
    """
    ours = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if ours else None
    if not callable(handler):  # ignored, left to the system, or set outside Python
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:  # call the handler, because another signal would count as a second Ctrl-C
            handler(came[0], None)
