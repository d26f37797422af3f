"""Let one process tune a workload, while other processes with the same workload wait for its plan.

holder   locks KEY.tuning.lock | tunes | stores the plan | unlocks
waiter   reports the holder and waits . . . . . . . . . | locks, finds the plan, unlocks

The operating system releases filelock's lock when the holder ends for any reason. If the file system has no locks, no
process waits. The holder's name in the file is only for users.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autosplit.errors import ProfileError
from autosplit.files import make_private_folder
from autosplit.notes import Note

if TYPE_CHECKING:
    import filelock

WAIT_LIMIT_S = 1800.0
"""Maximum wait in seconds without a time limit. A tuning that takes longer probably hangs."""

LEAST_WAIT_S = 60.0
"""Minimum wait in seconds with a time limit. The wait is twice the limit, which applies only to a tuning's trials."""

POLL_S = 0.1
"""Time in seconds between two attempts to acquire a lock."""

_HOLDER = re.compile(r"(\d{1,10}) ([\w.-]{1,200}) (\d\d:\d\d:\d\d)", re.ASCII)
"""Content of a lock file: process, machine and start time of its holder."""


class WaitingWarning(UserWarning):
    """Warn that this process waits for the plan of another process that tunes the same workload."""


def wait_limit_s(remaining_s: float | None) -> float:
    """Return the maximum wait for another process in seconds, given the rest of the time limit (or None)."""
    return WAIT_LIMIT_S if remaining_s is None else max(LEAST_WAIT_S, 2 * remaining_s)


class Turn(contextlib.AbstractContextManager["Turn"]):
    """The turn of this process to tune a workload. The end of the context releases it.

    Args:
        path: The lock file. Its folder is made if necessary. None if there can be no folder.
        tell: Called once with a sentence about the holder, when the wait begins.
        trouble: The reason why there is no lock file.

    Attributes:
        waited_s: Time spent waiting, in seconds.
        trouble: The reason why this process cannot wait, or None.
        gave_up: A message if the limit ended the wait, or None.
    """

    def __init__(
        self, path: Path | None, *, limit_s: float, tell: Callable[[str], None], trouble: str | None = None
    ) -> None:
        assert path is not None or trouble is not None
        self.path, self.limit_s = path or Path(), limit_s
        self.held = False
        self.waited_s = 0.0
        self.trouble = trouble
        self.gave_up: str | None = None
        self._tell = tell
        self._told = False
        self._begun_s: float | None = None
        self._lock: filelock.BaseFileLock | None = None

    def __exit__(self, *_: object) -> None:
        if self.held:
            self.held = False
            _write(self.path, "")
            assert self._lock is not None
            with contextlib.suppress(OSError):  # the file system is gone, and the lock with it
                self._lock.release()

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes about the wait, for the plan."""
        if self.gave_up is not None:
            return (Note("gave-up-waiting", self.gave_up),)
        waited = f"Waited {self.waited_s:.0f} s for another process that tuned the same workload."
        return (Note("waited", waited),) if self._told else ()

    @property
    def _is_over(self) -> bool:
        return self.held or self.trouble is not None or self.gave_up is not None

    def wait(self, for_s: float = float("inf")) -> bool:
        """Wait for the lock for at most `for_s` seconds. Return whether the wait is over. If not, call again.

        The wait is also over if the limit is reached, or if there is no lock. Ctrl-C ends it immediately.
        """
        now_s = time.monotonic()
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        end_s, limit_s = now_s + for_s, self._begun_s + self.limit_s
        while not self._is_over:
            # After the first attempt, the holder has written its name.
            look_s = min(end_s, limit_s) - now_s if self._told else POLL_S
            if self._lock_within(max(0.0, look_s)) or self.trouble is not None:
                break
            now_s = time.monotonic()
            self.waited_s = now_s - self._begun_s
            if now_s >= limit_s:
                self.gave_up = (
                    f"{_holder_text(self.path)}. This process stopped waiting at its time limit, and tuned the "
                    "workload itself."
                )
            elif not self._told:
                self._told = True
                self._tell(f"{_holder_text(self.path)}. Waiting for its plan, at most {self.limit_s:.0f} s")
            elif now_s >= end_s:
                break
        return self._is_over

    def _lock_within(self, limit_s: float) -> bool:
        import filelock  # slow to import

        try:
            make_private_folder(self.path.parent)
            # A singleton for the path detects that this thread holds the lock. Otherwise the thread would wait for
            # itself.
            self._lock = filelock.FileLock(self.path, mode=0o600, fallback_to_soft=False, is_singleton=True)
            if self._lock.is_locked:
                self.trouble = "this thread is already tuning the same workload"
                return False
            self._lock.acquire(limit_s, poll_interval=POLL_S)
        except filelock.Timeout:
            return False
        except (OSError, NotImplementedError, ProfileError) as error:  # no folder, no permission, or no locks
            reason = getattr(error, "strerror", None) or str(error)
            # If there is no file at the path, the problem is the folder.
            self.trouble = f"{self.path} can't be locked ({reason})" if os.path.lexists(self.path) else reason
            return False
        self.held = True
        _write(self.path, f"{os.getpid()} {socket.gethostname()} {time.strftime('%H:%M:%S')}")
        return True


def _write(path: Path, text: str) -> None:
    with contextlib.suppress(OSError), path.open("r+", encoding="utf-8") as file:
        file.truncate()
        file.write(text)


def _holder_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = _HOLDER.fullmatch(file.read(512).decode("ascii", "replace"))
    except OSError:
        found = None
    if found is None:
        return "Another process is tuning the same workload"
    pid, host, since = found.groups()
    who = "Another thread of this process" if pid == str(os.getpid()) else f"Process {pid}"
    if host != socket.gethostname():
        who = f"Process {pid} on {host}"
    return f"{who} has been tuning the same workload since {since}"
