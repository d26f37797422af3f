"""A workload whose samples have another length: its sample batch, cropped or repeated along its sequences."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import WorkloadError
from autosplit.workload.batch import Whole, leaves_of, map_leaves, map_tensors
from autosplit.workload.workload import Workload

__all__ = ["at_length"]


def at_length(workload: Workload, length: int) -> Workload:
    """Return the workload with samples of another length.

    The length of the sample batch is the first dimension beside the batch of its first tensor with one. Every other
    dimension of that size is cropped, or repeated, in all tensors: masks of length by length, too. Where that is not
    what another length is, `make_batch` takes it: ``make_batch(n, length=length)``.

    Raises:
        WorkloadError: No tensor has such a dimension, or `make_batch` takes no length.
    """
    size, dim = workload.sample_batch_size, workload.batch_dim
    given: Any = workload.make_batch
    if given is not None:
        if not _takes_length(given):
            raise WorkloadError(
                "lengths are given, and make_batch takes none; expected make_batch(n, length=...), which returns n "
                "samples of that length; add the keyword"
            )
        make_batch = functools.partial(given, length=length)
        return replace(workload, sample_batch=make_batch(size), make_batch=make_batch)
    now = _length_of(workload.sample_batch, size, dim)
    if now is None or now < 2:
        raise WorkloadError(
            "lengths are given, and the sample batch has no tensor of sequences: samples by length, 2 or more; "
            "expected one; pass a padded batch, or make_batch(n, length=...)"
        )

    def resized(tensor: Tensor, *, batched: bool) -> Tensor:
        for position, extent in enumerate(tensor.shape):
            if extent == now and not (batched and position == dim):
                index = torch.arange(length, device=tensor.device) % now
                tensor = tensor.index_select(position, index)
        return tensor

    def leaf(value: Any) -> Any:
        if isinstance(value, Whole):
            return Whole(map_tensors(lambda tensor: resized(tensor, batched=False), value.value))
        if not isinstance(value, Tensor):
            return value
        return resized(value, batched=value.dim() > dim and value.size(dim) == size)

    return replace(workload, sample_batch=map_leaves(leaf, workload.sample_batch))


def _length_of(batch: Any, size: int, dim: int) -> int | None:
    tensors = (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor))
    along = 0 if dim else 1
    return next((int(one.size(along)) for one in tensors if one.dim() > max(dim, 1) and one.size(dim) == size), None)


def _takes_length(make_batch: Any) -> bool:
    try:
        parameters = inspect.signature(make_batch).parameters.values()
    except ValueError:  # it has no signature
        return False
    return any(one.name == "length" or one.kind is one.VAR_KEYWORD for one in parameters)
