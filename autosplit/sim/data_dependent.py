"""Run operators whose results depend on values while a step is traced with fake tensors, which have no values.

- If the number of output rows depends on values (`nonzero`, `x[mask]`, `_ctc_loss`), the trace uses the recorded
  number (see Note [Replayed values]) or, without a recorded step, the upper bound.
- For reads of values (`.item()`, `if tensor`), the trace uses the recorded value. Without a recorded step, torch's
  exception ends the trace.
- For reads by an optimizer's arithmetic, such as Adafactor's norms of parameters, the trace uses 1. These numbers scale
  an update and do not affect shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosplit.notes import Note
from autosplit.sim.sample_values import SampleValues, WholeReads, calling_module
from autosplit.torch_versions import DATA_DEPENDENT_ERRORS, FakeTensor, aten_ops

_aten = torch.ops.aten

_ARITHMETIC_READERS = ("torch.optim.", "transformers.optimization")
"""Modules of optimizers that read values only to compute with them."""

_MISSING = (".numpy() is not supported", "its data is not allocated yet")
"""Messages of torch's other errors about values that a fake tensor lacks."""

_MASKS = (torch.bool, torch.uint8)
READS = aten_ops("_local_scalar_dense item equal allclose is_nonzero")
"""Operators that return a tensor's values as Python objects."""
_GROUPED_PRODUCTS = aten_ops("_grouped_mm")
_NOTHING = object()


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


class DataDependent:
    """Run the operators of a tracer's steps.

    Args:
        values: Records or replays the values that steps read.

    Attributes:
        bounded: Operators that used the upper bound, as the keys of a dict (an ordered set).
    """

    def __init__(self, values: SampleValues | None = None) -> None:
        self.bounded: dict[str, None] = {}
        self._arithmetic: dict[str, None] = {}
        self._values = values

    @contextmanager
    def step(self, split: Sequence[int], *, evaluates: bool) -> Iterator[None]:
        """Begin a step of this split. With `evaluates`, the step is only a forward."""
        if self._values is not None:
            self._values.begin(split, evaluates=evaluates)
        with nullcontext() if self._values is None else WholeReads(self._values):
            yield

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, with replacements for the values that fake tensors lack.

        Raises:
            Exception: The operator's own exception, if there is no replacement.
        """
        try:
            outputs = func(*args, **kwargs)
        except RuntimeError as error:  # torch's exceptions for missing values are RuntimeErrors
            outputs = self._replaced(func, args, kwargs, error)
            if outputs is _NOTHING:
                raise
        else:
            if self._values is not None and self._values.phase != "replay":
                self._record(self._values, func, args, kwargs, outputs)
        return outputs

    def as_error(self) -> Exception:
        """Return the exception for a trace that may not use an upper bound."""
        return NotImplementedError(f"the number of rows that {_listed(self.bounded)} returns depends on values")

    def notes(self) -> tuple[Note, ...]:
        """Return a note for each kind of replacement."""
        found = []
        if self.bounded:
            text = (
                f"The number of rows that {_listed(self.bounded)} returns depends on values, but traces have no "
                "values. The trace assumes the upper bound. Real steps may take less memory and time."
            )
            found.append(Note("rows-depend-on-values", text))
        if self._values is not None and self._values.replayed:
            text = (
                f"The model's code depends on the values of tensors ({_listed(self._values.replayed)}). autosplit "
                "took the values from one step of the sample batch on the CPU. Batches with other values may take "
                "more or less memory and time."
            )
            found.append(Note("values-from-sample", text))
        if self._arithmetic:
            text = (
                f"The optimizer reads numbers from tensors ({_listed(self._arithmetic)}). autosplit assumed 1 for "
                "each. The numbers affect no tensor's shape."
            )
            found.append(Note("optimizer-reads-values", text))
        return tuple(found)

    def _record(
        self, values: SampleValues, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any
    ) -> None:
        packet = getattr(func, "overloadpacket", None)
        if packet in READS:
            values.note_values([outputs])
        elif packet is _aten.index:
            for mask in args[1]:
                if mask is not None and mask.dtype in _MASKS:
                    values.note_rows(_name(_aten.nonzero), mask.numel(), int(mask.count_nonzero()))
        elif packet in OPERATORS:
            operator = OPERATORS[packet]
            values.note_rows(_name(packet), operator.elements(*args, **kwargs), operator.rows(outputs, *args, **kwargs))

    def _replaced(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: RuntimeError) -> Any:
        packet = getattr(func, "overloadpacket", None)
        if packet in _GROUPED_PRODUCTS and isinstance(args[0], FakeTensor):
            return grouped_product(args, kwargs)
        if not isinstance(error, DATA_DEPENDENT_ERRORS):
            return _NOTHING
        if packet is _aten.index:
            return self._indexed(args)
        if packet in OPERATORS:
            return self._made(packet, args, kwargs)
        return self._read(packet, args) if packet in READS else _NOTHING

    def _made(self, packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        operator, name = OPERATORS[packet], _name(packet)
        if self._values is not None:
            rows = self._values.rows(name, operator.elements(*args, **kwargs), grows=operator.grows)
        elif operator.bound is None:
            return _NOTHING
        else:
            rows = operator.bound(*args, **kwargs)
            self.bounded[name] = None
        return operator.make(rows, *args, **kwargs)

    def _indexed(self, args: Sequence[Any]) -> Any:
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in _MASKS:
                indices.append(index)
            else:
                indices.extend(self._made(_aten.nonzero, (index,), {}).unbind(1))
        return _aten.index.Tensor(args[0], indices)

    def _read(self, packet: Any, args: Sequence[Any]) -> Any:
        """Return a made-up value for an operator that reads one, or the value that a real step had there."""
        name = _name(packet)
        if calling_module().startswith(_ARITHMETIC_READERS):
            self._arithmetic[name] = None
            return True if args[0].dtype is torch.bool else 1.0 if args[0].is_floating_point() else 1
        return _NOTHING if self._values is None else self._values.values(1, name)[0].item()


def needs_values(found: DataDependent | Exception) -> bool:
    """Return whether values of a real step would improve a trace, or make a failed trace possible."""
    if isinstance(found, DataDependent):
        return bool(found.bounded)
    error: BaseException | None = found
    while error is not None:
        if isinstance(error, DATA_DEPENDENT_ERRORS) or any(text in str(error) for text in _MISSING):
            return True
        error = error.__cause__ or error.__context__
    return False


def _name(packet: Any) -> str:
    return str(packet)


def _listed(names: Mapping[str, None]) -> str:
    return ", ".join(names)
