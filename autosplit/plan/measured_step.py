"""The value that `measure` returns: the time and the memory of one configuration's optimizer step, and its bounds."""

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

Without = tuple[What, "str | None", float]
"""What a step is without, of which device (None for all together), and the seconds that it then takes."""


@dataclass(frozen=True)
class MeasuredStep:
    """The time and the memory of an optimizer step of one configuration. `str()` is a line for people.

    Attributes:
        split: Samples per device in one forward; of DDP, each rank's.
        accumulation_steps: Forwards of the step.
        effective_batch_size: Samples of the step: all of the split's, in every forward.
        strategy: ``"balanced"``, BalancedDataParallel (on one device a plain model), or ``"ddp"``.
        precision: Of the workload.
        devices: Labels of the devices, in the order of the split, as all that is told by device.
        device_names: What their makers call them.
        step_s: All forwards and backwards of the step, and the update. Real steps of more than two forwards are put
            together from shorter ones.
        update_s: The optimizer's part of it.
        spread_s: Standard error of `step_s`; 0 where times are exact (`sim`).
        samples_per_s: ``effective_batch_size / step_s``.
        peak_bytes: The most that each device held.
        capacity_bytes: What each may hold, the reserve taken off.
        memory: What each peak is made of; None where that is not known.
        bound_by: Without what the step would be faster, at this very split, the largest gain first: a device that is
            twice as fast (``"device"``; without a name, all of them), free copies, and so on. Empty where it is not
            known.
        simulated: The devices are not there.
        predicted: The time is computed from each rank's own, and no step of all ranks together was run: DDP from one
            process.
        rates: Where the figures of each simulated card are from: ``"published"``, or on what they were measured.
        notes: What was assumed or could not be done. Each `Note` has a `kind` and a `text`.
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
        """How the time came to be known: ``"measured"``, ``"predicted"`` or ``"simulated"``."""
        return "simulated" if self.simulated else "predicted" if self.predicted else "measured"

    @property
    def faster_with(self) -> str:
        """Its bounds in words; empty where they are not known."""
        return ", ".join(map(time_text, self.bound_by))

    def __str__(self) -> str:
        """Return the configuration and its rate in one line."""
        forwards = counted_text(self.accumulation_steps, "forward")
        return (
            f"split {self.split}, {forwards} per optimizer step of {self.effective_batch_size}: "
            f"{rate_text(self.samples_per_s)}, {ms_text(self.step_s)} a step ({self.how})"
        )


def checked_split(split: int | Sequence[int], labels: Sequence[str]) -> tuple[int, ...]:
    """Return the samples that each device is given; a number is the share of a single one.

    Raises:
        InputError: Not a whole number of 0 or more for each device, or nothing but zeros.
    """
    given = split if isinstance(split, Iterable) else [split]  # an array has an `__index__`, too
    advice = f"as many, or name other devices than {listed(labels, 4)}"
    shares = tuple(limits_of("split", given, len(labels), advice))
    if not any(shares):
        raise InputError(
            f"split is {shares}; expected at least one share above 0; give the devices samples", code="split-empty"
        )
    return shares


def bounds_of(step_s: float, samples: int, without: Iterable[Without]) -> tuple[Bound, ...]:
    """Return what binds a step, the largest gain first."""
    gains = [Bound(what, device, samples / seconds, step_s / seconds) for what, device, seconds in without if seconds]
    return tuple(sorted((bound for bound in gains if bound.gain > 1 + BINDING_SHARE), key=lambda bound: -bound.gain))


def faster_devices(
    labels: Sequence[str], step_s: float, seconds: Callable[[Sequence[int]], float]
) -> Iterator[Without]:
    """Yield a step with each device twice as fast; where none by itself brings anything, with all of them.

    Args:
        seconds: What the step takes with devices of these positions twice as fast.
    """
    found = [seconds([index]) for index in range(len(labels))]
    if len(labels) > 1 and step_s <= min(found) * (1 + BINDING_SHARE):
        yield "device", None, seconds(range(len(labels)))
    for label, alone_s in zip(labels, found, strict=True):
        yield "device", label, alone_s
