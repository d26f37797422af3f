"""Know where each rank is in its training, so that the error of a collective that timed out names it.

Each rank publishes its place in the job's store, at most once per second. A rank whose collective timed out publishes
its exact place, and reads the places of the others:

    Rank 1 waited 600 s in micro-batch 1 of optimizer step 2 of loop 2. Rank 0 is at the start of loop 3.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from autosplit.ddp.failure import is_broken_off, print_line
from autosplit.errors import RankFailedError, user_frames
from autosplit.parallel.step_listener import StepListener

_PUBLISH_EVERY_S = 1.0
_OTHERS_S = 2.0
"""Time in seconds in which a rank that timed out waits for the exact places of the others."""

_LATE = 0.8
"""Fraction of the time-out after which a waiting rank prints its place, because NCCL ends it without an error."""


class Progress(StepListener):
    """Record the place of this rank: a loop of `Context.steps`, an optimizer step and a micro-batch.

    Args:
        timeout_s: The time-out of the process group's collectives in seconds.

    Attributes:
        store: The job's store. None before the group exists, after it ends, and for a group that the user created.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self.store: Any = None
        self._loop, self._step, self._micro_batch = 0, -1, 0
        self._since = self._published = time.monotonic()
        self._is_late = False

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
        self._is_late = False
        if self.store is not None and self._since > self._published + _PUBLISH_EVERY_S:
            self._published = self._since
            with suppress(Exception):  # without the store, only the other ranks' errors lack this place
                self.store.set(f"place/{self._rank}", self.place)

    def print_if_late(self) -> None:
        """Print the place if this rank has been there for most of the time-out."""
        waited_s = time.monotonic() - self._since
        if self.store is not None and not self._is_late and waited_s > _LATE * self._timeout_s:
            self._is_late = True
            print_line(
                f"autosplit: rank {self._rank} has been {self.place} for {waited_s:.0f} s. A collective that waits for "
                f"{self._timeout_s:.0f} s ends the job."
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise RankFailedError with the places of all ranks if a collective timed out in the `with` block."""
        try:
            yield
        except Exception as error:
            waited_s = time.monotonic() - self._since
            if self.store is None or waited_s < 0.95 * self._timeout_s or not is_broken_off(error):
                raise
            raise self._timed_out(self.store, waited_s, error) from error

    def _timed_out(self, store: Any, waited_s: float, error: Exception) -> RankFailedError:
        frames = user_frames(error.__traceback__)
        where = f" ({frames[-1]})" if frames else ""
        others = self._places(store)
        elsewhere = {rank: place for rank, place in others.items() if place != self.place} or others
        places = ", ".join(f"rank {rank} is {place}" for rank, place in [*elsewhere.items()][:4])
        return RankFailedError(
            f"rank {self._rank} waited {waited_s:.0f} s for the other ranks {self.place}{where}, but {places}. All "
            "ranks must run the same steps. If a rank may take longer, pass timeout_s= to autosplit.ddp.setup",
            rank=next(iter(elsewhere)),
            cause=f"a collective timed out: {places}",
        )

    def _places(self, store: Any) -> dict[int, str]:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        places = dict.fromkeys(others, "at an unknown place")
        with suppress(Exception):  # rank 0 may have ended, and it has the store
            store.set(f"waits/{self._rank}", self.place)
            with suppress(Exception):
                store.wait([f"waits/{rank}" for rank in others], timedelta(seconds=_OTHERS_S))
            for rank in others:
                key = next((key for key in (f"waits/{rank}", f"place/{rank}") if store.check([key])), None)
                if key is not None:
                    places[rank] = store.get(key).decode()
        return places
