"""Define the protocol of the runtimes: the steps that they run, and their results as plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from autosplit.devices.device import Device
from autosplit.notes import Note
from autosplit.solve.memory import MemoryParts
from autosplit.workload.model_call import LossRule
from autosplit.workload.workload import Workload

T = TypeVar("T")

Arrangement = Literal["balanced", "rank", "eval"]
"""``balanced`` is BalancedDataParallel, ``rank`` is one DDP process, ``eval`` is a forward without gradients."""


@dataclass(frozen=True)
class StepShape:
    """One optimizer step, with the samples of each device.

    Attributes:
        splits: The samples of each device in each micro-step.
        arrangement: How the step runs. For ``rank`` and ``eval``, exactly one device has samples.
        num_ranks: DDP processes in the job, for ``rank``. With more than one, DDP allocates gradient buckets.
        accumulates: Whether gradients of earlier micro-steps are in memory throughout the step.
        updates: Whether the optimizer runs and has state. A replica's step has no update.
    """

    splits: tuple[tuple[int, ...], ...]
    arrangement: Arrangement = "balanced"
    num_ranks: int = 1
    accumulates: bool = False
    updates: bool = True

    def __post_init__(self) -> None:
        assert self.splits, "a step has at least one micro-step"
        assert all(sum(split) > 0 for split in self.splits), self.splits

    def __str__(self) -> str:
        times = f" x {len(self.splits)}" if len(self.splits) > 1 else ""
        return f"{self.splits[0]}{times} as {self.arrangement}"

    @property
    def alone(self) -> bool:
        """Whether a single device has all samples."""
        return self.arrangement != "balanced"

    @property
    def num_samples(self) -> int:
        """Number of samples in the whole step."""
        return sum(sum(split) for split in self.splits)


@dataclass(frozen=True)
class Measurement:
    """The time and the memory of one optimizer step.

    Attributes:
        seconds: Wall time of the step. The median if the step was repeated.
        error_s: Standard error of the median. 0 if the time is exact (`sim`).
        peak_bytes: Peak memory of each device. Empty if it was not measured.
        update_s: The optimizer's part of `seconds`.
    """

    seconds: float
    error_s: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    busy_s: tuple[float, ...] = ()
    update_s: float = 0.0
    repeats: int = 1


@dataclass(frozen=True)
class StepMemory:
    """The memory of an optimizer step on accelerators.

    Attributes:
        allocated_bytes: Peak of the tensors on each device.
        reserved_bytes: Peak of the allocator on each device: tensors and cached blocks.
    """

    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Facts:
    """What small steps of a workload show.

    Attributes:
        least_batch: The smallest batch to train on: 2 if a BatchNorm layer gets one value per sample, otherwise 1.
        leaves_unused: Whether a trainable parameter got no gradient. Always False for a custom step.
        loss_rule: Where the loss is in the model's outputs. None if the workload has a function for the loss.
        gradient_bytes: Bytes of the gradients of all trainable parameters, which DDP's buckets contain.
        checkpointed: Names of the workload's checkpointed layers.
        largest_batch: The largest batch that the worker can predict. None for no limit.
    """

    least_batch: int = 1
    leaves_unused: bool = False
    loss_rule: LossRule | None = None
    gradient_bytes: int = 0
    checkpointed: tuple[str, ...] = ()
    largest_batch: int | None = None


class Worker(Protocol):
    """Run and measure training steps on some devices.

    There are four classes. `cpu.CpuWorker` and `accelerator.AcceleratorWorker` run steps in this process.
    `child_worker.ChildWorker` has one of these in a process that can be killed. `sim.simulated.SimulatedWorker`
    computes its answers.

    Attributes:
        exact: Whether bytes and times have no noise, because they are computed.
        steps: Number of real steps so far.
    """

    devices: tuple[Device, ...]
    exact: bool
    steps: int

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes on processes that died in a step. Empty for workers in this process."""

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """Memory that training may use on each device, without the reserve."""

    def ask(self, function: Callable[[Workload], T]) -> T:
        """Call a function on the workload, in the process that runs the steps."""

    def facts(self) -> Facts:
        """Return what small steps of the workload show.

        Raises:
            UserCodeError: The workload's own code raised on its sample batch.
        """

    def predicted(self, shape: StepShape) -> tuple[MemoryParts, ...] | None:
        """Predict the parts of each device's peak, even above its capacity. None on accelerators."""

    def prediction_holds(self, shape: StepShape) -> bool:
        """Compare the prediction of a step with the step, if that is possible. Return False if predictions changed."""

    def known_parts(self, shape: StepShape) -> tuple[MemoryParts, ...]:
        """Return the parts of each device's memory that are known without running the step."""

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step, and return each device's peak memory in bytes.

        Raises:
            OutOfMemoryError: A device would exceed its capacity. The error names the device.
        """

    def measure(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Time a step, and return its memory if the same run measures it.

        Raises:
            OutOfMemoryError: A device would exceed its capacity. The error names the device.
        """
