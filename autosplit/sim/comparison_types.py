"""Define the types of the ``--json`` output of ``autosplit compare``."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.sim.cluster import ClusterPrediction

SCHEMA_VERSION = 1
"""Version of a comparison's JSON."""


@dataclass(frozen=True)
class Misfit:
    """The reason why a workload does not fit a machine.

    Attributes:
        reason: The reason as a sentence.
        device: The device that is too small, as ``"sim:0"``. None if it is not a single device.
        needed_bytes: Memory of the smallest step on that device. 0 if unknown.
        capacity_bytes: Memory limit of the device. 0 if unknown.
    """

    reason: str
    device: str | None
    needed_bytes: int
    capacity_bytes: int


@dataclass(frozen=True)
class Compute:
    """The time of the whole training.

    Attributes:
        hours: Hours on the whole machine.
        device_hours: Hours, times the number of devices.
        cost: The cost in the currency of the command line. None without a price.
    """

    hours: float
    device_hours: float
    cost: float | None

    def __str__(self) -> str:
        price = "" if self.cost is None else f", cost {self.cost:,.2f}"
        return f"{self.hours:,.2f} hours, {self.device_hours:,.2f} device-hours{price}"


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
