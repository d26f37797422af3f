"""The log on stderr: what is logged under ``autosplit``.

Each step that is tried, and why, is of level INFO and shown with ``--verbose``; what the user ought to know although
the answer comes all the same is a WARNING.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from autosplit.cli.output import Manner
from autosplit.text import printable, without_passwords

__all__ = ["logged"]


class _Lines(logging.Handler):
    """Writes a line for each record, with the seconds since it was made where it is no warning."""

    def __init__(self) -> None:
        super().__init__()
        rank = os.environ.get("RANK")
        self._whose = "" if rank in (None, "0") else f"rank {rank}: "
        self._began_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        said = self._whose + printable(without_passwords(" ".join(record.getMessage().split())))
        if record.levelno < logging.WARNING:
            said = f"{time.monotonic() - self._began_s:7.2f} s  {said}"
        # To what stderr is now: a bar that is being drawn has put something there that keeps out of its way.
        sys.stderr.write(f"{said}\n")


@contextmanager
def logged(manner: Manner) -> Iterator[None]:
    """Write what is logged to stderr: warnings; with ``--verbose`` each step as well, with ``--quiet`` nothing.

    Whatever handlers the user's code gives to other loggers, these lines come once.
    """
    log = logging.getLogger("autosplit")
    level, propagate = log.level, log.propagate
    handler = _Lines()
    log.addHandler(handler)
    log.setLevel(logging.ERROR if manner.quiet else logging.DEBUG if manner.verbose else logging.WARNING)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
