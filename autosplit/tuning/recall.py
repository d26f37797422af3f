"""Recall a remembered plan: one that still holds, one that a step has to confirm, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosplit.errors import ProfileError
from autosplit.plan.plan import Plan
from autosplit.probe.request import Request
from autosplit.profiles import store as profiles
from autosplit.profiles.differences import nearest_told
from autosplit.profiles.key import key_of
from autosplit.profiles.tuning_lock import Turn, wait_limit_s
from autosplit.profiles.validity import differing_facts, memory_shortfall
from autosplit.tuning.job import Job

__all__ = ["NOT_REMEMBERED", "REFRESH_HINT", "Recalled", "Wanted"]

REFRESH_HINT = "--profile refresh (profile='refresh') tunes anew"

NOT_REMEMBERED = "the plan is not remembered: "
"""How the note begins that says why a plan could not be kept."""

MOST_LOOKED_AT = 200
"""Profiles, the newest first, among which the nearest is looked for."""

JOB_SLICE_S = 0.5
"""So often the ranks of a job that waits hear of each other: Ctrl-C reaches all, and no collective times out."""


@dataclass(frozen=True)
class Wait:
    """The outcome of waiting for another process; `trouble` says why nobody could be waited for, if so."""

    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    trouble: str | None = None


@dataclass(frozen=True)
class Recalled:
    """A remembered plan, or why there is none.

    Attributes:
        notes: Why there is none, or what is to be said of it.
        short: Which devices have too little memory free for it; None where all have enough.
        differing: Facts that are others than the plan's and do not make another plan of it.
    """

    plan: Plan | None = None
    path: Path | None = None
    notes: tuple[str, ...] = ()
    short: str | None = None
    differing: tuple[str, ...] = ()
    unreadable: bool = False
    wait: Wait = Wait()

    @property
    def holds(self) -> bool:
        """Whether there is a plan that holds as it is."""
        return self.plan is not None and self.short is None and not self.differing

    def told(self, *said: str) -> Plan:
        """Return the plan with where it comes from, and what else is to be said of it."""
        assert self.plan is not None
        return self.plan.with_notes(*said, *self.notes)

    @property
    def origin(self) -> str:
        """Where the plan comes from."""
        assert self.path is not None, "it is remembered"
        return f"from the profile {self.path.stem[: profiles.KEY_DIGITS]}"


@dataclass(frozen=True)
class Wanted:
    """The request, machine and workload that a plan is wanted for.

    Attributes:
        machine: By `key.machine_of`.
        described: By `key.workload_of`.
        facts: By `Request.facts`.
        measured: A plan whose DDP answer is predicted does not do.
    """

    request: Request
    machine: dict[str, Any]
    described: dict[str, Any]
    facts: Mapping[str, Any]
    measured: bool = False

    @property
    def key(self) -> str:
        """The profile's key."""
        return key_of(self.machine, self.described, self.facts, self.request.name)

    @property
    def asked(self) -> dict[str, Any]:
        """The part of the request that is in the key, as a plan keeps it."""
        return {**self.facts, "name": self.request.name}

    def recalled(self) -> Recalled:
        """Look for a plan, and hold it against what there is now."""
        if self.request.profile != "auto" or self.request.sampler is not None:
            return Recalled()
        found = self._remembered()
        if found.plan is None:
            return Recalled(notes=found.notes, unreadable=found.unreadable)
        if not found.plan.complete:
            return Recalled(notes=("the search of the remembered plan was interrupted: tuned anew",))
        if self.measured and not found.plan.ddp.measured:
            return Recalled(notes=("the remembered plan's DDP answer was predicted by one process: tuned anew",))
        request = self.request
        return Recalled(
            found.plan,
            found.path,
            found.notes,
            memory_shortfall(found.plan, request.devices, request.capacities_bytes),
            differing_facts(found.plan, request.devices, request.capacities_bytes),
        )

    def recalled_in_turn(self, turn: Turn | None, job: Job) -> Recalled:
        """Look for a plan; where there is none that holds, wait for the turn to tune, and look again.

        Rank 0, which alone has a turn, does so for all of its job.
        """
        found = job.told(self.recalled)
        if found.holds or self.request.profile == "off":
            return found

        def wait() -> Wait | None:
            assert turn is not None, "it is rank 0's"
            ended = turn.wait(JOB_SLICE_S if job.several else float("inf"))
            return Wait(turn.waited_s, turn.notes, turn.trouble) if ended else None

        while (waited := job.told(wait)) is None:
            pass
        # Also where nobody was waited for: another may have ended between the first look and the lock.
        again = job.told(self.recalled)
        if again.plan is None and not again.notes:  # what the first look has moved out of the way is to be told of
            again = replace(again, notes=found.notes, unreadable=found.unreadable)
        return replace(again, wait=waited)

    def nothing_run(self, found: Recalled) -> str:
        """Say that a remembered plan is the answer."""
        unused = "" if self.request.storage is None else ", and the storage was not opened"
        return f"{found.origin}: nothing was run{unused}; {REFRESH_HINT}"

    def turn(self, tell: Callable[[str], None]) -> Turn:
        """Return what waits for another process that tunes the same thing, and tells of it when the wait begins."""
        limit_s = wait_limit_s(self.request.remaining_s)
        try:
            return Turn(profiles.turn_path(self.key), limit_s=limit_s, tell=tell)
        except ProfileError as error:  # nobody knows where the cache is
            return Turn(None, limit_s=limit_s, tell=tell, trouble=str(error))

    def nearest(self, ignoring: Sequence[str] = ()) -> tuple[str, ...]:
        """Say which remembered plan is the nearest, and why it does not hold; nothing where there is none."""
        if self.request.profile != "auto":
            return ()
        try:
            remembered = profiles.profiles(MOST_LOOKED_AT)
        except (OSError, ProfileError):  # there is no cache
            return ()
        parts = {"machine": self.machine, "workload": self.described, "request": self.asked}
        told = nearest_told(remembered, **parts, ignoring=ignoring)
        return () if told is None else (told,)

    def kept(
        self, plan: Plan, found: Recalled, said: tuple[str, ...], always: tuple[str, ...], *, stores: bool = True
    ) -> Plan:
        """Remember a plan, and add the notes of this run alone: what is `said` of the cache, and what is said `always`.

        That the cache is of no use is said once. One process of each machine stores the plan.
        """
        if self.request.profile != "off":  # on every rank alike, and now, when nobody waits for a line of it
            plan = plan.with_explanation()
        path, failed = self.stored(plan) if stores else (None, ())
        if failed and found.unreadable:
            said = ()
        if path is not None and found.wait.trouble is not None:
            said = (*said, f"waiting for other processes that tune the same failed: {found.wait.trouble}")
        return plan.with_notes(*said, *always, last=failed).kept_at(path)

    def stored(self, plan: Plan) -> tuple[Path | None, tuple[str, ...]]:
        """Remember a plan, and return its file and notes; the best so far does not replace one whose search ended."""
        if self.request.profile == "off":
            return None, ()
        there = None if plan.complete else self._remembered().plan
        if there is not None and there.complete:
            return None, (
                f"{NOT_REMEMBERED}its search was interrupted, and a plan of a finished search is already remembered",
            )
        try:
            return profiles.store(self.key, plan), ()
        except ProfileError as error:
            return None, (f"{NOT_REMEMBERED}{error}",)

    def _remembered(self) -> profiles.Found:
        return profiles.find(self.key, machine=self.machine, workload=self.described, request=self.asked)

    def with_facts(self, plan: Plan) -> Plan:
        """Return a plan with the facts of the devices that are here, on which a step has confirmed it."""
        devices = tuple(
            replace(planned, uuid=device.uuid, driver=device.driver)
            for planned, device in zip(plan.devices, self.request.devices, strict=True)
        )
        return replace(plan, devices=devices)
