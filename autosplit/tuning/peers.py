"""Exchange results between the ranks after each step. If one rank fails, all ranks raise.

each rank   runs its part | sends its result or its failure to all | all continue, or all raise

The messages use their own process group, so a step that hangs or fails does not disturb them.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torch import distributed as dist

from autosplit.errors import AutosplitError, RankFailedError, from_user_code, is_broken_off, one_line
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.runtime.trainee import ran_a_step

T = TypeVar("T")

SAME_KEYPRESS_S = 1.0
"""Longest time in seconds between two signals of one Ctrl-C.

torchrun forwards a Ctrl-C that its processes have already received, so one keypress arrives twice.
"""

CUT_S = 10.0
"""Longest wait in seconds until a collective is aborted."""

LOOK_EVERY_S = 0.1
"""Time in seconds between two looks whether another rank failed."""


@dataclass(frozen=True)
class Failure:
    """The failure of a rank.

    Attributes:
        message: The exception on one line.
        exit_code: Exit code of the command line for the exception.
        frames: The user's own frames.
        lacks_memory: Whether memory ran out, so that fewer samples may fit.
        waited: Whether this rank only waited for another rank, whose failure is the cause.
    """

    rank: int
    message: str
    exit_code: int
    frames: tuple[str, ...] = ()
    lacks_memory: bool = False
    waited: bool = False

    def as_error(self) -> AutosplitError:
        """Return the error that other ranks raise. DoesNotFitError keeps its type, because another variant may fit."""
        message = f"rank {self.rank} failed: {self.message}"
        if self.exit_code == DoesNotFitError.exit_code:
            return DoesNotFitError(message, device_index=self.rank)
        return RankFailedError(
            message, rank=self.rank, cause=self.message, exit_code=self.exit_code, frames=self.frames
        )


@dataclass(frozen=True)
class _Message(Generic[T]):
    value: T | None
    failure: Failure | None


class Interrupts:
    """Record Ctrl-C until rank 0's next order reports it. All ranks must stop together."""

    def __init__(self) -> None:
        self.came = False
        self._at_s = 0.0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record Ctrl-C in this context. A second Ctrl-C after more than `SAME_KEYPRESS_S` raises KeyboardInterrupt."""
        ours = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if ours else None
        if not callable(before):  # another thread, or Ctrl-C is ignored in this process
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _note(self, _number: int, _frame: object) -> None:
        now_s = time.monotonic()
        if self.came and now_s - self._at_s > SAME_KEYPRESS_S:
            raise KeyboardInterrupt
        self.came, self._at_s = True, now_s


class _Attempts:
    """Number the steps that all ranks run together. If one rank fails, the step is aborted on all ranks.

    A rank that waits in an NCCL collective returns only if its group is aborted. So the rank that failed writes the
    number of the attempt into the job's store, and a thread of each other rank looks for it. Without a store, and with
    gloo, which cannot abort (torch 2.13), the ranks wait for the group's time-out.
    """

    def __init__(self, store: Any) -> None:
        self.was_cut = False
        self._store = store
        self._number = 0

    @contextmanager
    def next(self, cut: Callable[[], None] | None) -> Iterator[None]:
        """Run one attempt. If another rank fails, `cut` aborts the collectives of this rank in another thread.

        The thread calls `cut` until the attempt ends.
        """
        self._number += 1
        self.was_cut = False
        if cut is None or self._store is None:
            yield
            return
        key, over = f"failed/{self._number}", threading.Event()
        thread = threading.Thread(target=self._look, args=(key, over, cut), name="autosplit-cut", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            over.set()
            thread.join(CUT_S)
            if not self.was_cut:
                with contextlib.suppress(Exception):  # the process that has the store may have ended
                    self._store.set(key, "")
                cut()  # a collective that began before the failure still waits for the other ranks
            raise
        finally:
            over.set()
            thread.join(CUT_S)

    def _look(self, key: str, over: threading.Event, cut: Callable[[], None]) -> None:
        with contextlib.suppress(Exception):  # the process that has the store may have ended
            while not self._store.check([key]):
                if over.wait(LOOK_EVERY_S):
                    return
            self.was_cut = True
            cut()
            while not over.wait(LOOK_EVERY_S):
                cut()  # a collective that begins after a cut is not aborted by it, and waits for the rank that failed


class Peers:
    """Exchange messages with the other ranks of a job, in a gloo group.

    Attributes:
        parted: Whether every rank has read the last message, so each rank may leave.
        stopped: Whether an order has reported Ctrl-C to all ranks.
    """

    def __init__(self, rank: int, world_size: int, group: Any, interrupts: Interrupts, store: Any = None) -> None:
        self.parted = self.stopped = False
        self.rank = rank
        self.world_size = world_size
        self.interrupts = interrupts
        self._came = False
        self._group = group
        self._attempts = _Attempts(store)

    def gathered(self, value: T) -> list[T]:
        """Return every rank's value, in the order of the ranks. Raise RuntimeError if a rank has gone."""
        self.parted = False
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def ordered(self, order: Any) -> Any:
        """Return rank 0's order on every rank. Afterwards, `take_interrupt` returns the same on every rank."""
        messages = self.gathered((order, self.interrupts.came))
        self._came = any(came for _, came in messages)
        return messages[0][0]

    def take_interrupt(self) -> bool:
        """Return True once if the last order reported Ctrl-C."""
        if self._came and not self.stopped:
            self.stopped = True
            return True
        return False

    def is_cut_off(self, error: BaseException) -> bool:
        """Return whether an error prevents this rank from sending another message to the other ranks."""
        if isinstance(error, KeyboardInterrupt):
            return not self.stopped  # A second Ctrl-C raises at once, even during a message.
        return not isinstance(error, AutosplitError) and is_broken_off(error)

    def all_run(self, run: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return each rank's result. If it raises on any rank, all ranks leave.

        Raises:
            Exception: The function raised on this rank.
            RankFailedError: The function raised on another rank.
        """
        if self.world_size == 1:
            return [run()]
        try:
            return self.answers(run)
        except Exception:
            self.part()
            raise

    def answers(self, run: Callable[[], T]) -> list[T]:
        """Call a function on every rank like `all_run`. If it raises, the ranks stay connected and can continue."""
        messages, own = self._exchanged(run)
        self._raise_first(messages, own)
        return [one.value for one in messages]  # type: ignore[misc]

    def all_try(self, run: Callable[[], T], *, cut: Callable[[], None] | None = None) -> list[T] | Failure:
        """Call a function on every rank that may run out of memory.

        Return each rank's result, or the first out-of-memory failure, which is the same on all ranks. Other failures
        raise, as in `answers`.
        """
        messages, own = self._exchanged(run, cut)
        short = next((one.failure for one in messages if one.failure is not None and one.failure.lacks_memory), None)
        if short is not None:
            return short
        self._raise_first(messages, own)
        return [one.value for one in messages]  # type: ignore[misc]

    def _raise_first(self, messages: list[_Message[T]], own: BaseException | None) -> None:
        """Raise this rank's own error, or an error for the rank that failed. A rank that only waited did not fail."""
        failures = [one.failure for one in messages if one.failure is not None]
        causes = [failure for failure in failures if not failure.waited] or failures
        if own is not None and any(cause.rank == self.rank for cause in causes):
            raise own
        if causes:
            raise causes[0].as_error() from own

    def _exchanged(
        self, run: Callable[[], T], cut: Callable[[], None] | None = None
    ) -> tuple[list[_Message[T]], BaseException | None]:
        value: T | None = None
        own: BaseException | None = None
        failure: Failure | None = None
        try:
            with self._attempts.next(cut):
                value = run()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the other ranks wait for an answer
            waited = self._attempts.was_cut or is_broken_off(error)
            users = isinstance(error, SystemExit) or ran_a_step(error.__traceback__)
            own = (
                from_user_code(error, "the workload")
                if users and not (waited or isinstance(error, AutosplitError))
                else error
            )
            failure = replace(self.failure(own), waited=waited)
        return self.gathered(_Message(value, failure)), own

    def part(self) -> None:
        """Wait until every rank has read the last message. All ranks call this before they leave.

        If a rank closed its connections at once, a message that another rank has not read yet might be lost.
        """
        if self.world_size == 1:
            return
        with contextlib.suppress(RuntimeError):  # Another rank has read the message and left.
            dist.barrier(group=self._group)
        self.parted = True

    def failure(self, error: BaseException) -> Failure:
        """Describe an exception of this rank for the other ranks."""
        known = isinstance(error, AutosplitError)
        return Failure(
            rank=self.rank,
            message=" ".join(str(error).split()) if known else one_line(error),
            exit_code=error.exit_code if isinstance(error, AutosplitError) else 1,
            frames=getattr(error, "frames", ()) if known else (),
            lacks_memory=isinstance(error, OutOfMemoryError) and not isinstance(error, DoesNotFitError),
            waited=is_broken_off(error),
        )
