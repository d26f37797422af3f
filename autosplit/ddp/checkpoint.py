"""Checkpoints of a job: rank 0 writes them, whole or not at all, and every rank reads them into host memory.

rank 0   state dicts -> a file beside -> read back -> put in its place     | all ranks learn what came of it
each     file, mapped into memory -> held against model and optimizer      | all ranks agree -> loaded, or nothing is

What the ranks have shared out comes together tensor by tensor in rank 0's host memory: the file is that of a plain
model. A sharded checkpoint is a folder of torch.distributed.checkpoint's, which any number of ranks reads.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from autosplit.ddp.checkpoint_state import fitting, is_shared_out, placed, state_of, tensors_in, with_tensors
from autosplit.ddp.failure import TOLD_AFTER_S, told_if_long
from autosplit.ddp.fsdp import is_shard, part_of, room_for, whole
from autosplit.errors import AutosplitError, CheckpointError, first_line, one_line

MODEL = "model"
"""What the state dict of a model is called in a file that holds more."""
_VALUES = "(values)"
"""What a sharded checkpoint calls all that is no tensor; no keyword argument has such a name."""


def save_checkpoint(path: str | os.PathLike[str], parts: Mapping[str, Any], *, rank: int) -> None:
    """Write a checkpoint on rank 0; as `Context.save_checkpoint`."""
    shared = {name: part for name, part in parts.items() if is_shared_out(part)}
    states: dict[str, Any] = {}
    reason = None
    if shared:
        _meet(rank, "save_checkpoint, which keeps what the ranks share out")
        states, reason = _brought_together(shared, rank)
    if rank == 0 and reason is None:
        try:
            state = {name: states[name] if name in states else _kept_of(name, part) for name, part in parts.items()}
            _refuse_shards(state)
            _write_file(Path(path), state)
        except Exception as error:
            if not shared:
                raise CheckpointError(_not_written(path, _reason_of(error))) from error
            reason = _reason_of(error)  # the other ranks wait to hear of it, whatever it is
    told = _told_by_rank_0(reason) if shared else None
    if told is not None:
        raise CheckpointError(_not_written(path, told))


def _meet(rank: int, what: str) -> None:
    """Wait until all ranks are here; say which call it is that every rank has to make, where that takes long."""
    with told_if_long(
        f"rank {rank} has waited {TOLD_AFTER_S:.0f} s for the other ranks in {what}; expected every rank to call it; "
        "call it outside of `if ctx.rank == 0`"
    ):
        _told_by_all(None)


def _not_written(path: str | os.PathLike[str], reason: str) -> str:
    return (
        f"checkpoint {str(path)!r} was not written: {reason}; expected rank 0 to write it and to read it back; "
        "nothing was replaced"
    )


def _kept_of(name: str, part: Any) -> Any:
    try:
        return state_of(part)
    except Exception as error:
        raise CheckpointError(
            f"{name!r} has no state ({_reason_of(error)}); expected one; leave {name}= out"
        ) from error


def load_checkpoint(path: str | os.PathLike[str], parts: Mapping[str, Any], *, rank: int) -> dict[str, Any]:
    """Load a checkpoint on all ranks or on none; as `Context.load_checkpoint`.

    A file that is a model's state dict by itself loads as ``model``.
    """
    _meet(rank, "load_checkpoint")  # rank 0 may have been writing it

    def read() -> tuple[dict[str, Any], dict[str, Any]]:
        found = _read_file(Path(path), only_model=set(parts) == {MODEL})
        return found, {name: placed(part, fitting(name, part, found), _own_part) for name, part in parts.items()}

    (found, states), reason = _tried(read, ({}, {}))
    _raise_together(path, reason, rank)
    for name, part in parts.items():
        part.load_state_dict(states[name])
    return {name: value for name, value in found.items() if name not in parts}


def _tried(call: Callable[[], Any], otherwise: Any = None) -> tuple[Any, str | None]:
    """Return what a call returns, or why it can't: the other ranks wait to hear of it, whatever it is."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001
        return otherwise, _reason_of(error)


def _told_by_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    told = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    return told[0]


def _told_by_all(value: Any) -> list[Any]:
    """Return every rank's value, in the order of the ranks."""
    values = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def _raise_together(path: str | os.PathLike[str], reason: str | None, rank: int) -> None:
    """Raise on all ranks where one of them can't load, for the reason that it gives."""
    reasons = _told_by_all(reason)
    failed = {other: text for other, text in enumerate(reasons) if text is not None}
    if not failed:
        return
    first = rank if rank in failed else min(failed)
    place = f" by rank {first}" if len(reasons) > 1 else ""
    raise CheckpointError(
        f"checkpoint {str(path)!r} was not loaded{place}: {failed[first]}; nothing was changed on any rank"
    )


