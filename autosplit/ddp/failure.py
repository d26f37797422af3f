"""End a job of which a rank fails: the others hear of it, and none waits for it in vain.

rank 1   raises: says so on the line, then leaves the group  |  is killed: its system closes the line
rank 0   hears it -> says it on -> its own collective is cut off -> RankFailedError leaves `setup`
rank 2   hears it                -> its own collective is cut off -> the same; else its process is ended after GRACE_S
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import distributed as dist

from autosplit.ddp.failure_channel import Line, Word
from autosplit.errors import AutosplitError, RankFailedError, causes_of, one_line, user_frames
from autosplit.text import printable

GRACE_S = 10.0
"""A rank that was told of another's failure has so long to leave `setup`; then its process is ended."""

_LET_FIRST_S = 2.0
"""How long a rank that stops for another one's failure lets that one end before it."""

_VERDICT_S = 5.0
"""A rank whose collective broke off waits so long to hear which other rank failed."""

_OTHER_CAUSE_S = 1.0
"""A rank that has left is named after so long, unless another one turns out to have failed."""

TOLD_AFTER_S = 15.0
"""A rank that waits for others for so long says for whom."""

_SIGN_EVERY_S = 3.0
"""So often a rank lets the others hear that it is alive."""

_SILENT_S = 12.0
"""A rank that has not been heard for so long is stopped, most likely; it may go on, so nobody is ended."""

_BROKEN_OFF = re.compile(
    # gloo's errors, which are plain RuntimeErrors; NCCL's come as DistBackendError, and as the last when aborted.
    r"gloo/transport|Connection (?:closed|reset) by peer|Broken pipe|NCCL (?:communicator|error|operation)"
)


class UnwatchedWarning(UserWarning):
    """A rank did not find rank 0, from which it would hear that another failed."""


