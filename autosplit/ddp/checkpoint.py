"""Save and load the checkpoints of a job: all parts or nothing, on all ranks or on none.

rank 0      collects state dicts -> writes a new file -> reads it back -> replaces the old file
each rank   maps the file -> compares it with model and optimizer -> copies it -> all ranks agree -> loads it

Sharded tensors are gathered one by one in rank 0's host memory. A sharded checkpoint is a folder of
torch.distributed.checkpoint, which any number of ranks can load.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.ddp.checkpoint_file import MODEL, read_file, reason_of, write_file
from autosplit.ddp.checkpoint_state import (
    digest_of,
    fitting,
    has_shards,
    is_loadable,
    is_verified,
    placed,
    state_of,
    tensors_in,
    with_tensors,
)
from autosplit.ddp.device import gathered_objects
from autosplit.ddp.sharded_tensors import is_shard, part_of, room_for, whole
from autosplit.errors import CheckpointError

_VALUES = "(values)"
"""The name of all values in a sharded checkpoint that are not tensors. No keyword argument has such a name."""
_WRITTEN = ("written", "Any earlier checkpoint is unchanged")
_LOADED = ("loaded", "Nothing was changed on any rank")


class CheckpointMethods:
    """Save and load checkpoints on all ranks. `Context` inherits these methods."""

    rank: int
    world_size: int

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
        shared = any(map(has_shards, parts.values()))
        if self.rank and not shared:
            return
        together = partial(_together, path, self.rank, _WRITTEN, exchange=shared)
        states = together(lambda: {name: state_of(name, part) for name, part in parts.items()})
        states = together(lambda: _gathered(states, keep=self.rank == 0) if shared else _without_shards(states))
        together(lambda: None if self.rank else write_file(Path(path), states))

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
        gathered_objects(None)  # rank 0 may still be writing the file
        together = partial(_together, path, self.rank, _LOADED)
        found = together(lambda: read_file(Path(path), only_model=set(parts) == {MODEL}))
        fits = together(lambda: _fitting(parts, found))
        if self.world_size > 1:
            digests = gathered_objects(together(lambda: {name: digest_of(state) for name, state in fits.items()}))
            together(lambda: _require_equal(digests))
        states = together(lambda: {name: placed(parts[name], fits[name], _own_part) for name in fits})
        _load_together(together, parts, states)
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
        from autosplit.ddp import checkpoint_folder as folders

        folder = Path(path).resolve()
        partial_folder = folder.with_name(f".{folder.name}.part")
        together = partial(_together, path, self.rank, _WRITTEN)
        state = together(lambda: _taken_apart(parts))
        if self.rank == 0:
            shutil.rmtree(partial_folder, ignore_errors=True)  # a killed process may have left it
        together(lambda: None if self.rank else folders.refuse_other_files(folder))
        try:
            together(lambda: folders.write_into(partial_folder, state))
            together(lambda: None if self.rank else folders.put_in_place(partial_folder, folder))
        finally:
            if self.rank == 0:
                shutil.rmtree(partial_folder, ignore_errors=True)

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
        from autosplit.ddp import checkpoint_folder as folders

        folder = Path(path).resolve()
        gathered_objects(None)  # rank 0 may still be renaming the folder
        together = partial(_together, path, self.rank, _LOADED)
        digests = gathered_objects(together(lambda: {".metadata": folders.checked(folder, self.rank)}))
        together(lambda: _require_equal(digests))
        values: dict[str, Any] = {_VALUES: None}
        together(lambda: folders.read_into(values, folder))
        held, stated = values[_VALUES]
        names = {id(tensor): _name_of(place) for place, tensor in tensors_in(held)}
        room: dict[str, Tensor] = {}

        def make_room(value: Tensor, own: Tensor | None) -> Tensor:
            made = torch.empty_like(value, device="cpu") if own is None else room_for(own, value.dtype)
            return room.setdefault(names[id(value)], made)

        fits = together(lambda: _fitting(parts, held))
        states = together(lambda: {name: placed(parts[name], fits[name], make_room) for name in fits})
        others = {name: value for name, value in held.items() if name not in states and name not in stated}
        rest: dict[str, Any] = with_tensors(others, lambda _, value: make_room(value, None))
        together(lambda: folders.read_into(room, folder))
        _load_together(together, parts, states)
        return rest


def _together(
    path: str | os.PathLike[str],
    rank: int,
    outcome: tuple[str, str],
    call: Callable[[], Any],
    *,
    exchange: bool = True,
) -> Any:
    """Return the result of a call. If the call fails on a rank, raise CheckpointError on all ranks."""
    found, failure = None, None
    try:
        found = call()
    except Exception as error:  # noqa: BLE001  # the other ranks wait for it
        failure = error
    reason = None if failure is None else reason_of(failure)
    reasons = gathered_objects(reason) if exchange else [reason]
    failed = {other: text for other, text in enumerate(reasons) if text is not None}
    if not failed:
        return found
    first = rank if rank in failed else min(failed)
    place = f" on rank {first}" if len(failed) < len(reasons) else ""
    did, state = outcome
    why = f"The checkpoint {str(path)!r} was not {did}{place}. {failed[first].rstrip('.')}. {state}."
    raise CheckpointError(why) from failure


def _require_equal(digests: list[dict[str, str]]) -> None:
    """Raise CheckpointError if the ranks would load different states, given every rank's digests."""
    for rank, theirs in enumerate(digests):
        names = [name for name in theirs if theirs[name] != digests[0].get(name)]
        if names:
            raise CheckpointError(
                f"The ranks read different checkpoints, because {names} of rank {rank} differ from those of rank 0. "
                "Expected one checkpoint on all ranks. Save to a disk that all machines share, or copy rank 0's "
                "checkpoint to each machine",
            )


