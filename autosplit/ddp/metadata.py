"""Reads which tensors a sharded checkpoint holds, and executes nothing in it.

`torch.distributed.checkpoint` keeps that as a pickle, and loads it as one: whatever is in the file then runs. Here a
pickle may name a few plain records of torch's, and nothing else; what they say is held against the files.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from autosplit.ddp.checkpoints import first_line
from autosplit.errors import CheckpointError

__all__ = ["Reader", "Writer", "read_metadata"]

METADATA = ".metadata"
"""What torch.distributed.checkpoint calls the file."""

_RECORDS = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a layout up by its name
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
            *("StorageMeta", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
"""What a pickle may make: records that hold what they are given, and do nothing."""


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"its {METADATA} names {module}.{name}; expected nothing but the sizes and places of tensors; it may be "
            "somebody's attempt to run code here: load only what save_sharded wrote"
        )


def read_metadata(folder: Path) -> Metadata:
    """Read what tensors a folder holds, and make sure that their files are there and whole.

    Raises:
        CheckpointError: A file is missing or cut short, or the pickle holds more than that.
    """
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointError(f"{str(path)!r} is no file; expected one that save_sharded wrote; take an earlier one")
    try:
        with path.open("rb") as file:
            found = _Records(file).load()
        ends = _ends_of(found)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} is cut short or no list of tensors ({first_line(error)}); expected what save_sharded "
            "wrote; take an earlier one"
        ) from error
    for name, end_bytes in ends.items():
        _require_file(folder, name, end_bytes)
    assert isinstance(found, Metadata), "its tensors were looked at"
    return found


def _ends_of(found: Any) -> dict[str, int]:
    """Return how long each file is at the least, if every part of every tensor has its place in one."""
    if not isinstance(found, Metadata):
        raise TypeError(f"it holds a {type(found).__name__}")
    places = {(index.fqn, index.offset): info for index, info in found.storage_data.items()}
    ends: dict[str, int] = {}
    for name, held in found.state_dict_metadata.items():
        if not isinstance(held, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor")
        for chunk in held.chunks:
            info = places[name, chunk.offsets]
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return ends


def _require_file(folder: Path, name: str, size_bytes: int) -> None:
    if Path(name).name != name:
        raise CheckpointError(f"its {METADATA} names the file {name!r}; expected one beside it")
    path = folder / name
    has_bytes = path.stat().st_size if path.is_file() else 0
    if has_bytes < size_bytes:
        raise CheckpointError(
            f"{str(path)!r} has {has_bytes} bytes; expected {size_bytes}, so what a rank wrote is cut short or not "
            "here; give all ranks a folder that they all see, or take an earlier checkpoint"
        )


class Writer(FileSystemWriter):
    """Writes a rank's tensors, and nothing about where: the folder may be moved, and a path is no plain record."""

    def storage_meta(self) -> None:
        """Say nothing of the folder."""


class Reader(FileSystemReader):
    """Reads tensors of which the metadata was looked at before.

    Args:
        folder: Where they are.
        metadata: What `read_metadata` found.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what was found before."""
        return self._metadata
