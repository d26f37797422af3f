"""Define a layout: how one strategy divides a batch among devices, and how fast it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal

from msgspec import Meta

from autosplit.errors import PlanError
from autosplit.solve.memory import Ceiling, MemoryParts, Region
from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import Cost

Strategy = Literal["balanced", "ddp"]
"""``"balanced"``: BalancedDataParallel in one process. ``"ddp"``: DistributedDataParallel, one process per device."""

MOST_DEVICES = 4096
"""Largest number of devices in a plan, over all machines of a job."""

MOST_FORWARDS = 2**20
"""Largest number of forwards per optimizer step."""


@dataclass(frozen=True)
class PlanDevice:
    """A device of the plan.

    Attributes:
        label: ``"cuda:0"``, ``"cpu:1"`` or ``"sim:2"``.
        kind: ``"cpu"``, ``"sim"``, or torch's name of an accelerator, such as ``"cuda"``.
        index: Position among the devices for cpu and sim. Logical index for an accelerator.
        name: Model name of the device.
        memory_bytes: Memory of the device, or its budget.
        capacity_bytes: Memory that the plan may use, without the reserve.
        budgeted: Whether autosplit enforces the capacity.
        uuid: UUID of a GPU. None for other devices.
        driver: Version of the GPU's driver. None for other devices.
        rates: Source of a simulated GPU's speed, ``"published"`` or ``"measured on ..."``. None for other devices.
        attention: The back ends that torch chooses for `scaled_dot_product_attention`. Empty if the model calls no
            attention, and for devices other than NVIDIA GPUs.
    """

    label: str
    kind: str
    index: int
    name: str
    memory_bytes: int
    capacity_bytes: int
    budgeted: bool
    uuid: str | None = None
    driver: str | None = None
    rates: str | None = None
    attention: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seat:
    """One device of a layout.

    Attributes:
        device: The device.
        samples: Samples per forward on this device.
        ceiling: The largest batch that fits on the device, and how it was found.
        peak_bytes: Peak memory in a step of the layout. Predicted for simulated GPUs.
        busy_s: Compute time of a full micro-step, from the fitted curve. 0 if the layout has no fit.
        memory: Parts of `peak_bytes`. None if they are unknown.
    """

    device: PlanDevice
    samples: int
    ceiling: Ceiling
    peak_bytes: int
    busy_s: float = 0.0
    memory: MemoryParts | None = None


@dataclass(frozen=True)
class DdpOptions:
    """The options of DistributedDataParallel, which `autosplit.ddp` sets.

    Attributes:
        gradient_as_bucket_view: Whether gradients are views into DDP's buckets, which saves one copy.
        find_unused_parameters: Whether a trainable parameter got no gradient in a step. Without this option, DDP would
            wait for its gradient.
        static_graph: Whether the graph is the same in every step. autosplit never sets it, because a few steps can't
            prove it.
    """

    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False

    def keywords(self) -> dict[str, bool]:
        """Return the options as keyword arguments."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class Layout:
    """The samples of each device, and the throughput, with one strategy.

    Attributes:
        strategy: ``"balanced"`` or ``"ddp"``.
        seats: The devices. With ``"ddp"``, one rank each, in the order of the ranks.
        accumulation_steps: Forwards per optimizer step, equal on all devices.
        effective_batch_size: Samples per optimizer step. The last micro-step may be shorter.
        samples_per_s: Throughput of whole optimizer steps.
        measured: Whether the throughput was measured or simulated, rather than predicted.
        even_samples_per_s: Throughput of the same samples per optimizer step, split evenly. For ranks it is predicted.
            None if it does not fit, was not run, or is meaningless (one device, or devices that share a CPU).
        least_batch: Smallest number of samples on which a device trains: 2 if a BatchNorm layer gets one value per
            sample, else 1.
        cost: The fitted time model, with its residuals. None if it is unknown.
        region: The splits that fit with BalancedDataParallel: device 0's memory by its samples and the whole batch, and
            the other devices' ceilings. None for ranks, and if it is unknown.
        options: Options of DistributedDataParallel.
        shard_size: Ranks per shard group of FSDP2 (`tune_sharded`). None if each rank has the whole model.
    """

    strategy: Strategy
    seats: Annotated[tuple[Seat, ...], Meta(min_length=1, max_length=MOST_DEVICES)]
    accumulation_steps: Annotated[int, Meta(ge=1, le=MOST_FORWARDS)]
    effective_batch_size: Annotated[int, Meta(ge=1)]
    samples_per_s: Annotated[float, Meta(gt=0)]
    measured: bool = True
    even_samples_per_s: Annotated[float, Meta(gt=0)] | None = None
    least_batch: Annotated[int, Meta(ge=1)] = 1
    cost: Cost | None = None
    region: Region | None = None
    options: DdpOptions = DdpOptions()
    shard_size: Annotated[int, Meta(ge=2)] | None = None

    def __post_init__(self) -> None:
        split, count = self.split, len(self.seats)
        if not split or min(split) < 0 or not any(split):
            self._refuse("split", split, "0 or more samples on each device, and at least one sample")
        # A single rank may exceed its ceiling: the search ran a plain model, and the ceiling counts DDP's buckets.
        is_bounded = count > 1 or self.strategy == "balanced"
        if is_bounded and any(seat.samples > seat.ceiling.batch_size for seat in self.seats):
            self._refuse("split", split, f"a split within the ceilings {self.ceilings}")
        if self.effective_batch_size < 1:
            self._refuse("effective_batch_size", self.effective_batch_size, "1 or more")
        steps = accumulation_steps(self.effective_batch_size, self.batch_size)
        if self.accumulation_steps != steps:
            self._refuse("accumulation_steps", self.accumulation_steps, f"ceil(effective / batch), {steps}")
        if not self.samples_per_s > 0:
            self._refuse("samples_per_s", self.samples_per_s, "more than 0")
        if self.cost is not None and not self.cost.fits(count):
            self._refuse("cost", self.cost, f"{count} curves of measured times")
        if self.region is not None and (self.strategy == "ddp" or len(self.region.ceilings) != count):
            self._refuse("region", self.region, f"a ceiling for each of {count} devices, or none for ranks")

    def _refuse(self, name: str, value: object, expected: str) -> None:
        raise PlanError(f"{name} is {value!r:.200}. Expected {expected}. Tune again.")

    @property
    def devices(self) -> tuple[PlanDevice, ...]:
        """The devices, in the order of the split."""
        return tuple(seat.device for seat in self.seats)

    @property
    def split(self) -> tuple[int, ...]:
        """Samples per device in one forward. With ``"ddp"``, the batch size of each rank."""
        return tuple(seat.samples for seat in self.seats)

    @property
    def batch_size(self) -> int:
        """Samples per forward: ``sum(split)``."""
        return sum(seat.samples for seat in self.seats)

    @property
    def ceilings(self) -> tuple[int, ...]:
        """Samples per device that fit at the same time. Any split within the ceilings fits."""
        return tuple(seat.ceiling.batch_size for seat in self.seats)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak memory of each device in a step."""
        return tuple(seat.peak_bytes for seat in self.seats)

    @property
    def shares_processor(self) -> bool:
        """Whether the devices are parts of one CPU, so that splitting brings no gain."""
        return len(self.seats) > 1 and all(seat.device.kind == "cpu" for seat in self.seats)


def seated(
    layout: Layout,
    split: Sequence[int],
    ceilings: Sequence[Ceiling],
    peaks_bytes: Sequence[int],
    cost: Cost,
) -> tuple[Seat, ...]:
    """Return the seats of a layout with another split."""
    return tuple(
        replace(seat, samples=samples, ceiling=ceiling, peak_bytes=peak_bytes, busy_s=curve(samples), memory=None)
        for seat, samples, ceiling, peak_bytes, curve in zip(
            layout.seats, split, ceilings, peaks_bytes, cost.step_time.curves, strict=True
        )
    )
