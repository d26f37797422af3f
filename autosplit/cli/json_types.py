"""Define the types of the commands' ``--json`` output that are not plans. docs/json-schema.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from autosplit.cli.stored_profile import Profile
from autosplit.probe.check_result import Check
from autosplit.solve.memory import Ceiling

T = TypeVar("T")


def answer_of(value: object, answer: type[T]) -> T:
    """Convert a value to one of these types. Each field is the attribute, or the key, of the same name."""
    return msgspec.convert(value, answer, from_attributes=True)


@dataclass(frozen=True)
class ProbedCeiling(Ceiling):
    """A ceiling and its headroom.

    Attributes:
        headroom_bytes: The part of the capacity that is free at the ceiling. Negative if not even one sample fits.
    """

    headroom_bytes: int = 0


@dataclass(frozen=True)
class Ceilings:
    """The ceilings that were found.

    Attributes:
        simulated: Whether the GPUs are simulated.
        ceilings: One for each device and role, in the order of the command line.
        notes: Notes on the ceilings, one sentence each.
    """

    simulated: bool
    ceilings: tuple[ProbedCeiling, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Checks:
    """Whether splitting the batch changes the training.

    Attributes:
        checks: One for each part of the training that was compared.
    """

    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Profiles:
    """The profiles in the cache.

    Attributes:
        folder: The folder of the profiles. It may not exist yet.
        profiles: The profiles, newest first.
    """

    folder: str
    profiles: tuple[Profile, ...]


@dataclass(frozen=True)
class Place:
    """A path.

    Attributes:
        path: The folder of all profiles, the file of the named profile, or the page that `report` wrote.
    """

    path: str


@dataclass(frozen=True)
class Removed:
    """The profiles that were removed.

    Attributes:
        folder: The folder of the profiles.
        removed: The files that were removed.
    """

    folder: str
    removed: tuple[str, ...]


@dataclass(frozen=True)
class LaunchCommand:
    """The command that `launch` would run.

    Attributes:
        command: The program and its arguments.
        environment: Additional environment variables.
        plan: A description of the plan.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    plan: str
