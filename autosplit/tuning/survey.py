"""Measure all devices of one process: the largest batches, the times of batches, and the costs beside the devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autosplit.errors import one_line
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError
from autosplit.plan.layout import DdpOptions, Layout
from autosplit.probe.prober import timed_sizes
from autosplit.runtime.protocol import StepShape
from autosplit.solve.memory import Ceiling, Role
from autosplit.solve.proposals import PATIENCE
from autosplit.solve.search_space import Space
from autosplit.solve.solver import Solver
from autosplit.solve.step_time import Cost, StepTime, TimeCurve
from autosplit.solve.timed_sizes import TimedSize, curve_of, pooled
from autosplit.solve.trial import LEAST_DIFFERENCE, LEAST_MEASURED_DIFFERENCE
from autosplit.tuning.assemble import solved_ranks
from autosplit.tuning.limits import Limits
from autosplit.tuning.run import POINT_BUDGET_S, TRIAL_BUDGET_S, Run, Survey

EXACT_PATIENCE = 1
"""`proposals.PATIENCE` for exact times. Then the solver's result and its neighbours are enough."""

MOST_SOLVED = 4
"""Largest number of rounds. A round solves for DDP's batch sizes and times them. Later rounds change them less."""

UNTIMED = TimedSize(1, 1.0)
"""The time of a device that could not be timed: one second per sample."""

_BUCKET_BYTES = 25 * 2**20
"""Size of a DDP bucket in bytes (torch 2.13, ``bucket_cap_mb``)."""

_BUCKET_START_S = 1.1e-4
"""Fixed time of an all-reduce message: its whole time, minus the time of its bytes at the rate of long messages.

For 32 MiB it is 0.17 ms on 8 A100, 0.09 ms on 8 H200, and 0.11 ms on 8 B200 (github.com/stas00/ml-engineering,
network/README.md).
"""


def survey_split(run: Run) -> Survey:
    """Measure the devices for BalancedDataParallel, and as DDP ranks."""
    _begin(run)
    limits, prober = Limits(run.request, run.prober), run.prober
    ranks = limits.of_roles()
    space = limits.space()
    step_time = _step_time(run, limits, space, _curves(run, limits, ranks))
    exact = prober.worker.exact
    solver = Solver(
        limits.with_several(space, step_time),
        step_time,
        least_difference=LEAST_DIFFERENCE if exact else LEAST_MEASURED_DIFFERENCE,
    )
    # With exact times, or if all splits are equally fast, more trials would only find noise.
    patience = EXACT_PATIENCE if exact or prober.shares_processor else PATIENCE
    return Survey(ranks, step_time, prober.least_batch, ddp_options(run), solver, limits, patience)


def survey_alone(run: Run) -> Survey:
    """Measure the devices as DDP ranks, one after the other. Nothing is searched afterwards."""
    _begin(run)
    limits = Limits(run.request, run.prober)
    ranks = limits.of_ranks()
    step_time = _rank_time(run, _curves(run, limits, ranks), [rank.batch_size for rank in ranks])
    return Survey(ranks, step_time, run.prober.least_batch, ddp_options(run))


def _begin(run: Run) -> None:
    largest = run.prober.facts.largest_batch
    if largest is not None and largest < run.request.largest_batch:
        run.prober.max_batch_size = largest
        text = f"autosplit tried no batch above {largest}, because real tensors would fill this machine's memory."
        run.notes.append(Note("larger-batches-not-tried", text))


# Times of single devices


def _curves(run: Run, limits: Limits, ranks: tuple[Ceiling, ...]) -> tuple[TimeCurve, ...]:
    run.report.stage = "times"
    if limits.plain_cpu_curve is not None:
        return (limits.plain_cpu_curve,)
    if run.prober.shares_processor:
        widest = max(range(len(ranks)), key=lambda index: ranks[index].batch_size)
        return (curve_of(_timed_sizes(run, limits, widest, ranks[widest])),) * len(ranks)
    timed = [_timed_sizes(run, limits, index, rank) for index, rank in enumerate(ranks)]
    return tuple(map(curve_of, pooled(timed, _kinds(run))))


