"""Sharded checkpoints: a folder into which every rank writes its own part, and which any number of ranks reads.

    last/checkpoint.pt        values, and the names of the tensors; says which folder has them; replaced at the end
    last/tensors-1f0c9a7e/    .metadata, __0_0.distcp of rank 0, __1_0.distcp of rank 1: torch.distributed.checkpoint

A write makes a folder of its own. Replacing the one small file is what makes it the checkpoint; until then, and
whatever happens, the earlier one stands. Folders that no file names are removed by the next write.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autosplit.ddp.checkpoint import (
    meet,
    raise_together,
    read_file,
    reason_of,
    told_by_all,
    told_by_rank_0,
    write_file,
)
from autosplit.ddp.checkpoint_state import fitting, placed, state_of, with_tensors
from autosplit.ddp.fsdp import room_for
from autosplit.ddp.sharded_metadata import Reader, Writer, read_metadata
from autosplit.errors import CheckpointError, one_line

__all__ = ["load_sharded", "save_sharded"]

_FILE = "checkpoint.pt"
_FOLDER = re.compile(r"tensors-[0-9a-f]{8}")
_KEYS = {"format", "folder", "values", "stated", "tensors", "kinds"}
_FORMAT = "autosplit sharded checkpoint 2"


def save_sharded(path: str | os.PathLike[str], parts: Mapping[str, Any], *, rank: int) -> None:
    """Let every rank write its part of a checkpoint; all of them call it.

    Args:
        path: The folder, which all ranks see; it is made where it is not there, and what else is in it stays.
        parts: As for `save_checkpoint`.
        rank: Of this process.

    Raises:
        CheckpointError: A rank could not write, on all ranks; the earlier checkpoint is as it was.
    """
    meet(rank, "save_sharded")
    state: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    folder = ""
    reason = None
    try:
        state, tensors = _taken_apart({name: state_of(part) for name, part in parts.items()})
        state["stated"] = [name for name, part in parts.items() if hasattr(part, "state_dict")]
        if rank == 0:
            folder = f"tensors-{secrets.token_hex(4)}"
            (Path(path) / folder).mkdir(parents=True)
    except Exception as error:  # noqa: BLE001  # the other ranks wait to hear of it, whatever it is
        reason = reason_of(error)
    everyones = told_by_all((reason, folder))
    reason = next((text for text, _ in everyones if text is not None), None)
    new = Path(path) / (everyones[0][1] or "tensors-none")
    try:
        if reason is None:
            reason = _written(new, tensors)
        if rank == 0 and reason is None:
            reason = _made_current(Path(path), {**state, "folder": new.name})
    finally:
        if rank == 0 and not _is_current(new):
            shutil.rmtree(new, ignore_errors=True)
    told = told_by_rank_0(reason)
    if told is not None:
        raise CheckpointError(
            f"checkpoint {str(path)!r} was not written: {told}; expected a folder that all ranks write to; nothing was "
            "replaced"
        )


def load_sharded(path: str | os.PathLike[str], parts: Mapping[str, Any], *, rank: int) -> dict[str, Any]:
    """Load a sharded checkpoint, on all ranks or on none; all of them call it.

    Each rank reads its part into host memory, whatever number of ranks wrote it, and nothing in the files is executed.

    Args:
        path: The folder, which all ranks see.
        parts: What is loaded, under the names that it was saved with, into models that are shared out or not.
        rank: Of this process.

    Returns:
        What else it holds, apart from the states of models and the like, which are not read unless asked for.

    Raises:
        CheckpointError: It is missing, cut short, holds more than plain values, or does not fit; on all ranks, and
            nothing was loaded on any.
    """
    meet(rank, "load_sharded")
    states: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    room: dict[str, Tensor] = {}
    reader = None
    reason = None
    try:
        state, reader = _opened(Path(path))
        held, names = _put_together(state, reader.read_metadata())
        rest = {name: value for name, value in held.items() if name not in parts and name not in state["stated"]}

        def make_room(value: Tensor, own: Tensor | None) -> Tensor:
            made = torch.empty_like(value, device="cpu") if own is None else room_for(own, value.dtype)
            return room.setdefault(names[id(value)], made)

        states = {name: placed(part, fitting(name, part, held), make_room) for name, part in parts.items()}
        rest = with_tensors(rest, lambda _, value: make_room(value, None))
    except Exception as error:  # noqa: BLE001  # the other ranks wait to hear of it, whatever it is
        reason = reason_of(error)
    raise_together(path, reason, rank)
    assert reader is not None, "or there were a reason"
    raise_together(path, _read_into(room, reader), rank)
    for name, part in parts.items():
        part.load_state_dict(states[name])
    return rest


# Writing


def _taken_apart(states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Part a state into what is said of it in one file, and its tensors, each under a name of its own."""
    tensors: dict[str, Tensor] = {}
    places: dict[str, list[Any]] = {}
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

    def keep(place: tuple[Any, ...], tensor: Tensor) -> None:
        name = ".".join(map(str, place))
        while name in tensors:
            name += "_"
        tensors[name], places[name] = tensor.detach(), list(place)
        kinds[name] = tensor.dtype, tuple(tensor.shape)

    values = with_tensors(states, keep)
    return {"format": _FORMAT, "values": values, "tensors": places, "kinds": kinds}, tensors


