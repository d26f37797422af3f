"""Define the types of the commands' ``--json`` output. docs/json-schema.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from autosplit.cli.stored_profile import Profile
from autosplit.devices.examination import Examination, SharedResult
from autosplit.devices.inventory import DeviceReport
from autosplit.extras.cluster import ClusterPrediction
from autosplit.extras.compare import Compute, Misfit
from autosplit.extras.written_workload import StartingWorkload
from autosplit.plan.measured_step import MeasuredStep
from autosplit.plan.plan import Plan
from autosplit.probe.check_result import Check
from autosplit.probe.loader_result import MeasuredLoader
from autosplit.solve.memory import Ceiling

T = TypeVar("T")


def answer_of(value: object, answer: type[T]) -> T:
    """Convert a value to one of these types. Each field is the attribute, or the key, of the same name."""
    return msgspec.convert(value, answer, from_attributes=True)


@dataclass(frozen=True)
class Devices:
    """The GPUs of this machine.

    Attributes:
        devices: One report per GPU. Empty if there is no GPU.
        notes: Notes on all GPUs, one sentence each.
    """

    devices: tuple[DeviceReport, ...]
    notes: tuple[str, ...]


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


@dataclass(frozen=True)
class ComparedPlan:
    """The main numbers of a plan. `tune` with the same devices prints the full plan.

    Attributes:
        split: Samples per device in one forward.
        gpu0_bsz: The first number of the split.
        batch_size: Samples per forward.
        accumulation_steps: Forwards per optimizer step.
        effective_batch_size: Samples per optimizer step.
        precision: The fastest of the requested precisions.
    """

    split: tuple[int, ...]
    gpu0_bsz: int
    batch_size: int
    accumulation_steps: int
    effective_batch_size: int
    precision: str


@dataclass(frozen=True)
class ScaledCluster:
    """Predictions for a cluster.

    Attributes:
        predictions: One for each number of nodes, the whole cluster last.
        pays_up_to_nodes: Largest number of nodes at which each added GPU brings at least half of an earlier GPU's
            samples/s.
        summary: Where scaling stops paying, and what limits it.
    """

    predictions: tuple[ClusterPrediction, ...]
    pays_up_to_nodes: int
    summary: str


@dataclass(frozen=True)
class ComparedMachine:
    """A machine, its plan and its price.

    Attributes:
        devices: The device spec from the command line.
        plan: The plan. None if the workload does not fit, and for a cluster.
        misfit: Why the workload does not fit. None if it fits.
        cluster: The predictions for a cluster. None for other machines.
        predicted: Whether the samples/s are predicted and not measured.
        complete: False if the search was interrupted and this is the best plan so far.
        ddp_samples_per_s: Throughput of DDP. None if it is unknown.
        samples_per_s: Throughput of the plan. None without a plan.
        headroom_bytes: The free part of the capacity on the fullest device.
        headroom_device: The fullest device.
        price_per_hour: The price per hour, in the currency of the command line. None if it was not given.
        cost_per_million_samples: The cost of training on a million samples, in the same currency. None without a price
            or a plan.
        compute: The time of the whole training. None without `--samples`, or if the workload does not fit.
    """

    devices: str
    plan: ComparedPlan | None
    misfit: Misfit | None
    cluster: ScaledCluster | None
    predicted: bool
    complete: bool
    ddp_samples_per_s: float | None
    samples_per_s: float | None
    headroom_bytes: int | None
    headroom_device: str | None
    price_per_hour: float | None
    cost_per_million_samples: float | None
    compute: Compute | None


@dataclass(frozen=True)
class Compared:
    """The same workload on several machines.

    Attributes:
        schema_version: The version of this JSON.
        sorted_by: The key by which the machines are sorted.
        complete: False if Ctrl-C stopped the comparison or a search early.
        samples: Samples of the whole training. None without `--samples`.
        machines: The machines, best first. Machines that the workload does not fit come last.
        not_compared: Machines that were left out because of Ctrl-C.
        notes: Notes on the machines, one sentence each.
    """

    schema_version: int
    sorted_by: str
    complete: bool
    samples: int | None
    machines: tuple[ComparedMachine, ...]
    not_compared: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ErrorOfPredictions:
    """The measured error of predicted samples/s for one kind of model.

    Attributes:
        median: Half of the predictions were off by at most this fraction.
        p90: 90% of the predictions were off by at most this fraction.
    """

    median: float
    p90: float


@dataclass(frozen=True)
class ComparedModel:
    """A model on several machines.

    Attributes:
        name: The spec of the model.
        failure: Why the model was not compared, or an empty string.
        error: The error of predictions for this kind of model. None if it was not measured, or if no prediction was
            made.
        comparison: The machines. None if the model was not compared.
    """

    name: str
    failure: str
    error: ErrorOfPredictions | None
    comparison: Compared | None


@dataclass(frozen=True)
class ComparedModels:
    """Several models on the same machines.

    Attributes:
        schema_version: The version of this JSON.
        models: The models in the order of the file.
    """

    schema_version: int
    models: tuple[ComparedModel, ...]


@dataclass(frozen=True)
class Exported:
    """A plan as the settings of another tool.

    Attributes:
        to: The tool or the format.
        exact: Whether the tool trains exactly as the plan does.
        lost_share: The predicted loss of samples/s, as a share of the plan's. None if it is unknown.
        notes: What the tool cannot do, one sentence each.
        settings: The settings by the tool's own names.
        text: The text to paste.
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
    "init": StartingWorkload,
    "tune": Plan,
    "compare": Compared,
    "compare --models": ComparedModels,
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
"""The type of each command's answer."""

FILES: Mapping[str, type] = {"doctor --share": SharedResult}
"""The type of each file that a command writes, by the command."""
