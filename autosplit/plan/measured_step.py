"""Define the result of `measure`: time, memory and bounds of an optimizer step of one configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autosplit.errors import InputError
from autosplit.notes import Note
from autosplit.plan.explanation import BINDING_SHARE, Bound, What, time_text
from autosplit.solve.memory import MemoryParts
from autosplit.solve.split import limits_of
from autosplit.text import counted_text, listed, ms_text, rate_text

ChangedTime = tuple[What, "str | None", float]
"""A change (as in `Bound`), its device (None for all devices), and the time of the step with this change in seconds."""


@dataclass(frozen=True)
class MeasuredStep:
    """The time and the memory of an optimizer step of one configuration. `str()` returns one line of text.

    Attributes:
        split: Samples per device in one forward. For DDP, samples per rank.
        accumulation_steps: Forwards per optimizer step.
        effective_batch_size: Samples per optimizer step: the sum of the split times the forwards.
        strategy: ``"balanced"`` (BalancedDataParallel, or a plain model on one device) or ``"ddp"``.
        precision: ``"none"``, ``"bf16"`` or ``"fp16"``.
        devices: Labels of the devices, in the order of the split. All other values per device have this order.
        device_names: Model names of the devices.
        step_s: Time of the optimizer step in seconds: all forwards, backwards and the update. A real step of more than
            two forwards is computed from shorter steps.
        update_s: Time of the optimizer in seconds, included in `step_s`.
        spread_s: Standard error of `step_s`. 0 for simulated devices, whose times are exact.
        samples_per_s: Throughput, ``effective_batch_size / step_s``.
        peak_bytes: Peak memory of each device.
        capacity_bytes: Memory that training may use on each device, without the reserve.
        memory: Parts of each peak. None if they are unknown.
        bound_by: Changes that would make the step faster with the same split, the largest gain first. ``"device"``: a
            device that is twice as fast, or all devices if it has no label. See `Bound` for the others. Empty if they
            are unknown.
        simulated: Whether the devices are simulated.
        predicted: Whether the time is computed from each rank's own time, because no step of all ranks was run (DDP
            from one process).
        rates: Source of each simulated GPU's speed: ``"published"``, or ``"measured on ..."`` with the device.
        notes: Assumptions, and tasks that could not be done. Each `Note` has a `kind` and a `text`.
    """

    split: tuple[int, ...]
    accumulation_steps: int
    effective_batch_size: int
    strategy: Literal["balanced", "ddp"]
    precision: str
    devices: tuple[str, ...]
    device_names: tuple[str, ...]
    step_s: float
    update_s: float
    spread_s: float
    samples_per_s: float
    peak_bytes: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    memory: tuple[MemoryParts | None, ...]
    bound_by: tuple[Bound, ...]
    simulated: bool
    predicted: bool = False
    rates: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def how(self) -> str:
        """The source of the time: ``"measured"``, ``"predicted"`` or ``"simulated"``."""
        return "simulated" if self.simulated else "predicted" if self.predicted else "measured"

    @property
    def faster_with(self) -> str:
        """The bounds in words. Empty if they are unknown."""
        return ", ".join(map(time_text, self.bound_by))

    def __str__(self) -> str:
        forwards = counted_text(self.accumulation_steps, "forward")
        return (
            f"split {self.split}, {forwards} per optimizer step of {self.effective_batch_size}: "
            f"{rate_text(self.samples_per_s)}, {ms_text(self.step_s)} a step ({self.how})"
        )


def checked_split(split: int | Sequence[int], labels: Sequence[str]) -> tuple[int, ...]:
    """Return the samples of each device from a number (for a single device) or a sequence.

    Raises:
        InputError: The split is not a whole number of 0 or more for each device, or all numbers are 0.
    """
    given = split if isinstance(split, Iterable) else [split]  # numpy arrays have `__index__`, so test for Iterable
    advice = f"as many, or name other devices than {listed(labels, 4)}"
    shares = tuple(limits_of("split", given, len(labels), advice))
    if not any(shares):
        raise InputError(f"split={shares} has no samples. Give at least one device samples.")
    return shares


def bounds_of(step_s: float, samples: int, without: Iterable[ChangedTime]) -> tuple[Bound, ...]:
    """Convert a step's times on hypothetical machines into bounds, the largest gain first."""
    gains = [Bound(what, device, samples / seconds, step_s / seconds) for what, device, seconds in without if seconds]
    return tuple(sorted((bound for bound in gains if bound.gain > 1 + BINDING_SHARE), key=lambda bound: -bound.gain))


def faster_devices(
    labels: Sequence[str], step_s: float, seconds: Callable[[Sequence[int]], float]
) -> Iterator[ChangedTime]:
    """Yield the time of the step in seconds, with each device twice as fast.

    If no single faster device gains anything, also yield the time with all devices twice as fast.

    Args:
        seconds: Function that returns the time of the step if the devices at these positions are twice as fast.
    """
    found = [seconds([index]) for index in range(len(labels))]
    if len(labels) > 1 and step_s <= min(found) * (1 + BINDING_SHARE):
        yield "device", None, seconds(range(len(labels)))
    for label, alone_s in zip(labels, found, strict=True):
        yield "device", label, alone_s
