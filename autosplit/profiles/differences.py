"""Explain why no saved plan was used: name the parts of the key in which the newest plan differs.

The content of a plan's file is untrusted, so it is only shown, on one line.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autosplit.errors import ProfileError, shown
from autosplit.plan.plan import Plan
from autosplit.profiles.store import KEY_DIGITS, profile_paths, read_or_none
from autosplit.text import size_text

if TYPE_CHECKING:
    from autosplit.profiles.key import ProfileKey

_log = logging.getLogger(__name__)

_DIGESTS = {
    "model_tree": "the classes, code or settings of its modules",
    "model_tensors": "its parameters' names, shapes, dtypes or requires_grad",
    "model_text": "its repr",
    "model_factory": "the function that creates it",
}
_ASKED = ("strategy", "effective_batch_size", "max_batch_size", "reserve", "name")
_FUNCTIONS = ("loss_fn", "compute_loss", "step", "make_batch", "evaluate")
_SAID = {
    "torch": "tuned with torch {}, now {}",
    "cuda": "tuned with CUDA {}, now {}",
    "autosplit": "tuned with autosplit {}, now {}",
    "sample_batch_size": "the sample batch had {} samples, now {}",
    "sample_batch": "the sample batch has a different structure, shape or dtype",
    "optimizer": "the optimizer or its options are different",
    **dict.fromkeys(_FUNCTIONS, "{part} is different"),
}
"""Texts for a changed part. Other parts are shown with both values."""


def log_differences(key: ProfileKey) -> None:
    """Log how the newest profile differs from a key that has no profile. No other file is read."""
    try:
        paths = profile_paths()[:1]
    except (OSError, ProfileError):  # there is no cache
        return
    for path in paths:
        plan = read_or_none(path)
        if plan is not None and plan.workload.get("model") == key.workload.get("model"):
            # The file may be nested too deeply, or have a number of thousands of digits.
            with contextlib.suppress(RecursionError, ValueError):
                found = "; ".join(differences(plan, key))
                _log.info("no profile matches. The newest, %s: %s", path.stem[:KEY_DIGITS], found)


def differences(plan: Plan, key: ProfileKey) -> list[str]:
    """Return a clause for each difference between a plan and a key's machine, workload and request, in this order."""
    told = [*_of_machine(plan.machine, key.machine), *_of_workload(plan.workload, key.workload)]
    return [*told, *_of_request(plan, key.machine, key.request)]


def _of_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    told = []
    if before.get("devices") != now.get("devices"):
        told.append(_devices_told(before.get("devices"), now.get("devices")))
    told += _differing(("torch", "cuda", "autosplit"), before, now)
    if before.get("ranks_per_machine") != now.get("ranks_per_machine"):
        ranks = [_text(one.get("ranks_per_machine") or "those of one") for one in (before, now)]
        told.append(f"the ranks per machine were {ranks[0]}, now {ranks[1]}")
    return told


def _differing(parts: Iterable[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    told = []
    for part in parts:
        was, is_now = before.get(part), now.get(part)
        if was == is_now:
            continue
        said = _SAID.get(part, "{part} was {}, now {}")
        if part in _FUNCTIONS and None in (was, is_now):
            said = "there was no {part}" if was is None else "there was a {part}, now there is none"
        told.append(said.format(_text(was), _text(is_now), part=part))
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
    if texts[0] == texts[1]:  # only a digest differs
        return f"tuned for {texts[0]} with other values in gpus.toml than now"
    return f"tuned for {texts[0]}, now {texts[1]}"


def _runs(devices: Any) -> list[tuple[int, str]] | None:
    if not isinstance(devices, list) or not all(isinstance(run, dict) for run in devices):
        return None
    runs = []
    for run in devices:
        name = _text(run.get("name"))
        if run.get("kind") == "cpu":
            name += f" with {_text(run.get('processors'))} cores ({_text(run.get('architecture'))})"
        elif run.get("kind") == "sim":
            name = f"simulated {name}"
        if run.get("memory_gib") is not None:
            name += f" with {_text(run['memory_gib'])} GiB"
        if isinstance(run.get("capacity_bytes"), int):
            name += f" with {size_text(run['capacity_bytes'])}"
        count = run.get("count")
        runs.append((count if isinstance(count, int) else 0, name))
    return runs


def _of_workload(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    told = []
    changed = [said for part, said in _DIGESTS.items() if before.get(part) != now.get(part)]
    sizes = before.get("parameters"), now["parameters"]
    if sizes[0] != sizes[1] and None not in sizes:
        told.append(f"the model had {_text(sizes[0])} parameters, now {_text(sizes[1])}")
    elif changed:
        told.append(f"the model is different: {' and '.join(changed[:2])} differ")
    same_size = before.get("sample_batch_size") == now.get("sample_batch_size")
    batch = "sample_batch" if same_size else "sample_batch_size"
    # Only some workloads have the last two parts.
    others = ("precision", "loss_reduction", "loss_scope", "batch_dim", "checkpointing")
    return told + _differing((batch, "optimizer", *_FUNCTIONS, *others), before, now)


def _of_request(plan: Plan, machine: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    same_machine = plan.machine.get("devices") == machine.get("devices")
    return _differing((*_ASKED, *(("devices",) if same_machine else ())), plan.request, now)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "something else"
    if isinstance(value, list) and len(value) <= 64:
        return (":" if all(isinstance(item, int) for item in value) else ", ").join(map(_text, value))[:120]
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= 60:
        return value
    return shown(value)
