"""Write checkpoint files atomically, read them through a memory map, and check their CRCs."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.ddp.checkpoint_state import tensors_in, with_tensors
from autosplit.errors import AutosplitError, CheckpointError, causes_of, first_line, one_line
from autosplit.text import size_text

MODEL = "model"
"""The name of a model's state dict in a file that contains several parts."""


# Writing


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint to a new file, read it back, and replace the old file with it.

    If the path is a symbolic link, its target is replaced.
    """
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.part")
    beside.unlink(missing_ok=True)
    try:
        with beside.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        read_file(beside)
        beside.replace(target)
    except Exception as error:
        failure = disk_failure(error)
        if failure is not None:
            why = failure_text(failure, target.parent, state)
            raise CheckpointError(why, code="checkpoint-not-written") from error
        raise CheckpointError(_unkept(state, error), code="checkpoint-value-not-kept") from error
    finally:
        with suppress(OSError):  # the disk may be gone
            beside.unlink(missing_ok=True)


def disk_failure(error: BaseException) -> OSError | None:
    """Return the OSError of a failed write, or None. torch raises a RuntimeError while it handles the OSError."""
    return next((link for link in causes_of(error, contexts=True) if isinstance(link, OSError)), None)


def failure_text(failure: OSError, folder: Path, tensors: Mapping[str, Any]) -> str:
    """Describe why `tensors` could not be written to `folder`."""
    if failure.errno not in (errno.ENOSPC, errno.EDQUOT):
        return one_line(failure)
    needed = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_in(dict(tensors)))
    free = size_text(shutil.disk_usage(folder).free)
    limit = "The disk is full" if failure.errno == errno.ENOSPC else "The disk quota is used up"
    return (
        f"{limit}. The tensors take {size_text(needed)}, and {str(folder)!r} has {free} free next to the unfinished "
        "checkpoint. Free some space, or save to another disk"
    )


def _unkept(state: Mapping[str, Any], error: Exception) -> str:
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


# Reading


def read_file(path: Path, *, only_model: bool = False) -> dict[str, Any]:
    """Map a checkpoint into memory and check its CRCs, which takes about 1 s per GiB.

    Args:
        only_model: Whether the file may be the state dict of a model, without a name.
    """
    if not path.is_file():
        folder = ". Use load_sharded for a folder" if path.is_dir() else ""
        raise CheckpointError(
            f"{str(path)!r} is not a file. Expected a file that save_checkpoint or torch.save wrote{folder}",
            code="checkpoint-missing",
        )
    damaged = damage_of(path) if zipfile.is_zipfile(path) else None
    if damaged is not None:
        raise CheckpointError(
            f"Its record {damaged.partition('/')[2] or damaged!r} does not match its checksum (CRC-32). The disk or "
            "a copy has damaged the file. Load an earlier checkpoint, or copy this one again",
            code="checkpoint-damaged",
        )
    state = _loaded(path)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"The file contains a {type(state).__name__}. Expected a dict with one entry for each named part",
            code="checkpoint-not-a-dict",
        )
    is_state = bool(state) and all(isinstance(value, Tensor) for value in state.values())
    return {MODEL: state} if only_model and MODEL not in state and is_state else dict(state)


def _loaded(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises KeyError for a text file, other errors for other bytes
        if isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"The file contains objects other than tensors and plain values ({_first_line(error)}). Expected "
                "numbers, strings, tensors, and lists and dicts of these. Save other objects in another file",
                code="checkpoint-unsafe-values",
            ) from error
        raise CheckpointError(
            f"The file is incomplete or not a checkpoint ({_first_line(error)}). Expected a file that save_checkpoint "
            "or torch.save wrote. Load an earlier checkpoint",
            code="checkpoint-cut-short",
        ) from error


def damage_of(file: Path | io.BytesIO) -> str | None:
    """Compare the records of a torch file with their CRCs. Return the name of the first damaged record, or None.

    torch.serialization.set_crc32_options(False) writes 0 for every CRC. Such a file can't be checked.
    """
    try:
        with zipfile.ZipFile(file) as records:
            return None if not any(record.CRC for record in records.infolist()) else records.testzip()
    except Exception as error:  # noqa: BLE001  # a flipped bit may mean encryption, compression, or no zip file
        return f"directory ({first_line(error)})"


def content_id(path: Path) -> str | None:
    """Return a digest of the names, sizes and CRCs of a file's records. Return None if the file has no CRCs."""
    with zipfile.ZipFile(path) as records:
        facts = [
            (record.filename.partition("/")[2], record.file_size, record.CRC)
            for record in records.infolist()
            if not record.filename.endswith("serialization_id")  # depends on the name of the file
        ]
    has_crcs = any(crc for _, _, crc in facts)
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest() if has_crcs else None


def reason_of(error: BaseException) -> str:
    """Return a one-line description of what went wrong."""
    return str(error) if isinstance(error, AutosplitError) else one_line(error)


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception. If torch refused to unpickle a name, return the name."""
    refused = re.search(
        r"WeightsUnpickler error: (?:Unsupported global: GLOBAL )?([^\n]*?)(?: was not an allowed|\. |\n|$)", str(error)
    )
    if refused:  # skip the 12 lines in which torch suggests weights_only=False
        return refused[1]
    return first_line(error).rstrip(".")


def digest_of(state: Any) -> str:
    """Return a digest of the values in a state, which does not depend on the file format."""

    def summary(_: object, value: Tensor) -> str:
        dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        content = b"" if value.is_meta else dense.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        return f"{value.dtype} {tuple(value.shape)} {zlib.crc32(content)}"

    return hashlib.sha256(repr(with_tensors(state, summary)).encode()).hexdigest()