# What the ranks have shared out


def _brought_together(parts: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], str | None]:
    """Return the whole state of parts on rank 0, nothing on the others, and why it could not be had."""
    states, reason = _tried(lambda: {name: state_of(part) for name, part in parts.items()}, {})
    # In the order in which they will meet: a rank that has others would wait for them for ever.
    shards = [(place, tuple(tensor.shape)) for place, tensor in tensors_in(states) if is_shard(tensor)]
    everyones = _told_by_all((reason, shards))
    for other, (text, theirs) in enumerate(everyones):
        if text is not None:
            return {}, text
        if theirs != everyones[0][1]:
            return {}, f"rank {other} has shared out other tensors than rank 0"
    keep = rank == 0
    gathered = with_tensors(states, lambda _, value: whole(value, keep=keep) if is_shard(value) else value)
    return (gathered if keep else {}), None


def _refuse_shards(state: Mapping[str, Any]) -> None:
    for place, tensor in tensors_in(state):
        if is_shard(tensor):
            raise CheckpointError(
                f"{place[0]!r} keeps a part of a tensor that the ranks share; expected that of models and optimizers "
                "only; write it with save_sharded"
            )


def _own_part(value: Tensor, own: Tensor | None) -> Tensor:
    if value.is_meta:
        raise CheckpointError(
            f"it holds a tensor {tuple(value.shape)} on the meta device, which has no values; expected none; save the "
            "model once it is on a device"
        )
    return value if own is None else part_of(value, own)


# Writing


def _write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a file beside the old one, read it back, and put it in its place."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with beside.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _read_file(beside)
        beside.replace(path)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(_unkept(state, error)) from error
    finally:
        beside.unlink(missing_ok=True)


def _unkept(state: Mapping[str, Any], error: Exception) -> str:
    """Say which part can't be kept, by trying each by itself."""
    for name, value in state.items():
        alone = io.BytesIO()
        try:
            torch.save(value, alone)
            alone.seek(0)
            torch.load(alone, weights_only=True)
        except Exception as found:  # noqa: BLE001  # whatever a part may raise
            return (
                f"{name!r} can't be kept ({_first_line(found)}); expected numbers, strings, tensors, lists and dicts "
                f"of them, or something with a state_dict() of such; leave {name}= out"
            )
    return _reason_of(error)


# Reading


def _read_file(path: Path, *, only_model: bool = False) -> dict[str, Any]:
    """Map a file into memory; where `only_model` is asked for, it may be that one's state dict by itself."""
    if not path.is_file():
        folder = "; load_sharded reads folders" if path.is_dir() else ""
        raise CheckpointError(
            f"{str(path)!r} is no file; expected one that save_checkpoint or torch.save wrote{folder}"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"it holds more than tensors and plain values ({_first_line(error)}); expected numbers, strings, tensors, "
            "and lists and dicts of them; save what else there is in a file of its own"
        ) from error
    except Exception as error:  # a text file is a KeyError to torch, other bytes are other errors
        raise CheckpointError(
            f"it is cut short or no checkpoint at all ({_first_line(error)}); expected what save_checkpoint or "
            "torch.save wrote; take an earlier one"
        ) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it holds a {type(state).__name__}; expected a dict by name")
    is_state = bool(state) and all(isinstance(value, Tensor) for value in state.values())
    return {MODEL: state} if only_model and MODEL not in state and is_state else dict(state)


def _reason_of(error: BaseException) -> str:
    """Say in a line what went wrong."""
    return str(error) if isinstance(error, AutosplitError) else one_line(error)


def _first_line(error: BaseException) -> str:
    """Return the first line of what an exception says; of torch's word on what is not plain, what it names."""
    refused = re.search(
        r"WeightsUnpickler error: (?:Unsupported global: GLOBAL )?([^\n]*?)(?: was not an allowed|\. |\n|$)", str(error)
    )
    if refused:  # before it stand twelve lines on how to load it all the same
        return refused[1]
    return first_line(error).rstrip(".")


# Sharded checkpoints


