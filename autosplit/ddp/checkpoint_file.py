"""Checkpoint files: written next to the old file and renamed, read through a memory map, checked by their CRCs."""

from __future__ import annotations

import errno
import glob
import hashlib
import io
import os
import pickle
import re
import secrets
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosplit.ddp.checkpoint_state import tensors_in
from autosplit.errors import AutosplitError, CheckpointError, first_line, one_line
from autosplit.text import size_text

if sys.platform != "win32":
    import fcntl

MODEL = "model"
"""The name of a model's state dict in a file that holds several parts."""

_ABANDONED_S = 24 * 3600.0
"""Without file locks, a part file that nobody has written to for this long is removed."""


# Writing


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, read it back, and replace the old file with it.

    A symbolic link is followed: its target is replaced. Part files of killed processes are removed first.
    """
    target = Path(os.path.realpath(path))
    _sweep(target)
    with _part_file(target) as (beside, file):
        try:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            read_file(beside)
            if sys.platform == "win32":
                file.close()  # Windows renames no open file
            beside.replace(target)
        except Exception as error:
            failure = error if isinstance(error, OSError) else file.failure
            if failure is not None and failure.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CheckpointError(_full_disk(target.parent, state, failure), code="checkpoint-disk-full") from error
            if failure is not None:
                raise failure from None
            raise CheckpointError(_unkept(state, error), code="checkpoint-value-not-kept") from error


class _PartFile(io.BufferedWriter):
    """A file that keeps the error of a failed write: torch raises another error in its place."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write as usual."""
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


@contextmanager
def _part_file(target: Path) -> Iterator[tuple[Path, _PartFile]]:
    """Create a locked file next to the target, and remove it at the end if it was not renamed.

    The lock shows other processes that the writer is alive. It ends with the process, however that ends.
    """
    while True:
        beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        file = _PartFile(io.FileIO(beside, "x"))
        if _locked(file.fileno(), wait=True) is not True or _is_at(beside, file.fileno()):
            break
        file.close()  # another process swept it between creation and lock
    try:
        yield beside, file
    finally:
        with suppress(OSError):  # on a full disk, closing writes the buffer and fails again
            file.close()
        beside.unlink(missing_ok=True)


def _sweep(target: Path) -> None:
    """Remove the part files of writers that were killed, never a living writer's."""
    ours = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{8}" + re.escape(".part"))
    for found in glob.glob(os.path.join(glob.escape(str(target.parent)), ".*.part")):  # noqa: PTH207, PTH118
        path = Path(found)
        if ours.fullmatch(path.name):
            with suppress(OSError):  # it is gone by now, or belongs to another user
                _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        free = _locked(file.fileno(), wait=False)
        if free is None:
            free = time.time() - os.fstat(file.fileno()).st_mtime > _ABANDONED_S
        if free and sys.platform != "win32":
            path.unlink()
    if free and sys.platform == "win32":
        path.unlink()


def _locked(descriptor: int, *, wait: bool) -> bool | None:
    """Lock an open file; return None if this file system has no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _full_disk(folder: Path, state: Mapping[str, Any], failure: OSError) -> str:
    needed = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_in(dict(state)))
    free = shutil.disk_usage(folder).free
    limit = "the disk is full" if failure.errno == errno.ENOSPC else "the disk quota is used up"
    return (
        f"{limit}: {str(folder)!r} has {free} bytes ({size_text(free)}) free besides the unfinished file, and the "
        f"tensors take {size_text(needed)}; free some space, or save to another disk"
    )


def _unkept(state: Mapping[str, Any], error: Exception) -> str:
    """Name the part that can't be kept, by trying each alone."""
    for name, value in state.items():
        alone = io.BytesIO()
        try:
            torch.save(value, alone)
            alone.seek(0)
            torch.load(alone, weights_only=True)
        except Exception as found:  # noqa: BLE001  # a part may raise anything
            return (
                f"{name!r} can't be kept ({_first_line(found)}); expected numbers, strings, tensors, lists and dicts "
                f"of them, or something with a state_dict() of such; leave {name}= out"
            )
    return reason_of(error)


# Reading


def read_file(path: Path, *, only_model: bool = False) -> dict[str, Any]:
    """Map a checkpoint into memory and check its CRCs, which takes about 1 s per GiB on top of reading the file.

    Args:
        only_model: Accept the state dict of a model that is not under a name.
    """
    if not path.is_file():
        folder = "; load_sharded reads folders" if path.is_dir() else ""
        raise CheckpointError(
            f"{str(path)!r} is no file; expected a file of save_checkpoint or torch.save{folder}",
            code="checkpoint-missing",
        )
    damaged = damage_of(path)
    state = _loaded(path, damaged)
    if damaged is not None:
        raise CheckpointError(_says_damaged(path, damaged, state), code="checkpoint-damaged")
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"it holds a {type(state).__name__}; expected a dict by name", code="checkpoint-not-a-dict"
        )
    is_state = bool(state) and all(isinstance(value, Tensor) for value in state.values())
    return {MODEL: state} if only_model and MODEL not in state and is_state else dict(state)


