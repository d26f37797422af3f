"""Solve a plan again for less memory or a slow loader, using the plan's fits. No step is run.

Peaks with fewer samples follow from the memory model near the ceiling and from the sizes that were tried. More samples
never have a lower peak. If the new step has several forwards and the plan's step had one, each device also keeps
gradients between forwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autosplit.plan.explain import problem_with
from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpPlan
from autosplit.solve.memory import Ceiling, Region, samples_within
from autosplit.solve.problem import Problem, Solution
from autosplit.solve.step_time import Fit

LINE_ERROR = 0.01
"""Fraction of the memory that stays free, because a linear model does not include the allocator's rounding.

By the line through 32 and 64 samples, a linear layer of 512 fitted 60 samples in 448265 bytes. Its step took 448512.
"""


@dataclass(frozen=True)
class Lack:
    """The limits that a plan exceeds: less memory, or a slow loader.

    Attributes:
        capacities_bytes: Memory that training may use on each device.
        waiting_bytes: Memory of the gradients that each device keeps between forwards.
        least_batch: Minimum samples on which a device trains.
    """

    capacities_bytes: tuple[int, ...]
    waiting_bytes: int
    least_batch: int
    most_samples_per_s: float = math.inf


def solved_again(plan: Plan, lack: Lack) -> Plan | None:
    """Return a smaller plan with predicted throughput and peaks. Return None without a fit, or if nothing fits."""
    fit, before = plan.fit, plan.region
    if fit is None:
        return None
    alone = len(plan.split) == 1
    if not alone or before is None:
        plan = replace(plan, ddp=_ddp(plan, fit, lack))
    if before is None:
        return _of_ranks(plan, lack)
    problem = _problem(plan, fit, tuple(device.ceiling for device in plan.devices), before, lack)
    solution = problem.solve()
    if solution is None:
        return None
    region = problem.region_of(solution.accumulation_steps)
    ceilings, peaks = _all_at_once(region, solution.split), _peaks(plan, before, region, solution.split)
    if alone and plan.ddp.ranks:  # with one device, DDP's settings equal the plan's settings
        plan = replace(plan, ddp=_with_ranks(plan.ddp, lack, solution, ceilings, peaks))
    return _remade(plan, lack, solution, ceilings, peaks, region)


def _problem(plan: Plan, fit: Fit, ceilings: tuple[Ceiling, ...], region: Region | None, lack: Lack) -> Problem:
    problem = replace(problem_with(plan, fit, ceilings, region), most_samples_per_s=lack.most_samples_per_s)
    # The region of a plan with several forwards includes the gradients that are kept between forwards.
    waiting_bytes = lack.waiting_bytes if plan.accumulation_steps == 1 else 0
    capacities_bytes = [int((1 - LINE_ERROR) * nbytes) for nbytes in lack.capacities_bytes]
    return problem.with_capacities(capacities_bytes, waiting_bytes=waiting_bytes, least_batch=lack.least_batch)


def _remade(
    plan: Plan,
    lack: Lack,
    solution: Solution,
    ceilings: tuple[int, ...],
    peaks: tuple[int, ...],
    region: Region | None,
) -> Plan:
    assert plan.fit is not None
    devices = tuple(
        replace(
            device,
            capacity_bytes=capacity,
            share=share,
            peak_bytes=peak_bytes,
            busy_s=curve(share),
            ceiling=device.ceiling.with_capacity(capacity, ceiling),
        )
        for device, capacity, share, peak_bytes, curve, ceiling in zip(
            plan.devices, lack.capacities_bytes, solution.split, peaks, plan.fit.step_time.curves, ceilings, strict=True
        )
    )
    return replace(
        plan,
        lengths=None,  # lengths belong to the other split
        split=solution.split,
        gpu0_bsz=solution.split[0],
        batch_size=sum(solution.split),
        accumulation_steps=solution.accumulation_steps,
        effective_batch_size=solution.effective_batch_size,
        samples_per_s=solution.samples_per_s,
        even_samples_per_s=None,
        ceilings=ceilings,
        devices=devices,
        region=region,
    )


# ------------------------------------------------------------------------------------------------- a split of forwards


def _peaks(plan: Plan, before: Region, region: Region, split: tuple[int, ...]) -> tuple[int, ...]:
    waiting_bytes = int(region.primary.fixed_bytes - before.primary.fixed_bytes)
    first, *others = (
        device.ceiling.bytes_at(share) + waiting_bytes if share else 0
        for device, share in zip(plan.devices, split, strict=True)
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


# --------------------------------------------------------------------------------------------------------- DDP's ranks


def _ddp(plan: Plan, fit: Fit, lack: Lack) -> DdpPlan:
    if not plan.ddp.ranks:
        return plan.ddp
    ceilings, waiting_bytes = tuple(rank.ceiling for rank in plan.ddp.ranks), 0
    problem = _problem(plan, fit, ceilings, None, lack)
    solution = problem.solve()
    if solution is not None and solution.accumulation_steps > 1 == plan.ddp.ranks[0].accumulation_steps:
        waiting_bytes = lack.waiting_bytes
        room = tuple(nbytes - waiting_bytes for nbytes in lack.capacities_bytes)
        problem = _problem(plan, fit, ceilings, None, replace(lack, capacities_bytes=room))
        solution = problem.solve()
    if solution is None:
        return DdpPlan(
            (),
            0.0,
            "the plan's measurements predict that a rank on each device does not fit in the memory that is free now",
        )
    peaks = tuple(
        ceiling.bytes_at(share) + waiting_bytes for ceiling, share in zip(ceilings, solution.split, strict=True)
    )
    return _with_ranks(plan.ddp, lack, solution, problem.region.ceilings, peaks)


def _with_ranks(
    ddp: DdpPlan, lack: Lack, solution: Solution, ceilings: tuple[int, ...], peaks: tuple[int, ...]
) -> DdpPlan:
    ranks = tuple(
        replace(
            rank,
            batch_size=share,
            accumulation_steps=solution.accumulation_steps,
            ceiling=rank.ceiling.with_capacity(capacity, ceiling),
            peak_bytes=peak_bytes,
        )
        for rank, share, capacity, ceiling, peak_bytes in zip(
            ddp.ranks, solution.split, lack.capacities_bytes, ceilings, peaks, strict=True
        )
    )
    return replace(
        ddp,
        ranks=ranks,
        samples_per_s=solution.samples_per_s,
        effective_batch_size=solution.effective_batch_size,
        measured=False,
    )


def _of_ranks(plan: Plan, lack: Lack) -> Plan | None:
    ranks = plan.ddp.ranks
    if not ranks:
        return None
    solution = Solution(
        tuple(rank.batch_size for rank in ranks),
        ranks[0].accumulation_steps,
        plan.ddp.effective_batch_size,
        plan.ddp.samples_per_s,
    )
    ceilings = tuple(rank.ceiling.batch_size for rank in ranks)
    return _remade(plan, lack, solution, ceilings, tuple(rank.peak_bytes for rank in ranks), None)
