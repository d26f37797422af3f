"""Record values that a model's code reads from tensors in a real step, and replay them in steps of fake tensors.

Fake tensors have no values for `.item()`, `.tolist()`, `.numpy()` or masks. See Note [Replayed values].
"""

# Note [Replayed values]
# ----------------------
# A step of the sample batch runs once with real tensors on the CPU. It records two things for each line of code:
#
#   values   `.item()`, `.tolist()`, `.numpy()`, `bool(tensor)`: the numbers, in the order of the reads.
#   rows     `nonzero`, `masked_select`, ...: the number of elements of the input, and of rows of the output.
#
# Batches of other sizes repeat the samples of the sample batch, so the replay repeats the recorded numbers:
#
#   sample batch of 2:   lengths.tolist() == [7, 9]         mask.nonzero(): 5 rows of 20 elements
#   batch of 5:          lengths.tolist() == [7, 9, 7, 9, 7]     mask.nonzero(): 15 rows of 50 elements
#
# A sample has 2.5 rows here. The replay rounds this number up to 3, because `AffineTraces` extrapolates whole rows.
#
# A real step of twice the sample batch follows. It shows which inputs grow with the batch. An input that does not grow
# (for example one flag per expert) is replayed with its recorded number of rows. `replayed` also
# compares the replay with both real steps, so it rejects a number that grows with the batch, such as a sum of lengths.

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autosplit.runtime.protocol import StepShape
from autosplit.sim.op_cost import Work
from autosplit.torch_versions import FakeTensor, unset_fake_temporarily

_log = logging.getLogger(__name__)

T = TypeVar("T")

Site = tuple[str, str, int]
"""The kind of read, and the file and line of the code that read."""

_WHOLE_READS = frozenset({Tensor.numpy, Tensor.__array__, Tensor.tolist})
"""Functions that read all values of a tensor without the dispatcher."""

_CALLERS = ("torch.optim.", "autosplit.runtime.trainee")
"""Modules of torch and autosplit that count as callers of operators, as the model's code does."""


class UnknownValueError(RuntimeError):
    """A line of code reads a value or runs an operator, but did not do so in the recorded step."""


def calling_module() -> str:
    """Return the module whose code called the running operator. Within torch, only `torch.optim` counts."""
    return str(_caller().f_globals.get("__name__", ""))


