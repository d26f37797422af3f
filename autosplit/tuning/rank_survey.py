"""Measure every rank of a job on its own device, all ranks at the same time. Then time their all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.errors import WorkloadError
from autosplit.oom import DoesNotFitError
from autosplit.plan.layout import DdpOptions
from autosplit.probe.ceilings import ceiling_by_time, ceiling_of, does_not_fit
from autosplit.probe.prober import timed_sizes
from autosplit.runtime.accelerator import equalize_capacities
from autosplit.solve.memory import Ceiling, Region
from autosplit.solve.proposals import PATIENCE
from autosplit.solve.search_space import Space
from autosplit.solve.solver import Solver
from autosplit.solve.step_time import BACKWARD_SHARE, RankStepTime
from autosplit.solve.timed_sizes import TimedSize, curve_of, pooled
from autosplit.solve.trial import LEAST_MEASURED_DIFFERENCE
from autosplit.tuning.assemble import accumulates, why_no_ranks
from autosplit.tuning.limits import most_steps
from autosplit.tuning.process import Process
from autosplit.tuning.run import POINT_BUDGET_S, Run, Survey

LEAST_SEEN = 0.05
"""Smallest fraction of an all-reduce that the backward does not hide: about the first bucket."""


@dataclass(frozen=True)
class RankMeasurement:
    """The measurements of one rank on its own device.

    Attributes:
        timed: Time of a micro-step in seconds, by number of samples.
        leaves_unused: Whether a trainable parameter got no gradient.
    """

    ceiling: Ceiling
    timed: tuple[TimedSize, ...]
    update_s: float
    least_batch: int
    leaves_unused: bool


def survey_ranks(run: Run) -> Survey:
    """Measure the ranks. Afterwards, the processes run steps of all ranks together.

    Raises:
        WorkloadError: DDP can't train the workload.
        DoesNotFitError: The workload does not fit on every device.
    """
    why_not = why_no_ranks(run.request, run.workload, (), 1)
    if why_not is not None:
        raise WorkloadError(f"DDP can't train this workload: {why_not}.")
    count = len(run.request.devices)
    needed = 0 if run.may_accumulate else -(-run.request.least_effective // count)
    ceilings = run.processes.ask(_ceiling, needed, accumulates(run.request, run.workload))
    run.report.stage = "times"
    ranks = run.processes.ask(_timed, ceilings)
    least_batch = max(rank.least_batch for rank in ranks)
    why_not = why_no_ranks(run.request, run.workload, tuple(rank.ceiling for rank in ranks), least_batch)
    if why_not is not None:
        raise DoesNotFitError(
            f"DDP can't train this workload: {why_not}. Expected a rank on each device. Use a smaller model or larger "
            "devices.",
        )
    options = DdpOptions(find_unused_parameters=any(rank.leaves_unused for rank in ranks))
    run.processes.ask(Process.begin_steps, options)
    step_time = _step_time(run, ranks, max(run.processes.ask(_all_reduce_seconds)))
    solver = Solver(_space(run, ranks, least_batch), step_time, least_difference=LEAST_MEASURED_DIFFERENCE)
    return Survey(tuple(rank.ceiling for rank in ranks), step_time, least_batch, options, solver, patience=PATIENCE)


def _space(run: Run, ranks: list[RankMeasurement], least_batch: int) -> Space:
    needed, asked = len(ranks) * least_batch, run.request.largest_batch
    if asked < needed:
        raise DoesNotFitError(
            f"{len(ranks)} ranks need a batch of at least {needed} samples, but at most {asked} are "
            "allowed. Raise effective_batch_size or max_batch_size, or name fewer devices.",
        )
    ceilings = tuple(rank.ceiling.batch_size for rank in ranks)
    region = Region.apart(ceilings, min(asked, sum(ceilings)), least_batch)
    sizes = run.request.effective_batch_sizes
    if run.may_accumulate:
        return Space(region, sizes, most_steps(sizes, region.largest_batch))
    if run.request.least_effective > region.largest_batch:
        raise DoesNotFitError(
            f"One forward over all ranks fits at most {region.largest_batch} samples. The step needs "
            f"{run.request.least_effective}, and this workload can't accumulate gradients. Lower "
            "effective_batch_size.",
        )
    return Space(region, sizes)


def _step_time(run: Run, ranks: list[RankMeasurement], reduce_s: float) -> RankStepTime:
    """Fit the time of a step: the ranks' curves, and the part of the all-reduce that no backward hides."""
    capacities = equalize_capacities(run.request.devices, [rank.ceiling.capacity_bytes for rank in ranks])
    kinds = [(device.name, nbytes) for device, nbytes in zip(run.request.devices, capacities, strict=True)]
    curves = tuple(map(curve_of, pooled([rank.timed for rank in ranks], kinds)))
    largest_s = max(curve(rank.ceiling.batch_size) for curve, rank in zip(curves, ranks, strict=True))
    seen_s = max(reduce_s - BACKWARD_SHARE * largest_s, LEAST_SEEN * reduce_s)
    count = len(curves)
    copies = (0.0, *(seen_s / (count - 1),) * (count - 1))
    return RankStepTime(curves, copies, (0.0,) * count, max(rank.update_s for rank in ranks), adds_up=False)


# Run by each rank


def _ceiling(process: Process, needed: int, accumulates: bool) -> tuple[Ceiling, tuple[TimedSize, ...]]:
    """Find this rank's ceiling. On a plain CPU, also return its times."""
    prober = process.prober
    if prober.evidence == "time":
        curve, found = ceiling_by_time(prober, needed, "rank")
        return found, tuple(TimedSize(samples, seconds) for samples, seconds in curve.points)
    found = ceiling_of(prober, 0, "rank", accumulates=accumulates)
    if found.batch_size == 0:
        raise does_not_fit(prober, 0)
    return found, ()


def _timed(process: Process, found: list[tuple[Ceiling, tuple[TimedSize, ...]]]) -> RankMeasurement:
    prober = process.prober
    own, timed = found[process.peers.rank]
    if not timed:
        timed = tuple(timed_sizes(prober, 0, own.batch_size, role="rank", budget_s=POINT_BUDGET_S))
    return RankMeasurement(
        own,
        timed,
        0.0 if prober.evidence == "time" else prober.update_seconds(),
        prober.least_batch,  # runs the user's code
        prober.facts.leaves_unused,
    )


def _all_reduce_seconds(process: Process) -> float:
    assert process.steps is not None, "`begin_steps` sets it"
    return process.steps.all_reduce_seconds(process.prober.facts.gradient_bytes)
