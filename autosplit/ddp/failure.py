"""End a job if one of its ranks fails, and report the cause to the other ranks.

Note [How ranks wait]
~~~~~~~~~~~~~~~~~~~~~
A rank that waits for another is blocked in a collective until the group's timeout (10 minutes).
So a second thread of each rank listens on a connection to rank 0 (`failure_channel`), and aborts the collective if a
rank fails. For example, rank 1 of three raises an error while the others are in an all-reduce:

     0 s   rank 1 sends its error to rank 0, which forwards it to rank 2
           ranks 0 and 2 print the error, and abort their collective
     2 s   ranks 0 and 2 raise RankFailedError. torchrun blames the rank that ends first, so rank 1 gets a head start
    10 s   a rank that has not left `setup` by now, for example because a kernel hangs, is killed

A rank can also end in other ways:

    killed               at once     its system closes the connection, so rank 0 reports it
    machine is down      15 s        its system does not answer keep-alive packets
    stopped (SIGSTOP)    12 s        it sends no message. The others print this and wait, because it may continue
    never joins          15 s        the others print this and wait
    left too early       1 s         no failure arrives in this time, so the rank that left is the cause

A collective may break before the message with the cause arrives. A rank then waits up to 5 s for that message. So a
failed rank is named within 20 s, and no rank waits longer than the group's timeout.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import distributed as dist

from autosplit.ddp.failure_channel import Line, Word
from autosplit.errors import AutosplitError, RankFailedError, causes_of, one_line, user_frames, warn_user
from autosplit.text import printable

# See Note [How ranks wait] for these durations.

GRACE_S = 10.0
"""Time in seconds in which a rank must leave `setup` after another rank failed. Then its process is killed."""

_LET_FIRST_S = 2.0
"""Time in seconds until a rank raises an error for another rank's failure. torchrun blames the first rank to end."""

_VERDICT_S = 5.0
"""Time in seconds in which a rank with a broken collective waits for the message with the cause."""

_OTHER_CAUSE_S = 1.0
"""Time in seconds until a rank that has left is blamed, unless a failure of another rank arrives."""

TOLD_AFTER_S = 15.0
"""Waiting time in seconds after which a rank prints which method the other ranks must call."""

_SIGN_EVERY_S = 3.0
"""Time in seconds between two messages that a rank sends to show that it is alive."""

_SILENT_S = 12.0
"""Time in seconds without a message, after which a rank is reported as stopped.

The rank may continue, so no process is ended.
"""

_BROKEN_OFF = re.compile(
    # gloo raises plain RuntimeErrors, and so does an aborted NCCL group (last pattern). Other errors are DistErrors.
    r"gloo/transport|Connection (?:closed|reset) by peer|Broken pipe|NCCL (?:communicator|error|operation)"
)


class UnwatchedWarning(UserWarning):
    """A rank has no connection to rank 0, so it does not learn of other ranks' failures."""


