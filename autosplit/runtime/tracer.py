"""Run a training step once over pretended devices, and keep what it would cost anywhere.

A trace holds each device's peak and the work between transfers, so that one run gives the time on every card. The
tensors are fake where the model allows it: no numbers, no memory, and the same cost at any batch size.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from autosplit.errors import AutosplitError, WorkloadError, from_user_code, users_errors
from autosplit.notes import Note
from autosplit.rng import kept_rng
from autosplit.runtime.attention import AttentionCall, Backend, chosen_backend
from autosplit.runtime.cuda_functions import CudaFunctions
from autosplit.runtime.data_dependent import DataDependent, needs_values
from autosplit.runtime.fake_copy import fake_mode, holds_fakes, mode_of
from autosplit.runtime.gpu_kernels import GpuKernels, kernels_of_device
from autosplit.runtime.gradient_arrivals import Way, entries_of
from autosplit.runtime.interrupts import held_interrupts
from autosplit.runtime.memory_tracker import Entry, Kind, Tracker
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.op_calls import resizer
from autosplit.runtime.op_cost import Move, OpCost
from autosplit.runtime.op_recorder import Event, OpRecorder, Recorded
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.replayed_trace import replayed
from autosplit.runtime.sample_values import SampleValues
from autosplit.runtime.tracked_step import bucket_bytes, run_placed, run_until_settled
from autosplit.runtime.trainee import CPU, Trainee
from autosplit.runtime.transformers_masks import masks_of_real_tensors
from autosplit.solve.memory import MemoryParts
from autosplit.text import size_text
from autosplit.torch_versions import NORMS, cublas_workspace_bytes
from autosplit.workload.workload import Workload

_log = logging.getLogger(__name__)

aten = torch.ops.aten

Phase = Literal["broadcast", "micro", "reduce", "update"]
"""The parts of an optimizer step, in order; ``micro`` comes once for each micro-step."""


@dataclass(frozen=True)
class Trace:
    """One optimizer step, followed.

    Attributes:
        broadcast: Copies of the parameters to replicas that are kept, once a step; otherwise they are in `micro`.
        reduce: Kept replicas' gradients come home, once a step; otherwise they are in `micro`.
    """

    peak_bytes: tuple[int, ...]
    parts: tuple[MemoryParts, ...]
    entries: tuple[Entry, ...]
    broadcast: tuple[Event, ...]
    micro: tuple[Event, ...]
    reduce: tuple[Event, ...]
    update: tuple[Event, ...]

    def events(self, phase: Phase) -> tuple[Event, ...]:
        """Return the events of a phase."""
        events: tuple[Event, ...] = getattr(self, phase)
        return events


@dataclass(frozen=True)
class _Update:
    """An optimizer's update that was followed: of how many gradients, the storages it took, and its work."""

    num_gradients: int
    count: Callable[[Tracker], None]
    events: tuple[Recorded, ...]


