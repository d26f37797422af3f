"""Change the length of a workload's samples, by cropping or repeating its sample batch along the sequences."""

from __future__ import annotations

import functools
import inspect
from collections import UserDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import WorkloadError, users_errors
from autosplit.workload.tree import Node, Whole, map_leaves, map_tensors, tensors_of
from autosplit.workload.workload import Workload


def at_length(workload: Workload, length: int) -> Workload:
    """Return the workload with samples of a different length.

    The current length is the first dimension after the batch dimension, in the first tensor that has such a dimension.
    Every other dimension of this size is cropped or repeated in all tensors, even in masks. To change this, define
    ``make_batch(n, length=length)``.
    """
    size, dim = workload.sample_batch_size, workload.batch_dim
    if workload.make_batch is not None:
        return _made_at_length(workload, workload.make_batch, length)
    now = _length_of(workload.sample_batch, size, dim)
    if now is None or now < 2:
        raise WorkloadError(
            "lengths are given, but the sample batch has no tensor of shape (samples, length) with a length of 2 or "
            "more. Pass a padded batch, or make_batch(n, length=...).",
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


def _made_at_length(workload: Workload, given: Any, length: int) -> Workload:
    if not _takes_length(given):
        raise WorkloadError(
            "lengths are given, but make_batch takes no length. Expected make_batch(n, length=...) with n samples "
            "of that length. Add the keyword.",
        )
    size, make_batch = workload.sample_batch_size, functools.partial(given, length=length)
    shorter = max(1, length // 2)
    with users_errors("make_batch"):
        batch, other = make_batch(size), given(size, length=shorter)
    if shorter < length and [one.shape for one in tensors_of(batch)] == [one.shape for one in tensors_of(other)]:
        raise WorkloadError(
            f"make_batch({size}, length={shorter}) returned samples of length {length}. Expected length "
            f"{shorter}. Let make_batch use its argument length.",
        )
    return replace(workload, sample_batch=batch, make_batch=make_batch)


def _length_of(batch: Any, size: int, dim: int) -> int | None:
    """Return the length of the first tensor. Prefer `input_ids`, because labels may come first in a mapping."""
    if isinstance(batch, (Mapping, UserDict)) and isinstance(batch.get("input_ids"), Tensor):
        batch = batch["input_ids"]
    tensors = (part.value for part in Node.of(batch).tensors)
    along = 0 if dim else 1
    return next((int(one.size(along)) for one in tensors if one.dim() > max(dim, 1) and one.size(dim) == size), None)


def _takes_length(make_batch: Any) -> bool:
    try:
        parameters = inspect.signature(make_batch).parameters.values()
    except ValueError:  # the function has no signature
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any((one.name == "length" and one.kind in by_name) or one.kind is one.VAR_KEYWORD for one in parameters)
