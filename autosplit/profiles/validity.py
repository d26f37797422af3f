"""Compare a saved plan with this machine: devices, free memory, and facts that may differ."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.accelerators import backend, is_accelerator
from autosplit.errors import shown
from autosplit.plan.layout import MOST_DEVICES
from autosplit.plan.plan import Plan
from autosplit.profiles.key import machine_of
from autosplit.profiles.store import profile_paths, read_or_none
from autosplit.text import size_text

if TYPE_CHECKING:
    from autosplit.devices.device import Device


def usable_here() -> Iterator[tuple[Path, Plan]]:
    """Yield the saved plans whose devices are on this machine, the newest first, without simulated plans.

    Each file is read when its plan is requested, so that a caller can stop at the first plan that it can use.
    """
    from autosplit.devices.spec import parse_devices

    paths = profile_paths()
    if not paths:
        return
    gpus = [device for device in parse_devices("auto", ask_memory=False) if is_accelerator(device.kind)]
    here = machine_of((*gpus, *parse_devices("cpu")))
    for path in paths:
        plan = read_or_none(path)
        if plan is not None and _is_usable(plan, here):
            yield path, plan


def _is_usable(plan: Plan, here: Mapping[str, Any]) -> bool:
    if plan.simulated or not plan.complete or not isinstance(plan.machine.get("devices"), list):
        return False
    if any(plan.machine.get(name) != here[name] for name in ("torch", "cuda", "autosplit")):
        return False
    present: Counter[tuple[str, ...]] = Counter()
    for run in here["devices"]:
        present[_model_of(run)] += run["count"]
    try:
        wanted = _wanted(plan.machine)
    except (AttributeError, KeyError, TypeError, ValueError):  # the file's description is invalid
        return False
    return any(all(present[model] >= count for model, count in one.items()) for one in wanted)


def _wanted(machine: Mapping[str, Any]) -> list[Counter[tuple[str, ...]]]:
    devices = [run for run in machine["devices"] for _ in range(min(run["count"], MOST_DEVICES))]
    counts = machine.get("ranks_per_machine", [len(devices)])
    wanted, rest = [], iter(devices)
    for count in counts[:MOST_DEVICES]:
        here: Counter[tuple[str, ...]] = Counter()
        for run in itertools.islice(rest, count):
            # A spec may define any number of devices on one CPU.
            here[_model_of(run)] = 1 if run.get("kind") == "cpu" else here[_model_of(run)] + 1
        wanted.append(here)
    return [one for one in wanted if one]


def _model_of(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the properties that a machine must have for a run of devices. Any CPU may have any budget."""
    return tuple(str(run.get(name)) for name in ("kind", "name", "memory_gib", "processors", "architecture"))


SLACK = 0.01
"""Fraction of a plan's peak that may be missing on a GPU, for example because of a display. The plan still runs.

The reserve, by default five times as much, covers it. Without this tolerance, a plan at its limit was solved again for
any missing MiB.
"""


def memory_shortfall(plan: Plan, devices: Sequence[Device], capacities_bytes: Sequence[int]) -> str | None:
    """Name the devices whose free memory is less than the plan's peaks. Return None if the plan fits.

    `capacities_bytes` is the memory that training may currently use on each device, without the reserve.
    """
    short = [
        f"{device.label} may use {size_text(capacity)}, and its {seat.samples} samples need "
        f"{size_text(seat.peak_bytes)}"
        for seat, device, capacity in zip(plan.main.seats, devices, capacities_bytes, strict=True)
        if (1 - SLACK * is_accelerator(device.kind)) * seat.peak_bytes > capacity
    ]
    return f"the saved plan does not fit now ({'; '.join(short)})" if short else None


def differing_facts(plan: Plan, devices: Sequence[Device], capacities_bytes: Sequence[int]) -> tuple[str, ...]:
    """Return a clause for each difference between the current GPUs and the plan's GPUs, in the plan's order.

    Clauses do not contain GPU identifiers. On the same machine there are no clauses.
    """
    pairs = list(zip(plan.devices, devices, strict=True))
    others = [device.label for planned, device in pairs if planned.uuid != device.uuid]
    clauses = [f"tuned on other GPUs of the same model ({', '.join(others)})"] if others else []
    drivers = {(planned.driver, device.driver) for planned, device in pairs if planned.driver != device.driver}
    clauses += [f"tuned with driver {_driver_text(one)}, now {_driver_text(two)}" for one, two in drivers][:1]
    tight = []
    for seat, device, capacity in zip(plan.main.seats, devices, capacities_bytes, strict=True):
        # The plan's free memory includes the context of the process that tuned, and the ceiling's capacity does not.
        # If this process has allocated memory on the GPU, its context is already part of the used memory.
        context = max(0, seat.device.capacity_bytes - seat.ceiling.capacity_bytes)
        if is_accelerator(device.kind) and (1 - SLACK) * seat.peak_bytes > capacity - context:
            in_use = backend(device.kind).memory_stats(device.index).get("allocation.all.allocated", 0)
            tight += [] if in_use else [device.label]
    clauses += [f"tuned with more free memory ({', '.join(tight)})"] if tight else []
    return tuple(clauses)


def _driver_text(driver: str | None) -> str:
    return "unknown" if driver is None else driver if driver.isprintable() and len(driver) <= 40 else shown(driver)