class Watch:
    """Listens for the failure of any rank, from joining the job until leaving it.

    It costs a connection to rank 0, and a thread that sleeps until a rank has something to say, or for 3 s. Alone there
    is nothing to watch.

    Attributes:
        on_missing: Told the number of what another rank said that it misses; nothing where a rank failed for good.
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
        self._last_resort: threading.Timer | None = None

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, be it this one."""
        return self._failed is not None

    def begin(self, sockets: Mapping[int, str]) -> None:
        """Start listening; all ranks call it, in a process group, with its `group_sockets`."""
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
        """Stop listening; whatever happens to this rank from now on is its own affair."""
        if self._line is not None and self._thread is not None:
            self._line.say(Word("over", self._rank))
            self._thread.join(_VERDICT_S)
        if self._last_resort is not None:
            self._last_resort.cancel()
        if self._line is not None:
            self._line.close()

    def say_missing(self, number: str) -> None:
        """Tell the other ranks that this one does not come to what they may wait in, which has this number."""
        self._tell(Word("missing", self._rank, number))

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks how a block ends, and raise what another rank's failure means for this one."""
        try:
            yield
        except BaseException as error:
            found = self._failure_behind(error)
            if found is not None:
                if found.kind == "left":  # nobody else said so: without a word this one would be blamed
                    self._tell(Word("left", self._rank, f"rank {found.rank} had left"))
                raise self._stopped_by(found) from error
            # sys.exit(0), and a generator that is closed, are ways to leave, and no failure.
            if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0)):
                self._tell(Word("left", self._rank, f"{type(error).__name__}, exit code 0"))
            else:
                frames = user_frames(error.__traceback__)
                where = f" ({frames[-1]})" if frames else ""
                kind: Literal["failed", "interrupted"] = "failed"
                if isinstance(error, KeyboardInterrupt):
                    kind = "interrupted"
                self._tell(Word(kind, self._rank, f"{one_line(error)}{where}"))
                if self._thread is not None:
                    self._heard.wait(_VERDICT_S)  # before the group's end makes others ask who failed
            raise
        if self._failed is not None:
            raise self._stopped_by(self._failed)
        self._tell(Word("left", self._rank, "its block came to its end"))

    def _stopped_by(self, word: Word) -> RankFailedError:
        """Return what this rank raises for another one, once that has ended: torchrun blames the first that ends."""
        if word.kind in ("failed", "interrupted") and word.rank != self._rank:
            time.sleep(_LET_FIRST_S)
        return RankFailedError(self._message(word), rank=word.rank, cause=word.cause)

    # What this rank says

    def _tell(self, word: Word) -> None:
        if self._line is not None and self._thread is not None:
            self._line.say(word)

    def _failure_behind(self, error: BaseException) -> Word | None:
        """Return another rank's failure where that is why this one stops, and not its own affair."""
        if not isinstance(error, Exception) or isinstance(error, RankFailedError):
            return None  # the user's own order to stop, or the word of a context within this one
        broken_off = _is_broken_off(error)
        if isinstance(error, AutosplitError) and not broken_off:
            return None  # says more than that another rank stopped, too: most are raised by all ranks together
        return self._verdict() if broken_off and self._thread is not None else self._failed

    def _verdict(self) -> Word | None:
        """Wait to hear why a collective was broken off: a rank failed, or else one has left before it was over."""
        begun = time.monotonic()
        while not self._heard.wait(0.1) and time.monotonic() < begun + (_OTHER_CAUSE_S if self._gone else _VERDICT_S):
            pass
        return self._failed or next(iter(self._gone.values()), None)

    def _message(self, word: Word) -> str:
        if word.kind == "interrupted":
            others = "the other ranks were told" if word.rank == self._rank else f"this rank {self._rank} stops with it"
            return f"rank {word.rank} was interrupted (Ctrl-C); {others}"
        if word.kind == "left":
            return (
                f"rank {word.rank} left autosplit.ddp.setup ({word.cause}) while this rank {self._rank} was in a "
                "collective with it; expected all ranks to take equally many steps and to leave together"
            )
        says = f"rank {word.rank} {'failed' if word.kind == 'failed' else 'is gone'}: {word.cause}"
        if word.rank == self._rank:
            return f"{says}; the other ranks were told"
        return f"{says}; this rank {self._rank} stops, since the ranks train together; start the job again"

    # What it hears, in a thread of its own

    def _listen(self) -> None:
        self._thread = threading.Thread(target=self._follow, name="autosplit-watch", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._line is not None, "there is something to listen to"
        signed = looked = time.monotonic()
        while True:
            for word in self._line.words(_SIGN_EVERY_S):
                if word.kind == "over":
                    return
                self._take(self._line, word)
            now = time.monotonic()
            if now >= signed + _SIGN_EVERY_S:
                signed = now
                self._line.send(Word("sign", self._rank), but=self._silent)  # what they don't read would fill up
            if now > looked + 2 * _SIGN_EVERY_S:
                self._line.forgive_silence()  # this process itself was stopped
            looked = now
            self._look_for_silence(self._line, now)

    def _look_for_silence(self, line: Line, now: float) -> None:
        """Say which rank gives no sign any more, and which does again."""
        silent = {rank for rank, heard_s in line.silent_since().items() if now > heard_s + _SILENT_S}
        for rank in sorted(silent - self._silent):
            _print(
                f"autosplit: rank {rank} has given no sign for {_SILENT_S:.0f} s: its process is stopped (SIGSTOP, "
                "Ctrl-Z, a debugger), or can't run; the other ranks wait for it"
            )
        for rank in sorted(self._silent & line.silent_since().keys() - silent):
            _print(f"autosplit: rank {rank} is back")
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
        """Get this rank out of what it waits for; end it where that is in vain."""
        assert self._failed is not None, "there is a reason"
        if self._failed.rank != self._rank and not self._left:
            # Now, and not with the traceback: torchrun ends all ranks as soon as one is gone.
            _print(f"autosplit: {self._message(self._failed)}")
        in_vain = f"rank {self._rank} did not leave autosplit.ddp.setup within {GRACE_S:.0f} s"
        self._last_resort = threading.Timer(GRACE_S, end_process, (f"{self._message(self._failed)}; {in_vain}",))
        self._last_resort.daemon = True
        self._last_resort.start()
        if self._failed.rank != self._rank:
            cut_off(dist.group.WORLD, self._sockets)
            self.on_missing("")


def end_process(why: str) -> None:
    """End this process, where nothing else gets it out of what it waits for; say why on stderr."""
    _print(f"autosplit: {why}, so its process is ended now")
    os._exit(1)


@contextlib.contextmanager
def _unwatched(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"{what} ({error}); expected a connection to rank 0 beside the process group's; without it, the ranks "
            "learn of a failure from broken collectives only, and may wait for their time-out; let the job's machines "
            "reach each other on any port",
            UnwatchedWarning,
            stacklevel=2,
        )


def _is_broken_off(error: BaseException) -> bool:
    """Tell whether an exception, or one that led to it, comes from a collective in which a peer went missing."""
    return any(
        isinstance(link, dist.DistError) or (isinstance(link, RuntimeError) and _BROKEN_OFF.search(str(link)))
        for link in causes_of(error, contexts=True)
    )


@contextlib.contextmanager
def told_if_long(message: str) -> Iterator[None]:
    """Say on stderr what is waited for, once it has taken `TOLD_AFTER_S`."""
    timer = threading.Timer(TOLD_AFTER_S, _print, (f"autosplit: {message}",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print(text: str) -> None:
    with contextlib.suppress(Exception):  # closed, or none: what matters is that the rank ends
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


# The process group's connections


def open_sockets() -> dict[int, str]:
    """Return the sockets that this process has open, by descriptor; none where the system does not list them."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed by now
                target = str(entry.readlink())
                if target.startswith("socket:"):
                    found[int(entry.name)] = target
    return found


def group_sockets(before: Mapping[int, str]) -> dict[int, str]:
    """Return the sockets that were opened since, while gloo made the process group."""
    return {number: name for number, name in open_sockets().items() if before.get(number) != name}


def abort_group(group: Any) -> None:
    """Let NCCL give up what it is doing, which would keep a group from being destroyed."""
    with contextlib.suppress(Exception):  # whatever it is, there is a last resort
        group.abort()


def cut_off(group: Any, sockets: Mapping[int, str]) -> None:
    """Let whoever waits in a group's collective have an error, or go on without what it waited for.

    NCCL can be told to abort. Gloo can't (torch 2.13: `abort` does nothing, a time-out holds from the next collective
    on), but it ends a collective as soon as a connection ends, so this side hangs up as well, on its `sockets` from
    `group_sockets`.
    """
    abort_group(group)
    still = open_sockets()
    for number in [number for number, name in sockets.items() if still.get(number) == name]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
            end.getpeername()  # gloo does not survive a listener that is shut down
            end.shutdown(socket.SHUT_RDWR)
