"""Assemble a plan from measurements and results. No steps are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autosplit.notes import Note
from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpOptions, DdpPlan, PlanDevice, RankSettings
from autosplit.probe.request import Request
from autosplit.profiles.key import ProfileKey
from autosplit.solve.memory import Ceiling, MemoryParts, Region
from autosplit.solve.problem import Problem
from autosplit.solve.solver import Solver
from autosplit.solve.step_time import Fit, Residual, StepTime, TimeCurve
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


@dataclass(frozen=True)
class Answer:
    """The results that `assembled` makes a plan from.

    Attributes:
        peak_bytes: Peak memory of each device.
        region: The splits that fit. None if no batch is split.
        memory: Parts of each device's peak. Empty if they are unknown for all devices.
    """

    split: tuple[int, ...]
    accumulation_steps: int
    effective_batch_size: int
    samples_per_s: float
    peak_bytes: tuple[int, ...]
    ceilings: tuple[Ceiling, ...]
    curves: tuple[TimeCurve, ...]
    ddp: DdpPlan
    even_samples_per_s: float | None = None
    region: Region | None = None
    fit: Fit | None = None
    memory: tuple[MemoryParts | None, ...] = ()


def assembled(request: Request, workload: Workload, key: ProfileKey, answer: Answer, **more: Any) -> Plan:
    """Make the plan from an `Answer`. `more` has the plan's other attributes."""
    batch_size = sum(answer.split)
    return Plan(
        split=answer.split,
        gpu0_bsz=answer.split[0],
        batch_size=batch_size,
        accumulation_steps=answer.accumulation_steps,
        effective_batch_size=answer.effective_batch_size,
        samples_per_s=answer.samples_per_s,
        even_samples_per_s=answer.even_samples_per_s,
        ceilings=tuple(ceiling.batch_size for ceiling in answer.ceilings),
        devices=tuple(_device(request, answer, position) for position in range(len(request.devices))),
        region=answer.region,
        fit=answer.fit,
        effective_batch_sizes=request.effective_batch_sizes,
        max_batch_size=request.max_batch_size,
        accumulates=why_single(workload) is None,
        sample_batch_size=workload.sample_batch_size,
        ddp=answer.ddp,
        precision=workload.precision or "none",
        simulated=request.simulated,
        batch_dim=workload.batch_dim,
        loss_reduction=workload.loss_reduction,
        called_with=called_with(workload),
        machine=key.machine,
        workload=key.workload,
        request=key.request,
        **more,
    )


def idle_notes(request: Request, answer: Answer) -> tuple[Note, ...]:
    """Return a note if a device gets no samples."""
    pairs = zip(request.devices, answer.split, strict=True)
    idle = [device.label for device, share in pairs if share == 0]
    if not idle:
        return ()
    why = "The other devices train faster without it."
    if answer.effective_batch_size < len(request.devices):
        why = (
            f"The effective batch size is {answer.effective_batch_size}, and there are {len(request.devices)} devices. "
            "Pass a larger effective_batch_size to use all of them."
        )
    return (Note("device-idle", f"{' and '.join(idle)} get{'s' * (len(idle) == 1)} no samples. {why}"),)


def _device(request: Request, answer: Answer, position: int) -> PlanDevice:
    device, share = request.devices[position], answer.split[position]
    return PlanDevice(
        label=device.label,
        kind=device.kind,
        index=device.index,
        name=device.name,
        memory_bytes=device.capacity_bytes,
        capacity_bytes=request.capacities_bytes[position],
        budgeted=device.budgeted,
        share=share,
        peak_bytes=answer.peak_bytes[position],
        busy_s=answer.curves[position](share),
        ceiling=answer.ceilings[position],
        uuid=device.uuid,
        driver=device.driver,
        memory=answer.memory[position] if answer.memory else None,
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
) -> DdpPlan:
    """Solve for DDP's batch sizes from each device's ceiling and times as a rank.

    If DDP is not possible, return a `DdpPlan` with the reason.
    """
    why_not = why_no_ranks(request, workload, ranks, least_batch)
    if why_not is not None:
        return DdpPlan((), 0.0, why_not)
    may_accumulate = why_single(workload) is None
    problem = Problem.of(
        Fit(step_time, all_reduce_s),
        ranks,
        None,
        effective_batch_sizes=request.effective_batch_sizes,
        max_batch_size=request.largest_batch,
        accumulates=may_accumulate,
        least_batch=least_batch,
        tells_apart=LEAST_DIFFERENCE if request.simulated else LEAST_MEASURED_DIFFERENCE,
    )
    answer = problem.solve()
    if answer is None:
        return DdpPlan((), 0.0, _why_unsolved(request, ranks, least_batch, may_accumulate=may_accumulate))
    settings = tuple(
        RankSettings(
            rank=index,
            device=ceiling.device,
            batch_size=samples,
            accumulation_steps=answer.accumulation_steps,
            ceiling=ceiling,
            # The memory line was fitted near the ceiling. Below the ceiling, the line may exceed the ceiling's peak,
            # but real peaks do not.
            peak_bytes=max(0, min(ceiling.peak_bytes, ceiling.fixed_bytes + ceiling.bytes_per_sample * samples)),
        )
        for index, (ceiling, samples) in enumerate(zip(ranks, answer.split, strict=True))
    )
    even = None if len(ranks) == 1 or step_time.adds_up else problem.even(answer.effective_batch_size)
    return DdpPlan(
        settings,
        answer.samples_per_s,
        effective_batch_size=answer.effective_batch_size,
        options=options,
        least_batch=least_batch,
        even_samples_per_s=None if even is None else even.samples_per_s,
        fit=Fit(step_time, all_reduce_s),
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


def measured_ranks(
    ceilings: tuple[Ceiling, ...], best: Trial, effective_batch_size: int, options: DdpOptions, least_batch: int
) -> DdpPlan:
    """Return DDP's settings from measured steps of all ranks together, or of a plain model on one device."""
    assert best.samples_per_s is not None
    settings = tuple(
        RankSettings(rank, ceiling.device, share, best.accumulation_steps, ceiling, peak_bytes)
        for rank, (ceiling, share, peak_bytes) in enumerate(zip(ceilings, best.split, best.peak_bytes, strict=True))
    )
    return DdpPlan(
        settings,
        best.samples_per_s,
        effective_batch_size=effective_batch_size,
        measured=True,
        options=options,
        least_batch=least_batch,
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
    """Return the predictions of a fitted model for every trial that ran, in order."""
    residuals = []
    for trial in trials:
        if trial.samples_per_s is not None:
            splits = solver.splits_of(configuration_of(trial), trial.split)
            measured_s = sum(map(sum, splits)) / trial.samples_per_s
            residuals.append(Residual(trial.split, trial.accumulation_steps, measured_s, step_time.seconds(splits)))
    return tuple(residuals)


def rank_answer(ddp: DdpPlan, fit: Fit) -> Answer:
    """Return an `Answer` for a plan that is for DDP only. Its split has the ranks' batch sizes."""
    assert ddp.ranks, ddp
    return Answer(
        split=tuple(rank.batch_size for rank in ddp.ranks),
        accumulation_steps=ddp.ranks[0].accumulation_steps,
        effective_batch_size=ddp.effective_batch_size,
        samples_per_s=ddp.samples_per_s,
        peak_bytes=tuple(rank.peak_bytes for rank in ddp.ranks),
        ceilings=tuple(rank.ceiling for rank in ddp.ranks),
        curves=fit.step_time.curves,
        ddp=replace(ddp, fit=None),
        fit=fit,
    )
