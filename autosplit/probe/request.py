"""Check the arguments of a tuning once, before anything is measured."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from autosplit.devices.device import Device, reserve_bytes
from autosplit.errors import InputError, shown
from autosplit.solve.split import whole_number

LARGEST_LOOKED_AT = 65536
"""Largest batch to try if neither `max_batch_size` nor an effective batch size limits it."""

MOST_SAMPLES = 2**31 - 1
"""Largest number of samples per batch. Kernels count in 32-bit integers."""

LONGEST_NAME = 64
"""Largest number of characters of a profile's name."""

STRATEGIES = ("auto", "balanced", "ddp")
PROFILES = ("auto", "refresh", "off")


class Deadline:
    """A time limit that begins now.

    Attributes:
        end_s: `time.monotonic()` at the end. None for no limit.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.end_s = None if limit_s is None else time.monotonic() + limit_s

    @property
    def remaining_s(self) -> float | None:
        """The remaining seconds, or None for no limit."""
        return None if self.end_s is None else max(0.0, self.end_s - time.monotonic())

    def part(self, parts: int) -> Deadline:
        """Return a deadline with 1 / `parts` of the remaining time."""
        remaining_s = self.remaining_s
        return Deadline(None if remaining_s is None else remaining_s / parts)


@dataclass(frozen=True)
class Request:
    """The checked arguments of a tuning.

    Attributes:
        defaulted: Whether the user named no devices.
        capacities_bytes: Memory that training may use on each device, without the reserve.
        effective_batch_sizes: Smallest and largest number of samples per optimizer step, equal for an exact number.
            None for one forward of any size.
        max_batch_size: Largest batch of a forward. None for no limit.
        deadline: The time after which no trial begins.
        sampler: An Optuna sampler, or None to use the cost model.
        reserve: The reserve as the user passed it. In bytes, it may depend on the free memory of a GPU.
    """

    devices: tuple[Device, ...]
    capacities_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    strategy: str
    effective_batch_sizes: tuple[int, int] | None
    max_batch_size: int | None
    n_trials: int
    profile: str
    name: str | None
    seed: int
    defaulted: bool = False
    sampler: Any = None
    reserve: object = None
    deadline: Deadline = field(default_factory=Deadline, compare=False)

    @property
    def kind(self) -> str:
        """The kind of all devices."""
        return self.devices[0].kind

    @property
    def simulated(self) -> bool:
        """Whether the devices are simulated."""
        return self.kind == "sim"

    @property
    def largest_batch(self) -> int:
        """The largest batch to try."""
        effective = None if self.effective_batch_sizes is None else self.effective_batch_sizes[1]
        bounds = [n for n in (effective, self.max_batch_size) if n is not None]
        return min(bounds) if bounds else LARGEST_LOOKED_AT

    @property
    def least_effective(self) -> int:
        """The smallest number of samples of an optimizer step. 1 without an effective batch size."""
        return 1 if self.effective_batch_sizes is None else self.effective_batch_sizes[0]

    def facts(self) -> dict[str, Any]:
        """Return the arguments that affect the plan, for the profile's key."""
        least, most = self.effective_batch_sizes or (None, None)
        return {
            "devices": [device.label for device in self.devices],
            "reserve": None if self.reserve is None else str(self.reserve).strip(),
            "strategy": self.strategy,
            "effective_batch_size": least if least == most else [least, most],
            "max_batch_size": self.max_batch_size,
            "name": self.name,
        }


