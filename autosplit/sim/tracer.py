"""Run a training step once on simulated devices, and record its memory and work.

A trace contains each device's peak and the work between transfers, which gives the time on every GPU. If the model
allows it, the tensors are fake. Fake tensors have no values and no memory, and their cost does not grow with the batch.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from autosplit.errors import AutosplitError, WorkloadError, from_user_code, users_errors
from autosplit.notes import Note
from autosplit.rng import preserved_rng
from autosplit.runtime.interrupts import held_interrupts
from autosplit.runtime.memory_tracker import Kind
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import bucket_bytes, run_placed, run_until_settled
from autosplit.runtime.trainee import Trainee
from autosplit.sim.allocator_settings import AllocatorSettings
from autosplit.sim.attention import AttentionCall, Backend, chosen_backend
from autosplit.sim.cuda_functions import CudaFunctions
from autosplit.sim.data_dependent import DataDependent, needs_values
from autosplit.sim.fake_copy import fake_mode, masks_of_real_tensors, mode_of
from autosplit.sim.fake_results import FakeResults
from autosplit.sim.fake_trainee import traced_copy
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.gradient_arrivals import Variant, entries_of
from autosplit.sim.kernel_time import Numbers
from autosplit.sim.op_calls import resizer
from autosplit.sim.op_cost import Move, OpCost
from autosplit.sim.op_recorder import Event, OpRecorder, Recorded
from autosplit.sim.reserved_memory import block_bytes, reserved_bytes
from autosplit.sim.sample_values import SampleValues, replayed
from autosplit.sim.trace_tracker import BoundedEntry, TraceTracker
from autosplit.solve.memory import MemoryParts
from autosplit.text import size_text
from autosplit.torch_versions import cublas_workspace_bytes
from autosplit.workload.model_call import LossRule, loss_rule, takes_loss_itself
from autosplit.workload.workload import Workload, modules_of, sample_text

_log = logging.getLogger(__name__)

aten = torch.ops.aten

Phase = Literal["broadcast", "micro", "reduce", "update"]
"""The parts of an optimizer step, in order. ``micro`` is repeated for each micro-step."""


@dataclass(frozen=True)
class Trace:
    """A traced optimizer step.

    Attributes:
        peak_bytes: Peak of each device. Empty for a trace that was derived, not run.
        entries: Allocated and freed blocks, in order.
        entry_bytes: Their bytes, rounded to blocks. Negative for freed blocks.
        broadcast: Copies of parameters to persistent replicas, once per step. Other copies are in `micro`.
        reduce: Reduction of persistent replicas' gradients, once per step. Other reductions are in `micro`.
        reserved: Results of `reserved_bytes`, by its arguments.
    """

    peak_bytes: tuple[int, ...]
    parts: tuple[MemoryParts, ...]
    entries: tuple[BoundedEntry, ...]
    entry_bytes: Numbers = field(compare=False)
    broadcast: tuple[Event, ...]
    micro: tuple[Event, ...]
    reduce: tuple[Event, ...]
    update: tuple[Event, ...]
    reserved: dict[Any, int] = field(default_factory=dict, compare=False, repr=False)

    def events(self, phase: Phase) -> tuple[Event, ...]:
        """Return the events of a phase."""
        events: tuple[Event, ...] = getattr(self, phase)
        return events

    def reserved_bytes(self, device: int, settings: AllocatorSettings, capacity_bytes: int | None = None) -> int:
        """Return the most memory that the allocator reserves on a device, see `reserved_memory.reserved_bytes`."""
        key = device, settings, capacity_bytes
        if key not in self.reserved:
            peak_bytes = self.parts[device].total_bytes
            found = reserved_bytes(self.entries, self.entry_bytes, device, settings, capacity_bytes)
            self.reserved[key] = max(peak_bytes, found)
        return self.reserved[key]


@dataclass(frozen=True)
class _Update:
    """A traced optimizer update: its number of gradients, a function that charges its storages, and its work."""

    num_gradients: int
    count: Callable[[TraceTracker], None]
    events: tuple[Recorded, ...]


class Tracer:
    """Trace training steps of one workload.

    Args:
        fake: Trace fake tensors. Otherwise trace real tensors on the CPU.
        like_gpu: Run the GPU's variants of operators and optimizers instead of the CPU's.
        kernels: The GPU whose kernels and inner memory fake CPU tensors imitate. None imitates an A100 without inner
            memory.
        values: Records values that steps of real tensors read, or replays them in steps of fake tensors.

    Attributes:
        data_dependent: Replaces values that fake tensors lack, and reports this.
        norms_over_samples: Whether an op normalises over the batch. It may reject a batch of 1.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        fake: bool,
        like_gpu: bool,
        kernels: GpuKernels | None = None,
        values: SampleValues | None = None,
    ) -> None:
        self.workload = workload
        self.attention: dict[AttentionCall, Backend] = {}
        self.fake = fake
        self.like_gpu = like_gpu
        self.kernels = kernels
        self.runs = 0
        self.norms_over_samples = False
        self.data_dependent = DataDependent(values)
        with preserved_rng(), held_interrupts() if fake else nullcontext():
            # Tensors of two fake modes do not mix, so reuse the mode of a model that was built under one.
            mode = (mode_of(workload) or fake_mode()) if fake else None
            self.trainee: Trainee = traced_copy(workload, mode, gpu_variants=like_gpu)
        self._fake_results = FakeResults() if fake else None
        self._traces: dict[StepShape, Trace] = {}
        self._with_gradient: list[nn.Parameter] | None = None
        self._zeroing: list[OpCost] = []
        self._accumulation: list[OpCost] = []
        self._leaves_unused = False
        self._is_trained = False
        self._has_cuda_functions = like_gpu
        self._update: _Update | None = None
        self._has_settled = False
        # Do not add this tracer: a cycle would keep the optimizer state alive until Python collects garbage.
        self._for_others: dict[GpuKernels, Tracer] = {}

    def for_kernels(self, kernels: GpuKernels) -> Tracer:
        """Return a tracer of the same steps on another GPU. If the GPU runs the same operators, return this tracer.

        Both share the model copy and the optimizer state. Temporary blocks of `sum` (`kernel_memory`) may have other
        sizes there, but do not require a new trace.
        """
        if self.kernels is None or self._runs_equally(kernels):
            return self
        if kernels not in self._for_others:
            other = self._for_others[kernels] = copy.copy(self)
            vars(other).update(kernels=kernels, attention={}, _traces={}, _for_others={})
        return self._for_others[kernels]

    def _runs_equally(self, kernels: GpuKernels) -> bool:
        assert self.kernels is not None, "the caller has seen it"
        own_bytes, other_bytes = (cublas_workspace_bytes(one.capability) for one in (self.kernels, kernels))
        return own_bytes == other_bytes and all(
            chosen_backend(call, kernels) == own for call, own in self.attention.items()
        )

    def trace(self, shape: StepShape, first: StepShape | None = None) -> Trace:  # noqa: ARG002  # as `AffineTraces`
        """Return the trace of an optimizer step on simulated devices with unlimited memory. Run each step only once.

        Args:
            shape: A step of one micro-step. With `accumulates`, it adds to gradients of earlier micro-steps.
            first: Ignored. `AffineTraces` uses it.
        """
        if shape not in self._traces:
            self._settle(shape)
            if shape not in self._traces:
                self._traces[shape] = self._run(shape)
        return self._traces[shape]

    def trace_resized(
        self, shape: StepShape, splits: Sequence[tuple[int, ...]], variants: Sequence[Variant] = ("plain",)
    ) -> list[list[Trace]]:
        """Trace a step of an odd split (Note [Odd splits]). Return its traces for all splits, for each variant.

        The derived traces have no peaks.
        """
        self._settle(shape)
        return self._traced(shape, splits, variants)

    def _settle(self, shape: StepShape) -> None:
        if shape.arrangement == "eval" or self._with_gradient is not None:
            return
        self._with_gradient = []
        first = replace(shape, accumulates=False, updates=True)
        has_begun = False
        try:
            has_begun = self.fake and self.workload.step is None and self.trainee.begin_state()
        except Exception as error:  # noqa: BLE001  # an optimizer may need a step to create state, so run a step
            _log.debug("the optimizer's state appears in a step: %s", error)
            self.trainee.end_state(())
        found = run_until_settled(self.trainee, lambda: self._run(first))
        if has_begun and self._leaves_unused:  # parameters without a gradient get no optimizer state
            self.trainee.end_state(self._with_gradient)
            found = run_until_settled(self.trainee, lambda: self._run(first))
        if self.workload.step is None and not self._is_trained:
            raise WorkloadError(
                "No parameter of the model gets a gradient, so the loss does not come from the model's outputs. "
                "In compute_loss, call the model that is passed, not one from outside.",
            )
        self._traces[first] = found
        self._has_settled = True

    def _run(self, shape: StepShape) -> Trace:
        return self._traced(shape)[0][0]

    def _traced(
        self, shape: StepShape, resized: Sequence[tuple[int, ...]] = (), variants: Sequence[Variant] = ("plain",)
    ) -> list[list[Trace]]:
        recorder = OpRecorder(sum(shape.splits[0]), keeps_calls=bool(resized) or len(variants) > 1)
        begun_at = updated_at = 0

        def mark(phase: str) -> None:
            nonlocal begun_at, updated_at
            begun_at, updated_at = begun_at or len(tracker.account), len(tracker.account)
            recorder.mark(phase)
            for kind, tensors in self.trainee.held().items():
                for tensor in tensors:
                    tracker.classify(tensor, kind)
            if phase == "update" and not self._traces:
                self._note_gradients()

        held: list[nn.Parameter] = (self._with_gradient or []) if shape.accumulates else []
        tracker = TraceTracker(
            len(shape.splits[0]),
            observer=recorder,
            draws=self.trainee.draws,
            kernels=self.kernels,
            data_dependent=self.data_dependent,
            fake_results=self._fake_results,
        )
        functions = CudaFunctions(self.kernels or GpuKernels()) if self._has_cuda_functions else None
        with (
            preserved_rng(),
            held_interrupts() if self.fake else nullcontext(),
            _without_collector(),
            # When a fake tensor fails, torch logs pages, which would hide the error of two lines.
            _switched(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
            # oneDNN fuses ops that GPUs run separately, which would make an LSTM's memory several times too small.
            _switched(torch.backends.mkldnn, "enabled", False) if self.like_gpu else nullcontext(),
            functions or nullcontext(),
            masks_of_real_tensors(self.workload.sample_batch) if self.fake else nullcontext(),
            self.data_dependent.step(shape.splits[0], evaluates=shape.arrangement == "eval"),
            recorder.recurrent.watching(self.trainee.models.modules) if self.like_gpu else nullcontext(),
        ):
            update = partial(self._updated, tracker, recorder)
            peaks = run_placed(self.trainee, shape, tracker, mark, update=update, held=held)
        self.runs += 1
        if shape.arrangement != "eval" and functions is not None:
            self._has_cuda_functions = functions.needed  # skip the mode if unused: it slows every torch call
            self.attention.update(functions.calls)
        _log.debug("traced %s: %s", shape, ", ".join(map(size_text, peaks)))
        self.norms_over_samples |= recorder.norms_over_samples
        splits = (shape.splits[0], *resized)
        # Without an update, as in evaluation, every entry belongs to forward and backward.
        stages = begun_at, updated_at if shape.updates and updated_at else len(tracker.account)
        return self._traces_of(shape, splits, variants, tracker, recorder, stages)

    def _traces_of(
        self,
        shape: StepShape,
        splits: Sequence[tuple[int, ...]],
        variants: Sequence[Variant],
        tracker: TraceTracker,
        recorder: OpRecorder,
        stages: tuple[int, int],
    ) -> list[list[Trace]]:
        parts = [_parts_of(tracker, device) for device in range(len(splits[0]))]
        buckets = bucket_bytes(self.trainee) if "bucketed" in variants else 0
        found: list[list[Trace]] = []
        for variant in variants:
            entries = entries_of(tracker, variant, stages, buckets)
            found.append([])
            for split in splits:
                size = resizer(splits[0], split)
                others = tuple(entry._replace(nbytes=size(entry.nbytes)) for entry in entries)
                is_own = variant == "plain" and split == splits[0]
                found[-1].append(_trace_of(shape, parts if is_own else (), others, recorder.phases(size, variant)))
        return found

    def _updated(self, tracker: TraceTracker, recorder: OpRecorder) -> None:
        """Update the parameters. For fake tensors, replay the first update, because it does not depend on the batch."""
        count = sum(parameter.grad is not None for parameter in self.trainee.parameters())
        if self.fake and self._has_settled and self._update is not None and self._update.num_gradients == count:
            self._update.count(tracker)
            recorder.repeat(self._update.events)
            return
        counted = tracker.repeatable(self.trainee.update)
        self._update = None if counted is None else _Update(count, counted, recorder.phase())

    def _note_gradients(self) -> None:
        """Store the parameters with a gradient. If layers are skipped at random, keep the largest set."""
        grads = [(p, p.grad) for p in self.trainee.parameters()]
        self._is_trained |= any(grad is not None for _, grad in grads)
        if self.fake and any(grad is not None and grad.is_sparse for _, grad in grads):
            raise NotImplementedError("the number of rows of a sparse gradient depends on the data")
        found = [p for p, grad in grads if grad is not None and not grad.is_sparse]
        if len(found) >= len(self._with_gradient or []):
            self._with_gradient = found
            nbytes = [p.numel() * p.element_size() for p in found]
            self._zeroing = [OpCost(0, each, "float32", part="backward") for each in nbytes]
            # Accumulation reads two tensors and writes one.
            self._accumulation = [OpCost(0, 3 * each, "float32", part="backward") for each in nbytes]
            self._leaves_unused = any(grad is None and p.requires_grad for p, grad in grads)

    @property
    def scales_loss(self) -> bool:
        """Whether a gradient scaler multiplies the loss. Before each update, it waits for the device."""
        return self.workload.precision == "fp16"

    def accumulation_costs(self) -> list[OpCost]:
        """Return the cost of adding a micro-step's gradients to earlier gradients: one op per parameter."""
        return self._accumulation

    def zeroing_costs(self) -> list[OpCost]:
        """Return the cost of making zero gradients, to which replicas' gradients are added: one op per parameter."""
        return self._zeroing

    def leaves_unused(self) -> bool:
        """Return whether a trainable parameter got no gradient in a step. Always False for a custom step."""
        return self._leaves_unused and self.workload.step is None

    def notes(self) -> tuple[Note, ...]:
        """Return the assumptions of the traces, one note each."""
        return tuple(self.data_dependent.notes())

    @functools.cached_property
    def loss_rule(self) -> LossRule | None:
        """Where the loss is in the model's outputs. None if the workload has a function for the loss."""
        if not takes_loss_itself(self.workload) or not self.runs:
            return None
        with (
            preserved_rng(),
            self.trainee.making,
            torch.no_grad(),
            TraceTracker(1, data_dependent=self.data_dependent),
            self.data_dependent.step((self.workload.sample_batch_size,), evaluates=True),
        ):
            return loss_rule(self.trainee.outputs(self.workload.sample_batch_size))


def _trace_of(
    shape: StepShape,
    parts: Sequence[MemoryParts],
    entries: tuple[BoundedEntry, ...],
    phases: list[tuple[str, list[Event]]],
) -> Trace:
    peaks = tuple(one.total_bytes for one in parts)
    sizes = block_bytes(entries, np.array([float(entry.nbytes) for entry in entries]))
    micro, update = _events(phases, "micro"), _events(phases, "update")
    if not shape.accumulates:
        return Trace(peaks, tuple(parts), entries, sizes, (), micro, (), update)
    # The traced step is one of several micro-steps. Persistent replicas get parameters before it and reduce after it.
    broadcast = tuple(event for event in _events(phases, "broadcast") if _moves(event, "parameter"))
    home = next((index for index, event in enumerate(micro) if _moves(event, "gradient")), len(micro))
    return Trace(peaks, tuple(parts), entries, sizes, broadcast, micro[:home], micro[home:], update)


def _parts_of(tracker: TraceTracker, device: int) -> MemoryParts:
    account = tracker.peak_account(device)
    others: tuple[Kind, ...] = ("gradients", "optimizer", "gathered", "activations")
    parameters_bytes = account.get("parameters", 0) + account.get("left", 0)
    return MemoryParts(parameters_bytes, *(account.get(kind, 0) for kind in others))


def _moves(event: Event, purpose: str) -> bool:
    return isinstance(event, Move) and event.purpose == purpose


def _events(phases: list[tuple[str, list[Event]]], wanted: str) -> tuple[Event, ...]:
    return tuple(event for name, events in phases if name == wanted for event in events)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection during a trace, because the peak would depend on its timing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _switched(owner: Any, name: str, value: bool) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _cause_text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def make_tracer(workload: Workload, *, like_gpu: bool, kernels: GpuKernels | None = None) -> tuple[Tracer, str | None]:
    """Make a tracer of fake tensors, or of real tensors if the model can't run with fake tensors.

    If steps for simulated GPUs depend on values, the tracer replays them. See Note [Replayed values]. For CPUs, real
    tensors are exact.

    Returns:
        The tracer, and a sentence about why it uses real tensors, or None.
    """
    shape = StepShape(((workload.sample_batch_size,),))
    kernels = (kernels or GpuKernels()) if like_gpu else None
    failure = _traced_fake(workload, shape, like_gpu=like_gpu, kernels=kernels)
    has_meta = any(p.is_meta for module in modules_of(workload) for p in module.parameters())
    has_values = not (mode_of(workload) or has_meta)
    if has_values and like_gpu and needs_values(failure.data_dependent if isinstance(failure, Tracer) else failure):
        found = replayed(partial(_traced_once, workload, shape, kernels=kernels), shape)
        failure = failure if found is None else found
    if isinstance(failure, Tracer):
        if like_gpu or not has_values or not failure.data_dependent.bounded:
            return failure, None
        failure = failure.data_dependent.as_error()
    if not has_values:
        raise from_user_code(failure, "The model, traced with fake tensors on its own sample batch,")
    with users_errors(sample_text(workload)):
        tracer = _traced_once(workload, shape, fake=False, like_gpu=like_gpu, kernels=kernels)
    return tracer, (
        f"autosplit can't trace the model with fake tensors ({_cause_text(failure)}). It traced real tensors on "
        "the CPU instead."
    )


def _traced_fake(workload: Workload, shape: StepShape, **options: Any) -> Tracer | Exception:
    try:
        return _traced_once(workload, shape, fake=True, **options)
    except AutosplitError:
        raise
    except Exception as error:  # noqa: BLE001  # fake tensors do not support an op, or the user's code failed
        return error


def _traced_once(
    workload: Workload,
    shape: StepShape,
    *,
    fake: bool,
    like_gpu: bool,
    kernels: GpuKernels | None = None,
    values: SampleValues | None = None,
) -> Tracer:
    kernels = kernels if like_gpu else None
    tracer = Tracer(workload, fake=fake, like_gpu=like_gpu, kernels=kernels, values=values)
    try:
        tracer.trace(shape)
        if {"eval", "forward"} & {*workload.held}:  # `generate` usually reads values, so check now whether it works
            tracer.trace(replace(shape, arrangement="eval"))
    except BaseException:
        tracer.trainee.restore()
        raise
    return tracer
