"""Reads which tensors a sharded checkpoint holds, and executes nothing in it.

`torch.distributed.checkpoint` keeps that as a pickle, and loads it as one: whatever is in the file then runs. Here a
pickle may name a few plain records of torch's, and nothing else, and gets stand-ins for them: a pickle can change the
very classes that it names. What the stand-ins say is held against the files, and only then put into torch's records.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from autosplit.ddp.checkpoint import first_line
from autosplit.errors import CheckpointError

__all__ = ["Reader", "Writer", "read_metadata"]

METADATA = ".metadata"
"""What torch.distributed.checkpoint calls the file."""

_RECORDS = {
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
"""What a pickle may name; each stands for a record that holds what it is given, and does nothing."""
_VALUES = {("collections", "OrderedDict"): dict, ("torch", "Size"): torch.Size}
"""What it may make as it is: classes of C, on which nothing can be set."""


class _Record:
    """Stands for one of torch's records in a pickle."""

    state: Any

    def __new__(cls, *_: Any) -> _Record:
        made = super().__new__(cls)
        made.state = None
        return made

    def __init__(self, *_: Any) -> None:
        """Take what a pickle calls it with, such as the name of a layout, and leave it."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Records(pickle.Unpickler):
    """Makes stand-ins, of classes that are this pickle's own: whatever it sets on them is gone with them."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._kinds: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return self._kinds.setdefault(name, type(name, (_Record,), {}))
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"its {METADATA} names {module}.{name}; expected nothing but the sizes and places of tensors; it may be "
            "somebody's attempt to run code here: load only what save_sharded wrote"
        )

    def fields(self, record: Any, kind: str) -> Mapping[str, Any]:
        """Return what a stand-in of that kind holds, by name.

        Raises:
            TypeError: It is something else.
        """
        if type(record) is not self._kinds.get(kind) or not isinstance(record.state, dict):
            raise TypeError(f"it holds a {type(record).__name__} in place of a {kind}")
        return record.state

    def dtype(self, record: Any) -> torch.dtype:
        """Return the dtype that properties hold, which are a tuple.

        Raises:
            TypeError: They are something else.
        """
        if type(record) is not self._kinds.get("TensorProperties") or not isinstance(record.state, tuple):
            raise TypeError(f"it holds a {type(record).__name__} in place of TensorProperties")
        found: torch.dtype = _of(torch.dtype, record.state[0])
        return found


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
            pickled = _Records(file)
            found = _metadata_of(pickled, pickled.load())
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
    return found


# From stand-ins to records


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"it holds a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _metadata_of(pickled: _Records, record: Any) -> Metadata:
    held = pickled.fields(record, "Metadata")
    tensors = _of(dict, held["state_dict_metadata"])
    places = _of(dict, held["storage_data"])
    return Metadata(
        state_dict_metadata={_of(str, name): _tensor_of(pickled, tensor) for name, tensor in tensors.items()},
        storage_data={_index_of(pickled, index): _place_of(pickled, place) for index, place in places.items()},
    )


def _tensor_of(pickled: _Records, record: Any) -> TensorStorageMetadata:
    held = pickled.fields(record, "TensorStorageMetadata")
    chunks = [pickled.fields(chunk, "ChunkStorageMetadata") for chunk in _of(list, held["chunks"])]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=pickled.dtype(held["properties"])),
        size=_of(torch.Size, held["size"]),
        chunks=[ChunkStorageMetadata(_of(torch.Size, x["offsets"]), _of(torch.Size, x["sizes"])) for x in chunks],
    )


def _index_of(pickled: _Records, record: Any) -> MetadataIndex:
    held = pickled.fields(record, "MetadataIndex")
    index = held.get("index")
    return MetadataIndex(
        _of(str, held["fqn"]), _of(torch.Size, held["offset"]), None if index is None else _of(int, index)
    )


def _place_of(pickled: _Records, record: Any) -> _StorageInfo:
    held = pickled.fields(record, "_StorageInfo")
    return _StorageInfo(_of(str, held["relative_path"]), _of(int, held["offset"]), _of(int, held["length"]))


# Against the files


def _ends_of(found: Metadata) -> dict[str, int]:
    """Return how long each file is at the least, if every part of every tensor has its place in one."""
    places = {(index.fqn, index.offset): info for index, info in found.storage_data.items()}
    ends: dict[str, int] = {}
    for name, held in found.state_dict_metadata.items():
        assert isinstance(held, TensorStorageMetadata), "nothing else was made"
        _require_whole(name, held.size, held.chunks)
        for chunk in held.chunks:
            info = places[name, chunk.offsets]
            if min(info.offset, info.length) < 0:
                raise ValueError(f"{name} is at byte {info.offset}, and {info.length} bytes long")
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return ends


def _require_whole(name: str, size: Sequence[int], chunks: Iterable[ChunkStorageMetadata]) -> None:
    """Make sure that the parts are the whole tensor: what none of them covers would be whatever is in memory."""
    volume = 0
    beside: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        if not len(size) == len(chunk.offsets) == len(chunk.sizes):
            raise ValueError(f"{name} has {len(size)} dimensions, and a part of it others")
        if not all(0 <= at <= at + of <= end for at, of, end in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError(f"a part of {name} goes beyond its size {tuple(size)}")
        if not math.prod(chunk.sizes):
            continue  # of a rank beyond the last part
        # They come in the order of their first dimension: what ends before this one meets none that follows.
        beside = [other for other in beside if other.offsets[0] + other.sizes[0] > chunk.offsets[0]] if size else beside
        if any(_overlap(chunk, other) for other in beside):
            raise ValueError(f"parts of {name} overlap")
        beside.append(chunk)
        volume += math.prod(chunk.sizes)
    if volume != math.prod(size):
        raise ValueError(f"the parts of {name} have {volume} elements of {math.prod(size)}")


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        max(begin, start) < min(begin + size, start + length)
        for begin, size, start, length in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


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