def _kinds(run: Run) -> list[tuple[str, int]]:
    """Return each device's name and capacity. Equal devices have equal times."""
    capacities = run.prober.worker.capacities_bytes
    return [(device.name, nbytes) for device, nbytes in zip(run.request.devices, capacities, strict=True)]


def _timed_sizes(run: Run, limits: Limits, index: int, rank: Ceiling) -> list[TimedSize]:
    """Time a device as a DDP rank, or in its own role if that role fits more than twice the samples."""
    role: Role = "rank"
    ceiling = rank.batch_size
    own = limits.primary if index == 0 else next(iter(limits.replicas[index - 1 : index]), None)
    if own is not None and own.batch_size > 2 * ceiling:
        role, ceiling = own.role, own.batch_size
    if ceiling == 0:
        return [UNTIMED]  # This device gets no samples, so its time is not used.
    try:
        return timed_sizes(run.prober, index, ceiling, role=role, budget_s=POINT_BUDGET_S)
    except OutOfMemoryError as error:  # without the others, a replica may need more memory than in the step
        label = run.request.devices[index].label
        run.notes.append(Note("not-timed", f"autosplit could not time {label}, and assumes that it is slow: {error}"))
        return [UNTIMED]


# Times of steps of several devices


def _step_time(run: Run, limits: Limits, space: Space, curves: tuple[TimeCurve, ...]) -> StepTime:
    shares_processor = run.prober.shares_processor
    fitted = StepTime.bare(curves, run.prober.update_seconds(), adds_up=shares_processor)
    if not limits.replicas or shares_processor:
        return fitted
    kinds = _kinds(run)
    firsts = {kind: index for index, kind in reversed([*enumerate(kinds)][1:])}
    measured = {kind: _steps_of_two(run, space, index) for kind, index in firsts.items()}
    fitted = _with_host(run, fitted)
    for index, kind in enumerate(kinds[1:], 1):
        one = fitted.with_overhead(firsts[kind], *measured[kind]) if measured[kind][0] else fitted
        fitted = fitted.with_costs_of(index, one.copies_s[firsts[kind]], one.gather_s_per_sample[firsts[kind]])
    return fitted


def _with_host(run: Run, fitted: StepTime) -> StepTime:
    """Fit the time that the host needs to start a device, from steps of one and of two micro-steps."""
    if not run.may_accumulate:
        return fitted
    least = run.prober.least_batch
    for samples in sorted({max(2, least), least}, reverse=True):
        split = (samples,) * len(run.request.devices)
        timed = _timed(run, split, 1, 2)
        if timed:
            return fitted.with_host(split, *timed)
    return fitted


