"""Write and read the folder of a sharded checkpoint with torch.distributed.checkpoint, and check its CRCs."""

from __future__ import annotations

import hashlib
import io
import pickle
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autosplit.ddp.checkpoint_file import damage_of, damage_text, disk_failure, failure_text
from autosplit.errors import CheckpointError, one_line


class _Writer(FileSystemWriter):
    def write_data(self, *arguments: Any) -> Any:
        try:
            return super().write_data(*arguments)
        except Exception as error:  # noqa: BLE001
            # The other ranks get a pickle of the exception, which has no cause and no context.
            raise disk_failure(error) or error from None


def write_into(folder: Path, state: dict[str, Any]) -> None:
    """Write a sharded checkpoint on all ranks. Raise CheckpointError on all ranks if it fails on one."""
    # Tensors that every rank has are saved by rank 0, as in a checkpoint of one file. Buffers may differ.
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    try:
        save(state, storage_writer=_Writer(folder), planner=planner)
    except CheckpointException as error:
        why = _failure_text(error, "write", folder, tensors)
        raise CheckpointError(why) from error


def put_in_place(new: Path, folder: Path) -> None:
    """Replace a folder with a new one."""
    old = _earlier(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _earlier(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def refuse_other_files(folder: Path) -> None:
    """Raise CheckpointError if the path is a file, or the folder has files that are no part of a checkpoint."""
    others = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    others = [name for name in others if name != ".metadata" and not name.endswith(".distcp")]
    if folder.is_file() or others:
        found = "The path is a file" if folder.is_file() else f"The folder contains {others[0]!r}, which would be lost"
        raise CheckpointError(f"{found}. Choose a new or empty folder")


def checked(folder: Path, rank: int) -> str:
    """Check this rank's part of the CRCs. Return a digest of the list of tensors.

    Raises:
        CheckpointError: There is no checkpoint in the folder, or it is damaged.
    """
    _require_folder(folder)
    _check_records(folder, rank)
    return hashlib.sha256((folder / ".metadata").read_bytes()).hexdigest()


def _require_folder(folder: Path) -> None:
    if (folder / ".metadata").is_file():
        return
    found = "The path is not a folder with a .metadata file"
    step = "Check that every rank can read it"
    if folder.is_file():
        found, step = "The path is a file", "Use load_checkpoint for a file"
    elif _earlier(folder).is_dir():
        found = "The folder does not exist, but the checkpoint before it does"
        step = f"Rename {str(_earlier(folder))!r} to load that"
    raise CheckpointError(f"{found}. Expected a folder that save_sharded wrote. {step}")


def _check_records(folder: Path, rank: int) -> None:
    """Compare every n-th record with its CRC, so the n ranks together check the whole folder once."""
    try:
        stored = FileSystemReader(folder).read_metadata().storage_data
    except Exception:  # noqa: BLE001  # `read_into` raises the same error
        return
    for index, record in [*stored.items()][rank :: dist.get_world_size()]:
        with suppress(OSError), (folder / record.relative_path).open("rb") as file:
            file.seek(record.offset)
            content = file.read(record.length)
            # torch's loader reports records that are too short or lack the signature of a zip file.
            if len(content) == record.length and content.startswith(b"PK") and damage_of(io.BytesIO(content)):
                why = damage_text(f"{index.fqn!r} in {record.relative_path}")
                raise CheckpointError(why)


def read_into(into: dict[str, Any], folder: Path) -> None:
    """Replace the values of a dict with those of the checkpoint that have the same names."""
    # `load` writes into a copy of `into` that it flattens, unless these are off.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load(into, storage_reader=FileSystemReader(folder), planner=planner)
    except CheckpointException as error:
        failure = _failure_text(error, "read", folder)
        why = f"{failure}. Expected a checkpoint that save_sharded wrote. Load an earlier one"
        raise CheckpointError(why) from error


def _failure_text(
    error: CheckpointException, what: str, folder: Path, tensors: Mapping[str, Tensor] = MappingProxyType({})
) -> str:
    rank, (first, _) = min(error.failures.items())
    if isinstance(first, KeyboardInterrupt):
        raise first from None
    if isinstance(first, OSError):
        text = failure_text(first, folder.parent, tensors)
    else:  # leave out torch's advice to load pickles without restrictions
        text = type(first).__name__ if isinstance(first, pickle.UnpicklingError) else one_line(first)
    return f"Rank {rank} can't {what} its part: {text}"
