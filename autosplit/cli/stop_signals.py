"""Handle SIGTERM and SIGHUP, which schedulers and closed terminals send, like Ctrl-C. So the best plan is saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NAMES = ("SIGTERM", "SIGHUP")


@contextmanager
def stop_like_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM and SIGHUP within the context, and restore the handlers afterwards.

    A signal that is ignored, as SIGHUP under nohup, stays ignored. Nothing changes outside of the main thread. Nor does
    anything change in processes of torchrun, which sends SIGTERM to the healthy ranks when another rank has failed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    by_default = [number for number in numbers if is_main and signal.getsignal(number) == signal.SIG_DFL]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        by_default = []
    for number in by_default:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in by_default:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Do the same as Ctrl-C at this moment: `held_interrupts` delays it inside of torch's callbacks."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)
    else:  # A shell started the process in the background, so Ctrl-C is ignored.
        raise KeyboardInterrupt
