"""Solve a remembered plan again where less memory is free than it takes: from its stored fits, running nothing.

What a device holds with fewer samples is read off the line near its ceiling and off the sizes that were looked at: a
peak never falls as samples are added, so that it is no less than that of any smaller size which is known. Where a step
takes several forwards and the plan's took one, the gradients that wait are added to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpPlan, RankSettings
from autosplit.solve.memory import Ceiling, MemoryFit, Region
from autosplit.solve.search_space import Space
from autosplit.solve.solver import RankAnswer, RankSolver, Solver
from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import Fit

__all__ = ["Lack", "solved_again"]

MOST_FORWARDS = 1024
"""Of an optimizer step: where it would take more, memory is so short that measuring anew is the better answer."""

MORE_FORWARDS = 3
"""Than the fewest are looked at: each costs a copy and brings nothing but memory."""


@dataclass(frozen=True)
class Lack:
    """The memory that there is now, where it is less than a plan takes.

    Attributes:
        capacities_bytes: What each device may hold.
        waiting_bytes: What gradients take on each device while they wait for another forward.
        least_batch: The fewest samples that a device trains on.
    """

    capacities_bytes: tuple[int, ...]
    waiting_bytes: int
    least_batch: int


@dataclass(frozen=True)
class _Found:
    """An answer by the fits, before it is a plan."""

    split: tuple[int, ...]
    accumulation_steps: int
    effective_batch_size: int
    samples_per_s: float
    peak_bytes: tuple[int, ...]
    ceilings: tuple[int, ...]
    region: Region | None


def solved_again(plan: Plan, lack: Lack) -> Plan | None:
    """Return a plan for less memory, by the fits of a plan that no longer fits.

    Returns:
        A plan whose throughput and peaks are predicted; None where the plan has no fits, or nothing fits by them.
    """
    if plan.fit is None:
        return None
    alone = len(plan.split) == 1
    ddp = plan.ddp if alone else _ddp(plan, plan.fit, lack)
    found = _found_ranks(ddp) if plan.region is None else _found_split(plan, plan.fit, plan.region, lack)
    if found is None:
        return None
    if alone and plan.ddp.ranks:  # one rank's answer is the plan's own
        ddp = _lone(plan, lack, found)
    return _remade(plan, lack, found, ddp)


def _remade(plan: Plan, lack: Lack, found: _Found, ddp: DdpPlan) -> Plan:
    assert plan.fit is not None
    curves = plan.fit.step_time.curves
    devices = tuple(
        replace(
            device,
            capacity_bytes=capacity,
            share=share,
            peak_bytes=peak_bytes,
            busy_s=curve(share),
            ceiling=_with_less(device.ceiling, ceiling, capacity),
        )
        for device, capacity, share, peak_bytes, curve, ceiling in zip(
            plan.devices, lack.capacities_bytes, found.split, found.peak_bytes, curves, found.ceilings, strict=True
        )
    )
    return replace(
        plan,
        split=found.split,
        gpu0_bsz=found.split[0],
        batch_size=sum(found.split),
        accumulation_steps=found.accumulation_steps,
        effective_batch_size=found.effective_batch_size,
        samples_per_s=found.samples_per_s,
        even_samples_per_s=None,
        ceilings=found.ceilings,
        devices=devices,
        region=found.region,
        ddp=ddp,
    )


# ------------------------------------------------------------------------------------------------- a split of forwards


def _found_split(plan: Plan, fit: Fit, region: Region, lack: Lack) -> _Found | None:
    space = _space(plan, region, lack)
    if space is None:
        return None
    solver = Solver(space, fit.step_time)
    best = next(iter(solver.answers()), None)
    if best is None:
        return None
    split, held = solver.split_of(best), space.region_of(best.accumulation_steps)
    waiting_bytes = int(held.primary.fixed_bytes - region.primary.fixed_bytes)
    others = (
        _bytes_at(device.ceiling, share) + waiting_bytes if share else 0
        for device, share in zip(plan.devices[1:], split[1:], strict=True)
    )
    first = held.primary.peak_bytes(split[0], best.batch_size)
    if len(split) == 1:
        first = _bytes_at(plan.devices[0].ceiling, split[0]) + waiting_bytes
    return _Found(
        split=split,
        accumulation_steps=best.accumulation_steps,
        effective_batch_size=space.effective_of(best),
        samples_per_s=solver.samples_per_s(best),
        peak_bytes=(max(0, int(first)), *others),
        ceilings=_all_at_once(held, split),
        region=held,
    )


def _space(plan: Plan, region: Region, lack: Lack) -> Space | None:
    """Bound what may be searched by what fits now; None where nothing does."""
    sizes = plan.effective_batch_sizes
    single = _lowered_region(plan, region, lack, waiting_bytes=0)
    if sizes is None:
        return Space(single, None) if single.largest_batch else None
    if not plan.accumulates:
        return Space(single, sizes) if sizes[0] <= single.largest_batch else None
    several = single  # the region of a plan of several forwards counts what waits
    if plan.accumulation_steps == 1:
        several = _lowered_region(plan, region, lack, waiting_bytes=lack.waiting_bytes)
    if several.largest_batch == 0:
        return Space(single, sizes) if sizes[0] <= single.largest_batch else None
    fewest, most = (accumulation_steps(size, several.largest_batch) for size in sizes)
    if fewest > MOST_FORWARDS:
        return None
    return Space(single, sizes, min(most, MOST_FORWARDS) + MORE_FORWARDS, several)


def _lowered_region(plan: Plan, region: Region, lack: Lack, *, waiting_bytes: int) -> Region:
    plane = replace(region.primary, fixed_bytes=region.primary.fixed_bytes + waiting_bytes)
    first, *others = (device.ceiling for device in plan.devices)
    room = [capacity - waiting_bytes for capacity in lack.capacities_bytes]
    if others:
        alone = plane.bytes_per_share + plane.bytes_per_batch
        primary = _line_holds(plane.fixed_bytes, alone, lack.capacities_bytes[0], region.primary_ceiling)
    else:
        primary = _holds(first, room[0], region.primary_ceiling)
    replicas = tuple(
        _holds(ceiling, left, most)
        for ceiling, left, most in zip(others, room[1:], region.replica_ceilings, strict=True)
    )
    return replace(
        region,
        primary=plane,
        primary_capacity_bytes=lack.capacities_bytes[0],
        primary_ceiling=primary,
        replica_ceilings=replicas,
        least_share=max(region.least_share, lack.least_batch),
    )


def _all_at_once(region: Region, split: tuple[int, ...]) -> tuple[int, ...]:
    """Return ceilings that hold all at once: those of the other devices, if device 0's share is held beside them."""
    if not region.replica_ceilings:
        return (max(region.primary_ceiling, split[0]),)
    plane: MemoryFit = region.primary
    beside = plane.fixed_bytes + plane.bytes_per_batch * sum(region.replica_ceilings)
    slope = plane.bytes_per_share + plane.bytes_per_batch
    first = _line_holds(beside, slope, region.primary_capacity_bytes, region.primary_ceiling)
    return (first, *region.replica_ceilings) if first >= split[0] else split


