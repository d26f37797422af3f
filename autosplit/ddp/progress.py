"""Publish where each rank is in its training, so that the error of a broken collective names the ranks behind.

Each rank publishes its place in the job's store, at most once per second, and how it ended. A rank whose collective
broke or timed out publishes its exact place, and reads the places of the others:

    Rank 1 waited 600 s in micro-batch 1 of optimizer step 2 of loop 2. Rank 0 is at the start of loop 3.

NCCL ends a process at the time-out, without an exception. So a thread prints the places after 80% of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from autosplit.ddp.failure import HEAD_START_S, is_failure, print_line
from autosplit.errors import RankFailedError, is_broken_off, one_line, user_frames
from autosplit.parallel.step_listener import StepListener

_PUBLISH_EVERY_S = 1.0

_LATE = 0.8
"""Fraction of the time-out after which a waiting rank prints all places."""

_NAMED = 4
"""Largest number of ranks in a message."""

_PHRASES = {
    "failed": "failed: ",
    "left": "left autosplit.ddp.setup",
    "waits": "is ",
    "silent": "was last seen ",
}
"""The beginning of a sentence about a rank, by the kind of its last message."""

_Found = dict[int, tuple[str, str]]
"""The kind and the text of each other rank's last message."""


class Progress(StepListener):
    """Record the place of this rank: a loop of `Context.steps`, an optimizer step and a micro-batch.

    Args:
        timeout_s: The time-out of the process group's collectives in seconds.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._others = [other for other in range(world_size) if other != rank]
        self._store: Any = None
        self._loop, self._step, self._micro_batch = 0, -1, 0
        self._since = self._published = time.monotonic()
        self._over = threading.Event()

    @property
    def place(self) -> str:
        """The place of this rank, for messages."""
        if not self._loop:
            return "before the first loop"
        if self._step < 0:
            return f"at the start of loop {self._loop}"
        after = f"in micro-batch {self._micro_batch} of" if self._micro_batch else "at the start of"
        return f"{after} optimizer step {self._step} of loop {self._loop}"

    def begin_loop(self) -> None:
        """Begin the next loop over the steps of an epoch."""
        self._loop += 1
        self._step = -1
        self._move()

    def begin_step(self, index: int) -> None:
        """Begin optimizer step `index` of the loop."""
        self._step, self._micro_batch = index, 0
        self._move()

    def draw(self, is_last: bool) -> None:  # noqa: ARG002
        """Begin the next micro-batch."""
        self._micro_batch += 1
        self._move()

    def _move(self) -> None:
        self._since = time.monotonic()
        if self._since > self._published + _PUBLISH_EVERY_S:
            self._published = self._since
            self._publish("place", self.place)

    def _publish(self, name: str, text: str) -> None:
        if self._store is not None:
            with suppress(Exception):  # without the store, only the other ranks' errors lack this text
                self._store.set(f"{name}/{self._rank}", text)

    @contextmanager
    def published(self, store: Any) -> Iterator[None]:
        """Publish the places and the end of the `with` block. Explain a collective that breaks in it.

        Args:
            store: The job's store. None if there are no other ranks, or if they have no store.

        Raises:
            RankFailedError: A collective broke or timed out. The message names the rank that failed, or all places.
        """
        self._store, self._since = store, time.monotonic()
        thread = threading.Thread(target=self._print_if_late, name="autosplit-progress", daemon=True)
        if store is not None:
            thread.start()
        try:
            yield
        except BaseException as error:
            frames = user_frames(error.__traceback__)
            where = f" ({frames[-1]})" if frames else ""
            if store is not None and _is_explained(error):
                self._publish("end", f"waits {self.place}")
                raise self._explanation(where) from error
            failed, exited = f"failed {one_line(error)}{where}", f"left  ({type(error).__name__}, exit code 0)"
            self._publish("end", failed if is_failure(error) else exited)
            raise
        else:
            self._publish("end", "left ")
        finally:
            self._over.set()
            if store is not None:
                thread.join()
            self._store = None  # a reference would keep the store's thread alive

    def _explanation(self, where: str) -> RankFailedError:
        waited_s = time.monotonic() - self._since
        head_start = time.monotonic() + HEAD_START_S
        with suppress(Exception):  # rank 0 may have ended, and it may have the store
            self._store.wait([f"end/{rank}" for rank in self._others], timedelta(seconds=HEAD_START_S))
        found = self._found()  # now, because a rank that ends may have the store
        time.sleep(max(0.0, head_start - time.monotonic()))
        ended = {rank: known for rank, known in found.items() if known[0] in ("failed", "left")}
        for rank, (kind, text) in sorted(ended.items(), key=lambda one: one[1][0]):  # a failure first
            return RankFailedError(
                f"{_listed({rank: (kind, text)})}. This rank {self._rank} stops {self.place}{where}. All ranks must "
                "take the same number of steps and leave together",
                rank=rank,
                cause=text.strip() or "left early",
            )
        silent = {rank: known for rank, known in found.items() if known[0] == "silent"}
        named = silent or {rank: known for rank, known in found.items() if known[1] != self.place} or found
        places = _listed(named)
        if silent:
            places += ", and does not answer (killed, stopped or busy)"
        long = waited_s > 0.95 * self._timeout_s
        advice = " If a rank may take longer, pass timeout_s= to autosplit.ddp.setup" if long else ""
        return RankFailedError(
            f"rank {self._rank} waited {waited_s:.0f} s for the other ranks {self.place}{where}, but {places}. All "
            f"ranks must run the same steps. Read the output of these ranks.{advice}",
            rank=next(iter(named)),
            cause=f"a collective {'timed out' if long else 'broke'}: {places}",
        )

    def _found(self) -> _Found:
        """Return the end of each other rank, or else the last place that it published."""
        found = dict.fromkeys(self._others, ("silent", "at an unknown place"))
        with suppress(Exception):  # rank 0 may have ended, and it may have the store
            for rank in self._others:
                if self._store.check([f"end/{rank}"]):
                    kind, _, text = self._store.get(f"end/{rank}").decode().partition(" ")
                    found[rank] = kind, text
                elif self._store.check([f"place/{rank}"]):
                    found[rank] = "silent", self._store.get(f"place/{rank}").decode()
        return found

    def _print_if_late(self) -> None:
        late_s, printed = _LATE * self._timeout_s, 0.0
        while not self._over.wait(min(1.0, self._timeout_s / 10)):
            since = self._since
            if printed == since or time.monotonic() < since + late_s:
                continue
            printed = since
            self._publish("place", self.place)
            self._over.wait(HEAD_START_S)  # the other ranks publish their places at about the same time
            print_line(
                f"autosplit: rank {self._rank} has been {self.place} for {time.monotonic() - since:.0f} s "
                f"({_listed(self._found())}). A collective that waits for {self._timeout_s:.0f} s ends the job."
            )


def _listed(found: _Found) -> str:
    return ", ".join(f"rank {rank} {_PHRASES[kind]}{text}" for rank, (kind, text) in [*found.items()][:_NAMED])


def _is_explained(error: BaseException) -> bool:
    """Return whether another rank is the cause. Ctrl-C is not, nor the error of an inner `setup`."""
    return isinstance(error, Exception) and not isinstance(error, RankFailedError) and is_broken_off(error)