class Tracer:
    """Traces training steps of one workload.

    Args:
        fake: Follow fake tensors; otherwise real ones on the CPU.
        like_gpu: Run the variants of operators and optimizers that a GPU would run, instead of the CPU's.
        device: The device that fake tensors claim, so that operators are those of that device.
        kernels: The GPU whose operators are run on fakes of the CPU, and whose inner memory is counted. None for an
            A100's operators, and no inner memory.
        values: Records the values that steps of real tensors read, or replays them in steps of fake ones.

    Attributes:
        attention: The calls of attention, with the back end that was chosen for each.
        data_dependent: Replaces values that fake tensors lack, and reports it.
        norms_over_samples: An op of these steps may refuse a single sample: it has but one value of each.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        fake: bool,
        like_gpu: bool,
        device: torch.device = CPU,
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
        with kept_rng(), held_interrupts() if fake else nullcontext():
            # What was built under fake tensors has a mode already, and tensors of two modes do not mix.
            self.trainee: Trainee = training_copy(
                workload,
                device=device if fake else CPU,
                mode=(mode_of(workload) or fake_mode()) if fake else None,
                gpu_variants=like_gpu,
            )
        self._kept: dict[StepShape, Trace] = {}
        self._with_gradient: list[nn.Parameter] | None = None
        self._zeroing: list[OpCost] = []
        self._accumulation: list[OpCost] = []
        self._leaves_unused = False
        self._is_trained = False
        self._has_cuda_functions = like_gpu
        self._update: _Update | None = None
        self._has_settled = False
        # Without this tracer: a cycle would keep the optimizer's state until Python collects garbage.
        self._for_others: dict[GpuKernels, Tracer] = {}

    def for_kernels(self, kernels: GpuKernels) -> Tracer:
        """Return a tracer of the same steps on another GPU: this one, if the GPU runs the same operators.

        It shares the copy of the model and the state of the optimizer. The temporary blocks of `sum` have another bound
        on another GPU (`kernel_memory`), which alone is no reason for a trace of its own.
        """
        if self.kernels is None or self._runs_alike(kernels):
            return self
        if kernels not in self._for_others:
            other = self._for_others[kernels] = copy.copy(self)
            vars(other).update(kernels=kernels, attention={}, _kept={}, _for_others={})
        return self._for_others[kernels]

    def _runs_alike(self, kernels: GpuKernels) -> bool:
        assert self.kernels is not None, "the caller has seen it"
        own_bytes, other_bytes = (cublas_workspace_bytes(one.capability) for one in (self.kernels, kernels))
        return own_bytes == other_bytes and all(
            chosen_backend(call, kernels) == own for call, own in self.attention.items()
        )

    def trace(self, shape: StepShape, first: StepShape | None = None) -> Trace:  # noqa: ARG002  # as `AffineTraces`
        """Return the trace of one optimizer step over pretended devices, followed once; no capacity bounds it.

        Args:
            shape: A step of one micro-step; with `accumulates`, one that adds to gradients of earlier ones.
            first: The first micro-step of its step, by which `AffineTraces` tells a further one; here each is followed.
        """
        if shape not in self._kept:
            self._settle(shape)
            if shape not in self._kept:
                self._kept[shape] = self._run(shape)
        return self._kept[shape]

    def trace_resized(
        self, shape: StepShape, splits: Sequence[tuple[int, ...]], ways: Sequence[Way] = ("plain",)
    ) -> list[list[Trace]]:
        """Follow a step of an odd split, see `odd_split`, and return it and its like with others, of each way.

        Those that were not followed have no peaks.
        """
        self._settle(shape)
        return self._followed(shape, splits, ways)

    def _settle(self, shape: StepShape) -> None:
        """Follow the first step, beside the optimizer's state that all others have, too."""
        if shape.arrangement == "eval" or self._with_gradient is not None:
            return
        self._with_gradient = []
        first = replace(shape, accumulates=False, updates=True)
        has_begun = False
        try:
            has_begun = self.fake and self.workload.step is None and self.trainee.begin_state()
        except Exception as error:  # noqa: BLE001  # whatever an optimizer can't do without a step: it is followed
            _log.debug("the optimizer's state appears in a step: %s", error)
            self.trainee.end_state(())
        found = run_until_settled(self.trainee, lambda: self._run(first))
        if has_begun and self._leaves_unused:  # no state appears for what gets no gradient
            self.trainee.end_state(self._with_gradient)
            found = run_until_settled(self.trainee, lambda: self._run(first))
        if self.workload.step is None and not self._is_trained:
            raise WorkloadError(
                "no parameter of the model gets a gradient: the loss comes from something else than the model that it "
                "is given; expected its outputs; call the model that compute_loss is passed, not one outside",
                code="no-gradient",
            )
        self._kept[first] = found
        self._has_settled = True

    def _run(self, shape: StepShape) -> Trace:
        return self._followed(shape)[0][0]

    def _followed(
        self, shape: StepShape, resized: Sequence[tuple[int, ...]] = (), ways: Sequence[Way] = ("plain",)
    ) -> list[list[Trace]]:
        """Trace a step; return its trace and those of the same step with other splits, for each way."""
        recorder = OpRecorder(sum(shape.splits[0]), keeps_calls=bool(resized) or len(ways) > 1)
        begun_at = 0

        def mark(phase: str) -> None:
            nonlocal begun_at
            begun_at = begun_at or len(tracker.account)
            recorder.mark(phase)
            for kind, tensors in self.trainee.held().items():
                for tensor in tensors:
                    tracker.classify(tensor, kind)
            if phase == "update" and not self._kept:
                self._note_gradients()

        held: list[nn.Parameter] = (self._with_gradient or []) if shape.accumulates else []
        names = [f"device {index}" for index in range(len(shape.splits[0]))]
        tracker = Tracker(
            names,
            [None] * len(names),
            observer=recorder,
            draws=self.trainee.draws,
            accounts=True,
            kernels=self.kernels,
            data_dependent=self.data_dependent,
        )
        functions = CudaFunctions(self.kernels or GpuKernels()) if self._has_cuda_functions else None
        with (
            kept_rng(),
            held_interrupts() if self.fake else nullcontext(),
            _without_collector(),
            # Torch's log of failing fake tensors buries the error that says it in two lines.
            _switched(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
            # What oneDNN fuses GPUs run apart: an LSTM's memory would be several times too small.
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
            self._has_cuda_functions = functions.needed  # the mode takes time at every call of torch's functions
            self.attention.update(functions.calls)
        _log.debug("traced %s: %s", shape, ", ".join(map(size_text, peaks)))
        self.norms_over_samples |= recorder.norms_over_samples
        splits = (shape.splits[0], *resized)
        return self._traces_of(shape, splits, ways, tracker, recorder, begun_at)

    def _traces_of(
        self,
        shape: StepShape,
        splits: Sequence[tuple[int, ...]],
        ways: Sequence[Way],
        tracker: Tracker,
        recorder: OpRecorder,
        begun_at: int,
    ) -> list[list[Trace]]:
        """Return the traces of a step that ran with the first of these splits: for each way, one with each split."""
        parts = [_parts_of(tracker, device) for device in range(len(splits[0]))]
        buckets = bucket_bytes(self.trainee) if "bucketed" in ways else 0
        found: list[list[Trace]] = []
        for way in ways:
            entries = entries_of(tracker, way, begun_at, buckets)
            found.append([])
            for split in splits:
                size = resizer(splits[0], split)
                others = tuple(entry._replace(nbytes=size(entry.nbytes)) for entry in entries)
                is_own = way == "plain" and split == splits[0]
                found[-1].append(_trace_of(shape, parts if is_own else (), others, recorder.phases(size, way)))
        return found

    def _updated(self, tracker: Tracker, recorder: OpRecorder) -> None:
        """Update the parameters; of fake ones once, and then count the same again: no batch makes it another."""
        count = sum(parameter.grad is not None for parameter in self.trainee.parameters())
        if self.fake and self._has_settled and self._update is not None and self._update.num_gradients == count:
            self._update.count(tracker)
            recorder.repeat(self._update.events)
            return
        counted = tracker.repeatable(self.trainee.update)
        self._update = None if counted is None else _Update(count, counted, recorder.phase())

    def _note_gradients(self) -> None:
        """Note which parameters have a gradient, in the step that leaves out the fewest layers."""
        grads = [(p, p.grad) for p in self.trainee.parameters()]
        self._is_trained |= any(grad is not None for _, grad in grads)
        if self.fake and any(grad is not None and grad.is_sparse for _, grad in grads):
            raise NotImplementedError("how many rows a sparse gradient has depends on the data")
        found = [p for p, grad in grads if grad is not None and not grad.is_sparse]
        if len(found) >= len(self._with_gradient or []):
            self._with_gradient = found
            nbytes = [p.numel() * p.element_size() for p in found]
            self._zeroing = [OpCost(0, each, "float32", part="backward") for each in nbytes]
            # Two tensors are read, and one is written.
            self._accumulation = [OpCost(0, 3 * each, "float32", part="backward") for each in nbytes]
            self._leaves_unused = any(grad is None and p.requires_grad for p, grad in grads)

    def accumulation_costs(self) -> list[OpCost]:
        """Return what adding a micro-step's gradients to those of earlier ones costs, an op for each parameter."""
        return self._accumulation

    def zeroing_costs(self) -> list[OpCost]:
        """Return what it costs to make gradients that replicas' can be added to, an op for each parameter."""
        return self._zeroing

    def leaves_unused(self) -> bool:
        """Tell whether some trainable parameter got no gradient in a step; of a custom step nobody knows."""
        return self._leaves_unused and self.workload.step is None

    def assumptions(self) -> tuple[Note, ...]:
        """Return what the workload and its traces assume, a sentence each."""
        replaced = self.data_dependent.notes()
        if not self.workload.takes_loss_itself or not self.runs:
            return (*self.workload.assumptions(), *replaced)
        with (
            kept_rng(),
            self.trainee.fake_mode or nullcontext(),
            torch.no_grad(),
            Tracker(["device 0"], [None], data_dependent=self.data_dependent),
            self.data_dependent.step((self.workload.sample_batch_size,), evaluates=True),
        ):
            return (*self.workload.assumptions(self.trainee.outputs()), *replaced)


def _trace_of(
    shape: StepShape, parts: Sequence[MemoryParts], entries: tuple[Entry, ...], phases: list[tuple[str, list[Event]]]
) -> Trace:
    """Put the phases of a step together as those of an optimizer step."""
    peaks = tuple(one.total_bytes for one in parts)
    micro, update = _events(phases, "micro"), _events(phases, "update")
    if not shape.accumulates:
        return Trace(peaks, tuple(parts), entries, (), micro, (), update)
    # What is followed is one micro-step of many: gradients wait on replicas that are there, and come home after it.
    broadcast = tuple(event for event in _events(phases, "broadcast") if _moves(event, "parameter"))
    home = next((index for index, event in enumerate(micro) if _moves(event, "gradient")), len(micro))
    return Trace(peaks, tuple(parts), entries, broadcast, micro[:home], micro[home:], update)


def _parts_of(tracker: Tracker, device: int) -> MemoryParts:
    account = tracker.peak_account(device)
    others: tuple[Kind, ...] = ("gradients", "optimizer", "gathered", "activations")
    parameters_bytes = account.get("parameters", 0) + account.get("left", 0)
    return MemoryParts(parameters_bytes, *(account.get(kind, 0) for kind in others))


def _moves(event: Event, purpose: str) -> bool:
    return isinstance(event, Move) and event.purpose == purpose


def _events(phases: list[tuple[str, list[Event]]], wanted: str) -> tuple[Event, ...]:
    """Return the events of a phase; a custom step that has no phases of its own is all in the first."""
    return tuple(event for name, events in phases if name == wanted for event in events)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector out of a trace, whose peak would depend on when it comes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _switched(owner: Any, name: str, value: bool) -> Iterator[None]:
    """Set a switch for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def make_device_tracer(workload: Workload, device: torch.device) -> tuple[Tracer, str | None]:
    """Make a tracer for a model on an accelerator. There, real steps decide what fits; traces give starting points.

    Fake tensors are on the accelerator, so that torch runs its operators. If that fails, they are on the CPU. If the
    model can't be traced with fake tensors at all, nothing is traced.

    Returns:
        The tracer, which is not fake if nothing can be traced, and a sentence about its shortcomings, or None.
    """
    shape = StepShape(((workload.sample_batch_size,),))
    failures: list[Exception] = []
    kernels = kernels_of_device(device)
    for place in (device, CPU) if holds_fakes(device) else (CPU,):
        tried = _followed_fake(workload, shape, like_gpu=True, device=place, kernels=kernels)
        if isinstance(tried, Tracer) and tried.data_dependent.bounded:  # real steps decide, and a bound may be far off
            tried = tried.data_dependent.as_error()
        if isinstance(tried, Exception):
            failures.append(tried)
        elif place == device:
            return tried, None
        else:
            why = f" ({_cause_text(failures[0])})" if failures else ""
            whose = "an A100" if kernels is None else "this GPU"
            return tried, (
                f"fake tensors can't be traced on {device.type}{why}: traces run the operators of {whose} on fake "
                "tensors of the CPU, and real steps correct them"
            )
    tracer = Tracer(workload, fake=False, like_gpu=True)
    tracer.norms_over_samples = any(
        isinstance(part, NORMS) for module in tracer.trainee.models.modules for part in module.modules()
    )
    return tracer, (
        f"the model can't be followed with fake tensors ({_cause_text(failures[0])}); what fits is told by real steps "
        "alone"
    )


def _cause_text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def make_tracer(workload: Workload, *, like_gpu: bool, kernels: GpuKernels | None = None) -> tuple[Tracer, str | None]:
    """Make a tracer of fake tensors, or of real ones if the model can't run with fake ones, with the reason for that.

    If steps for simulated GPUs depend on values, and the model has some, the tracer replays them. See Note [Replayed
    values]. For CPUs real tensors are exact.
    """
    shape = StepShape(((workload.sample_batch_size,),))
    kernels = (kernels or GpuKernels()) if like_gpu else None
    failure = _followed_fake(workload, shape, like_gpu=like_gpu, kernels=kernels)
    has_values = not (mode_of(workload) or any(p.is_meta for module in workload.modules for p in module.parameters()))
    if has_values and like_gpu and needs_values(failure.data_dependent if isinstance(failure, Tracer) else failure):
        found = replayed(partial(_traced_once, workload, shape, kernels=kernels), shape)
        failure = failure if found is None else found
    if isinstance(failure, Tracer):
        if like_gpu or not has_values or not failure.data_dependent.bounded:
            return failure, None
        failure = failure.data_dependent.as_error()
    if not has_values:
        raise from_user_code(failure, "the model, followed with fake tensors on its own sample batch,")
    with users_errors(workload.sample_text):
        tracer = _traced_once(workload, shape, fake=False, like_gpu=like_gpu, kernels=kernels)
    return tracer, (
        f"the model can't be followed with fake tensors ({_cause_text(failure)}); "
        "real ones on the CPU were followed instead"
    )


def _followed_fake(
    workload: Workload,
    shape: StepShape,
    *,
    like_gpu: bool,
    device: torch.device = CPU,
    kernels: GpuKernels | None = None,
) -> Tracer | Exception:
    """Return a tracer that has followed a step with fake tensors, or why there is none."""
    try:
        return _traced_once(workload, shape, fake=True, like_gpu=like_gpu, device=device, kernels=kernels)
    except AutosplitError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever fake tensors can't do, and whatever the user's code does wrong
        return error


def _traced_once(
    workload: Workload,
    shape: StepShape,
    *,
    fake: bool,
    like_gpu: bool,
    device: torch.device = CPU,
    kernels: GpuKernels | None = None,
    values: SampleValues | None = None,
) -> Tracer:
    """Make a tracer that has traced a step. If that fails, a borrowed model is put back."""
    own = kernels if like_gpu else None
    tracer = Tracer(workload, fake=fake, like_gpu=like_gpu, device=device, kernels=own, values=values)
    try:
        tracer.trace(shape)
        if "eval" in workload.fits:  # `generate` looks at numbers, mostly
            tracer.trace(replace(shape, arrangement="eval"))
    except BaseException:
        tracer.trainee.restore()
        raise
    return tracer
