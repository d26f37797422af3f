"""What ``--json`` prints: a type for each command, from which docs/json.md is made, and against which it is tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autosplit.commands.listing import Profile
from autosplit.cost import Ceiling
from autosplit.findings import Check
from autosplit.plan import Plan
from autosplit.survey import DeviceReport

__all__ = [
    "ANSWERS",
    "Ceilings",
    "Checks",
    "Devices",
    "LaunchCommand",
    "Place",
    "ProbedCeiling",
    "Profiles",
    "Removed",
]


@dataclass(frozen=True)
class Devices:
    """The GPUs of this machine.

    Attributes:
        devices: One for each; empty where there is none.
        notes: What there is to say of all of them, a sentence each.
    """

    devices: tuple[DeviceReport, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ProbedCeiling(Ceiling):
    """A ceiling, with what it leaves.

    Attributes:
        headroom_bytes: What is left of the capacity at the ceiling; below 0 where not even one sample fits.
    """

    # A number beside the others in JSON, where the ceiling itself computes it.
    headroom_bytes: int = 0

    @classmethod
    def of(cls, ceiling: Ceiling) -> ProbedCeiling:
        """Return a ceiling with its headroom."""
        known: dict[str, Any] = {one.name: getattr(ceiling, one.name) for one in fields(ceiling)}
        return cls(**known, headroom_bytes=ceiling.headroom_bytes)


@dataclass(frozen=True)
class Ceilings:
    """The ceilings that were found.

    Attributes:
        simulated: They are of cards that are not here.
        ceilings: One for each device and role, in the order in which they were asked for.
        notes: What there is to say of them, a sentence each.
    """

    simulated: bool
    ceilings: tuple[ProbedCeiling, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Checks:
    """What changes when the batch is cut.

    Attributes:
        checks: One for each thing that was looked at.
    """

    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Profiles:
    """The cache.

    Attributes:
        folder: Where profiles are kept; it may not exist yet.
        profiles: The newest first.
    """

    folder: str
    profiles: tuple[Profile, ...]


@dataclass(frozen=True)
class Place:
    """Where something is kept.

    Attributes:
        path: The folder of all profiles, or the file of the one that was named.
    """

    path: str


@dataclass(frozen=True)
class Removed:
    """What is no longer remembered.

    Attributes:
        folder: Where profiles are kept.
        removed: The files that were removed.
    """

    folder: str
    removed: tuple[str, ...]


@dataclass(frozen=True)
class LaunchCommand:
    """What `launch` would run.

    Attributes:
        command: The program and its arguments.
        environment: Variables that it gets in addition.
        plan: Which plan it is, in words.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    plan: str


ANSWERS: Mapping[str, type] = {
    "devices": Devices,
    "tune": Plan,
    "probe": Ceilings,
    "check": Checks,
    "show": Plan,
    "profiles": Profiles,
    "profiles list": Profiles,
    "profiles show": Plan,
    "profiles path": Place,
    "profiles remove": Removed,
    "launch": LaunchCommand,
}
"""The type of what each command prints with ``--json``."""