def checked_request(
    *,
    devices: tuple[Device, ...],
    defaulted: bool = False,
    strategy: str = "auto",
    effective_batch_size: Any = None,
    max_batch_size: int | None = None,
    reserve: str | float | None = None,
    n_trials: int = 1,
    time_limit_s: float | None = None,
    sampler: Any = None,
    profile: str = "off",
    name: str | None = None,
    seed: int = 0,
) -> Request:
    """Check the arguments of `tune` that do not concern the workload."""
    _one_of("strategy", strategy, STRATEGIES)
    _one_of("profile", profile, PROFILES)
    if max_batch_size is not None and whole_number("max_batch_size", max_batch_size, minimum=1) > MOST_SAMPLES:
        raise InputError(
            f"max_batch_size is {max_batch_size}. Expected at most {MOST_SAMPLES}. Leave it out for no bound."
        )
    whole_number("n_trials", n_trials, minimum=1)
    if whole_number("seed", seed, minimum=0) >= 2**32:  # numpy, which Optuna uses, has this limit.
        raise InputError(f"seed is {seed}. Expected a whole number below {2**32}. Use a smaller one.")
    _check_time_limit(time_limit_s)
    if isinstance(sampler, type) or not (sampler is None or callable(getattr(sampler, "sample_independent", None))):
        raise InputError(
            f"sampler is {shown(sampler)}. Expected an Optuna sampler, such as optuna.samplers.RandomSampler(seed=0). "
            "Pass one, or leave sampler out."
        )
    _check_name(name)
    reserved = tuple(reserve_bytes(reserve, device) for device in devices)
    return Request(
        devices=devices,
        capacities_bytes=tuple(device.capacity_bytes - kept for device, kept in zip(devices, reserved, strict=True)),
        reserved_bytes=reserved,
        strategy=strategy,
        effective_batch_sizes=effective_range(effective_batch_size),
        max_batch_size=max_batch_size,
        n_trials=n_trials,
        profile=profile,
        name=name,
        seed=seed,
        defaulted=defaulted,
        sampler=sampler,
        reserve=reserve,
        deadline=Deadline(time_limit_s),
    )


def effective_range(value: Any) -> tuple[int, int] | None:
    """Return the smallest and largest effective batch size of a number, ``(256, 1024)``, ``"256:1024"`` or None."""
    if value is None:
        return None
    is_range = isinstance(value, (tuple, list)) or (isinstance(value, str) and ":" in value)
    ends = (value.split(":") if isinstance(value, str) else value) if is_range else [value]
    if is_range and len(ends) != 2:
        raise InputError(
            f"effective_batch_size is {value!r}. Expected a number, or a range such as (256, 1024) or '256:1024'."
        )
    names = ("effective_batch_size", "the end of effective_batch_size")[: len(ends)]
    numbers = (_whole_text(end) if isinstance(end, str) else end for end in ends)
    checked = [whole_number(name, number, minimum=1) for name, number in zip(names, numbers, strict=True)]
    least, most = checked[0], checked[-1]
    if most < least:
        raise InputError(
            f"effective_batch_size is {least}:{most}. Expected the smaller end first. Write {most}:{least}."
        )
    if most > MOST_SAMPLES:
        raise InputError(f"{names[-1]} is {most}. Expected at most {MOST_SAMPLES}. Use a smaller number.")
    return least, most


def _check_time_limit(limit_s: Any) -> None:
    is_number = isinstance(limit_s, (int, float)) and not isinstance(limit_s, bool)
    if limit_s is not None and not (is_number and limit_s > 0):
        raise InputError(f"time_limit_s is {limit_s!r}. Expected seconds above 0. Leave it out for no limit.")


def _check_name(name: object) -> None:
    if name is None:
        return
    fine = isinstance(name, str) and name.isprintable() and name == name.strip() and 0 < len(name) <= LONGEST_NAME
    if not fine:
        raise InputError(
            f"name is {shown(name)}. Expected 1 to {LONGEST_NAME} printable characters on one line, with no space at "
            "either end. Choose another, or leave it out."
        )


def _whole_text(text: str) -> Any:
    """Convert a string of digits to a number. Return any other string unchanged, so that the next check reports it."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 18 else text


def _one_of(what: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{what} is {value!r}. Expected one of {', '.join(map(repr, allowed))}.")
