"""Types of ``--json``, one for each command: docs/json.md is made of them, and answers are tested against them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autosplit.cli.stored_profile import Profile
from autosplit.devices.examination import Examination
from autosplit.devices.inventory import DeviceReport
from autosplit.extras.compare import Misfit
from autosplit.plan.measured_step import MeasuredStep
from autosplit.plan.plan import Plan
from autosplit.probe.check_result import Check
from autosplit.probe.loader_result import MeasuredLoader
from autosplit.solve.memory import Ceiling


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
    """The checks of a workload: how its training depends on the cut of its batch.

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
        path: The folder of all profiles, or the file of the one that was named; of `report` the page.
    """

    path: str


@dataclass(frozen=True)
class Removed:
    """The profiles that were removed.

    Attributes:
        folder: Where profiles are kept.
        removed: The files that were removed.
    """

    folder: str
    removed: tuple[str, ...]


@dataclass(frozen=True)
class LaunchCommand:
    """The command that `launch` would run.

    Attributes:
        command: The program and its arguments.
        environment: Variables that it gets in addition.
        plan: Which plan it is, in words.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    plan: str


@dataclass(frozen=True)
class ComparedPlan:
    """The numbers of a plan; `tune` with the same devices has all of it.

    Attributes:
        split: Samples per device in one forward.
        gpu0_bsz: The first of them.
        batch_size: Samples per forward.
        accumulation_steps: Forwards per optimizer step.
        effective_batch_size: Samples per optimizer step.
        precision: What was the fastest of those asked for.
    """

    split: tuple[int, ...]
    gpu0_bsz: int
    batch_size: int
    accumulation_steps: int
    effective_batch_size: int
    precision: str


@dataclass(frozen=True)
class ComparedMachine:
    """A machine with its plan and its price.

    Attributes:
        devices: Its device spec, as it was given.
        plan: The plan; None where the workload does not fit.
        misfit: Why it does not; None where it does.
        predicted: The samples/s are computed and not measured.
        complete: False where the search was interrupted and this is the best so far.
        samples_per_s: Throughput of the plan; None where there is none.
        ddp_samples_per_s: That of DDP; None where there is no answer for it.
        headroom_bytes: What is left of the capacity on the device that is closest to it.
        headroom_device: That device.
        price_per_hour: Money for an hour, in whatever currency it was given; None where it was not.
        cost_per_million_samples: In the same currency; None without a price or a plan.
    """

    devices: str
    plan: ComparedPlan | None
    misfit: Misfit | None
    predicted: bool
    complete: bool
    samples_per_s: float | None
    ddp_samples_per_s: float | None
    headroom_bytes: int | None
    headroom_device: str | None
    price_per_hour: float | None
    cost_per_million_samples: float | None


@dataclass(frozen=True)
class Compared:
    """The same workload on several machines.

    Attributes:
        schema_version: Of this JSON.
        sorted_by: What the order of the machines goes by.
        complete: False where Ctrl-C left machines out, or cut a search short.
        machines: The best first; those that the workload does not fit come last.
        not_compared: Machines that were left out because of Ctrl-C.
        notes: What there is to say of them, a sentence each.
    """

    schema_version: int
    sorted_by: str
    complete: bool
    machines: tuple[ComparedMachine, ...]
    not_compared: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """Another tool's settings for a plan.

    Attributes:
        to: The tool or the format.
        exact: The tool trains with them as the plan says.
        lost_share: Of the plan's samples per second, how much is lost by what the tool can't express, as predicted;
            None where that is unknown.
        notes: What the tool can't express, a sentence each.
        settings: By the tool's own names.
        text: To paste.
    """

    to: str
    exact: bool
    lost_share: float | None
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    text: str


ANSWERS: Mapping[str, type] = {
    "devices": Devices,
    "doctor": Examination,
    "tune": Plan,
    "compare": Compared,
    "measure": MeasuredStep,
    "probe": Ceilings,
    "check": Checks,
    "loader": MeasuredLoader,
    "show": Plan,
    "profiles": Profiles,
    "profiles list": Profiles,
    "profiles show": Plan,
    "profiles path": Place,
    "profiles remove": Removed,
    "report": Place,
    "export": Exported,
    "launch": LaunchCommand,
}
"""The type of what each command prints with ``--json``."""