def _loaded(path: Path, damaged: str | None) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a text file is a KeyError to torch, other bytes are other errors
        if damaged is not None and zipfile.is_zipfile(path):
            raise CheckpointError(_says_damaged(path, damaged, None), code="checkpoint-damaged") from error
        if isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"it holds more than tensors and plain values ({_first_line(error)}); expected numbers, strings, "
                "tensors, and lists and dicts of them; save other objects in another file",
                code="checkpoint-unsafe-values",
            ) from error
        raise CheckpointError(
            f"it is cut short or no checkpoint at all ({_first_line(error)}); expected what save_checkpoint or "
            "torch.save wrote; take an earlier one",
            code="checkpoint-cut-short",
        ) from error


def damage_of(file: Path | io.BytesIO) -> str | None:
    """Compare the records of a torch file with their CRCs; return the name of the first damaged record, or None.

    torch.serialization.set_crc32_options(False) writes 0 for every CRC. Such a file can't be checked.
    """
    try:
        with zipfile.ZipFile(file) as records:
            return None if not any(record.CRC for record in records.infolist()) else records.testzip()
    except Exception as error:  # noqa: BLE001  # a flipped bit may mean encryption, compression, or no zip file
        return f"its directory ({first_line(error)})"


def content_id(path: Path) -> str | None:
    """Return a digest of the names, sizes and CRCs of a file's records: equal for equal content under any file name.

    None if the file has no CRCs.
    """
    with zipfile.ZipFile(path) as records:
        facts = [
            (record.filename.partition("/")[2], record.file_size, record.CRC)
            for record in records.infolist()
            if not record.filename.endswith("serialization_id")  # depends on the name of the file
        ]
    has_crcs = any(crc for _, _, crc in facts)
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest() if has_crcs else None


def _says_damaged(path: Path, record: str, state: Any) -> str:
    tensor = _tensor_in(path, record, state)
    place = record if record.startswith("its directory") else f"its record {record.partition('/')[2]!r}"
    holds = f", which holds the tensor {tensor!r}," if tensor else ""
    return (
        f"{place}{holds} does not match its checksum (CRC-32); expected the bytes that were written; the disk or a "
        "copy has damaged the file: take an earlier checkpoint, or copy it again"
    )


def _tensor_in(path: Path, damaged: str, state: Any) -> str | None:
    """Return the name of the tensor in a record; storages that are mapped lie in the order of the records."""
    if not isinstance(state, dict) or "/data/" not in damaged:
        return None
    with suppress(Exception), zipfile.ZipFile(path) as records:
        found = [record for record in records.infolist() if "/data/" in record.filename and record.file_size]
        names = [record.filename for record in sorted(found, key=lambda record: record.header_offset)]
        held: dict[int, str] = {}
        for place, tensor in tensors_in(state):
            if tensor.numel():
                held.setdefault(tensor.untyped_storage().data_ptr(), ".".join(map(str, place)))
        if len(held) == len(names):
            return held[sorted(held)[names.index(damaged)]]
    return None


def reason_of(error: BaseException) -> str:
    """Return what went wrong on one line."""
    return str(error) if isinstance(error, AutosplitError) else one_line(error)


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception; of torch's refusal to unpickle, the refused name."""
    refused = re.search(
        r"WeightsUnpickler error: (?:Unsupported global: GLOBAL )?([^\n]*?)(?: was not an allowed|\. |\n|$)", str(error)
    )
    if refused:  # skip the 12 lines in which torch suggests weights_only=False
        return refused[1]
    return first_line(error).rstrip(".")


# Comparing


def digest_of(state: Any) -> str:
    """Return a digest of the values in a state, whatever file they come from."""
    found = hashlib.sha256()
    _add(state, found)
    return found.hexdigest()


def _add(value: Any, found: Any) -> None:
    if isinstance(value, Tensor):
        found.update(repr((value.dtype, tuple(value.shape))).encode())
        if not value.is_meta:
            dense = value.detach().to_dense() if value.layout != torch.strided else value.detach()
            found.update(dense.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        found.update(b"{")
        for key, item in value.items():
            found.update(repr(key).encode())
            _add(item, found)
        found.update(b"}")
    elif isinstance(value, list | tuple):
        found.update(b"[")
        for item in value:
            _add(item, found)
        found.update(b"]")
    else:
        found.update(repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value).encode())
