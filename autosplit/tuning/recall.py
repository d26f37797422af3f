"""Recall a remembered plan: one that still holds, one that a step has to confirm, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosplit.errors import ProfileError
from autosplit.measure.request import Request
from autosplit.plan.plan import Plan
from autosplit.profiles import store as profiles
from autosplit.profiles.differences import nearest_told
from autosplit.profiles.key import key_of
from autosplit.profiles.tuning_lock import Turn, wait_limit_s
from autosplit.profiles.validity import differing_facts, memory_shortfall

__all__ = ["NOT_REMEMBERED", "Recalled", "Wanted"]

NOT_REMEMBERED = "the plan is not remembered: "
"""How the note begins that says why a plan could not be kept."""

MOST_LOOKED_AT = 200
"""Profiles, the newest first, among which the nearest is looked for."""


@dataclass(frozen=True)
class Recalled:
    """A remembered plan, or why there is none.

    Attributes:
        plan: The plan; None where there is none that could be used.
        path: Its file.
        notes: Why there is none, or what is to be said of it.
        short: Which devices have too little memory free for it; None where all have enough.
        differing: Facts that are others than the plan's and do not make another plan of it.
        unreadable: A file could not be read, for which `notes` are.
    """

    plan: Plan | None = None
    path: Path | None = None
    notes: tuple[str, ...] = ()
    short: str | None = None
    differing: tuple[str, ...] = ()
    unreadable: bool = False

    @property
    def holds(self) -> bool:
        """Whether there is a plan that holds as it is."""
        return self.plan is not None and self.short is None and not self.differing

    def told(self, *said: str) -> Plan:
        """Return the plan with where it comes from, and what else is to be said of it.

        Args:
            said: Sentences.
        """
        assert self.plan is not None
        return self.plan.with_notes(*said, *self.notes)

    @property
    def origin(self) -> str:
        """Where the plan comes from."""
        return f"from the profile {self.path}"


@dataclass(frozen=True)
class Wanted:
    """The request, machine and workload that a plan is wanted for.

    Attributes:
        request: What was asked for.
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
        found = profiles.find(self.key, machine=self.machine, workload=self.described, request=self.asked)
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
            differing_facts(found.plan, request.devices),
        )

    def turn(self, tell: Callable[[str], None]) -> Turn:
        """Return what waits for another process that tunes the same thing.

        Args:
            tell: Told once, when the wait begins.
        """
        limit_s = wait_limit_s(self.request.remaining_s)
        try:
            return Turn(profiles.turn_path(self.key), limit_s=limit_s, tell=tell)
        except ProfileError as error:  # nobody knows where the cache is
            return Turn(None, limit_s=limit_s, tell=tell, trouble=str(error))

    def nearest(self, ignoring: Sequence[str] = ()) -> tuple[str, ...]:
        """Say which remembered plan is the nearest, and why it does not hold; nothing where there is none.

        Args:
            ignoring: See `differences.nearest_told`.
        """
        if self.request.profile != "auto":
            return ()
        remembered = profiles.newest(MOST_LOOKED_AT)
        parts = {"machine": self.machine, "workload": self.described, "request": self.asked}
        told = nearest_told(remembered, **parts, ignoring=ignoring)
        return () if told is None else (told,)

    def stored(self, plan: Plan) -> tuple[Path | None, tuple[str, ...]]:
        """Remember a plan; the best so far does not take the place of one whose search ended.

        Returns:
            Its file, and what is to be said where that failed.
        """
        if self.request.profile == "off":
            return None, ()
        if not plan.complete and self._whole_one_is_there():
            return None, (f"{NOT_REMEMBERED}its search was interrupted, and that of the remembered one was not",)
        try:
            return profiles.store(self.key, plan), ()
        except ProfileError as error:
            return None, (f"{NOT_REMEMBERED}{error}",)

    def _whole_one_is_there(self) -> bool:
        found = profiles.find(self.key, machine=self.machine, workload=self.described, request=self.asked)
        return found.plan is not None and found.plan.complete

    def with_facts(self, plan: Plan) -> Plan:
        """Return a plan with the facts of the devices that are here, on which a step has confirmed it."""
        devices = tuple(
            replace(planned, uuid=device.uuid, driver=device.driver)
            for planned, device in zip(plan.devices, self.request.devices, strict=True)
        )
        return replace(plan, devices=devices)