def _caller() -> Any:
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and _is_between(str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    return frame


def _is_between(module: str) -> bool:
    # `Trainee` starts the operators of a backward, so their caller is not a line of the model.
    return module.startswith(("torch.", "autosplit.runtime.", "autosplit.sim.")) and not module.startswith(_CALLERS)


class SampleValues:
    """The values that a step of the sample batch read. See Note [Replayed values].

    Attributes:
        phase: The current steps: real steps of the sample batch, real steps of twice that batch, or fake steps.
        replayed: Functions and operators that got replayed values, as the keys of a dict (an ordered set).
    """

    def __init__(self) -> None:
        self.phase: Literal["sample", "twice", "replay"] = "sample"
        self.replayed: dict[str, None] = {}
        self._values: dict[Site, list[Any]] = {}
        self._rows: dict[Site, list[tuple[int, int]]] = {}
        self._elements_twice: dict[Site, list[int]] = {}
        self._used: dict[Site, int] = {}
        self._sizes: tuple[int, ...] = ()

    def begin(self, split: Sequence[int], *, evaluates: bool = False) -> None:
        """Begin a step of this split. A real training step of the sample batch replaces the record.

        Args:
            evaluates: Whether the step is only a forward, which keeps the record of the training step.
        """
        if self.phase == "sample" and not evaluates:
            self._values.clear()
            self._rows.clear()
        self._used.clear()
        self._sizes = tuple(sorted({*split, sum(split)} - {0}, reverse=True))

    def note_values(self, values: Sequence[Any]) -> None:
        """Record values that the calling line read in the step of the sample batch."""
        if self.phase == "sample":
            self._values.setdefault(_site("values"), []).extend(values)

    def note_rows(self, operator: str, elements: int, rows: int) -> None:
        """Record how many rows an operator returned for an input with this number of elements."""
        if self.phase == "sample":
            self._rows.setdefault(_site(operator), []).append((elements, rows))
        elif self.phase == "twice":
            self._elements_twice.setdefault(_site(operator), []).append(elements)

    def values(self, count: int, name: str) -> Any:
        """Return the next recorded values of the calling line, as an array. After the last value, start again.

        Raises:
            UnknownValueError: The line read nothing in the recorded step.
        """
        site, recorded = self._recorded(self._values, "values")
        start = self._used.get(site, 0)
        self._used[site] = (start + count) % len(recorded)
        self.replayed[name] = None
        if count == 1:  # `.item()` in a loop over thousands of elements
            return np.asarray(recorded[start : start + 1])
        return np.asarray(recorded)[(start + np.arange(count)) % len(recorded)]

    def rows(self, operator: str, elements: int, *, grows: bool) -> int:
        """Return how many rows the operator returns for an input with this number of elements.

        Args:
            grows: Whether the number of rows is proportional to the elements. Otherwise return the recorded number.

        Raises:
            UnknownValueError: The calling line did not run this operator in the recorded step.
        """
        site, recorded = self._recorded(self._rows, operator)
        at = self._used.get(site, 0)
        self._used[site] = at + 1
        self.replayed[operator] = None
        before, rows = map(int, recorded[at % len(recorded)])
        twice = self._elements_twice.get(site, [2 * before])
        if not grows or twice[at % len(twice)] == before:
            return rows
        samples = next((size for size in self._sizes if elements % size == 0), 1)
        return samples * -(-rows * elements // (before * samples))

    def _recorded(self, record: dict[Site, list[Any]], what: str) -> tuple[Site, list[Any]]:
        site = _site(what)
        if not record.get(site):
            raise UnknownValueError(f"{site[1]}:{site[2]} read no values ({what}) in the recorded step")
        return site, record[site]


def _site(what: str) -> Site:
    frame = _caller()
    return what, frame.f_code.co_filename, frame.f_lineno


class WholeReads(TorchFunctionMode):
    """Record or replay functions that read whole tensors or lists without the dispatcher."""

    def __init__(self, values: SampleValues) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.ctc_loss:  # torch turns lists of lengths into real tensors, which do not mix with fake tensors
            args = tuple(map(_as_tensor, args))
            kwargs = {name: _as_tensor(value) for name, value in (kwargs or {}).items()}
        if func in _WHOLE_READS:
            tensor = args[0]
            if isinstance(tensor, FakeTensor):
                array = self._values.values(tensor.numel(), f".{getattr(func, '__name__', func)}()")
                with unset_fake_temporarily():
                    tensor = torch.as_tensor(array).to(tensor.dtype).reshape(tensor.shape)
                    return func(tensor, *args[1:], **(kwargs or {}))
            if self._values.phase == "sample" and tensor.numel():
                self._values.note_values(tensor.detach().reshape(-1).tolist())
        return func(*args, **(kwargs or {}))


def _as_tensor(lengths: Any) -> Any:
    return torch.tensor(lengths) if isinstance(lengths, (list, tuple)) else lengths


# --------------------------------------------------------------------------------------------- compared with real steps

LEAST_OF_PEAK, LEAST_OF_GROWTH = 0.98, 0.9
"""Minimum peak of a replayed step, and growth of that peak with the batch, as fractions of real steps.

Optimizer steps in between change the rows that a router selects. A tiny Mixtral was 0.2% off.
"""


def replayed(trace: Callable[..., T], shape: StepShape, *, like_gpu: bool = True) -> T | None:
    """Return a tracer of fake tensors that replays recorded values, or None if its steps differ from real steps.

    Args:
        trace: Function that makes a `Tracer` and traces `shape` with it. It gets ``fake``, ``like_gpu`` and ``values``.
        like_gpu: As for `Tracer`. The compared steps always run the CPU's operators.
    """
    values = SampleValues()
    twice = StepShape(tuple(tuple(2 * samples for samples in split) for split in shape.splits))
    try:
        real: Any = trace(fake=False, like_gpu=False, values=values)
        values.phase = "twice"
        try:
            expected = [real.trace(one) for one in (shape, twice)]
        finally:
            real.trainee.restore()
        values.phase = "replay"
        found: Any = trace(fake=True, like_gpu=False, values=values)
        if not _agrees([found.trace(one) for one in (shape, twice)], expected):
            _log.info("steps with replayed values differ from real steps: not using the values")
            return None
        return trace(fake=True, like_gpu=True, values=values) if like_gpu else found
    except Exception as error:  # noqa: BLE001  # the caller has another tracer, or reports the failure
        _log.info("can't trace a step with replayed values: %s: %s", type(error).__name__, error)
        return None


def _agrees(fakes: Sequence[Any], reals: Sequence[Any]) -> bool:
    """Return whether fake steps have the same matrix products as real steps, in order, and need as much memory.

    Both sequences contain traces of the sample batch and of twice that batch.
    """
    if [_products(one) for one in fakes] != [_products(one) for one in reals]:
        return False
    fake_bytes, real_bytes = ([sum(one.peak_bytes) for one in traces] for traces in (fakes, reals))
    growth = (fake_bytes[1] - fake_bytes[0], real_bytes[1] - real_bytes[0])
    is_enough = [fake >= LEAST_OF_PEAK * real for fake, real in zip(fake_bytes, real_bytes, strict=True)]
    return all(is_enough) and growth[0] >= LEAST_OF_GROWTH * growth[1]


def _products(trace: Any) -> list[tuple[str, str]]:
    """Return the kind and the dtype of each kernel with arithmetic.

    For fake tensors, torch runs some composite operators without arithmetic differently.
    """
    works = [event for event in (*trace.micro, *trace.update) if isinstance(event, Work)]
    return [label[:2] for work in works for label, flops in zip(work.labels, work.numbers[0], strict=True) if flops]
