"""The reason why no remembered plan holds: the nearest one, and in which parts of the key it differs.

What a plan's file says of itself is not believed, only shown, and no more of it than fits a line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autosplit.errors import shown
from autosplit.plan.plan import Plan
from autosplit.text import listed, size_text

__all__ = ["NOT_JUST_THIS", "differences", "nearest_told"]

NOT_JUST_THIS = "no plan is remembered for just this"
"""How the note begins that names the nearest remembered plan."""

MOST_TOLD = 3
"""Of the parts that differ, or one more; the log has all of them."""

_log = logging.getLogger(__name__)

_VERSIONS = {"torch": "torch", "cuda": "CUDA", "autosplit": "autosplit"}
_DIGESTS = {
    "model_tree": "the classes, code or settings of its modules",
    "model_tensors": "its parameters' names, shapes, types or which of them are trained",
    "model_text": "its repr",
    "model_factory": "the function that makes it",
}
_SETTINGS = ("precision", "loss_reduction", "loss_scope", "batch_dim")
_LATER = ("checkpointing", "fits")
"""Settings that only workloads which have them tell of."""
_FUNCTIONS = ("loss_fn", "compute_loss", "step", "make_batch", "evaluate")
_ASKED = ("strategy", "effective_batch_size", "max_batch_size", "reserve", "name")


def nearest_told(
    remembered: Iterable[tuple[Path, Plan | None]],
    *,
    machine: Mapping[str, Any],
    workload: Mapping[str, Any],
    request: Mapping[str, Any],
    ignoring: Sequence[str] = (),
) -> str | None:
    """Say on one line which remembered plan is the nearest, and what differs; None where none is for this model's name.

    Args:
        remembered: The profiles, the newest first; those that can't be read are passed over.
        machine: What a plan is wanted for, by `key.machine_of`.
        workload: The same, by `key.workload_of`.
        request: What was asked for, as a plan keeps it.
        ignoring: A plan that differs in this part alone is no answer.
    """
    found: list[tuple[int, Path, list[str]]] = []
    for path, plan in remembered:
        if plan is None or plan.workload.get("model") != workload.get("model"):
            continue
        try:
            told = differences(plan, machine=machine, workload=workload, request=request)
        except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
            continue
        if told and not (len(told) == 1 and told[0].startswith(tuple(f"{part} was " for part in ignoring))):
            found.append((len(told), path, told))
    if not found:
        return None
    count, path, told = min(found, key=lambda one: one[0])
    said = f"in the nearest, {path.stem[:8]}: "
    if count > MOST_TOLD:
        _log.info("%s%s", said, "; ".join(told))
    return f"{NOT_JUST_THIS}; {said}{listed(told, MOST_TOLD, separator='; ', last='; ')}"


def differences(
    plan: Plan, *, machine: Mapping[str, Any], workload: Mapping[str, Any], request: Mapping[str, Any]
) -> list[str]:
    """Say in which parts of the key a plan differs from what is wanted now: a clause for each, the machine's first."""
    return [
        *_of_machine(plan.machine, machine),
        *_of_workload(plan.workload, workload),
        *_of_request(plan, machine, request),
    ]


def _of_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    told = []
    if before.get("devices") != now.get("devices"):
        told.append(_devices_told(before.get("devices"), now.get("devices")))
    told += [
        f"tuned with {name} {_text(before.get(part))}, now {_text(now.get(part))}"
        for part, name in _VERSIONS.items()
        if before.get(part) != now.get(part)
    ]
    if before.get("ranks_per_machine") != now.get("ranks_per_machine"):
        ranks = [_text(one.get("ranks_per_machine") or "those of one") for one in (before, now)]
        told.append(f"the ranks per machine were {ranks[0]}, now {ranks[1]}")
    return told


def _devices_told(before: Any, now: Any) -> str:
    stored, wanted = _runs(before), _runs(now)
    if stored is None or wanted is None:
        return "tuned for devices that it does not name"
    if len(stored) == len(wanted) == 1 and stored[0][1] == wanted[0][1]:
        (count, name), (count_now, _) = stored[0], wanted[0]
        if count != count_now:
            return f"tuned for {count} device{'s' * (count != 1)} {name}, now {count_now}"
    texts = [" + ".join(f"{count}x {name}" for count, name in runs)[:120] for runs in (stored, wanted)]
    if texts[0] == texts[1]:  # a digest tells them apart
        return f"tuned for {texts[0]} with other figures in gpus.toml than now"
    return f"tuned for {texts[0]}, now {texts[1]}"


def _runs(devices: Any) -> list[tuple[int, str]] | None:
    """Return how many there are of each device in a row, and what it is; None where that is not told."""
    if not isinstance(devices, list) or not all(isinstance(run, dict) for run in devices):
        return None
    runs = []
    for run in devices:
        name = _text(run.get("name"))
        if run.get("kind") == "cpu":
            name += f" of {_text(run.get('processors'))} processors ({_text(run.get('architecture'))})"
        elif run.get("kind") == "sim":
            name = f"simulated {name}"
        if run.get("memory_gib") is not None:
            name += f" of {_text(run['memory_gib'])} GiB"
        if isinstance(run.get("capacity_bytes"), int):
            name += f" with {size_text(run['capacity_bytes'])}"
        count = run.get("count")
        runs.append((count if isinstance(count, int) else 0, name))
    return runs


def _of_workload(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    differing = [part for part in {**before, **now} if before.get(part) != now.get(part)]
    told = []
    changed = [said for part, said in _DIGESTS.items() if part in differing]
    if "parameters" in differing and None not in (before.get("parameters"), now["parameters"]):
        told.append(f"the model had {_text(before['parameters'])} parameters, now {_text(now['parameters'])}")
    elif changed:
        told.append(f"the model was another: {' and '.join(changed[:2])} differ")
    if "sample_batch_size" in differing:
        sizes = [_text(one.get("sample_batch_size")) for one in (before, now)]
        told.append(f"the sample batch had {sizes[0]} samples, now {sizes[1]}")
    elif "sample_batch" in differing:
        told.append("the sample batch was another: its structure, shapes or types differ")
    if "optimizer" in differing:
        told.append("the optimizer or its options were others")
    told += [_other_function(part, before.get(part), now.get(part)) for part in _FUNCTIONS if part in differing]
    told += [_was(part, before.get(part), now.get(part)) for part in (*_SETTINGS, *_LATER) if part in differing]
    return told


def _other_function(part: str, before: Any, now: Any) -> str:
    if before is None:
        return f"there was no {part}"
    return f"there was a {part}, now there is none" if now is None else f"{part} was another"


def _of_request(plan: Plan, machine: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    before = plan.request
    if not before:
        # As much as an older file keeps of it.
        sizes = plan.effective_batch_sizes
        asked = None if sizes is None else sizes[0] if sizes[0] == sizes[1] else list(sizes)
        before = {**now, "effective_batch_size": asked, "max_batch_size": plan.max_batch_size}
    told = [_was(part, before.get(part), now.get(part)) for part in _ASKED if before.get(part) != now.get(part)]
    if before.get("devices") != now.get("devices") and plan.machine.get("devices") == machine.get("devices"):
        told.append(_was("devices", before.get("devices"), now.get("devices")))
    return told


def _was(part: str, before: Any, now: Any) -> str:
    return f"{part} was {_text(before)}, now {_text(now)}"


def _text(value: Any) -> str:
    """Write a value of a file on one line."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "something else"
    if isinstance(value, list) and len(value) <= 64:
        return (":" if all(isinstance(item, int) for item in value) else ", ").join(map(_text, value))[:120]
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 60:
        return value
    return shown(value)