def _written(folder: Path, tensors: dict[str, Tensor]) -> str | None:
    """Write this rank's tensors, and say why any rank could not."""
    # What every rank has whole is rank 0's, as in a checkpoint of one file: buffers may differ between ranks.
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    try:
        save(dict(tensors), storage_writer=Writer(folder), planner=planner)
    except CheckpointException as error:
        return _reason_of_any(error, "write")
    return None


def _made_current(path: Path, state: dict[str, Any]) -> str | None:
    """Make the folder that was written the checkpoint, on rank 0, if all of it is there."""
    try:
        read_metadata(path / state["folder"])
        write_file(path / _FILE, state)
        for other in path.iterdir():
            if _FOLDER.fullmatch(other.name) and other.name != state["folder"]:
                shutil.rmtree(other, ignore_errors=True)
    except Exception as error:  # noqa: BLE001  # the other ranks wait to hear of it, whatever it is
        return reason_of(error)
    return None


def _is_current(folder: Path) -> bool:
    try:
        return bool(read_file(folder.parent / _FILE).get("folder") == folder.name)
    except CheckpointError:
        return False


# Reading


def _opened(path: Path) -> tuple[dict[str, Any], Reader]:
    """Read what a checkpoint says it holds, and make sure that it is there."""
    if path.is_file():
        raise CheckpointError("it is a file; expected a folder that save_sharded wrote; pass it to load_checkpoint")
    state = read_file(path / _FILE)
    if state.get("format") != _FORMAT or set(state) != _KEYS or not _FOLDER.fullmatch(str(state["folder"])):
        raise CheckpointError(f"{_FILE} in it is something else; expected a folder that this save_sharded wrote")
    folder = path / state["folder"]
    metadata = read_metadata(folder)
    _require_tensors(state, metadata)
    return state, Reader(folder, metadata)


def _require_tensors(state: Mapping[str, Any], metadata: Metadata) -> None:
    """Make sure that both files speak of the same tensors."""
    unsaid = sorted(state["tensors"].keys() ^ state["kinds"].keys())
    if unsaid:
        raise CheckpointError(f"{_FILE} in it says no place or no dtype of {unsaid[0]!r}; take an earlier checkpoint")
    for name, kind in state["kinds"].items():
        known: Any = metadata.state_dict_metadata.get(name)
        if known is None:
            raise CheckpointError(f"{state['folder']} in it lacks the tensor {name!r}; take an earlier checkpoint")
        found = known.properties.dtype, tuple(known.size)
        if found != kind:
            raise CheckpointError(
                f"{state['folder']} in it has {name!r} as {found[0]} {found[1]}; expected {kind[0]} {kind[1]}, as "
                f"{_FILE} says; take an earlier checkpoint"
            )


def _put_together(state: Mapping[str, Any], metadata: Metadata) -> tuple[dict[str, Any], dict[int, str]]:
    """Return the state with tensors that have a shape and no values, and which names these have."""
    held: dict[str, Any] = state["values"]
    names: dict[int, str] = {}
    for name, place in state["tensors"].items():
        known: Any = metadata.state_dict_metadata[name]
        tensor = torch.empty(known.size, dtype=known.properties.dtype, device="meta")
        names[id(tensor)] = name
        _put(held, place, tensor)
    return held, names


def _put(held: Any, place: list[Any], tensor: Tensor) -> Any:
    """Put a tensor where it was taken from; tuples are made anew on the way."""
    if not place:
        if held is not None:
            raise CheckpointError(f"{_FILE} in it has two values for one place; take an earlier checkpoint")
        return tensor
    key, *inner = place
    if isinstance(held, tuple):
        return (*held[:key], _put(held[key], inner, tensor), *held[key + 1 :])
    held[key] = _put(held[key], inner, tensor)
    return held


def _read_into(room: dict[str, Tensor], reader: Reader) -> str | None:
    """Read this rank's tensors, and say why any rank could not."""
    try:
        load(dict(room), storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False))
    except CheckpointException as error:
        return _reason_of_any(error, "read")
    return None


def _reason_of_any(error: CheckpointException, what: str) -> str:
    rank, (first, _) = min(error.failures.items())
    if isinstance(first, KeyboardInterrupt):
        raise first
    # Torch's advice, to load it with everything that a pickle may do, is none to pass on.
    says = type(first).__name__ if isinstance(first, pickle.UnpicklingError) else one_line(first)
    return f"rank {rank} can't {what} its tensors: {says}"
