"""Functions that other processes run in tests of isolation. Without torch, the processes start quickly."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from autosplit.errors import UserCodeError
from autosplit.runtime.child_process import LostCauseError

FOREVER_S = 1000
"""Longer than the time limit of any test that waits for this."""


class Errand:
    """An object whose methods fail in every possible way."""

    def __init__(self, content: object = None) -> None:
        self.content = content
        self.closed_file: str | None = None

    def add(self, a: int, b: int) -> int:
        return a + b

    def has(self) -> object:
        return self.content

    def pids(self) -> tuple[int, int]:
        return os.getpid(), os.getppid()

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(FOREVER_S)

    def exit(self, code: int) -> None:
        os._exit(code)

    def hang(self) -> None:
        time.sleep(FOREVER_S)

    def hang_deaf(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(FOREVER_S)

    def hang_after(self, path: str) -> None:
        """Create a file, then hang."""
        Path(path).touch()
        time.sleep(FOREVER_S)

    def talk(self) -> str:
        sys.stdout.write("garbage\n")
        os.write(1, b"more garbage\n")
        return "answer"

    def scribble(self) -> None:
        """Write onto whatever is open, the pipe included."""
        for descriptor in range(3, 4096):  # after thousands of tests in one process, the pipe's number was above 64
            try:
                os.write(descriptor, b"\0\0\0\4abcd")
            except OSError:
                continue

    def close_all(self) -> None:
        os.closerange(3, 4096)

    def fork_and_die(self) -> None:
        """Leave a child process that keeps the pipe open."""
        if os.fork() == 0:
            time.sleep(FOREVER_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def fork(self) -> int:
        """Start a process that stays, and return its id."""
        pid = os.fork()
        if pid == 0:
            time.sleep(FOREVER_S)
        return pid

    def lose(self) -> None:
        raise LostCauseError("was of no more use")

    def exit_politely(self, code: int) -> None:
        sys.exit(code)

    def fail(self, kind: str) -> None:
        cause = ZeroDivisionError("the cause")
        if kind == "typed":
            raise UserCodeError("a message", ("a frame", "another")) from cause
        if kind == "awkward":
            raise AwkwardError(1, 2) from cause
        if kind == "interrupted":
            raise KeyboardInterrupt
        raise ValueError("foreign") from cause

    def unsendable(self) -> object:
        return threading.Lock()

    def told_when_closed(self, path: str) -> None:
        self.closed_file = path

    def close(self) -> None:
        if self.closed_file is not None:
            Path(self.closed_file).write_text("closed")


class AwkwardError(Exception):
    """An error whose pickle cannot be loaded."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


class OnlyHere:
    """Can be pickled, but not loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _missing, ("gone",)


def _missing(name: str) -> None:
    raise ImportError(f"no module named {name}")


def refuse() -> None:
    raise UserCodeError("it can't be built", ("its frame",))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(FOREVER_S)