def save_sharded(path: str | os.PathLike[str], parts: Mapping[str, Any], *, rank: int) -> None:
    """Write a sharded checkpoint; as `Context.save_sharded`."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = Path(path).resolve()
    beside = folder.with_name(f".{folder.name}.part")
    _meet(rank, "save_sharded")
    state, reason = _tried(lambda: _taken_apart(parts), {})
    if rank == 0 and reason is None:
        _, reason = _tried(lambda: _refuse_other_files(folder))
        shutil.rmtree(beside, ignore_errors=True)  # of a process that was ended
    reason = next((text for text in _told_by_all(reason) if text is not None), None)
    if reason is None:
        # What every rank has whole is rank 0's, as in a checkpoint of one file: buffers may differ between ranks.
        planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        reason = _failure_of(lambda: save(state, storage_writer=FileSystemWriter(beside), planner=planner), "write")
    if rank == 0:
        reason = reason or _put_in_place(beside, folder)
        shutil.rmtree(beside, ignore_errors=True)
    told = _told_by_rank_0(reason)
    if told is not None:
        raise CheckpointError(
            f"checkpoint {str(path)!r} was not written: {told}; expected a folder of its own that all ranks write to; "
            "nothing was replaced"
        )


def load_sharded(path: str | os.PathLike[str], parts: Mapping[str, Any], *, rank: int) -> dict[str, Any]:
    """Load a sharded checkpoint; as `Context.load_sharded`."""
    folder = Path(path).resolve()
    _meet(rank, "load_sharded")
    values: dict[str, Any] = {_VALUES: None}
    _raise_together(path, _unreadable(folder), rank)
    _raise_together(path, _failure_to_read(folder, values), rank)
    held, stated = values[_VALUES]
    names = {id(tensor): _name_of(place) for place, tensor in tensors_in(held)}
    room: dict[str, Tensor] = {}

    def make_room(value: Tensor, own: Tensor | None) -> Tensor:
        made = torch.empty_like(value, device="cpu") if own is None else room_for(own, value.dtype)
        return room.setdefault(names[id(value)], made)

    def make_states() -> tuple[dict[str, Any], dict[str, Any]]:
        others = {name: value for name, value in held.items() if name not in parts and name not in stated}
        states = {name: placed(part, fitting(name, part, held), make_room) for name, part in parts.items()}
        return states, with_tensors(others, lambda _, value: make_room(value, None))

    rest: dict[str, Any]
    (states, rest), reason = _tried(make_states, ({}, {}))
    _raise_together(path, reason, rank)
    _raise_together(path, _failure_to_read(folder, room), rank)
    for name, part in parts.items():
        part.load_state_dict(states[name])
    return rest


def _taken_apart(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return each tensor under a name of its own, and beside them all that is none."""
    apart: dict[str, Any] = {}

    def take(place: tuple[Any, ...], tensor: Tensor) -> Tensor:
        name = _name_of(place)
        if name in apart:
            raise CheckpointError(f"two tensors are called {name!r}; expected one; rename a key that leads to it")
        apart[name] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    held = {name: with_tensors(_kept_of(name, part), take, (name,)) for name, part in parts.items()}
    return {**apart, _VALUES: (held, [name for name, part in parts.items() if hasattr(part, "state_dict")])}


def _name_of(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place))


def _refuse_other_files(folder: Path) -> None:
    held = [each.name for each in folder.iterdir()] if folder.exists() else []
    others = [name for name in held if name != ".metadata" and not name.endswith(".distcp")]
    if others:
        raise CheckpointError(f"it holds {others[0]!r}, which would be lost")


def _put_in_place(new: Path, folder: Path) -> str | None:
    """Let a folder take the place of another, and say why it can't."""
    old = _earlier(folder)
    try:
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
    except OSError as error:
        return one_line(error)
    shutil.rmtree(old, ignore_errors=True)
    return None


def _earlier(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _unreadable(folder: Path) -> str | None:
    """Say why a folder is no sharded checkpoint."""
    if (folder / ".metadata").is_file():
        return None
    if folder.is_file():
        return "it is a file; expected a folder that save_sharded wrote; pass it to load_checkpoint"
    if _earlier(folder).is_dir():
        return f"it is missing, and the one before it is {str(_earlier(folder))!r}; rename that to load it"
    return "it is no folder with a .metadata; expected one that save_sharded wrote, which every rank sees"


def _failure_to_read(folder: Path, into: dict[str, Any]) -> str | None:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)  # either loads into a copy
    failure = _failure_of(lambda: load(into, storage_reader=FileSystemReader(folder), planner=planner), "read")
    return failure and f"{failure}; expected what save_sharded wrote; take an earlier one"


def _failure_of(call: Callable[[], object], what: str) -> str | None:
    """Run a call of torch.distributed.checkpoint's on all ranks, and say why any of them could not do it."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        call()
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        if isinstance(first, KeyboardInterrupt):
            raise first from None
        # Torch's advice, to load it with everything that a pickle may do, is none to pass on.
        says = type(first).__name__ if isinstance(first, pickle.UnpicklingError) else one_line(first)
        return f"rank {rank} can't {what} its part: {says}"
    return None
