"""The protocol of the runtimes: what they are asked and what they answer, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from autosplit.devices.device import Device

Arrangement = Literal["balanced", "rank", "eval"]
"""``balanced``: BalancedDataParallel over the devices; ``rank``: one DDP process; ``eval``: a forward, no gradients."""


@dataclass(frozen=True)
class StepShape:
    """One optimizer step: which samples go where.

    Attributes:
        arrangement: How the devices share the work. For ``rank`` and ``eval`` exactly one device has samples.
        num_ranks: DDP processes in the job, for ``rank``: more than one keeps gradient buckets.
        accumulates: Gradients of earlier micro-steps are held all through, and those of this step added to them.
        updates: The optimizer runs, and its state is there; without it, what a replica does is all there is to see.
        compiled: The model runs compiled, as it was given, on the first device alone; only real devices can.
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
        """Whether one device has all samples, wherever it stands in the list."""
        return self.arrangement != "balanced"

    @property
    def num_samples(self) -> int:
        """Samples in the whole step."""
        return sum(sum(split) for split in self.splits)


@dataclass(frozen=True)
class Measurement:
    """The time and the memory of one optimizer step.

    Attributes:
        seconds: Wall time of the step, the median where it was repeated.
        error_s: Standard error of that median; 0 where the time is exact (`sim`).
        peak_bytes: The most each device held; empty where it was not measured.
        busy_s: Time each device worked; empty where it was not measured.
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
        reserved_bytes: The most that the allocator held of each, for them and in blocks that it kept.
    """

    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    steps: int


class Runtime(Protocol):
    """Where a training step runs and is measured.

    Attributes:
        simulated: The numbers are computed, and a peak is exact.
        shares_processor: The devices run in turn on one processor: their busy times add.
    """

    devices: tuple[Device, ...]
    simulated: bool
    shares_processor: bool

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """The bytes that each device may hold, the reserve taken off."""

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step for its memory and return each device's peak, in bytes.

        Raises:
            OutOfMemoryError: A device would hold more than its capacity; it is named.
        """

    def measure(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Run a step for its time (and its memory, where one run gives both).

        Raises:
            OutOfMemoryError: A device would hold more than its capacity; it is named.
        """
