"""Assemble a plan from measurements and results. No steps are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autosplit.notes import Note
from autosplit.plan.layout import DdpOptions, Layout, PlanDevice, Seat
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_layouts
from autosplit.probe.request import Request
from autosplit.profiles.key import ProfileKey
from autosplit.solve.memory import Ceiling, MemoryParts
from autosplit.solve.problem import Problem
from autosplit.solve.solver import Solver
from autosplit.solve.step_time import Cost, Residual, StepTime, TimeCurve
from autosplit.solve.trial import LEAST_DIFFERENCE, LEAST_MEASURED_DIFFERENCE, Trial, configuration_of
from autosplit.workload.model_call import called_with
from autosplit.workload.workload import Workload, why_single

DDP_NOTE = Note(
    "ddp-predicted",
    "With strategy 'ddp', autosplit predicted samples/s and memory from separate measurements of each device. The "
    "ranks ran no step together. The split lists the ranks' batch sizes. Use them with autosplit.ddp.setup().",
)


def accumulates(request: Request, workload: Workload) -> bool:
    """Return whether to try steps of several micro-steps."""
    return why_single(workload) is None and request.effective_batch_sizes is not None


def assembled(request: Request, workload: Workload, key: ProfileKey, layouts: Sequence[Layout], **more: Any) -> Plan:
    """Make the plan from its layouts. `more` has the plan's other attributes."""
    plan = Plan(
        layouts=tuple(layouts),
        effective_batch_sizes=request.effective_batch_sizes,
        max_batch_size=request.max_batch_size,
        accumulates=why_single(workload) is None,
        sample_batch_size=workload.sample_batch_size,
        precision=workload.precision or "none",
        batch_dim=workload.batch_dim,
        loss_reduction=workload.loss_reduction,
        called_with=called_with(workload),
        machine=key.machine,
        workload=key.workload,
        request=key.request,
        **more,
    )
    return with_layouts(plan, *plan.layouts)


def idle_notes(request: Request, layout: Layout) -> tuple[Note, ...]:
    """Return a note if a device gets no samples."""
    idle = [seat.device.label for seat in layout.seats if seat.samples == 0]
    if not idle:
        return ()
    why = "The other devices train faster without it."
    if layout.effective_batch_size < len(request.devices):
        why = (
            f"The effective batch size is {layout.effective_batch_size}, and there are {len(request.devices)} devices. "
            "Pass a larger effective_batch_size to use all of them."
        )
    return (Note("device-idle", f"{' and '.join(idle)} get{'s' * (len(idle) == 1)} no samples. {why}"),)


def seats_of(
    request: Request,
    split: Sequence[int],
    ceilings: Sequence[Ceiling],
    peak_bytes: Sequence[int],
    curves: Sequence[TimeCurve],
    memory: Sequence[MemoryParts | None] = (),
) -> tuple[Seat, ...]:
    """Return the seats of a layout. `memory` has the parts of each peak. It is empty if all are unknown."""
    found = zip(split, ceilings, peak_bytes, curves, memory or (None,) * len(split), strict=True)
    return tuple(
        Seat(_device(request, position), samples, ceiling, peak, curve(samples), parts)
        for position, (samples, ceiling, peak, curve, parts) in enumerate(found)
    )


def _device(request: Request, position: int) -> PlanDevice:
    device = request.devices[position]
    return PlanDevice(
        label=device.label,
        kind=device.kind,
        index=device.index,
        name=device.name,
        memory_bytes=device.capacity_bytes,
        capacity_bytes=request.capacities_bytes[position],
        budgeted=device.budgeted,
        uuid=device.uuid,
        driver=device.driver,
        rates=None if device.spec is None else device.spec.rates,
    )


# ----------------------------------------------------------------------------------------------------------- DDP


def solved_ranks(
    request: Request,
    workload: Workload,
    ranks: tuple[Ceiling, ...],
    step_time: StepTime,
    options: DdpOptions,
    *,
    all_reduce_s: float,
    least_batch: int,
) -> Layout | str:
    """Solve for DDP's batch sizes from each device's ceiling and times as a rank.

    If DDP is not possible, return the reason.
    """
    why_not = why_no_ranks(request, workload, ranks, least_batch)
    if why_not is not None:
        return why_not
    may_accumulate, cost = why_single(workload) is None, Cost(step_time, all_reduce_s)
    problem = Problem.of(
        cost,
        ranks,
        None,
        effective_batch_sizes=request.effective_batch_sizes,
        max_batch_size=request.largest_batch,
        accumulates=may_accumulate,
        least_batch=least_batch,
        least_difference=LEAST_DIFFERENCE if request.simulated else LEAST_MEASURED_DIFFERENCE,
    )
    answer = problem.solve()
    if answer is None:
        return _why_unsolved(request, ranks, least_batch, may_accumulate=may_accumulate)
    # The memory line was fitted near the ceiling. Below the ceiling, the line may exceed the ceiling's peak, but real
    # peaks do not.
    peaks = [
        max(0, min(ceiling.peak_bytes, ceiling.fixed_bytes + ceiling.bytes_per_sample * samples))
        for ceiling, samples in zip(ranks, answer.split, strict=True)
    ]
    even = None if len(ranks) == 1 or step_time.adds_up else problem.even(answer.effective_batch_size)
    return Layout(
        "ddp",
        seats_of(request, answer.split, ranks, peaks, step_time.curves),
        answer.accumulation_steps,
        answer.effective_batch_size,
        answer.samples_per_s,
        measured=False,
        even_samples_per_s=None if even is None else even.samples_per_s,
        least_batch=least_batch,
        cost=cost,
        options=options,
    )


def _why_unsolved(request: Request, ranks: Sequence[Ceiling], least_batch: int, *, may_accumulate: bool) -> str:
    held, needed = sum(rank.batch_size for rank in ranks), len(ranks) * least_batch
    if not may_accumulate and held < request.least_effective:
        return (
            f"the ranks have {held} samples together, fewer than the {request.least_effective} of a step that can't "
            "be accumulated"
        )
    also = (
        f", and each rank none or at least {least_batch} in the shorter last forward (BatchNorm)"
        if least_batch > 1
        else ""
    )
    return (
        f"{len(ranks)} ranks need a batch of at least {needed} samples{also}. Raise effective_batch_size or "
        "max_batch_size"
    )


def why_no_ranks(request: Request, workload: Workload, ranks: tuple[Ceiling, ...], least_batch: int) -> str | None:
    """Return the reason why these ranks can't train a workload, or None if they can."""
    if workload.loss_scope == "batch" and len(request.devices) > 1:
        return (
            "loss_scope='batch' needs the whole batch, but a DDP rank has only its own samples. Gather the ranks' "
            "embeddings in the loss, and choose the ranks' batch sizes yourself"
        )
    small = [rank.device for rank in ranks if rank.batch_size < least_batch]
    if small:
        return f"parameters, gradients and optimizer state of a DDP rank do not fit on {', '.join(small)}"
    return None


def residuals_of(solver: Solver, step_time: StepTime, trials: Sequence[Trial]) -> tuple[Residual, ...]:
    """Compare the fitted model's prediction with the measured time of every trial that ran, in order."""
    residuals = []
    for trial in trials:
        if trial.samples_per_s is not None:
            splits = solver.splits_of(configuration_of(trial), trial.split)
            measured_s = sum(map(sum, splits)) / trial.samples_per_s
            residuals.append(Residual(trial.split, trial.accumulation_steps, measured_s, step_time.seconds(splits)))
    return tuple(residuals)
