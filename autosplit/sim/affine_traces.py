"""Predict the trace of a step at any batch size from a few traces.

Note [Trace models]
~~~~~~~~~~~~~~~~~~~
A step allocates and frees the same storages in the same order at every batch size. Each storage has
``c + s * samples`` bytes, and the work of each op is linear, too. Some blocks inside kernels are linear only between
two limits (`Entry.limits`). A traced step of an odd size gives ``c`` and ``s`` of every storage and op (Note [Odd
splits] in `op_calls`). So one trace for each variant of a step predicts every batch size:

* Bytes are rounded to allocator blocks and added in order, which gives the exact peak.
* Work is replayed on the simulated clocks of any GPU.
* A loss over the whole batch may be quadratic in the samples. A quadratic model covers such a loss on one device.

The model is compared with a traced small step. It is also compared with the largest requested step above the odd sizes.
If another kernel or branch runs at a different size, the step has no trace model and is traced at each requested size.
A step of real tensors is traced only twice, because it needs real memory. If its two traces have different ops, a line
through the two peaks predicts each peak.

Note [A batch of one]
~~~~~~~~~~~~~~~~~~~~~
A batch of 1 may need less memory than the line through larger batches predicts. torch ignores the stride of a dimension
of size 1, so a tensor of one sample is contiguous in any order of its dimensions:

    x.transpose(0, 1).contiguous()     (2, 12, 64) -> copies 2 * 12 * 64 numbers
                                       (1, 12, 64) -> returns the same memory

Kernels for one row also differ from kernels for several rows. So the trace model for batches of 2 and more is first
compared with a traced batch of 1 (`_predicts_one`). If they differ, steps with a batch of 1 on a device get a separate
model. Measured lines through several batch sizes start at 2 samples for the same reason.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from autosplit.runtime.protocol import StepShape
from autosplit.runtime.trainee import Trainee
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.gradient_arrivals import Variant
from autosplit.sim.kernel_time import Codes, Numbers
from autosplit.sim.op_calls import odd_split
from autosplit.sim.op_cost import Move, Work
from autosplit.sim.op_recorder import Event
from autosplit.sim.reserved_memory import block_bytes
from autosplit.sim.tracer import Phase, Trace, Tracer
from autosplit.solve.memory import MemoryParts

_log = logging.getLogger(__name__)

_KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "left")
_PHASES: tuple[Phase, ...] = ("broadcast", "micro", "reduce", "update")

MOST_KEPT = 256
"""Maximum number of predicted traces in the cache."""


@dataclass
class _Shared:
    """State that the trace models of one workload share across GPUs. `traces` caches predicted traces."""

    checks: bool = False
    given_up: bool = False
    traces: dict[tuple[int, StepShape, StepShape], Trace] = field(default_factory=dict)


class AffineTraces:
    """Predict the memory and work of steps. It has `Tracer`'s interface, but traces only a few steps."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.fake = tracer.fake
        self.scales_loss = tracer.scales_loss
        self.accumulation_costs = tracer.accumulation_costs
        self.zeroing_costs = tracer.zeroing_costs
        self._shared = _Shared()
        self._for_others: dict[int, AffineTraces] = {}
        self._models: dict[StepShape, _TraceModel | None] = {}
        self._is_curved = False
        self._compared_up_to: dict[bool, int] = {}
        self._fits_one: dict[bool, bool] = {}
        self._works_for_one: dict[bool, bool] = {}

    @property
    def given_up(self) -> bool:
        """Whether a trace model failed on some GPU. Then every step is traced."""
        return self._shared.given_up

    def for_kernels(self, kernels: GpuKernels) -> AffineTraces:
        """Return the trace models for another GPU, or this object if that GPU runs the same kernels."""
        tracer = self.tracer.for_kernels(kernels)
        if tracer is self.tracer:
            return self
        if id(tracer) not in self._for_others:
            other = self._for_others[id(tracer)] = AffineTraces(tracer)
            other._shared = self._shared
        return self._for_others[id(tracer)]

    @property
    def trainee(self) -> Trainee:
        """The model copy that is traced."""
        return self.tracer.trainee

    def trace(self, shape: StepShape, first: StepShape | None = None) -> Trace:
        """Return the trace of a step, or of a later micro-step.

        Args:
            first: For a later micro-step, the first one. Its trace model is used if it also predicts `shape`.
        """
        if first is None or (first != shape and 1 in shape.splits[0] and not self._predicts_work_of_one(shape)):
            first = shape
        if self._shared.checks:
            self._check(first)
        key, traces = (id(self), shape, first), self._shared.traces
        if key not in traces:
            if len(traces) >= MOST_KEPT:
                traces.clear()
            model = self._model_for(first)
            traces[key] = self.tracer.trace(shape) if model is None else model.at(shape.splits[0])
        return traces[key]

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Compare each prediction with a trace of the same step, unless a larger step was compared before."""
        self._shared.checks = True
        try:
            yield
        finally:
            self._shared.checks = False

    def _model_for(self, shape: StepShape) -> _TraceModel | None:
        """Return the trace model that predicts a step, or None. A batch of 1 on a device may need a separate model."""
        model = self._model_of(shape)
        if model is not None and self.fake and 1 in shape.splits[0] and not self._predicts_one(shape):
            model = self._model_of(shape, ones_apart=True)
        return model

    def _predicts_one(self, shape: StepShape) -> bool:
        """Return whether the trace model also holds for a batch of 1. PyTorch may skip a contiguous copy there.

        If both models predict the same peak and work for one sample on one device, no step over several devices is
        traced. In tests, the peak is then off by at most 10 KiB per GiB (tests/runtime/test_affine_traces.py).
        """
        model, own = self._models_for_one(shape)
        if model is None or own is None:
            return False
        evaluates, predicted, traced = shape.arrangement == "eval", model.at((1,)), own.at((1,))
        if evaluates not in self._fits_one:
            self._fits_one[evaluates] = model.predicts((1,), traced)
        fits_both = (
            len(shape.splits[0]) > 1 and predicted.peak_bytes == traced.peak_bytes and self._predicts_work_of_one(shape)
        )
        return self._fits_one[evaluates] or fits_both

    def _predicts_work_of_one(self, shape: StepShape) -> bool:
        evaluates = shape.arrangement == "eval"
        if evaluates not in self._works_for_one:
            model, own = self._models_for_one(shape)
            self._works_for_one[evaluates] = (
                model is None or own is None or np.allclose(_work_of(model.at((1,))), _work_of(own.at((1,))), rtol=0.01)
            )
        return self._works_for_one[evaluates]

    def _models_for_one(self, shape: StepShape) -> tuple[_TraceModel | None, _TraceModel | None]:
        """Return the trace models of a single-device step: for batches of 2 and more, and for a batch of 1.

        For real tensors, both are the same model.
        """
        one = StepShape(((1,),), "eval" if shape.arrangement == "eval" else "balanced")
        model = self._model_of(one)
        return model, self._model_of(one, ones_apart=True) if self.fake else model

    def _check(self, shape: StepShape) -> None:
        """Compare the trace model with a single-device step.

        One device is enough, because a device of a split runs like a single device with the same batch.
        """
        share = next(filter(None, shape.splits[0]))
        lone = StepShape(((share,),), "eval" if shape.arrangement == "eval" else "balanced")
        model = self._model_of(shape) and self._model_of(lone)
        if model is not None and lone.num_samples > self._compared_up_to[lone.arrangement == "eval"]:
            self._hold(model, lone)

    def _model_of(self, shape: StepShape, *, ones_apart: bool = False) -> _TraceModel | None:
        unit = _unit_of(shape, ones_apart=ones_apart)
        if unit not in self._models and not self.given_up:
            try:
                self._models[unit] = self._traced_at_odd_sizes(unit) if self.fake else self._traced_twice(unit)
            except Exception as error:  # noqa: BLE001  # the requested size may still work, or raise again
                _log.info("can't predict this step from other steps: %s: %s", type(error).__name__, error)
                self._models[unit] = None
        return None if self.given_up else self._models[unit]

    def _traced_at_odd_sizes(self, unit: StepShape) -> _TraceModel | None:
        """Trace a step of odd size to predict all others. Compare the first model of each kind with a trace."""
        active = [index for index, samples in enumerate(unit.splits[0]) if samples > 1]
        alone = StepShape(((self.tracer.workload.sample_batch_size,),))
        variants = self._variants_of(unit)
        if unit != _unit_of(alone):
            self._model_of(alone)  # sets `_is_curved`
        if len(active) > 1 and self._is_curved:
            return None  # an op may multiply samples of one device by samples of another
        if unit != variants["plain"]:
            self._model_of(variants["plain"], ones_apart=True)
            return self._models.get(unit)
        odd = odd_split(unit.splits[0])
        self._trace(
            variants, odd, [tuple(4 if place == index else n for place, n in enumerate(odd)) for index in active]
        )
        model, evaluates = self._models[unit], unit.arrangement == "eval"
        if model is not None and len(odd) == len(active) == 1 and evaluates not in self._compared_up_to:
            small = 2 if evaluates else max(2, alone.num_samples)
            self._hold(model, replace(unit, splits=((small,),)))
            self._compared_up_to[evaluates] = sum(odd)
        return model

    def _trace(self, variants: dict[Variant, StepShape], odd: tuple[int, ...], splits: list[tuple[int, ...]]) -> None:
        unit = variants["plain"]
        if len(splits) == 1:
            splits.append(tuple(min(16, samples) for samples in odd))
        found = self.tracer.trace_resized(replace(unit, splits=(odd,)), splits, tuple(variants))
        for variant, traces in zip(variants.values(), found, strict=True):
            self._models[variant] = model = _TraceModel()
            for split, trace in zip([odd, *splits], traces, strict=True):
                model.add(split, trace)
            if variant == _unit_of(StepShape(((self.tracer.workload.sample_batch_size,),))):
                self._is_curved = model.is_curved
            if not self._is_curved:
                model.straighten()

    def _variants_of(self, unit: StepShape) -> dict[Variant, StepShape]:
        """Return the step kinds that one trace covers. A trace of one-device training covers all training variants."""
        if len(unit.splits[0]) > 1 or unit.arrangement == "eval" or self.tracer.workload.step is not None:
            return {"plain": unit}
        plain = replace(unit, arrangement="balanced", num_ranks=1, accumulates=False)
        bucketed = replace(plain, arrangement="rank", num_ranks=2)
        return {"plain": plain, "accumulating": replace(plain, accumulates=True), "bucketed": bucketed}

    def _hold(self, model: _TraceModel, shape: StepShape) -> None:
        if model.predicts(shape.splits[0], self.tracer.trace(shape)):
            self._compared_up_to[shape.arrangement == "eval"] = shape.num_samples
            return
        _log.info("steps of other sizes take a different code path than %s: tracing each size", shape)
        self._shared.given_up = True
        self._shared.traces.clear()

    def _traced_twice(self, unit: StepShape) -> _TraceModel:
        """Trace a step of real tensors with the sample batch, and with twice as many samples on each device."""
        active = [index for index, samples in enumerate(unit.splits[0]) if samples]
        low = self.tracer.workload.sample_batch_size  # already traced
        model = _TraceModel()
        base = tuple(low if samples else 0 for samples in unit.splits[0])
        for split in [base, *((*base[:index], 2 * low, *base[index + 1 :]) for index in active)]:
            model.add(split, self.tracer.trace(replace(unit, splits=(split,))))
        return model


def _unit_of(shape: StepShape, *, ones_apart: bool = False) -> StepShape:
    """Return the step with every batch size replaced by 2. A batch of 1 stays 1 if `ones_apart`.

    Steps with equal results share a trace model.
    """
    least = 1 if ones_apart else 2
    return replace(shape, splits=(tuple(min(2, max(least, n)) if n else 0 for n in shape.splits[0]),))


def _work_of(trace: Trace) -> Numbers:
    works = [event for event in trace.micro if isinstance(event, Work)]
    totals: Numbers = np.array([[len(work.labels), *work.numbers[:2].sum(axis=1)] for work in works]).sum(axis=0)
    return totals


@dataclass(frozen=True, eq=False)
class _Columns:
    """A trace in columns.

    Attributes:
        numbers: All values that may change with the samples: bytes of each allocated or freed storage, then
            floating-point operations and bytes of each op, then bytes of each copy.
        order: Allocations, frees, ops and copies in order, without sizes. Equal for all steps of one model.
        kinds: The purpose of each storage, as an index of `_KINDS`.
    """

    split: tuple[int, ...]
    trace: Trace
    numbers: Numbers
    order: tuple[object, ...]
    kinds: Codes
    devices: Codes

    @classmethod
    def of(cls, split: tuple[int, ...], trace: Trace) -> _Columns:
        events = [event for phase in _PHASES for event in trace.events(phase)]
        works = [event for event in events if isinstance(event, Work)]
        columns = [np.array([float(entry.nbytes) for entry in trace.entries])]
        columns += [work.numbers.ravel() for work in works]
        columns.append(np.array([float(event.nbytes) for event in events if isinstance(event, Move)]))
        order: list[object] = [(one.kind, one.device, one.nbytes < 0, one.limits, one.block) for one in trace.entries]
        for phase in _PHASES:
            order.append(phase)
            for event in trace.events(phase):
                if isinstance(event, Move):
                    order.append((event.source, event.destination, event.purpose))
                else:
                    order.append((event.device, event.labels))
        kinds = np.array([_KINDS.index(entry.kind) for entry in trace.entries], dtype=np.int64)
        devices = np.array([entry.device for entry in trace.entries], dtype=np.int64)
        return cls(split, trace, np.concatenate(columns), tuple(order), kinds, devices)


class _TraceModel:
    """Trace model: bytes and work of a step as functions of the samples on each device."""

    def __init__(self) -> None:
        self._points: list[_Columns] = []

    def add(self, split: tuple[int, ...], trace: Trace) -> None:
        self._points.append(_Columns.of(split, trace))

    def predicts(self, split: tuple[int, ...], trace: Trace) -> bool:
        traced = _Columns.of(split, trace)
        if traced.order != self._points[0].order:
            return False
        return np.allclose(_evaluated(self._points, split), traced.numbers, rtol=1e-9, atol=0.5)

    @property
    def is_curved(self) -> bool:
        predicted = _evaluated(self._points[:2], self._points[2].split)
        return bool(np.abs(predicted - self._points[2].numbers).max(initial=0.0) > 0.5)

    def straighten(self) -> None:
        """Keep only the points that a linear fit needs. With more, rounding looks like curvature."""
        del self._points[1 + sum(1 for samples in self._points[0].split if samples) :]

    def at(self, split: tuple[int, ...]) -> Trace:
        """Return the trace for a split: the traced step, a prediction, or an estimate from the nearest traced step."""
        for point in self._points:
            if point.split == split and point.trace.peak_bytes:
                return point.trace
        same_order = all(self._points[0].order == point.order for point in self._points[1:])  # `order` has no sizes
        return self._made(split) if same_order else self._near(split)

    def _made(self, split: tuple[int, ...]) -> Trace:
        base = self._points[0].trace
        numbers = np.rint(_evaluated(self._points, split))
        count = len(base.entries)
        rounded = block_bytes(base.entries, numbers[:count])
        here = [self._points[0].devices == device for device in range(len(split))]
        parts = tuple(_parts(rounded[mask], self._points[0].kinds[mask]) for mask in here)
        made = iter(_events([event for phase in _PHASES for event in base.events(phase)], numbers[count:]))
        phases = [tuple(itertools.islice(made, len(base.events(phase)))) for phase in _PHASES]
        broadcast, micro, reduce, update = phases
        peaks = tuple(part.total_bytes for part in parts)
        return Trace(peaks, parts, base.entries, rounded, broadcast, micro, reduce, update)

    def _near(self, split: tuple[int, ...]) -> Trace:
        near = min(self._points, key=lambda point: abs(sum(point.split) - sum(split)))
        peaks = _evaluated(self._points, split, [np.array(point.trace.peak_bytes, float) for point in self._points])
        found = tuple(max(0, int(peak)) for peak in peaks)
        before = near.trace.parts
        parts = tuple(one.of_peak(peak, measured=False) or one for one, peak in zip(before, found, strict=True))
        times = sum(split) / sum(near.split)
        micro = tuple(_scaled(event, times) for event in near.trace.micro)
        pairs = zip(parts, before, strict=True)
        growth = np.array([part.activations_bytes / max(1, old.activations_bytes) for part, old in pairs])
        grown = np.where(near.kinds == _KINDS.index("activations"), growth[near.devices], 1.0)
        sizes = block_bytes(near.trace.entries, near.trace.entry_bytes * grown)
        return replace(near.trace, peak_bytes=found, parts=parts, entry_bytes=sizes, micro=micro, reserved={})


def _evaluated(points: Sequence[_Columns], split: tuple[int, ...], values: list[Numbers] | None = None) -> Numbers:
    """Evaluate a polynomial in each device's samples. Each further traced step increases its degree by 1."""
    base = points[0].split
    rows = [point.numbers for point in points] if values is None else values
    total = rows[0].copy()
    for index in range(len(split)):
        places = [0, *(i for i, point in enumerate(points) if point.split[index] != base[index])]
        for i in places[1:]:
            own = points[i].split[index]
            others = [points[j].split[index] for j in places if j != i]
            total += np.prod([(split[index] - other) / (own - other) for other in others]) * (rows[i] - rows[0])
    return total


def _parts(rounded: Numbers, kinds: Codes) -> MemoryParts:
    if not len(rounded):
        return MemoryParts(0, 0, 0, 0, 0)
    until = int(rounded.cumsum().argmax()) + 1
    held = [int(rounded[:until][kinds[:until] == kind].sum()) for kind in range(len(_KINDS))]
    parameters, *others, left = held
    return MemoryParts(parameters + left, *others)


def _events(events: Sequence[Event], numbers: Numbers) -> Iterator[Event]:
    copies = iter(numbers[len(numbers) - sum(isinstance(event, Move) for event in events) :])
    start = 0
    for event in events:
        if isinstance(event, Move):
            yield replace(event, nbytes=int(next(copies)))
        else:
            yield event.with_numbers(numbers[start : start + event.numbers.size])
            start += event.numbers.size


def _scaled(event: Event, times: float) -> Event:
    if isinstance(event, Move):
        return event
    return event.with_numbers(np.vstack([event.numbers[:2] * times, event.numbers[2:]]))
