"""Checkpoints of a job: rank 0 writes them, whole or not at all, and every rank reads them into host memory.

rank 0   state dicts -> a file beside -> read back -> put in its place     | all ranks learn what came of it
each     file, mapped into memory -> held against model and optimizer      | all ranks agree -> loaded, or nothing is
"""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import AutosplitError, CheckpointError, one_line
from autosplit.schedule import ScheduledBatchSampler
from autosplit.states import matching_state_dict

__all__ = ["load_checkpoint", "save_checkpoint"]

MODEL = "model"
"""What the state dict of a model is called in a file that holds more."""

_SHOWN = 5
"""Of names that do not fit, so many are told."""


def save_checkpoint(path: str | os.PathLike[str], parts: Mapping[str, Any], *, rank: int) -> None:
    """Write a checkpoint on rank 0, and let all ranks wait for it.

    Args:
        path: The file; it is replaced once the new one is whole and was read back.
        parts: What has a ``state_dict()`` is kept by that, a wrapped model by that of the model inside; anything else
            as it is: numbers, strings, tensors, and lists and dicts of them.
        rank: Of this process.

    Raises:
        CheckpointError: It can't be written, or could not be read again; on all ranks, and the file is as it was.
    """
    reason = None
    if rank == 0:
        try:
            _write(Path(path), {name: _state_of(part) for name, part in parts.items()})
        except Exception as error:  # noqa: BLE001  # the other ranks wait to hear of it, whatever it is
            reason = _reason(error)
    told = [reason]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise CheckpointError(
            f"checkpoint {str(path)!r} was not written: {told[0]}; expected rank 0 to write it and to read it back; "
            "nothing was replaced"
        )


def load_checkpoint(path: str | os.PathLike[str], parts: Mapping[str, Any], *, rank: int) -> dict[str, Any]:
    """Load a checkpoint into models, optimizers and the like, on all ranks or on none.

    The file is mapped into host memory, from where each rank fills its own device; nothing in it is executed.

    Args:
        path: The file, where every rank's machine sees it.
        parts: What is loaded, under the names that it was saved with; each has a ``load_state_dict()``. Names of a
            model may be those of a plain, wrapped or compiled one. A file that is a model's state dict by itself loads
            as ``model``.
        rank: Of this process.

    Returns:
        What else the file holds.

    Raises:
        CheckpointError: It is missing, cut short, holds more than plain values, or does not fit; on all ranks, and
            nothing was loaded on any.
    """
    found: dict[str, Any] = {}
    states: dict[str, Any] = {}
    reason = None
    try:
        found = _read(Path(path), only_model=set(parts) == {MODEL})
        states = {name: _fitting(name, part, found) for name, part in parts.items()}
    except Exception as error:  # noqa: BLE001  # the other ranks wait to hear of it, whatever it is
        reason = _reason(error)
    _raise_together(path, reason, rank)
    for name, part in parts.items():
        part.load_state_dict(states[name])
    return {name: value for name, value in found.items() if name not in parts}


def _raise_together(path: str | os.PathLike[str], reason: str | None, rank: int) -> None:
    reasons: list[str | None] = [reason]
    if dist.get_world_size() > 1:
        reasons = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
    failed = {other: text for other, text in enumerate(reasons) if text is not None}
    if not failed:
        return
    first = rank if rank in failed else min(failed)
    place = f" by rank {first}" if len(reasons) > 1 else ""
    raise CheckpointError(
        f"checkpoint {str(path)!r} was not loaded{place}: {failed[first]}; nothing was changed on any rank"
    )


# Writing


def _state_of(part: Any) -> Any:
    if isinstance(part, DistributedDataParallel):
        part = part.module  # named as a plain model's, for whoever loads it
    return part.state_dict() if hasattr(part, "state_dict") else part


def _write(path: Path, state: dict[str, Any]) -> None:
    """Write a file beside the old one, read it back, and put it in its place."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with beside.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _read(beside, only_model=False)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


# Reading


def _read(path: Path, *, only_model: bool) -> dict[str, Any]:
    """Map a file into memory."""
    if not path.is_file():
        raise CheckpointError(f"{str(path)!r} is no file; expected one that save_checkpoint or torch.save wrote")
    try:
        state = _mapped(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"it holds more than tensors and plain values ({_first_line(error)}); expected numbers, strings, tensors, "
            "and lists and dicts of them; save what else there is in a file of its own"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise CheckpointError(
            f"it is cut short or no checkpoint at all ({_first_line(error)}); expected what save_checkpoint or "
            "torch.save wrote; take an earlier one"
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it holds a {type(state).__name__}; expected a dict by name")
    is_state = bool(state) and all(isinstance(value, Tensor) for value in state.values())
    return {MODEL: state} if only_model and MODEL not in state and is_state else dict(state)


def _mapped(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used with files saved with" not in str(error):
            raise
    return torch.load(path, map_location="cpu", weights_only=True)  # from before torch 1.6, which can't be mapped


def _fitting(name: str, part: Any, found: Mapping[str, Any]) -> Any:
    """Return the state of a part, under the part's own names, where it fits."""
    if name not in found:
        raise CheckpointError(
            f"it holds {', '.join(map(repr, found)) or 'nothing'}; expected {name!r} as well; leave {name}= out, or "
            "load the file that has it"
        )
    state = found[name]
    if isinstance(part, nn.Module):
        state = matching_state_dict(part, state)
        _require_fit(name, part, state)
    elif isinstance(part, torch.optim.Optimizer):
        _require_groups(name, part, state)
    elif isinstance(part, ScheduledBatchSampler):
        part.check_state_dict(state)
    return state


def _require_fit(name: str, module: nn.Module, state: Mapping[str, Any]) -> None:
    own = module.state_dict(keep_vars=True)
    shapes = {key: value.shape for key, value in own.items() if isinstance(value, Tensor)}
    given = {key: value.shape for key, value in state.items() if isinstance(value, Tensor)}
    wrong = [key for key in shapes if key in given and shapes[key] != given[key]]
    for says, keys in (
        ("lacks", [key for key in own if key not in state]),
        ("has in addition", [key for key in state if key not in own]),
        ("has in another shape", [f"{key} {tuple(given[key])} for {tuple(shapes[key])}" for key in wrong]),
    ):
        if keys:
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            raise CheckpointError(
                f"{name!r} is of another model: it {says} {', '.join(keys[:_SHOWN])}{more}; expected the very names "
                "and shapes; build the model as it was when it was saved"
            )


def _require_groups(name: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    own = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups] if isinstance(groups, list) else None
    if own != theirs:
        raise CheckpointError(
            f"{name!r} is of another optimizer: its groups hold {theirs} parameters; expected {own}; make the "
            "optimizer of the same parameters as when it was saved"
        )


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, AutosplitError) else one_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
