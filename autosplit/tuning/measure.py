"""Define `measure()`, which runs or simulates one configuration like a trial of `tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.addons import addon
from autosplit.devices.device import Device
from autosplit.errors import InputError, WorkloadError, ends_tracebacks
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError, OutOfMemoryError, StepLostError
from autosplit.plan.layout import DdpOptions
from autosplit.plan.measured_step import ChangedTime, MeasuredStep, bounds_of, checked_split, faster_devices
from autosplit.plan.what_ifs import FASTER
from autosplit.probe.prober import Prober
from autosplit.probe.request import Request, checked_request
from autosplit.profiles.key import ProfileKey
from autosplit.runtime.prepare import Source, workload_source
from autosplit.runtime.protocol import Measurement, StepShape
from autosplit.solve.memory import MemoryParts
from autosplit.solve.split import even_split, whole_number
from autosplit.solve.step_time import Cost, StepTime, TimeCurve
from autosplit.text import size_text
from autosplit.tuning.answer import compiled_note
from autosplit.tuning.assemble import why_no_ranks
from autosplit.tuning.keywords import suggests_keywords
from autosplit.tuning.limits import MOST_FORWARDS
from autosplit.tuning.process import Job, Process, Processes, drive
from autosplit.tuning.progress import Progress
from autosplit.tuning.run import POINT_BUDGET_S, TRIAL_BUDGET_S, Run
from autosplit.tuning.survey import rank_fit
from autosplit.tuning.tune import NO_GPU_NOTE, process_for, quiet, request_for, users_code_named
from autosplit.workload.compiled import has_compiled_parts
from autosplit.workload.workload import Workload, modules_of, why_single

PREDICTED_TEXT = (
    "strategy 'ddp' in one process: the time is computed from each device's own time, and no step of all ranks ran "
    "together"
)
ON_EVERY_RANK = ". To run these steps, call it on every rank (with torchrun or the command autosplit measure)."


@ends_tracebacks
@suggests_keywords
def measure(
    model_or_workload: nn.Module | Workload | Callable[[], Workload],
    sample_batch: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    split: int | Sequence[int] | None = None,
    accumulation_steps: int = 1,
    compute_loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    loss_reduction: str | None = None,
    batch_dim: int = 0,
    make_batch: Callable[[int], Any] | None = None,
    devices: str | Device | torch.device | Sequence[str | int | Device | torch.device] | None = None,
    strategy: str = "auto",
    precision: str | None = None,
    reserve: str | float | None = None,
    isolate: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> MeasuredStep:
    """Measure an optimizer step of one configuration: its time, each device's memory, and its bounds.

    The step is run, or simulated for ``sim:`` devices, like a trial of `tune`. Nothing is searched, and no plan is read
    or stored. The workload is not changed.

    Args:
        model_or_workload: A module with its `sample_batch`, a `Workload`, or a function that returns a `Workload`. The
            other arguments of the workload are as in `tune`.
        split: Samples per device in one forward. For a single device, a number is enough. Default: the sample batch,
            split evenly.
        accumulation_steps: Forwards per optimizer step, each with the whole split.
        devices: As in `tune`. Default: every visible GPU, or the CPU if there is none.
        strategy: ``"auto"`` and ``"balanced"`` use BalancedDataParallel. ``"ddp"`` uses DistributedDataParallel with
            the split as the ranks' batch sizes. In one process, the time is computed from steps of single devices. In a
            job (called on every rank), all ranks run the step together.
        precision: ``"none"``, ``"bf16"`` or ``"fp16"``. It overrides the precision of a `Workload`.
        reserve: Memory to keep free on every device. Default: 5% on GPUs.
        isolate: Run real steps in a separate process, so that a crash does not end this process.
        progress: Function that is called with a `Progress` from time to time.

    Raises:
        InputError: An argument is invalid. `DeviceError` and `WorkloadError` are subclasses.
        DoesNotFitError: The configuration does not fit. The message has the device, and the bytes that are needed and
            available.
        UserCodeError: The workload's own code raised.
        RankFailedError: In a job, another rank raised.
    """
    request = request_for(devices, strategy, reserve=reserve)
    described = {
        "loss_fn": loss_fn,
        "compute_loss": compute_loss,
        "optimizer": optimizer,
        "make_batch": make_batch,
        "loss_reduction": loss_reduction,
        "batch_dim": batch_dim or None,
        "precision": precision,
    }

    def source_of(_number: int) -> Source:
        return workload_source(model_or_workload, sample_batch, described)

    with process_for(request, source_of, isolate=isolate) as process, users_code_named():
        return drive(process, lambda processes: _measured(processes, split, accumulation_steps, progress or quiet))


def _measured(
    processes: Processes, split: Any, accumulation_steps: int, listener: Callable[[Progress], None]
) -> MeasuredStep:
    job = processes.job
    processes.ask(Process.build)
    asked = _checked(split, accumulation_steps, job, processes.own.built.workload)
    most = sum(asked.split)
    key = ProfileKey(job.machine, {}, {})
    request, notes = processes.prepare(replace(job.request, max_batch_size=most), key)
    run = Run.of(processes, request, key, listener, notes)
    run.report.stage = "times"
    _refuse_untrainable(asked, run.prober)
    if job.has_peers:
        found = _run_together(processes, asked)
    else:
        found = (_rank_by_rank if request.strategy == "ddp" else _balanced)(run, asked)
        if any(map(has_compiled_parts, modules_of(run.workload))):
            run.notes.append(compiled_note(run))
    defaulted = (NO_GPU_NOTE,) if request.defaulted and request.kind == "cpu" else ()
    text = PREDICTED_TEXT if request.simulated else PREDICTED_TEXT + ON_EVERY_RANK
    predicted = (Note("ddp-predicted", text),) if found.predicted else ()
    measured, samples = found.measurement, most * asked.accumulation_steps
    return MeasuredStep(
        split=asked.split,
        accumulation_steps=asked.accumulation_steps,
        effective_batch_size=samples,
        strategy="ddp" if request.strategy == "ddp" else "balanced",
        precision=run.workload.precision or "none",
        devices=tuple(device.label for device in request.devices),
        device_names=tuple(device.name for device in request.devices),
        step_s=measured.seconds,
        update_s=measured.update_s,
        spread_s=measured.error_s,
        samples_per_s=samples / measured.seconds,
        peak_bytes=measured.peak_bytes,
        capacity_bytes=found.capacities_bytes,
        memory=found.memory,
        bound_by=bounds_of(measured.seconds, samples, found.without),
        simulated=request.simulated,
        predicted=found.predicted,
        rates=tuple(device.spec.rates for device in request.devices if device.spec is not None),
        notes=(*run.notes, *predicted, *defaulted, *processes.crash_notes()),
    )


@dataclass(frozen=True)
class _Configuration:
    split: tuple[int, ...]
    accumulation_steps: int

    @property
    def splits(self) -> tuple[tuple[int, ...], ...]:
        return (self.split,) * self.accumulation_steps

    @property
    def begin(self) -> StepShape:
        return StepShape(self.splits[:2])

    def of_rank(self, index: int, num_ranks: int) -> StepShape:
        own = tuple(n if place == index else 0 for place, n in enumerate(self.split))
        return StepShape((own,) * min(2, self.accumulation_steps), "rank", num_ranks=num_ranks)

    def own_shape(self, rank: int) -> StepShape:
        own = (self.split[rank],)
        return StepShape((own,) * min(2, self.accumulation_steps), "rank", num_ranks=len(self.split))


@dataclass(frozen=True)
class _Found:
    measurement: Measurement
    capacities_bytes: tuple[int, ...]
    memory: tuple[MemoryParts | None, ...]
    without: tuple[ChangedTime, ...]
    predicted: bool = False


# Checks


def _checked(split: Any, accumulation_steps: Any, job: Job, workload: Workload) -> _Configuration:
    devices = job.request.devices
    if split is None:
        split = even_split(workload.sample_batch_size, len(devices))
    shares = checked_split(split, [device.label for device in devices])
    steps = whole_number("accumulation_steps", accumulation_steps, minimum=1)
    if steps > MOST_FORWARDS:
        raise InputError(f"accumulation_steps is {steps}. Expected at most {MOST_FORWARDS}.")
    checked_request(devices=devices, max_batch_size=sum(shares))
    reason = why_single(workload)
    if steps > 1 and reason is not None:
        raise WorkloadError(f"accumulation_steps is {steps}, and {reason}. Expected 1. Leave accumulation_steps out.")
    if job.request.strategy == "ddp":
        _refuse_no_ranks(shares, job.request, workload)
    return _Configuration(shares, steps)


def _refuse_no_ranks(split: tuple[int, ...], request: Request, workload: Workload) -> None:
    why_not = why_no_ranks(request, workload, (), 1)
    if why_not is not None:
        raise WorkloadError(f"DDP can't train this workload: {why_not}.")
    if 0 in split:
        raise InputError(
            f"split is {split} with strategy 'ddp'. Expected at least one sample for each rank, because all ranks "
            "take part in a step. Leave out devices with 0 samples."
        )


def _refuse_untrainable(asked: _Configuration, prober: Prober) -> None:
    least = prober.least_batch
    if any(0 < share < least for share in asked.split):
        raise InputError(
            f"split is {asked.split}, but the model's BatchNorms need at least {least} samples. Expected 0 or at "
            f"least {least} for each device."
        )
    largest = prober.facts.largest_batch
    if largest is not None and max(asked.split) > largest:
        raise InputError(
            f"split is {asked.split}, but autosplit can trace the model only with real tensors, and "
            f"{largest} samples fit in this machine's memory. Measure a split with at most {largest} samples on a "
            "device."
        )


# Devices of one process


def _balanced(run: Run, asked: _Configuration) -> _Found:
    prober = run.prober
    prober.report(f"the split {asked.split}")
    prober.prediction_holds(asked.begin)
    try:
        measured = prober.step(asked.splits, budget_s=TRIAL_BUDGET_S, copies_s=_copies_s(prober, asked))
    except OutOfMemoryError as error:
        raise _misfit(asked.split, asked.begin, prober, error, error.device_index) from error
    if prober.worker.exact:
        without = tuple(addon("simulated_without")(prober.worker, StepShape(asked.splits)))
    else:
        without = tuple(_times_with_changes(prober, asked, measured))
    memory = prober.parts(asked.begin, measured.peak_bytes)
    return _Found(measured, prober.worker.capacities_bytes, memory, without)


def _copies_s(prober: Prober, asked: _Configuration) -> float:
    """Estimate the time spent copying in a step of many forwards, in seconds.

    The estimate comes from measured steps with one and with two forwards.
    """
    has_copies = any(asked.split[1:]) and not prober.worker.exact and not prober.shares_processor
    if asked.accumulation_steps < 3 or not has_copies:
        return 0.0
    one_s = prober.seconds_without_update(StepShape(asked.splits[:1]), budget_s=TRIAL_BUDGET_S)
    two_s = prober.seconds_without_update(StepShape(asked.splits[:2]), budget_s=TRIAL_BUDGET_S)
    # one_s = copies + forward, two_s = copies + 2 forwards
    return max(0.0, 2 * one_s - two_s)


def _times_with_changes(prober: Prober, asked: _Configuration, measured: Measurement) -> Iterator[ChangedTime]:
    """Yield predicted times of a real step: without the update, with faster devices, and without overhead.

    Overhead is the time beyond the slowest device. Each device is timed while the others are idle.
    """
    labels = [device.label for device in prober.worker.devices]
    yield "update", None, measured.seconds - measured.update_s
    if prober.shares_processor or len(labels) == 1:
        compute_s = measured.seconds - measured.update_s
        yield "device", labels[0] if len(labels) == 1 else None, measured.seconds - compute_s * (1 - 1 / FASTER)
        return
    try:
        curves = tuple(_alone(prober, index, share) for index, share in enumerate(asked.split))
    except OutOfMemoryError:  # Without the others, a device may need more memory than in the step.
        return
    alone = StepTime.bare(curves, measured.update_s, adds_up=False)
    overhead_s = max(0.0, measured.seconds - alone.seconds(asked.splits))

    def seconds(indices: Sequence[int]) -> float:
        return overhead_s + replace(alone, curves=_faster(alone.curves, indices)).seconds(asked.splits)

    yield from faster_devices(labels, measured.seconds, seconds)
    yield "overhead", None, measured.seconds - overhead_s


def _alone(prober: Prober, index: int, share: int) -> TimeCurve:
    if share == 0:
        return TimeCurve(((1, 1.0),))  # never evaluated
    shape = prober.forward_and_backward(index)(share)
    return TimeCurve(((share, prober.seconds_without_update(shape, budget_s=POINT_BUDGET_S)),))


def _faster(curves: Sequence[TimeCurve], indices: Sequence[int]) -> tuple[TimeCurve, ...]:
    return tuple(
        TimeCurve(tuple((n, seconds / FASTER) for n, seconds in curve.points)) if index in indices else curve
        for index, curve in enumerate(curves)
    )


def _rank_by_rank(run: Run, asked: _Configuration) -> _Found:
    prober, count = run.prober, len(asked.split)
    peaks = []
    for index in range(count):
        shape = asked.of_rank(index, count)
        prober.prediction_holds(shape)
        try:
            peaks.append(prober.confirmed_peaks(shape)[index])
        except OutOfMemoryError as error:
            raise _misfit(asked.split, shape, prober, error, index) from error
    fit = rank_fit(run, asked.split)
    counted = {asked.split: asked.accumulation_steps}
    shapes = [prober.shapes(index, "rank", (), False)(share) for index, share in enumerate(asked.split)]
    error_s = max(prober.measured(shape, budget_s=TRIAL_BUDGET_S).error_s for shape in shapes)
    step_s, steps = fit.rank_seconds(counted), asked.accumulation_steps
    measured = Measurement(step_s, error_s * steps, tuple(peaks), update_s=fit.step_time.update_s)
    memory = prober.rank_parts(asked.split, peaks, accumulates=steps > 1)
    without = tuple(_ranks_without(fit, [device.label for device in run.request.devices], counted))
    return _Found(measured, prober.worker.capacities_bytes, memory, without, predicted=count > 1)


def _ranks_without(fit: Cost, labels: Sequence[str], counted: dict[tuple[int, ...], int]) -> Iterator[ChangedTime]:
    step_time = fit.step_time

    def seconds(indices: Sequence[int]) -> float:
        faster = replace(step_time, curves=_faster(step_time.curves, indices))
        return replace(fit, step_time=faster).rank_seconds(counted)

    if step_time.adds_up:
        yield "device", labels[0] if len(labels) == 1 else None, seconds(range(len(labels)))
    else:
        yield from faster_devices(labels, fit.rank_seconds(counted), seconds)
    yield "copies", None, replace(fit, all_reduce_s=0.0).rank_seconds(counted)
    yield "update", None, replace(fit, step_time=replace(step_time, update_s=0.0)).rank_seconds(counted)


# Ranks of a job


def _run_together(processes: Processes, asked: _Configuration) -> _Found:
    count = len(asked.split)
    alone = processes.ask(_alone_on_rank, asked)
    for rank, found in enumerate(alone):
        if isinstance(found, str):
            raise _rank_misfit(processes.job.request, rank, found)
    unused = any(processes.ask(_leaves_unused))
    processes.ask(Process.begin_steps, DdpOptions(find_unused_parameters=unused))
    try:
        measured = processes.step(asked.splits, budget_s=TRIAL_BUDGET_S)
    except OutOfMemoryError as error:
        raise _rank_misfit(
            processes.job.request, error.device_index or 0, f"split {asked.split} does not fit: {error}"
        ) from error
    capacities, memory = zip(*processes.ask(_capacity_and_memory, asked, measured.peak_bytes), strict=True)
    curves = tuple(TimeCurve(((n, float(seconds)),)) for n, seconds in zip(asked.split, alone, strict=True))
    bare = Cost(StepTime.bare(curves, measured.update_s, adds_up=False))
    counted = {asked.split: asked.accumulation_steps}
    overhead_s = max(0.0, measured.seconds - bare.rank_seconds(counted))
    labels = [f"rank {rank}" for rank in range(count)]
    without = [(what, label, seconds + overhead_s) for what, label, seconds in _ranks_without(bare, labels, counted)]
    return _Found(measured, capacities, memory, (*without, ("copies", None, measured.seconds - overhead_s)))


def _alone_on_rank(process: Process, asked: _Configuration) -> float | str:
    prober, shape = process.prober, asked.own_shape(process.peers.rank)
    try:
        prober.confirmed_peaks(shape)
        return prober.rank_seconds(0, asked.split[process.peers.rank], budget_s=POINT_BUDGET_S)
    except OutOfMemoryError as error:
        return str(_misfit(asked.split, shape, prober, error, 0))


def _leaves_unused(process: Process) -> bool:
    return process.prober.facts.leaves_unused


def _capacity_and_memory(
    process: Process, asked: _Configuration, peaks: Sequence[int]
) -> tuple[int, MemoryParts | None]:
    rank, prober = process.peers.rank, process.prober
    return prober.worker.capacities_bytes[0], prober.parts(asked.own_shape(rank), [peaks[rank]])[0]


def _rank_misfit(request: Request, rank: int, why: str) -> DoesNotFitError:
    return DoesNotFitError(f"rank {rank}: {why}", device=request.devices[rank].label, device_index=rank)


# Errors


def _misfit(
    split: tuple[int, ...], shape: StepShape, prober: Prober, error: OutOfMemoryError, index: int | None
) -> DoesNotFitError:
    if index is None or isinstance(error, StepLostError):
        return DoesNotFitError(f"split {split} does not fit: {error}", device=error.device)
    device, share = prober.worker.devices[index], shape.splits[0][index]
    capacity_bytes = prober.worker.capacities_bytes[index]
    counted = error.live_bytes + error.requested_bytes
    needed = counted if prober.evidence == "steps" else prober.predicted(shape)[index]
    more = f"{needed} bytes ({size_text(needed)})" if needed > capacity_bytes else "more than that"
    return DoesNotFitError(
        f"split {split} does not fit {device.label} ({device.name}). Its {share} samples need {more}, and "
        f"{capacity_bytes} bytes ({size_text(capacity_bytes)}) are allowed. Give it fewer samples, and use more "
        "accumulation steps to keep the effective batch size.",
        device=device.label,
        device_index=index,
        requested_bytes=needed,
        capacity_bytes=capacity_bytes,
    )
