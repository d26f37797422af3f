"""Write checkpoint files atomically, read them through a memory map, and check their CRCs."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.ddp.checkpoint_state import tensors_in
from autosplit.errors import AutosplitError, CheckpointError, causes_of, first_line, one_line
from autosplit.text import size_text

MODEL = "model"
"""The name of a model's state dict in a file that contains several parts."""


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint to a new file, read it back, and replace the old file with it.

    If the path is a symbolic link, its target is replaced.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.part")
    partial.unlink(missing_ok=True)  # a killed process may have left it
    try:
        with partial.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        read_file(partial)
        partial.replace(target)
    except Exception as error:
        failure = disk_failure(error)
        why = _unsaved(state, error) if failure is None else failure_text(failure, target.parent, state)
        raise CheckpointError(why) from error
    finally:
        with suppress(OSError):  # the disk may be gone
            partial.unlink(missing_ok=True)


def disk_failure(error: BaseException) -> OSError | None:
    """Return the OSError of a failed write, or None. torch raises a RuntimeError while it handles the OSError."""
    return next((link for link in causes_of(error, contexts=True) if isinstance(link, OSError)), None)


def failure_text(failure: OSError, folder: Path, tensors: Mapping[str, Any]) -> str:
    """Describe why `tensors` could not be written to `folder`."""
    limits = {errno.ENOSPC: "The disk is full", errno.EDQUOT: "The disk quota is used up"}
    if failure.errno not in limits:
        return one_line(failure)
    needed = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_in(dict(tensors)))
    return (
        f"{limits[failure.errno]}. The tensors take {size_text(needed)}, and {str(folder)!r} has "
        f"{size_text(shutil.disk_usage(folder).free)} free next to the unfinished checkpoint. Free some space, or "
        "save to another disk"
    )


def _unsaved(state: Mapping[str, Any], error: Exception) -> str:
    for name, value in state.items():
        alone = io.BytesIO()
        try:
            torch.save(value, alone)
            alone.seek(0)
            torch.load(alone, weights_only=True)
        except Exception as found:  # noqa: BLE001  # a part may raise anything
            return (
                f"{name!r} can't be saved ({_first_line(found)}). Expected numbers, strings, tensors, lists and "
                f"dicts of these, or an object whose state_dict() contains only these. Leave {name}= out"
            )
    return reason_of(error)


def read_file(path: Path, *, only_model: bool = False) -> dict[str, Any]:
    """Map a checkpoint into memory and check its CRCs, which takes about 1 s per GiB.

    Args:
        only_model: Whether the file may be the state dict of a model, without a name.
    """
    if not path.is_file():
        folder = ". Use load_sharded for a folder" if path.is_dir() else ""
        why = f"{str(path)!r} is not a file. Expected a file that save_checkpoint or torch.save wrote{folder}"
        raise CheckpointError(why)
    damaged = damage_of(path) if zipfile.is_zipfile(path) else None
    if damaged is not None:
        raise CheckpointError(damage_text(f"Its record {damaged!r}"))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises KeyError for a text file, other errors for other bytes
        found = "contains objects other than tensors and plain values"
        if not isinstance(error, pickle.UnpicklingError):
            found = "is incomplete or not a checkpoint"
        why = (
            f"The file {found} ({_first_line(error)}). Expected a file that save_checkpoint or torch.save wrote, with "
            "numbers, strings, tensors, and lists and dicts of these. Load an earlier checkpoint"
        )
        raise CheckpointError(why) from error
    if not isinstance(state, Mapping):
        why = f"The file contains a {type(state).__name__}. Expected a dict with one entry for each named part"
        raise CheckpointError(why)
    is_state = bool(state) and all(isinstance(value, Tensor) for value in state.values())
    return {MODEL: state} if only_model and MODEL not in state and is_state else dict(state)


def damage_of(file: Path | io.BytesIO) -> str | None:
    """Compare the records of a torch file with their CRCs. Return the name of the first damaged record, or None.

    torch.serialization.set_crc32_options(False) writes 0 for every CRC. Such a file can't be checked.
    """
    try:
        with zipfile.ZipFile(file) as records:
            damaged = records.testzip() if any(record.CRC for record in records.infolist()) else None
            return None if damaged is None else damaged.partition("/")[2] or damaged
    except Exception as error:  # noqa: BLE001  # a flipped bit may mean encryption, compression, or no zip file
        return f"directory ({first_line(error)})"


def damage_text(record: str) -> str:
    """Describe a record whose CRC differs."""
    return (
        f"{record} does not match its checksum (CRC-32). The disk or a copy has damaged the file. Load an earlier "
        "checkpoint, or copy this one again"
    )


def reason_of(error: BaseException) -> str:
    """Return a one-line description of what went wrong."""
    return str(error) if isinstance(error, AutosplitError) else one_line(error)


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception. If torch refused to unpickle a name, return the name."""
    refused = re.search(
        r"WeightsUnpickler error: (?:Unsupported global: GLOBAL )?([^\n]*?)(?: was not an allowed|\. |\n|$)", str(error)
    )
    if refused:  # skip 12 lines, where torch suggests weights_only=False
        return refused[1]
    return first_line(error).rstrip(".")
