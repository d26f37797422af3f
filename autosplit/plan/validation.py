"""Check that the parts of a plan from a file are consistent, beyond types and single fields.

The file is untrusted. The explanation, the report, the wrapper and the ranks rely on these checks.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from autosplit.text import has_control_character

LARGEST = 2**62
"""Upper bound of all numbers of a plan: 4 EiB, or as many samples."""

DEEPEST = 32
"""Largest nesting depth of the descriptions of machine and workload. Real descriptions have about five levels."""

_MOST_OTHER_BOUNDS = 8
"""Largest number of bounds in addition to the memory and the time of each device."""

PRECISIONS = ("none", "bf16", "fp16")

_KIND = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
"""A kind of device: ``"sim"``, or a name that torch accepts, such as ``"cuda"`` or that of a PrivateUse1 back end."""

_ATTENTION = ("cudnn", "flash", "efficient", "math")

_PROSE = frozenset({"text", "failure", "advice", "remark", "reason"})
"""Keys of sentences, which may have tabs and line ends. They are never part of an exported command or a YAML file."""


def control_character(plain: object) -> str | None:
    """Describe a text in decoded JSON that has a control character. Return None if there is none.

    A line end would begin a new line of a shell script, and an escape sequence would control the terminal.
    """
    waiting = [("the plan", plain)]
    while waiting:  # recursion would end at Python's limit
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [("a key", key) for key in value]
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(name, item) for item in value]
        elif isinstance(value, str) and has_control_character(value, prose=name in _PROSE):
            return f"{name} is {value[:40]!r}, but control characters are not allowed"
    return None


def unsound_part(plan: Any) -> str | None:
    """Describe the first contradiction in a plan. Return None if there is none."""
    for name in ("machine", "workload"):
        if _is_deeper(getattr(plan, name), DEEPEST):
            return f"{name} is nested over {DEEPEST} levels deep"
    checks = (_unknown_values, _unsound_trials, _unsound_what_ifs)
    found = (text for check in checks for text in check(plan, len(plan.devices)))
    return next(itertools.chain(found, (text for layout in plan.layouts for text in _unsound_layout(layout))), None)


def _unknown_values(plan: Any, _count: int) -> Iterator[str]:
    devices = [device for layout in plan.layouts for device in layout.devices]
    for kind in {device.kind for device in devices}:
        if not _KIND.fullmatch(kind):
            yield f"a device's kind is {kind!r:.60}, expected a device type of torch, such as 'cuda', or 'sim'"
    request, workload = plan.request, plan.workload
    for name, values, known in (
        ("request.strategy", [request.get("strategy", "auto")], ("auto", "balanced", "ddp")),
        ("workload.precision", [workload.get("precision")], (None, *PRECISIONS)),
        ("workload.loss_reduction", [workload.get("loss_reduction", "mean")], ("mean", "sum")),
        ("workload.loss_scope", [workload.get("loss_scope", "sample")], ("sample", "batch")),
        ("attention", [one for device in devices for one in device.attention], _ATTENTION),
    ):
        unknown = [value for value in values if value not in known]
        if unknown:
            yield f"{name} is {unknown[0]!r:.60}, expected one of {known}"


def _unsound_layout(layout: Any) -> Iterator[str]:
    count, kinds = len(layout.seats), {device.kind for device in layout.devices}
    if "sim" in kinds and len(kinds) > 1:
        yield f"its devices are {' and '.join(sorted(kinds))}, but simulated and real devices can't be mixed"
    for seat in layout.seats:
        if seat.device.capacity_bytes > seat.device.memory_bytes:
            yield (
                f"a device's capacity is {seat.device.capacity_bytes} bytes, more than its memory of "
                f"{seat.device.memory_bytes}"
            )
    if layout.cost is None:
        return
    times = layout.cost.step_time
    lengths = {len(times.curves), len(times.copies_s), len(times.gather_s_per_sample)}
    if lengths != {count}:
        yield f"cost has {sorted(lengths)} entries, but there are {count} devices"
    if any(len(residual.split) != count for residual in layout.cost.residuals):
        yield f"a residual is not for {count} devices"


def _unsound_trials(plan: Any, count: int) -> Iterator[str]:
    for trial in plan.trials:
        if len(trial.split) != count or len(trial.peak_bytes) not in (0, count):
            yield f"a trial has {len(trial.split)} shares and {len(trial.peak_bytes)} peaks for {count} devices"
        if sum(trial.split) != trial.batch_size:
            yield f"a trial's batch_size is {trial.batch_size}, but its split adds up to {sum(trial.split)}"
        if (trial.samples_per_s is None) == (trial.failure is None):
            yield "a trial must have either a throughput or a failure"
        if trial.failed_device is not None and not 0 <= trial.failed_device < count:
            yield f"a trial failed on device {trial.failed_device}, but there are {count} devices"


def _unsound_what_ifs(plan: Any, count: int) -> Iterator[str]:
    what_ifs, labels = plan.what_ifs or (), {device.label for device in plan.devices}
    if len(what_ifs) > 3 * count + _MOST_OTHER_BOUNDS:
        yield f"it has {len(what_ifs)} what-ifs, too many for {count} devices"
    for what_if in what_ifs:
        if what_if.device is not None and what_if.device not in labels:
            yield f"a what-if names {what_if.device!r:.40}, which is not one of its devices"


def _is_deeper(value: object, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return items is not None and (levels <= 0 or any(_is_deeper(item, levels - 1) for item in items))


def unfit_number(value: Any, name: str = "the plan") -> str | None:
    """Return the name and value of the first number that is out of range for a plan, or None."""
    if isinstance(value, (int, float)):
        # A line through two points may be negative at 0 samples, so `fixed_bytes` may be below 0.
        least = -LARGEST if name == "fixed_bytes" else 0
        return None if least <= value < LARGEST else f"{name} is {value!r:.40}"
    if isinstance(value, tuple):
        parts: Iterator[tuple[object, str]] = ((item, f"{name}[{i}]") for i, item in enumerate(value))
    else:
        kind: Any = type(value)
        parts = ((getattr(value, part), part) for part in _field_names(kind))
    for item, called in parts:
        text = unfit_number(item, called)
        if text is not None:
            return text
    return None


@functools.cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(part.name for part in fields(kind)) if is_dataclass(kind) else ()
