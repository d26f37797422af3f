"""Write and read the folder of a sharded checkpoint with torch.distributed.checkpoint, and check its CRCs."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch import distributed as dist

from autosplit.ddp.checkpoint_file import damage_of, disk_failure, failure_text
from autosplit.errors import CheckpointError, one_line


def check_records(folder: Path, rank: int) -> None:
    """Compare every n-th record with its CRC, so the n ranks together check the whole folder once."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

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
                raise CheckpointError(
                    f"{index.fqn!r} in {record.relative_path} does not match its checksum (CRC-32). The disk or a "
                    "copy has damaged the file. Load an earlier checkpoint, or copy this one again",
                    code="checkpoint-record-damaged",
                )


def refuse_other_files(folder: Path) -> None:
    """Raise CheckpointError if the path is a file, or the folder has files that are no part of a checkpoint."""
    if folder.is_file():
        raise CheckpointError(
            "The path is a file. Expected a folder. Choose another name, or save a file with save_checkpoint",
            code="checkpoint-other-files",
        )
    held = [each.name for each in folder.iterdir()] if folder.exists() else []
    others = [name for name in held if name != ".metadata" and not name.endswith(".distcp")]
    if others:
        raise CheckpointError(
            f"The folder contains {others[0]!r}, which would be lost. Choose a new or empty folder",
            code="checkpoint-other-files",
        )


def write_into(folder: Path, state: dict[str, Any]) -> str | None:
    """Write a sharded checkpoint on all ranks. Return the reason of a failure, or None."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Writer(FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            try:
                return super().write_data(*arguments)
            except Exception as error:  # noqa: BLE001
                # The other ranks get a pickle of the exception, which has no cause and no context.
                raise disk_failure(error) or error from None

    # Tensors that every rank has are saved by rank 0, as in a checkpoint of one file. Buffers may differ.
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return _failure_of(lambda: save(state, storage_writer=Writer(folder), planner=planner), "write", folder, tensors)


def put_in_place(new: Path, folder: Path) -> str | None:
    """Replace a folder with a new one. Return the reason of a failure, or None."""
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


def require_folder(folder: Path) -> None:
    """Raise CheckpointError if there is no checkpoint in the folder."""
    if (folder / ".metadata").is_file():
        return
    if folder.is_file():
        found = "The path is a file. Expected a folder that save_sharded wrote. Use load_checkpoint for a file"
    elif _earlier(folder).is_dir():
        found = (
            f"The folder does not exist, but the checkpoint before it does. Rename {str(_earlier(folder))!r} to "
            "load that"
        )
    else:
        found = (
            "The path is not a folder with a .metadata file. Expected a folder that save_sharded wrote and that every "
            "rank can read"
        )
    raise CheckpointError(found, code="checkpoint-no-folder")


def read_into(into: dict[str, Any], folder: Path) -> None:
    """Replace the values of a dict with those of the checkpoint that have the same names."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    planner = DefaultLoadPlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False
    )  # `load` writes into a copy of `into`
    reader = FileSystemReader(folder)
    failure = _failure_of(lambda: load(into, storage_reader=reader, planner=planner), "read", folder)
    if failure:
        raise CheckpointError(
            f"{failure}. Expected a checkpoint that save_sharded wrote. Load an earlier one",
            code="checkpoint-folder-unreadable",
        )


def _failure_of(
    call: Callable[[], object], what: str, folder: Path, tensors: Mapping[str, Tensor] = MappingProxyType({})
) -> str | None:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        call()
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        if isinstance(first, KeyboardInterrupt):
            raise first from None
        if isinstance(first, OSError):
            says = failure_text(first, folder.parent, tensors)
        else:  # leave out torch's advice to load pickles without restrictions
            says = type(first).__name__ if isinstance(first, pickle.UnpicklingError) else one_line(first)
        return f"Rank {rank} can't {what} its part: {says}"
    return None