class Watch:
    """Listen for the failure of any rank. See Note [How ranks wait].

    This needs a connection to rank 0 and a sleeping thread. A job of one rank has neither.

    Attributes:
        on_missing: Called with the number of a collective that another rank does not join, or with "" if a rank failed.
        on_sign: Called every few seconds.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._line: Line | None = None
        self._thread: threading.Thread | None = None
        self._failed: Word | None = None
        self._left = False
        self._gone: dict[int, Word] = {}
        self._silent: set[int] = set()
        self._heard = threading.Event()
        self._sockets: Mapping[int, str] = {}
        self.on_missing: Callable[[str], None] = lambda _number: None
        self.on_sign: Callable[[], None] = lambda: None
        self._last_resort: threading.Timer | None = None

    @property
    def failed(self) -> bool:
        """Whether any rank has failed."""
        return self._failed is not None

    def begin(self, sockets: Mapping[int, str]) -> None:
        """Start listening. All ranks call this after they created the process group, with its `group_sockets`."""
        if self._world_size == 1:
            return
        self._sockets = sockets
        self._line = Line(self._rank)
        told: list[Any] = [None]
        if self._rank == 0:
            with _unwatched("rank 0 can't listen"):
                told = [self._line.listen()]
            self._listen()
        dist.broadcast_object_list(told, src=0)
        if self._rank != 0 and told[0] is not None:
            with _unwatched(f"rank {self._rank} is not connected"):
                self._line.join(told[0])
            self._listen()

    def end(self) -> None:
        """Stop listening."""
        if self._line is not None and self._thread is not None:
            self._line.say(Word("over", self._rank))
            self._thread.join(_VERDICT_S)
        if self._last_resort is not None:
            self._last_resort.cancel()
        if self._line is not None:
            self._line.close()

    def say_missing(self, number: str) -> None:
        """Report to the other ranks that this rank does not join the collective with this number."""
        self._tell(Word("missing", self._rank, number))

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Report to the other ranks how the block ends. Raise RankFailedError if another rank failed."""
        try:
            yield
        except BaseException as error:
            found = self._failure_behind(error)
            if found is not None:
                if found.kind == "left":  # the other ranks would blame this rank if it sent nothing
                    self._tell(Word("left", self._rank, f"rank {found.rank} had left"))
                raise self._stopped_by(found) from error
            # sys.exit(0) and a closed generator are not failures.
            if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0)):
                self._tell(Word("left", self._rank, f"{type(error).__name__}, exit code 0"))
            else:
                frames = user_frames(error.__traceback__)
                where = f" ({frames[-1]})" if frames else ""
                kind: Any = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                self._tell(Word(kind, self._rank, f"{one_line(error)}{where}"))
                if self._thread is not None:
                    self._heard.wait(_VERDICT_S)  # give the other ranks time to receive the cause before this rank ends
            raise
        if self._failed is not None:
            raise self._stopped_by(self._failed)
        self._tell(Word("left", self._rank, "the block ended"))

    def _stopped_by(self, word: Word) -> RankFailedError:
        if word.kind in ("failed", "interrupted") and word.rank != self._rank:
            time.sleep(_LET_FIRST_S)
        return RankFailedError(self._message(word), rank=word.rank, cause=word.cause)

    def _tell(self, word: Word) -> None:
        if self._line is not None and self._thread is not None:
            self._line.say(word)

    def _failure_behind(self, error: BaseException) -> Word | None:
        if not isinstance(error, Exception) or isinstance(error, RankFailedError):
            return None  # Ctrl-C, or an inner context has found the cause
        broken_off = is_broken_off(error)
        if isinstance(error, AutosplitError) and not broken_off:
            return None  # most of these are raised by all ranks together
        return self._verdict() if broken_off and self._thread is not None else self._failed

    def _verdict(self) -> Word | None:
        """Wait for the cause of a broken collective: a rank that failed, or otherwise a rank that left too early."""
        begun = time.monotonic()
        while not self._heard.wait(0.1) and time.monotonic() < begun + (_OTHER_CAUSE_S if self._gone else _VERDICT_S):
            pass
        return self._failed or next(iter(self._gone.values()), None)

    def _message(self, word: Word) -> str:
        if word.kind == "interrupted":
            others = (
                "The other ranks were notified" if word.rank == self._rank else f"This rank {self._rank} stops, too"
            )
            return f"rank {word.rank} was interrupted (Ctrl-C). {others}"
        if word.kind == "left":
            return (
                f"rank {word.rank} left autosplit.ddp.setup ({word.cause}) while this rank {self._rank} waited for it "
                "in a collective. All ranks must take the same number of steps and leave together"
            )
        says = f"rank {word.rank} {'failed' if word.kind == 'failed' else 'is gone'}: {word.cause}"
        if word.rank == self._rank:
            return f"{says}. The other ranks were notified"
        return (
            f"{says}. This rank {self._rank} stops, because the ranks train together. Start the job again, unless its "
            "launcher restarts it"
        )

    def _listen(self) -> None:
        self._thread = threading.Thread(target=self._follow, name="autosplit-watch", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._line is not None, "`begin` made it"
        signed = time.monotonic()
        while True:
            for word in self._line.words(_SIGN_EVERY_S):
                if word.kind == "over":
                    return
                self._take(self._line, word)
            now = time.monotonic()
            if now >= signed + _SIGN_EVERY_S:
                signed = now
                self._line.send(Word("sign", self._rank), but=self._silent)  # the buffers of silent ranks would fill up
            self._look_for_silence(self._line, now)
            self.on_sign()

    def _look_for_silence(self, line: Line, now: float) -> None:
        heard = line.silent_since()
        silent = {rank for rank, heard_s in heard.items() if now > heard_s + _SILENT_S}
        for rank in sorted(silent - self._silent):
            print_line(
                f"autosplit: rank {rank} has sent nothing for {_SILENT_S:.0f} s. Its process can't run, or it is "
                "stopped (SIGSTOP, Ctrl-Z, a debugger). The other ranks are waiting for it."
            )
        for rank in sorted(self._silent & heard.keys() - silent):
            print_line(f"autosplit: rank {rank} sends again")
        self._silent = silent

    def _take(self, line: Line, word: Word) -> None:
        if word.kind == "joined":
            if self._failed is not None:
                line.send(self._failed, only=word.rank)
        elif word.kind == "left":
            if word.rank == self._rank:
                self._left = True
            else:
                self._gone[word.rank] = word
            if self._rank in (0, word.rank):
                line.send(word)
        elif word.kind == "missing":
            if self._rank in (0, word.rank):
                line.send(word)
            if self._rank != word.rank:
                self.on_missing(word.cause)
        elif word.kind != "sign" and self._failed is None:
            self._failed = word
            line.send(word)
            self._heard.set()
            self._stop()

    def _stop(self) -> None:
        """Abort the collective in which this rank waits. Kill the process if it does not leave `setup` in time."""
        assert self._failed is not None, "`_take` set it"
        if self._failed.rank != self._rank and not self._left:
            # Print now, because torchrun may end this rank before it prints a traceback.
            print_line(f"autosplit: {self._message(self._failed)}")
        in_vain = f"Rank {self._rank} did not leave autosplit.ddp.setup within {GRACE_S:.0f} s"
        self._last_resort = threading.Timer(GRACE_S, end_process, (f"{self._message(self._failed)}. {in_vain}",))
        self._last_resort.daemon = True
        self._last_resort.start()
        if self._failed.rank != self._rank:
            cut_off(dist.group.WORLD, self._sockets)
            self.on_missing("")


def end_process(why: str) -> None:
    """Print the reason and kill this process."""
    print_line(f"autosplit: {why}, so its process is killed")
    os._exit(1)


@contextlib.contextmanager
def _unwatched(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warn_user(
            f"{what} ({error}). Expected a second connection to rank 0, next to the process group's. Without it, the "
            "other ranks may wait until their time-out when a rank fails. Allow connections between the job's "
            "machines on all ports.",
            UnwatchedWarning,
        )


def is_broken_off(error: BaseException) -> bool:
    """Return whether a collective failed, because another rank ended or did not join it in time."""
    return any(
        isinstance(link, dist.DistError) or (isinstance(link, RuntimeError) and _BROKEN_OFF.search(str(link)))
        for link in causes_of(error, contexts=True)
    )


@contextlib.contextmanager
def told_if_long(message: str) -> Iterator[None]:
    """Print the message on stderr if the block takes longer than `TOLD_AFTER_S`."""
    timer = threading.Timer(TOLD_AFTER_S, print_line, (f"autosplit: {message}",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_line(text: str) -> None:
    """Print a line on stderr."""
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


# The process group's connections


def open_sockets() -> dict[int, str]:
    """Return the open sockets of this process, by descriptor. Return {} if the system does not list sockets."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed by now
                target = str(entry.readlink())
                if target.startswith("socket:"):
                    found[int(entry.name)] = target
    return found


def group_sockets(before: Mapping[int, str]) -> dict[int, str]:
    """Return the sockets that gloo opened for the process group, since `before`."""
    return {number: name for number, name in open_sockets().items() if before.get(number) != name}


def abort_group(group: Any) -> None:
    """Abort NCCL's collectives. They would block the destruction of the group."""
    with contextlib.suppress(Exception):  # after `GRACE_S` the process is ended
        group.abort()


def cut_off(group: Any, sockets: Mapping[int, str]) -> None:
    """Abort the collectives of a group. They raise an error, or return incomplete data.

    gloo cannot abort (torch 2.13: `abort` does nothing), so close its connections, the `sockets` from `group_sockets`.
    """
    abort_group(group)
    still = open_sockets()
    for number in [number for number, name in sockets.items() if still.get(number) == name]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
            end.getpeername()  # raises OSError for a listening socket. If that was shut down, gloo would crash
            end.shutdown(socket.SHUT_RDWR)
