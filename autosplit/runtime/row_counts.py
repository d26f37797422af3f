"""Give bounds and fake outputs for operators whose number of output rows depends on values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Operator:
    """An operator whose number of output rows depends on values. Its functions get the operator's arguments.

    Attributes:
        elements: Returns the number of elements that can each give a row.
        rows: Returns the number of rows, from real outputs and the arguments.
        make: Makes fake outputs, from the number of rows and the arguments.
        bound: Returns the maximum number of rows. None if shapes give no bound.
        grows: Whether the number of rows is proportional to the elements.
    """

    elements: Callable[..., int]
    rows: Callable[..., int]
    make: Callable[..., Any]
    bound: Callable[..., int] | None
    grows: bool = True


def _nonzero_made(rows: int, mask: Tensor) -> Tensor:
    # CUDA's kernel stores the positions column by column: all rows of one dimension, then of the next.
    return mask.new_empty_strided((rows, mask.dim()), (1, max(1, rows)), dtype=torch.int64)


def _bincount_made(rows: int, values: Tensor, weights: Tensor | None = None, *_args: Any, **_kwargs: Any) -> Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return values.new_empty((rows,), dtype=dtype)


def _unique(dim_of: Callable[..., int | None], num_outputs: int = 3) -> Operator:
    """Return the operator for a variant of `unique`.

    Args:
        dim_of: Returns the dimension whose slices are compared, from the arguments after the first. None if single
            elements are compared.
    """

    def size(values: Tensor, *args: Any, **kwargs: Any) -> int:
        dim = dim_of(*args, **kwargs)
        return values.numel() if dim is None else values.size(dim)

    def rows(outputs: Any, _values: Tensor, *args: Any, **kwargs: Any) -> int:
        return size(outputs[0], *args, **kwargs)

    def make(rows: int, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        dim = dim_of(*args, **kwargs)
        shape, places = [rows], list(values.shape)
        if dim is not None:
            shape, places = list(values.shape), [values.size(dim)]
            shape[dim] = rows
        inverse, counts = (values.new_empty(one, dtype=torch.int64) for one in (places, [rows]))
        return (values.new_empty(shape), inverse, counts)[:num_outputs]

    return Operator(size, rows, make, size)


def _ctc_columns(log_probs: Tensor, targets: Tensor, _inputs: Any, lengths: Any, *_args: Any, **_kwargs: Any) -> int:
    """Return the width of CTC's table: a column for each symbol of the longest target, and for the blanks around it.

    Treat concatenated targets as targets of equal length. `labels[mask]` makes such targets, and the upper bound of a
    mask selects every element of the padded labels.
    """
    if not isinstance(lengths, Tensor):
        longest = max(lengths, default=0)
    elif targets.dim() == 2:
        longest = targets.size(1)
    else:
        batch = log_probs.size(1) if log_probs.dim() == 3 else 1
        longest = -(-targets.numel() // max(1, batch))
    return 2 * longest + 1


def _ctc_made(width: int, log_probs: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
    """Allocate each sample's loss and the table for the backward, as torch's CUDA kernel does.

    torch uses this kernel unless targets and lengths are int32 (aten/src/ATen/native/cuda/LossCTC.cu).
    """
    batch = [log_probs.size(1)] if log_probs.dim() == 3 else []
    return log_probs.new_empty(batch), log_probs.new_empty((*(batch or [1]), log_probs.size(0), width))


def _numel(values: Tensor, *_args: Any, **_kwargs: Any) -> int:
    return values.numel()


def _length(outputs: Tensor, *_args: Any, **_kwargs: Any) -> int:
    return outputs.size(0)


def _selected(values: Tensor, mask: Tensor) -> int:
    return math.prod(torch.broadcast_shapes(values.shape, mask.shape))


_BY_NAME = {
    "nonzero": Operator(_numel, _length, _nonzero_made, _numel),
    "masked_select": Operator(_selected, _length, lambda rows, values, _mask: values.new_empty((rows,)), _selected),
    "_unique": _unique(lambda *_, **__: None, num_outputs=2),
    "_unique2": _unique(lambda *_, **__: None),
    "unique_dim": _unique(lambda dim, *_, **__: dim),
    "unique_consecutive": _unique(lambda _inverse=False, _counts=False, dim=None, **_: dim),
    "unique_dim_consecutive": _unique(lambda dim, *_, **__: dim),
    "repeat_interleave": Operator(_numel, _length, lambda rows, counts, **_: counts.new_empty((rows,)), None),
    "bincount": Operator(_numel, _length, _bincount_made, None, grows=False),
    "_ctc_loss": Operator(_numel, lambda outputs, *_, **__: outputs[1].size(-1), _ctc_made, _ctc_columns, grows=False),
}

OPERATORS: Mapping[Any, Operator] = {
    getattr(_aten, name): operator for name, operator in _BY_NAME.items() if hasattr(_aten, name)
}
"""The operators by their packet of overloads."""


def grouped_product(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the fake output of `_grouped_mm`, because torch's fake operator accepts only bfloat16.

    For other dtypes, CUDA's kernel runs a loop of products into an output of the same shape
    (aten/src/ATen/native/cuda/GroupedBlas.cpp, `_grouped_mm_fallback`).
    """
    first, second = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = (args[4] if len(args) > 4 else kwargs.get("out_dtype")) or first.dtype
    shape = [first.size(-2), second.size(-1)]
    if first.dim() == second.dim():  # one product for each group: slices of the summed dimension, or of the batch
        shape.insert(0, first.size(0) if offsets is None else offsets.size(0))
    made: Tensor = first.new_empty(shape, dtype=dtype)
    return made