# --------------------------------------------------------------------------------------------------------- DDP's ranks


def _ddp(plan: Plan, fit: Fit, lack: Lack) -> DdpPlan:
    """Solve DDP's batch sizes again."""
    if not plan.ddp.ranks:
        return plan.ddp
    ceilings = [rank.ceiling for rank in plan.ddp.ranks]
    caps = [
        _holds(ceiling, capacity, ceiling.batch_size)
        for ceiling, capacity in zip(ceilings, lack.capacities_bytes, strict=True)
    ]
    answer = _rank_solver(plan, fit, caps, lack).answer()
    if answer is None:
        return DdpPlan((), 0.0, "the memory that is free now holds no rank on each device, by the plan's fits")
    return _with_ranks(plan, lack, answer, caps)


def _rank_solver(plan: Plan, fit: Fit, caps: Sequence[int], lack: Lack) -> RankSolver:
    given = (plan.max_batch_size, *(plan.effective_batch_sizes or ())[1:])
    return RankSolver(
        fit.step_time.curves,
        tuple(caps),
        all_reduce_s=fit.all_reduce_s,
        update_s=fit.step_time.update_s,
        effective_batch_sizes=plan.effective_batch_sizes,
        max_batch_size=min([sum(caps), *(most for most in given if most is not None)]),
        adds_up=fit.step_time.adds_up,
        least_batch=lack.least_batch,
        accumulates=plan.accumulates,
    )


