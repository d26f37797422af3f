"""Save and load the checkpoints of a job: all parts or nothing, on all ranks or on none.

rank 0      collects state dicts -> writes a new file -> reads it back -> replaces the old file
each rank   maps the file -> compares it with model and optimizer -> copies it -> all ranks agree -> loads it

Sharded tensors are gathered one by one in rank 0's host memory. A sharded checkpoint is a folder of
torch.distributed.checkpoint, which any number of ranks can load.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.ddp.checkpoint_file import (
    MODEL,
    content_id,
    digest_of,
    read_file,
    reason_of,
    write_file,
)
from autosplit.ddp.checkpoint_folder import (
    check_records,
    put_in_place,
    read_into,
    refuse_other_files,
    require_folder,
    write_into,
)
from autosplit.ddp.checkpoint_state import (
    fitting,
    is_loadable,
    is_shared_out,
    is_verified,
    placed,
    state_of,
    tensors_in,
    with_tensors,
)
from autosplit.ddp.device import told_by_all
from autosplit.ddp.failure import TOLD_AFTER_S, told_if_long
from autosplit.ddp.sharded_tensors import is_shard, part_of, room_for, whole
from autosplit.errors import CheckpointError

_VALUES = "(values)"
"""The name of all values in a sharded checkpoint that are not tensors. No keyword argument has such a name."""


class CheckpointMethods:
    """Save and load checkpoints on all ranks. `Context` inherits these methods."""

    rank: int

    def save_checkpoint(self, path: str | os.PathLike[str], **parts: Any) -> None:
        """Write a checkpoint on rank 0. The other ranks do nothing, unless a part is sharded.

            ctx.save_checkpoint("last.pt", model=model, optimizer=optimizer, sampler=loader.batch_sampler, step=number)

        Rank 0 writes a new file, reads it back, checks its CRCs (about 1 s per GiB), and then replaces the old file.
        `torch.load` reads the file, too. If `shard` has sharded the model, its tensors are gathered in rank 0's host
        memory, so every rank must call this method. If they do not fit, use `save_sharded`.

        Call it after `optimizer.step()`. A sampler that is saved earlier does not count the current step.

        Args:
            **parts: Objects with a ``state_dict()``, or numbers, strings, tensors, lists and dicts, which are saved
                unchanged. A wrapped model is saved under the names of the plain model.

        Raises:
            CheckpointError: The file was not written, and an earlier file is unchanged. Raised on rank 0, and on all
                ranks if a part is sharded.
        """
        rank = self.rank
        shared = {name: part for name, part in parts.items() if is_shared_out(part)}
        states: dict[str, Any] = {}
        reason = None
        if shared:
            _meet(rank, "save_checkpoint of a sharded model")
            states, reason = _brought_together(shared, rank)
        if rank == 0 and reason is None:
            try:
                state = {name: states[name] if name in states else _kept_of(name, part) for name, part in parts.items()}
                _refuse_shards(state)
                write_file(Path(path), state)
            except Exception as error:
                if not shared:
                    raise CheckpointError(
                        _not_written(path, reason_of(error)), code="checkpoint-not-written"
                    ) from error
                reason = reason_of(error)  # the other ranks wait for it
        told = told_by_all(reason)[0] if shared else None
        if told is not None:
            raise CheckpointError(_not_written(path, told), code="checkpoint-not-written")

    def load_checkpoint(self, path: str | os.PathLike[str], **parts: Any) -> dict[str, Any]:
        """Load a checkpoint on every rank, or on none. Call it on every rank.

            rest = ctx.load_checkpoint("last.pt", model=model, optimizer=optimizer, sampler=loader.batch_sampler)

        Each rank reads the file into its own host memory, checks its CRCs (about 1 s per GiB), and copies to its own
        device. So the file may be overwritten afterwards. No code in the file is executed. Before any part changes, the
        ranks verify every part. Files of plain and wrapped modules also load.

        Args:
            **parts: Objects to load, under the names that they were saved with. A part without a ``load_state_dict``,
                such as a number, must be in the file and is returned, because the caller's variable can't be changed.

        Returns:
            The values in the file that were not loaded into a part.

        Raises:
            CheckpointError: On any rank, the file is missing or damaged, does not fit, or differs from rank 0's file.
                Nothing was changed on any rank.
        """
        rank = self.rank
        _meet(rank, "load_checkpoint")  # rank 0 may still be writing the file

        def read() -> tuple[dict[str, Any], dict[str, Any], str | None]:
            found = read_file(Path(path), only_model=set(parts) == {MODEL})
            fits = {name: fitting(name, part, found) for name, part in parts.items()}
            return found, {name: fits[name] for name in _loadable(parts)}, content_id(Path(path))

        found, fits, content = _together(path, rank, read)
        _compare_contents(path, content, fits)
        states = _together(path, rank, lambda: {name: placed(parts[name], fits[name], _own_part) for name in fits})
        _load_together(path, parts, states, rank)
        # Copy, because `found` is a map of the file, which the caller may overwrite.
        return copy.deepcopy({name: value for name, value in found.items() if name not in states})

    def save_sharded(self, path: str | os.PathLike[str], **parts: Any) -> None:
        """Write each rank's shards into a folder. Call it on every rank.

            ctx.save_sharded("last", model=model, optimizer=optimizer, sampler=loader.batch_sampler, step=number)

        Any number of ranks can load the checkpoint, into models that are sharded, wrapped or plain. An earlier
        checkpoint is replaced when the new one is complete.

        Args:
            path: The folder, on a disk that all ranks share. It may contain nothing else.
            **parts: See `save_checkpoint`.

        Raises:
            CheckpointError: The checkpoint was not written on some rank, and an earlier checkpoint is unchanged.
        """
        rank = self.rank
        folder = Path(path).resolve()
        beside = folder.with_name(f".{folder.name}.part")
        _meet(rank, "save_sharded")
        state, reason = _tried(lambda: _taken_apart(parts), {})
        if rank == 0 and reason is None:
            _, reason = _tried(lambda: refuse_other_files(folder))
            shutil.rmtree(beside, ignore_errors=True)  # a killed process may have left it
        reason = next((text for text in told_by_all(reason) if text is not None), None)
        if reason is None:
            reason = write_into(beside, state)
        if rank == 0:
            reason = reason or put_in_place(beside, folder)
            shutil.rmtree(beside, ignore_errors=True)
        told = told_by_all(reason)[0]
        if told is not None:
            why = _not_written(path, told)
            raise CheckpointError(why, code="checkpoint-sharded-not-written")

    def load_sharded(self, path: str | os.PathLike[str], **parts: Any) -> dict[str, Any]:
        """Load a checkpoint of `save_sharded` on every rank, or on none. Call it on every rank.

            rest = ctx.load_sharded("last", model=model, optimizer=optimizer, sampler=loader.batch_sampler)

        Each rank reads its own shards into host memory. Load only your own checkpoints: torch.distributed.checkpoint
        stores the list of the tensors as a pickle, and loading a pickle executes its code.

        Args:
            **parts: Objects to load, under the names that they were saved with.

        Returns:
            The values in the checkpoint that were not loaded into a part, and are not the state of an object.

        Raises:
            CheckpointError: On any rank, the checkpoint is missing, is damaged or does not fit. Nothing was changed.
        """
        rank = self.rank
        folder = Path(path).resolve()
        _meet(rank, "load_sharded")
        values: dict[str, Any] = {_VALUES: None}
        _together(path, rank, lambda: require_folder(folder))
        digests = told_by_all(_tried(lambda: hashlib.sha256((folder / ".metadata").read_bytes()).hexdigest()))
        others = [str(other) for other, digest in enumerate(digests) if digest != digests[0]]
        if others:
            why = (
                f"Rank {', '.join(others)} and rank 0 see different checkpoints in the folder. Expected one "
                "checkpoint on all ranks. Save to a disk that all machines share"
            )
            raise CheckpointError(_not_loaded(path, why), code="checkpoint-folder-differs")
        _together(path, rank, lambda: check_records(folder, rank))
        _together(path, rank, lambda: read_into(values, folder))
        held, stated = values[_VALUES]
        names = {id(tensor): _name_of(place) for place, tensor in tensors_in(held)}
        room: dict[str, Tensor] = {}

        def make_room(value: Tensor, own: Tensor | None) -> Tensor:
            made = torch.empty_like(value, device="cpu") if own is None else room_for(own, value.dtype)
            return room.setdefault(names[id(value)], made)

        def make_states() -> tuple[dict[str, Any], dict[str, Any]]:
            fits = {name: fitting(name, part, held) for name, part in parts.items()}
            states = {name: placed(parts[name], fits[name], make_room) for name in _loadable(parts)}
            others = {name: value for name, value in held.items() if name not in states and name not in stated}
            return states, with_tensors(others, lambda _, value: make_room(value, None))

        rest: dict[str, Any]
        states, rest = _together(path, rank, make_states)
        _together(path, rank, lambda: read_into(room, folder))
        _load_together(path, parts, states, rank)
        return rest


def _meet(rank: int, what: str) -> None:
    """Wait for all ranks. If this takes `TOLD_AFTER_S`, print which method every rank must call."""
    with told_if_long(
        f"Rank {rank} has waited {TOLD_AFTER_S:.0f} s for the other ranks in {what}. Expected every rank to call "
        "it. Call it outside of `if ctx.rank == 0`."
    ):
        told_by_all(None)


def _not_written(path: str | os.PathLike[str], reason: str) -> str:
    return f"The checkpoint {str(path)!r} was not written. {reason.rstrip('.')}. Any earlier checkpoint is unchanged."


def _not_loaded(path: str | os.PathLike[str], reason: str, place: str = "") -> str:
    return f"The checkpoint {str(path)!r} was not loaded{place}. {reason.rstrip('.')}. Nothing was changed on any rank."


def _kept_of(name: str, part: Any) -> Any:
    try:
        return state_of(part)
    except Exception as error:
        raise CheckpointError(
            f"{name!r} returned no state ({reason_of(error)}). Leave {name}= out",
            code="checkpoint-part-without-state",
        ) from error


def _loadable(parts: Mapping[str, Any]) -> list[str]:
    return [name for name, part in parts.items() if is_loadable(name, part)]


def _compare_contents(path: str | os.PathLike[str], content: str | None, states: Mapping[str, Any]) -> None:
    """Raise CheckpointError on all ranks if they would load different states.

    If the digests of the files differ, compare all tensors of the loaded parts, because a rank's file may have other
    values in addition.
    """
    contents = {*told_by_all(content)}
    if None not in contents and len(contents) == 1:
        return
    everyones = told_by_all({name: digest_of(state) for name, state in states.items()})
    others = {
        rank: names
        for rank, digests in enumerate(everyones)
        if (names := [name for name in digests if digests[name] != everyones[0].get(name)])
    }
    if others:
        held = ", ".join(f"{names} of rank {rank}" for rank, names in others.items())
        why = (
            f"The ranks read different checkpoints, because {held} differ from those of rank 0. Expected one "
            "checkpoint on all ranks. Save to a disk that all machines share, or copy rank 0's file to each machine"
        )
        raise CheckpointError(_not_loaded(path, why), code="checkpoint-differs-between-ranks")


def _load_together(
    path: str | os.PathLike[str], parts: Mapping[str, Any], states: Mapping[str, Any], rank: int
) -> None:
    """Load states. Parts that verify a state only by loading it come first, and are restored if one of them fails."""
    unverified = {name: parts[name] for name in states if not is_verified(parts[name])}
    before: dict[str, Any] = {}

    def load_unverified() -> None:
        try:
            for name, part in unverified.items():
                before[name] = copy.deepcopy(part.state_dict())
                part.load_state_dict(states[name])
        except Exception as error:
            raise CheckpointError(
                f"The load_state_dict() of {[*before][-1]!r} failed ({reason_of(error)})",
                code="checkpoint-part-refuses",
            ) from error

    try:
        _together(path, rank, load_unverified)
    except CheckpointError:
        for name, state in before.items():
            unverified[name].load_state_dict(state)
        raise
    for name, state in states.items():
        if name not in unverified:
            parts[name].load_state_dict(state)


def _tried(call: Callable[[], Any], otherwise: Any = None) -> tuple[Any, str | None]:
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001
        return otherwise, reason_of(error)


def _together(path: str | os.PathLike[str], rank: int, call: Callable[[], Any]) -> Any:
    found, reason = _tried(call)
    reasons = told_by_all(reason)
    failed = {other: text for other, text in enumerate(reasons) if text is not None}
    if not failed:
        return found
    first = rank if rank in failed else min(failed)
    place = f" on rank {first}" if len(reasons) > 1 else ""
    raise CheckpointError(_not_loaded(path, failed[first], place), code="checkpoint-failed-on-rank")


# Sharded tensors in one file


def _brought_together(parts: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], str | None]:
    """Gather the states of sharded parts on rank 0. Return them (elsewhere {}) and the reason of a failure, or None."""
    states, reason = _tried(lambda: {name: state_of(part) for name, part in parts.items()}, {})
    # Check that all ranks have the same shards in the same order. Otherwise the collectives would wait forever.
    shards = [(place, tuple(tensor.shape)) for place, tensor in tensors_in(states) if is_shard(tensor)]
    everyones = told_by_all((reason, shards))
    for other, (text, theirs) in enumerate(everyones):
        if text is not None:
            return {}, text
        if theirs != everyones[0][1]:
            return {}, f"The sharded tensors of rank {other} differ from those of rank 0"
    keep = rank == 0
    gathered = with_tensors(states, lambda _, value: whole(value, keep=keep) if is_shard(value) else value)
    return (gathered if keep else {}), None


def _refuse_shards(state: Mapping[str, Any]) -> None:
    for place, tensor in tensors_in(state):
        if is_shard(tensor):
            raise CheckpointError(
                f"{place[0]!r} has a sharded tensor. Expected sharded tensors in models and optimizers only. Save "
                "it with save_sharded",
                code="checkpoint-part-is-sharded",
            )


def _own_part(value: Tensor, own: Tensor | None) -> Tensor:
    if value.is_meta:
        raise CheckpointError(
            f"A tensor of shape {tuple(value.shape)} is on the meta device, so it has no values. Move the model to a "
            "real device before you save it",
            code="checkpoint-meta-tensor",
        )
    # Copy, because an optimizer on the CPU keeps the tensors that it loads, and `value` is a map of the file.
    return copy.deepcopy(value) if own is None else part_of(value, own)


# Sharded checkpoints


def _taken_apart(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of all tensors by name. All other values are in its entry `_VALUES`."""
    apart: dict[str, Any] = {}

    def take(place: tuple[Any, ...], tensor: Tensor) -> Tensor:
        name = _name_of(place)
        if name in apart:
            raise CheckpointError(
                f"Two tensors have the name {name!r}. Expected different names. Rename one of the two keys",
                code="checkpoint-name-twice",
            )
        apart[name] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    held = {name: with_tensors(_kept_of(name, part), take, (name,)) for name, part in parts.items()}
    return {**apart, _VALUES: (held, [name for name, part in parts.items() if hasattr(part, "state_dict")])}


def _name_of(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place))
