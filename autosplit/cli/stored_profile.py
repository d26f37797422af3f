"""Describe a profile's file, even if it is not valid."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from autosplit.errors import PlanError
from autosplit.profiles.store import read_profile


@dataclass(frozen=True)
class Profile:
    """A profile: a plan in a file of the cache.

    Attributes:
        key: 32 hexadecimal digits. Commands accept the first digits as a name.
        path: The file.
        saved_at: Time when the file was written, as ISO 8601 with the offset from UTC. None if it is unknown.
        age_s: Time since then in seconds. None if unknown.
        problem: Why the file can't be read. None if it can. Otherwise all following values are empty.
        name: The ``name=`` given to `tune`, or None.
        model: The model's class, or the function that makes the model.
        parameters: Number of the model's parameters. None if it is unknown.
        devices: Labels of the devices, in order.
        device_names: Model names of the devices, in the same order.
        request: Arguments of `tune`, without those that were not given.
        split: Samples per device in one forward.
        batch_size: Samples per forward.
        accumulation_steps: Forwards per optimizer step.
        effective_batch_size: Samples per optimizer step.
        samples_per_s: Throughput.
        simulated: Whether the devices are simulated.
        complete: Whether the search was finished. If it was interrupted, this is the best plan so far.
    """

    key: str
    path: str
    saved_at: str | None
    age_s: float | None
    problem: str | None = None
    name: str | None = None
    model: str | None = None
    parameters: int | None = None
    devices: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()
    request: Mapping[str, Any] | None = None
    split: tuple[int, ...] = ()
    batch_size: int | None = None
    accumulation_steps: int | None = None
    effective_batch_size: int | None = None
    samples_per_s: float | None = None
    simulated: bool | None = None
    complete: bool | None = None


_NUMBERS = (
    *("split", "batch_size", "accumulation_steps", "effective_batch_size"),
    *("samples_per_s", "simulated", "complete"),
)


def profile_at(path: Path) -> Profile:
    """Describe a profile's file, even if it is not valid."""
    saved_at: str | None = None
    age_s: float | None = None
    with contextlib.suppress(OSError, ValueError, OverflowError):  # The file was removed, or its time is out of range.
        written_s = path.lstat().st_mtime
        saved_at = datetime.fromtimestamp(written_s).astimezone().isoformat("T", "seconds")
        age_s = max(0.0, time.time() - written_s)
    try:
        plan = read_profile(path)
    except PlanError as error:
        return Profile(path.stem, str(path), saved_at, age_s, problem=str(error).split(";", maxsplit=1)[0])
    name, parameters = plan.request.get("name"), plan.workload.get("parameters")
    model = plan.workload.get("model")
    return Profile(
        key=path.stem,
        path=str(path),
        saved_at=saved_at,
        age_s=age_s,
        name=name if isinstance(name, str) else None,
        model=model if isinstance(model, str) else None,
        parameters=parameters if isinstance(parameters, int) else None,
        devices=tuple(device.label for device in plan.devices),
        device_names=tuple(device.name for device in plan.devices),
        request={key: value for key, value in plan.request.items() if value is not None and key != "name"},
        **{name: getattr(plan, name) for name in _NUMBERS},
    )