def _fitting(parts: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    fits = {name: fitting(name, part, found) for name, part in parts.items()}
    return {name: fits[name] for name, part in parts.items() if is_loadable(name, part)}


def _load_together(
    together: Callable[[Callable[[], None]], Any], parts: Mapping[str, Any], states: Mapping[str, Any]
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
            why = f"The load_state_dict() of {[*before][-1]!r} failed ({reason_of(error)})"
            raise CheckpointError(why) from error

    try:
        together(load_unverified)
    except CheckpointError:
        for name, state in before.items():
            unverified[name].load_state_dict(state)
        raise
    for name, state in states.items():
        if name not in unverified:
            parts[name].load_state_dict(state)


def _own_part(value: Tensor, own: Tensor | None) -> Tensor:
    if value.is_meta:
        raise CheckpointError(
            f"A tensor of shape {tuple(value.shape)} is on the meta device, so it has no values. Move the model to a "
            "real device before you save it",
        )
    # Copy, because an optimizer on the CPU keeps the tensors that it loads, and `value` is a map of the file.
    return copy.deepcopy(value) if own is None else part_of(value, own)


def _gathered(states: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """Gather sharded tensors one by one. Return the whole states if `keep` is true, otherwise {}."""
    # Check that all ranks have the same shards in the same order. Otherwise the collectives would wait forever.
    shards = [(place, tuple(tensor.shape)) for place, tensor in tensors_in(states) if is_shard(tensor)]
    for rank, theirs in enumerate(everyones := gathered_objects(shards)):
        if theirs != everyones[0]:
            why = f"The sharded tensors of rank {rank} differ from those of rank 0"
            raise CheckpointError(why)
    found = with_tensors(states, lambda _, value: whole(value, keep=keep) if is_shard(value) else value)
    return found if keep else {}


def _without_shards(states: dict[str, Any]) -> dict[str, Any]:
    for place, tensor in tensors_in(states):
        if is_shard(tensor):
            why = (
                f"{place[0]!r} has a sharded tensor. Expected sharded tensors in models and optimizers only. Save it "
                "with save_sharded"
            )
            raise CheckpointError(why)
    return states


def _taken_apart(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of all tensors by name. All other values are in its entry `_VALUES`."""
    apart: dict[str, Any] = {}

    def take(place: tuple[Any, ...], tensor: Tensor) -> Tensor:
        name = _name_of(place)
        if name in apart:
            why = f"Two tensors have the name {name!r}. Expected different names. Rename one of the two keys"
            raise CheckpointError(why)
        apart[name] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    held = {name: with_tensors(state_of(name, part), take, (name,)) for name, part in parts.items()}
    return {**apart, _VALUES: (held, [name for name, part in parts.items() if hasattr(part, "state_dict")])}


def _name_of(place: tuple[Any, ...]) -> str:
    return ".".join(map(str, place))
