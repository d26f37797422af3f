"""Several processes that tune the same thing: one tunes, the others wait for its plan.

holder   locks KEY.tuning.lock | tunes | stores the plan | unlocks
waiter   sees the lock, tells who has it . . . . . . . . | locks, finds the plan, unlocks

The lock is the operating system's own (by way of filelock: flock, or what Windows has), because such a lock goes when
its process goes, however that ends; where the file system has none, nobody waits. What the file says of its holder is
for people only.
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
"""Without a time limit nobody waits longer for another's tuning: by then it hangs, or is of no use any more."""

LEAST_WAIT_S = 60.0
"""With a time limit, twice of it, and no less than this: what a tuning does beside its trials has no limit."""

POLL_S = 0.1
"""Between two looks at a lock that is held."""

_HOLDER = re.compile(r"(\d{1,10}) ([\w.-]{1,200}) (\d\d:\d\d:\d\d)", re.ASCII)
"""A lock's file: its holder's process, machine, and since when it has it."""


class WaitingWarning(UserWarning):
    """Another process is tuning the same thing, and this one waits for its plan."""


def wait_limit_s(remaining_s: float | None) -> float:
    """Return how long to wait for another process at most, by what is left of the time limit; None for no limit."""
    return WAIT_LIMIT_S if remaining_s is None else max(LEAST_WAIT_S, 2 * remaining_s)


class Turn(contextlib.AbstractContextManager["Turn"]):
    """A turn at something that one process at a time is to do; a context that gives it back at its end.

    Args:
        path: The lock's file, its folder made where it is missing; None where there can be none.
        tell: Told once, when the wait begins, what is waited for.
        trouble: Why there can be none.

    Attributes:
        held: The turn is here, and others wait.
        trouble: Why there is nothing to wait for here, in a few words; None where there is.
        gave_up: What is to be said where the limit was over; None where it was not.
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
        """Give the turn back, if it is here."""
        if self.held:
            self.held = False
            _write(self.path, "")
            assert self._lock is not None
            with contextlib.suppress(OSError):  # the file system has gone; the lock with it
                self._lock.release()

    @property
    def notes(self) -> tuple[Note, ...]:
        """The notes on the wait that a plan gets."""
        if self.gave_up is not None:
            return (Note("gave-up-waiting", self.gave_up),)
        waited = f"waited {self.waited_s:.0f} s for another process that tuned the same workload"
        return (Note("waited", waited),) if self._told else ()

    @property
    def _is_over(self) -> bool:
        return self.held or self.trouble is not None or self.gave_up is not None

    def wait(self, for_s: float = float("inf")) -> bool:
        """Wait until this turn comes, or there is no point in waiting on; return whether the wait is over.

        It lasts `for_s` at most: call it again to go on. Ctrl-C ends it at once.
        """
        now_s = time.monotonic()
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        end_s, limit_s = now_s + for_s, self._begun_s + self.limit_s
        while not self._is_over:
            # By the end of the first look the holder has written who it is.
            look_s = min(end_s, limit_s) - now_s if self._told else POLL_S
            if self._lock_within(max(0.0, look_s)) or self.trouble is not None:
                break
            now_s = time.monotonic()
            self.waited_s = now_s - self._begun_s
            if now_s >= limit_s:
                self.gave_up = f"{_holder_text(self.path)}, which is longer than to be waited for: tuned beside it"
            elif not self._told:
                self._told = True
                self._tell(f"{_holder_text(self.path)}: waiting for its plan, {self.limit_s:.0f} s at most")
            elif now_s >= end_s:
                break
        return self._is_over

    def _lock_within(self, limit_s: float) -> bool:
        """Tell whether this process has the lock, for which it waits that long."""
        import filelock  # slow to import

        try:
            make_private_folder(self.path.parent)
            # One for all turns at the path, which knows whether this thread has it: it would wait for itself in vain.
            self._lock = filelock.FileLock(self.path, mode=0o600, fallback_to_soft=False, is_singleton=True)
            if self._lock.is_locked:
                self.trouble = "this thread tunes the same already"
                return False
            self._lock.acquire(limit_s, poll_interval=POLL_S)
        except filelock.Timeout:
            return False
        except (OSError, NotImplementedError, ProfileError) as error:  # no such folder, no right to write, no locks
            reason = getattr(error, "strerror", None) or str(error)
            # Where nothing stands there, the folder is to blame.
            self.trouble = f"{self.path} can't be locked ({reason})" if os.path.lexists(self.path) else reason
            return False
        self.held = True
        _write(self.path, f"{os.getpid()} {socket.gethostname()} {time.strftime('%H:%M:%S')}")
        return True


def _write(path: Path, text: str) -> None:
    """Write into a lock's file, if it is still there."""
    with contextlib.suppress(OSError), path.open("r+", encoding="utf-8") as file:
        file.truncate()
        file.write(text)


def _holder_text(path: Path) -> str:
    """Say who has a lock, and since when, as far as its file tells."""
    try:
        with path.open("rb") as file:
            found = _HOLDER.fullmatch(file.read(512).decode("ascii", "replace"))
    except OSError:
        found = None
    if found is None:
        return "another process has been tuning the same"
    pid, host, since = found.groups()
    who = "another thread of this process" if pid == str(os.getpid()) else f"process {pid}"
    if host != socket.gethostname():
        who = f"process {pid} on {host}"
    return f"{who} has been tuning the same since {since}"
