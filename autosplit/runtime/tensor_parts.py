"""Find the tensors among an operator's arguments and outputs, and the storages with their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from autosplit.torch_versions import FakeTensor, is_wrapper_subclass, storage_key

_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, FakeTensor})
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values and in their nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_among(value)


def dense_parts(tensor: Tensor) -> Iterable[Tensor]:
    """Return the strided tensors that contain a tensor's memory."""
    if type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided:  # fast path: nearly every tensor, at every op
        return (tensor,)
    return _parts_of(tensor)


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    parts = _SPARSE_PARTS.get(tensor.layout)
    if parts is not None:
        for part in parts:
            yield getattr(tensor, part)()
    elif is_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from dense_parts(getattr(tensor, name))
    else:
        yield tensor


def key_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage."""
    return storage_key(tensor.untyped_storage())