def _with_ranks(plan: Plan, lack: Lack, answer: RankAnswer, caps: Sequence[int]) -> DdpPlan:
    ranks = tuple(
        replace(
            rank,
            batch_size=samples,
            accumulation_steps=answer.accumulation_steps,
            ceiling=_with_less(rank.ceiling, cap, capacity),
            peak_bytes=_bytes_at(rank.ceiling, samples),
        )
        for rank, samples, cap, capacity in zip(
            plan.ddp.ranks, answer.batch_sizes, caps, lack.capacities_bytes, strict=True
        )
    )
    return replace(
        plan.ddp,
        ranks=ranks,
        samples_per_s=answer.samples_per_s,
        effective_batch_size=answer.effective_batch_size,
        measured=False,
    )


def _found_ranks(ddp: DdpPlan) -> _Found | None:
    """Return DDP's answer as the plan's own."""
    if not ddp.ranks:
        return None
    return _Found(
        split=tuple(rank.batch_size for rank in ddp.ranks),
        accumulation_steps=ddp.ranks[0].accumulation_steps,
        effective_batch_size=ddp.effective_batch_size,
        samples_per_s=ddp.samples_per_s,
        peak_bytes=tuple(rank.peak_bytes for rank in ddp.ranks),
        ceilings=tuple(rank.ceiling.batch_size for rank in ddp.ranks),
        region=None,
    )


def _lone(plan: Plan, lack: Lack, found: _Found) -> DdpPlan:
    settings: RankSettings = plan.ddp.ranks[0]
    settings = replace(
        settings,
        batch_size=found.split[0],
        accumulation_steps=found.accumulation_steps,
        ceiling=_with_less(settings.ceiling, found.ceilings[0], lack.capacities_bytes[0]),
        peak_bytes=found.peak_bytes[0],
    )
    return replace(
        plan.ddp,
        ranks=(settings,),
        samples_per_s=found.samples_per_s,
        effective_batch_size=found.effective_batch_size,
        measured=False,
    )


# -------------------------------------------------------------------------------------------------------------- memory


def _bytes_at(ceiling: Ceiling, samples: int) -> int:
    """Return what a device holds with so many samples: by its line, and no less than what fewer of them took."""
    known = (nbytes for size, nbytes, _ in ceiling.points if size <= samples)
    return max(0, ceiling.fixed_bytes + ceiling.bytes_per_sample * samples, *known)


def _holds(ceiling: Ceiling, capacity_bytes: int, most: int) -> int:
    """Return the most samples that fit, up to `most`."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _bytes_at(ceiling, middle) <= capacity_bytes else (low, middle - 1)
    return low


def _line_holds(fixed_bytes: float, bytes_per_sample: float, capacity_bytes: int, most: int) -> int:
    left = capacity_bytes - fixed_bytes
    if left < 0:
        return 0
    return most if bytes_per_sample <= 0 else min(most, math.floor(left / bytes_per_sample))


def _with_less(ceiling: Ceiling, batch_size: int, capacity_bytes: int) -> Ceiling:
    """Return a ceiling as it is with less memory, by its line."""
    if batch_size == ceiling.batch_size:
        return replace(ceiling, capacity_bytes=capacity_bytes)
    return replace(
        ceiling,
        batch_size=batch_size,
        limited_by="memory",
        peak_bytes=_bytes_at(ceiling, batch_size),
        capacity_bytes=capacity_bytes,
        confirmed=False,
    )