def _steps_of_two(
    run: Run, space: Space, index: int
) -> tuple[list[tuple[tuple[int, ...], float]], tuple[tuple[int, ...], float] | None]:
    """Time two steps of device 0 and one other device with equal samples: a small step, and the largest that fits.

    Returns:
        Both steps, and the time of one more micro-step of the largest step, in seconds.
    """
    least, region = run.prober.least_batch, space.region
    most = min(region.primary_ceiling, region.replica_ceilings[index - 1], run.prober.max_batch_size // 2)
    while most > least and region.primary_most(2 * most) < most:
        most //= 2
    few = max(least, 2) if most > 2 else least  # see `runtime.linear_memory`

    def both(share: int) -> tuple[int, ...]:
        return tuple(share if place in (0, index) else 0 for place in range(len(run.request.devices)))

    splits = [both(share) for share in sorted({few, max(few, most)}) if share <= most]
    measured = [(split, seconds) for split in splits for seconds in _timed(run, split, 1)]
    while measured and run.may_accumulate and most >= few:
        timed = _timed(run, both(most), 1, 2)
        if timed:
            return measured, (both(most), timed[1] - timed[0])
        most //= 2
    return measured, None


def _timed(run: Run, split: tuple[int, ...], *counts: int) -> list[float]:
    run.report(f"timing the split {split}")
    try:
        return [
            run.prober.seconds_without_update(StepShape((split,) * count), budget_s=POINT_BUDGET_S) for count in counts
        ]
    except OutOfMemoryError:
        return []  # The memory model was slightly too low. Trials will show what fits.


# DDP


def ddp_options(run: Run) -> DdpOptions:
    """Return the options of DDP for the workload."""
    return DdpOptions(find_unused_parameters=run.prober.facts.leaves_unused)


def solve_ranks(run: Run, ranks: tuple[Ceiling, ...], step_time: StepTime) -> tuple[Layout | str, StepTime]:
    """Solve for DDP's batch sizes, and time each rank at its own. Return the layout and the time model.

    If DDP is not possible, return the reason instead of the layout.

    Without these times, the curves would be interpolated at the batch sizes, and the predicted samples/s would be
    inexact.
    """
    for _ in range(MOST_SOLVED):
        ddp = solved_ranks(
            run.request,
            run.workload,
            ranks,
            step_time,
            ddp_options(run),
            all_reduce_s=all_reduce_seconds(run, step_time),
            least_batch=run.prober.least_batch,
        )
        curves = _timed_at(run, () if isinstance(ddp, str) else ddp.split, step_time.curves)
        if curves == step_time.curves or run.prober.out_of_time:
            break
        step_time = replace(step_time, curves=curves)
    return ddp, step_time


def _timed_at(run: Run, shares: Sequence[int], curves: tuple[TimeCurve, ...]) -> tuple[TimeCurve, ...]:
    """Return the ranks' curves with the times at these batch sizes. A rank that can't be timed keeps its curve."""
    if run.prober.shares_processor:
        return curves  # All ranks share one curve, and its sizes were measured.
    timed = list(curves)
    for index, share in enumerate(shares):
        if any(samples == share for samples, _ in curves[index].points):
            continue
        try:
            seconds = run.prober.rank_seconds(index, share, budget_s=POINT_BUDGET_S)
        except OutOfMemoryError:
            continue
        timed[index] = TimeCurve.of([*curves[index].points, (share, seconds)])
    return tuple(timed)


def rank_fit(run: Run, split: Sequence[int]) -> Cost:
    """Time each device as a DDP rank at its own batch size, and return the time model."""
    timed = [run.prober.rank_seconds(index, n, budget_s=TRIAL_BUDGET_S) for index, n in enumerate(split)]
    curves = tuple(TimeCurve(((n, seconds),)) for n, seconds in zip(split, timed, strict=True))
    step_time = _rank_time(run, curves, split)
    return Cost(step_time, all_reduce_seconds(run, step_time))


def _rank_time(run: Run, curves: tuple[TimeCurve, ...], shares: Sequence[int]) -> StepTime:
    """Return the ranks' time model. One small balanced step yields the time of copying parameters and gradients."""
    prober = run.prober
    bare = StepTime.bare(curves, prober.update_seconds(), adds_up=prober.shares_processor)
    if len(shares) == 1 or prober.shares_processor or prober.worker.exact:
        return bare  # The simulation computes the all-reduce. On one CPU nothing is copied.
    split = (max(prober.least_batch, min(shares) // 4),) * len(shares)
    try:
        seconds = prober.seconds_without_update(StepShape((split,)), budget_s=POINT_BUDGET_S)
    except OutOfMemoryError:
        return bare
    except Exception as error:  # noqa: BLE001  # DDP cuts no batch and replicates no model, so its ranks can train
        text = (
            f"autosplit could not time copies between the devices ({one_line(error)}). The predicted samples/s do "
            "not include DDP's all-reduce."
        )
        run.notes.append(Note("copies-not-timed", text))
        return bare
    return bare.with_copies(split, seconds)


def all_reduce_seconds(run: Run, step_time: StepTime) -> float:
    """Return the time of DDP's all-reduce, for a ring over simulated links or over the links of the replicas."""
    count = len(run.request.devices)
    if count == 1:
        return 0.0
    links = [device.spec.link_bytes_per_s for device in run.request.devices if device.spec is not None]
    if links:
        nbytes = run.prober.facts.gradient_bytes
        # A ring sends 2 (W - 1) / W of the gradients over each link (Patarasuk and Yuan 2009).
        return 2 * (count - 1) / count * nbytes / min(links) + math.ceil(nbytes / _BUCKET_BYTES) * _BUCKET_START_S
    # A replica's copy time includes its parameters and its gradients, and the replicas are copied one after the other.
    # A ring sends over all links at once in both directions, so the slowest link decides.
    return (count - 1) / count * max(step_time.copies_s)
