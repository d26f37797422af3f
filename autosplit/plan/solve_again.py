"""Solve a plan again after a change, from its measurements: less memory, other devices, a slow loader. Run no step.

Peaks with fewer samples follow from the memory model near the ceiling and from the sizes that were tried. More samples
never have a lower peak. If the new step has several forwards and the layout's step had one, each device also keeps
gradients between forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autosplit.errors import PlanError
from autosplit.plan.layout import Layout, Seat
from autosplit.plan.record import P, PlanRecord, with_layouts
from autosplit.solve.change import Change, changed
from autosplit.solve.memory import Region, samples_within
from autosplit.solve.problem import MOST_WORK, Problem, Solution

LINE_ERROR = 0.01
"""Fraction of the memory that stays free, because a linear model does not include the allocator's rounding.

By the line through 32 and 64 samples, a linear layer of 512 fitted 60 samples in 448265 bytes. Its step took 448512.
"""

MOST_CURVES = 200_000
"""Largest product of a step's forwards and the plan's devices.

Above this product, a prediction would take seconds and is skipped.
"""


def problem_of(plan: PlanRecord, layout: Layout) -> Problem | None:
    """Return the problem that a layout solves, or None if it has no cost model or a prediction would take too long."""
    forwards = layout.effective_batch_size / layout.batch_size
    if layout.cost is None or forwards > MOST_WORK or forwards * len(layout.seats) > MOST_CURVES:
        return None
    return _problem(plan, layout)


def required_problem(plan: PlanRecord, layout: Layout) -> Problem:
    """Return the problem that a layout solves. Raise PlanError if there is none."""
    problem = problem_of(plan, layout)
    if problem is None:
        raise PlanError(
            "the plan has no time model, or its step has too many forwards for a prediction. Tune again, or "
            "measure the split with autosplit.measure(workload, split=...).",
        )
    return problem


def _problem(plan: PlanRecord, layout: Layout) -> Problem:
    assert layout.cost is not None, "the caller tests it"
    return Problem.of(
        layout.cost,
        tuple(seat.ceiling for seat in layout.seats),
        None if layout.strategy == "ddp" else layout.region,
        effective_batch_sizes=plan.effective_batch_sizes,
        max_batch_size=plan.max_batch_size,
        accumulates=plan.accumulates,
        least_batch=layout.least_batch,
    )


def resolve(plan: P, change: Change) -> P | None:
    """Return the plan after a change, with predicted throughput and peaks.

    Args:
        change: The change, with the plan's devices.

    Returns:
        None if the main layout does not fit, or has no cost model. If only DDP does not fit, the plan lacks its layout.
    """
    main = _solved(plan, plan.main, change)
    if main is None:
        return None
    layouts, why = [main], plan.why_no_ddp
    if plan.ddp is not None and plan.ddp is not plan.main:
        # With one device, DDP trains as the plain model does.
        ddp = _as_single_rank(plan.ddp, main) if len(main.seats) == 1 else _solved(plan, plan.ddp, change)
        layouts += [] if ddp is None else [ddp]
        if ddp is None:
            why = "the plan's measurements predict that a rank on each device does not fit in the memory that is free"
    again = replace(plan, layouts=tuple(layouts), why_no_ddp=why, lengths=None)  # lengths belong to the other split
    return with_layouts(again, *layouts)


def _as_single_rank(ddp: Layout, main: Layout) -> Layout:
    """Return DDP's layout with one rank, which trains as the main layout's only device does."""
    return replace(main, strategy="ddp", region=None, measured=False, options=ddp.options, least_batch=ddp.least_batch)


def _solved(plan: PlanRecord, layout: Layout, change: Change) -> Layout | None:
    """Solve a layout's problem after a change."""
    if layout.cost is None:
        return None
    solve = _solved_ranks if layout.strategy == "ddp" else _solved_split
    return solve(plan, layout, change)


def _within_lines(change: Change, waiting_bytes: int) -> Change:
    """Leave `LINE_ERROR` of the memory free."""
    if change.capacities_bytes is None:
        return change
    capacities = tuple(int((1 - LINE_ERROR) * nbytes) for nbytes in change.capacities_bytes)
    return replace(change, capacities_bytes=capacities, waiting_bytes=waiting_bytes)


