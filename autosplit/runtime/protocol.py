"""Define the protocol of the runtimes: the steps that they run, and their results as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from autosplit.devices.device import Device

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
        compiled: Whether the first device runs the model that the user compiled. Only on real devices.
    """

    splits: tuple[tuple[int, ...], ...]
    arrangement: Arrangement = "balanced"
    num_ranks: int = 1
    accumulates: bool = False
    updates: bool = True
    compiled: bool = False

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
    steps: int


class Runtime(Protocol):
    """Run and measure training steps.

    Attributes:
        simulated: Whether the results are computed, not measured. Then peaks are exact.
        shares_processor: Whether the devices take turns on one CPU, so that their compute times add up.
    """

    devices: tuple[Device, ...]
    simulated: bool
    shares_processor: bool

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """Memory that training may use on each device, without the reserve."""

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
