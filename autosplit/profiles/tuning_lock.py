"""Several processes that tune the same thing: one tunes, the others wait for its plan.

holder   locks KEY.tuning.lock | tunes | stores the plan | unlocks
waiter   sees the lock, tells who has it . . . . . . . . | locks, finds the plan, unlocks

The lock is the operating system's own (by way of filelock: flock, or what Windows has). Such a lock goes when its
process goes, however that ends: SIGKILL leaves none behind, and nobody has to judge whether its holder still lives. A
lock that is a file's mere presence would be left behind, so that where the file system has no others nobody waits.
What the file says of its holder is for people only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from autosplit.errors import ProfileError
from autosplit.files import make_private_folder

__all__ = ["WAIT_LIMIT_S", "Turn", "WaitingWarning", "wait_limit_s"]

WAIT_LIMIT_S = 1800.0
"""Without a time limit nobody waits longer for another's tuning: by then it hangs, or is of no use any more."""

LEAST_WAIT_S = 60.0
"""With a time limit, twice of it, and no less than this: what a tuning does beside its trials has no limit."""

POLL_S = 0.1
"""Between two looks at a lock that is held."""

_HOLDER_BYTES = 512
"""More than a holder writes of itself."""

_DAY_S = 86400.0


class WaitingWarning(UserWarning):
    """Another process is tuning the same thing, and this one waits for its plan."""


def wait_limit_s(remaining_s: float | None) -> float:
    """Return how long to wait for another process at most.

    Args:
        remaining_s: What is left of the time limit; None for no limit.
    """
    return WAIT_LIMIT_S if remaining_s is None else max(LEAST_WAIT_S, 2 * remaining_s)


@dataclass(frozen=True)
class _Holder:
    """The process that holds a lock, as it writes itself into the lock's file."""

    pid: int
    host: str
    since_s: float


_held: set[tuple[int, Path]] = set()
"""Which thread of this process holds what: a thread that waited for itself would wait in vain."""


class Turn:
    """A turn at something that one process at a time is to do; a context that gives it back at its end.

    Args:
        path: The lock's file, its folder made where it is missing; None where there can be none.
        limit_s: How long to wait at most.
        tell: Told once, when the wait begins, what is waited for.
        trouble: Why there can be none.

    Attributes:
        held: The turn is here, and others wait.
        waited_s: How long it took to come.
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
        self._lock: contextlib.AbstractContextManager[object] | None = None

    def __enter__(self) -> Turn:
        """Return itself; `wait` is what waits."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the turn back, if it is here."""
        if self.held:
            self.held = False
            _held.discard(self._mine)
            _write(self.path, b"")
            assert self._lock is not None
            with contextlib.suppress(OSError):  # the file system has gone; the lock with it
                self._lock.__exit__(None, None, None)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes on the wait that a plan gets."""
        waited = f"waited {self.waited_s:.0f} s for another that tuned the same" if self._told else None
        return tuple(said for said in (self.gave_up or waited,) if said is not None)

    @property
    def _mine(self) -> tuple[int, Path]:
        return threading.get_ident(), self.path

    @property
    def _is_over(self) -> bool:
        return self.held or self.trouble is not None or self.gave_up is not None

    def wait(self, for_s: float = float("inf")) -> bool:
        """Wait until it is this process's turn, or there is no point in waiting any longer. Ctrl-C ends it at once.

        Args:
            for_s: No longer than this; call again to go on.

        Returns:
            Whether the wait is over, for one of the reasons that the attributes tell.
        """
        now_s = time.monotonic()
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        until_s = now_s + for_s
        while not self._is_over:
            self._attempt()
            now_s = time.monotonic()
            if self._is_over or now_s >= until_s:
                break
            self.waited_s = now_s - self._begun_s
            if self.waited_s >= self.limit_s:
                self.gave_up = f"{_holder_text(self.path)}, which is longer than to be waited for: tuned beside it"
                break
            if not self._told and self.waited_s >= POLL_S:  # by now the holder has written who it is
                self._told = True
                self._tell(f"{_holder_text(self.path)}: waiting for its plan, {self.limit_s:.0f} s at most")
            time.sleep(POLL_S)
        return self._is_over

    def _attempt(self) -> None:
        """Lock, if nobody else has."""
        import filelock  # slow to import

        if self._mine in _held:
            self.trouble = "this thread tunes the same already"
            return
        try:
            make_private_folder(self.path.parent)
            self._lock = filelock.FileLock(self.path, blocking=False, mode=0o600, fallback_to_soft=False)
            self._lock.__enter__()
        except filelock.Timeout:
            return
        except (OSError, NotImplementedError, ProfileError) as error:  # no such folder, no right to write, no locks
            reason = getattr(error, "strerror", None) or str(error)
            # Where nothing stands there, the folder is to blame.
            self.trouble = f"{self.path} can't be locked ({reason})" if os.path.lexists(self.path) else reason
            return
        self.held = True
        _held.add(self._mine)
        _write(self.path, msgspec.json.encode(_Holder(os.getpid(), socket.gethostname()[:200], time.time())))


def _write(path: Path, text: bytes) -> None:
    """Write into a lock's file, if it is still there."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        file.truncate()
        file.write(text)


def _holder_text(path: Path) -> str:
    """Say who has a lock, and since when, as far as its file tells."""
    try:
        with path.open("rb") as file:
            holder = msgspec.json.decode(file.read(_HOLDER_BYTES), type=_Holder)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "another process has been tuning the same"
    who = "another thread of this process" if holder.pid == os.getpid() else f"process {holder.pid}"
    if holder.host != socket.gethostname()[:200]:
        who = f"process {holder.pid} on {holder.host if holder.host.isprintable() else 'another machine'}"
    ago_s = time.time() - holder.since_s
    if not -_DAY_S < ago_s < 365 * _DAY_S:
        return f"{who} has been tuning the same"
    return f"{who} has been tuning the same since {time.strftime('%H:%M:%S', time.localtime(holder.since_s))}"