def _solved_split(plan: PlanRecord, layout: Layout, change: Change) -> Layout | None:
    before = layout.region
    if before is None:
        return None
    # The region of a layout with several forwards includes the gradients that are kept between forwards.
    waiting_bytes = change.waiting_bytes if layout.accumulation_steps == 1 else 0
    problem = changed(_problem(plan, layout), _within_lines(change, waiting_bytes))
    solution = problem.solve()
    if solution is None:
        return None
    region = problem.region_of(solution.accumulation_steps)
    ceilings = _all_at_once(region, solution.split)
    return with_solution(layout, solution, change, ceilings, _peaks(layout, before, region, solution.split), region)


def _solved_ranks(plan: PlanRecord, layout: Layout, change: Change) -> Layout | None:
    waiting_bytes, problem = 0, changed(_problem(plan, layout), _within_lines(change, 0))
    solution = problem.solve()
    if solution is not None and solution.accumulation_steps > 1 == layout.accumulation_steps:
        waiting_bytes = change.waiting_bytes
        room = None if change.capacities_bytes is None else tuple(n - waiting_bytes for n in change.capacities_bytes)
        problem = changed(_problem(plan, layout), _within_lines(replace(change, capacities_bytes=room), 0))
        solution = problem.solve()
    if solution is None:
        return None
    pairs = zip(layout.seats, solution.split, strict=True)
    peaks = tuple(seat.ceiling.bytes_at(samples) + waiting_bytes for seat, samples in pairs)
    return with_solution(layout, solution, change, problem.region.ceilings, peaks)


def with_solution(
    layout: Layout,
    solution: Solution,
    change: Change,
    ceilings: Sequence[int],
    peaks_bytes: Sequence[int],
    region: Region | None = None,
) -> Layout:
    """Return the layout with the solution of its changed problem."""
    assert layout.cost is not None, "its problem was solved"
    capacities = change.capacities_bytes or tuple(seat.device.capacity_bytes for seat in layout.seats)
    curves = layout.cost.step_time.curves
    seats = tuple(
        replace(
            seat,
            device=replace(seat.device, capacity_bytes=capacity),
            samples=samples,
            ceiling=seat.ceiling.with_capacity(capacity, ceiling),
            peak_bytes=peak_bytes,
            busy_s=curve(samples),
        )
        for seat, capacity, samples, ceiling, peak_bytes, curve in zip(
            layout.seats, capacities, solution.split, ceilings, peaks_bytes, curves, strict=True
        )
    )
    return replace(solved(layout, solution, seats), region=region)


def solved(layout: Layout, solution: Solution, seats: Sequence[Seat]) -> Layout:
    """Return the layout with another solution, whose throughput is predicted, and the seats of its split."""
    return replace(
        layout,
        seats=tuple(seats),
        accumulation_steps=solution.accumulation_steps,
        effective_batch_size=solution.effective_batch_size,
        samples_per_s=solution.samples_per_s,
        measured=False,
        even_samples_per_s=None,
    )


def _peaks(layout: Layout, before: Region, region: Region, split: Sequence[int]) -> tuple[int, ...]:
    waiting_bytes = int(region.primary.fixed_bytes - before.primary.fixed_bytes)
    first, *others = (
        seat.ceiling.bytes_at(samples) + waiting_bytes if samples else 0
        for seat, samples in zip(layout.seats, split, strict=True)
    )
    if others:
        first = max(0, int(region.primary.peak_bytes(split[0], sum(split))))
    return (first, *others)


def _all_at_once(region: Region, split: tuple[int, ...]) -> tuple[int, ...]:
    """Return ceilings that fit at the same time.

    If device 0's samples fit while the replicas are full, use the replicas' ceilings. Otherwise return the split.
    """
    if not region.replica_ceilings:
        return (max(region.primary_ceiling, split[0]),)
    plane = region.primary
    beside = plane.peak_bytes(0, sum(region.replica_ceilings))
    slope = plane.bytes_per_share + plane.bytes_per_batch
    first = samples_within(region.primary_capacity_bytes - beside, slope, region.primary_ceiling)
    return (first, *region.replica_ceilings) if first >= split[0] else split
