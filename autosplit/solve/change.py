"""Change a problem: other memory, devices, costs or bounds. A what-if is the solution of a changed problem.

The difference in throughput is the cost of a bound. Beyond the measured sizes, memory is extrapolated along the line
near each ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autosplit.solve.memory import Region, samples_within
from autosplit.solve.problem import Problem
from autosplit.solve.step_time import StepTime, TimeCurve

NO_LIMIT_BYTES = 2**60
"""More memory than any step needs: 1 EiB."""

Overhead = Literal["copies", "gather", "overhead", "update"]
"""A cost of a step in addition to the compute time. ``"overhead"`` is all of them except the optimizer."""


@dataclass(frozen=True)
class Change:
    """A difference from the machine or the request of a plan. The defaults change nothing.

    Attributes:
        devices: Positions of the plan's devices that become DDP ranks, in the order of the ranks. A position may occur
            several times, for a job with more devices of that kind.
        capacities_bytes: Bytes that training may use on each device, if they are fewer than now.
        waiting_bytes: Bytes of gradients that stay on each device during later forwards, if the layout's memory models
            do not include them. They apply with `capacities_bytes`.
        least_batch: The smallest batch of a device that has samples. It applies with `capacities_bytes`.
        more_bytes: Additional memory of each device. Each ceiling grows by ``more_bytes / bytes_per_sample``, except a
            ceiling that a kernel or the time of a step limits.
        most_samples: A larger `max_batch_size`. If the old bound limited a ceiling, the ceiling grows.
        most_effective: A larger maximum of samples per optimizer step.
        speeds: Factor by which each device is faster.
        links: Factor by which all links between devices are faster.
        without: A cost that is removed. For ranks, the all-reduce is the only cost except the optimizer.
        alone: Position of the only device, which runs the plain model. The optimizer takes as long as on device 0.
        alone_ceiling: The ceiling of this device.
        loader_samples_per_s: Throughput of the data loader. Without an effective batch size, the smallest batch that
            keeps up with the loader is enough.
    """

    devices: tuple[int, ...] | None = None
    capacities_bytes: tuple[int, ...] | None = None
    waiting_bytes: int = 0
    least_batch: int = 1
    more_bytes: tuple[int, ...] | None = None
    most_samples: int | None = None
    most_effective: int | None = None
    speeds: tuple[float, ...] | None = None
    links: float = 1.0
    without: Overhead | None = None
    alone: int | None = None
    alone_ceiling: int = 0
    loader_samples_per_s: float = math.inf


def changed(problem: Problem, change: Change) -> Problem:
    """Return the problem after a change. If the change has no effect, return the problem itself."""
    if change.devices is not None:
        problem = _among(problem, change.devices)
    if change.capacities_bytes is not None:
        problem = _with_capacities(problem, change)
    if change.more_bytes is not None:
        problem = _with_memory(problem, change.more_bytes)
    if change.most_effective is not None:
        problem = _with_effective(problem, change.most_effective)
    if change.most_samples is not None:
        problem = _with_most(problem, change.most_samples)
    if change.alone is not None:
        problem = _alone(problem, change.alone, change.alone_ceiling)
    if change.loader_samples_per_s < math.inf:
        problem = replace(problem, most_samples_per_s=change.loader_samples_per_s)
    return _with_costs(problem, change)


def with_ceilings(problem: Problem, ceilings: Sequence[int]) -> Problem:
    """Return the problem with other ceilings. Device 0's ceiling is for a batch that runs only there."""
    first, *others = (min(ceiling, problem.region.max_batch_size) for ceiling in ceilings)
    return replace(problem, region=replace(problem.region, primary_ceiling=first, replica_ceilings=tuple(others)))


def _among(problem: Problem, devices: Sequence[int]) -> Problem:
    """Return the problem of DDP ranks on these devices."""
    ceilings = tuple(problem.ceilings[index] for index in devices)
    caps, region = [problem.region.ceilings[index] for index in devices], problem.region
    return replace(
        problem,
        cost=problem.cost.among(devices),
        ceilings=ceilings,
        region=Region.apart(caps, region.max_batch_size, region.least_share),
        ranks=True,
    )


def _alone(problem: Problem, index: int, ceiling: int) -> Problem:
    most = problem.region.max_batch_size
    region, ceilings = Region.apart([min(ceiling, most)], most), problem.ceilings[index : index + 1]
    return replace(problem, cost=problem.cost.among([index]), ceilings=ceilings, region=region, ranks=False)


# Memory


def _with_capacities(problem: Problem, change: Change) -> Problem:
    """Lower the memory limits, using the memory models and the sizes that were tried."""
    capacities_bytes, waiting_bytes = change.capacities_bytes, change.waiting_bytes
    assert capacities_bytes is not None, "the caller tests it"
    if problem.ranks:
        caps = [c.most_within(n, c.batch_size) for c, n in zip(problem.ceilings, capacities_bytes, strict=True)]
        return replace(problem, region=Region.apart(caps, problem.region.max_batch_size, change.least_batch))
    least = max(problem.region.least_share, change.least_batch)
    region = replace(_lowered(problem, capacities_bytes, 0), least_share=least)
    waiting = None
    if waiting_bytes:
        waiting = replace(_lowered(problem, capacities_bytes, waiting_bytes), least_share=least)
    return replace(problem, region=region, accumulating=waiting)


def _lowered(problem: Problem, capacities_bytes: Sequence[int], waiting_bytes: int) -> Region:
    region = problem.region
    plane = replace(region.primary, fixed_bytes=region.primary.fixed_bytes + waiting_bytes)
    devices = zip(problem.ceilings, capacities_bytes, region.ceilings, strict=True)
    first, *others = (ceiling.most_within(n - waiting_bytes, most) for ceiling, n, most in devices)
    if others:
        slope = plane.bytes_per_share + plane.bytes_per_batch
        first = samples_within(capacities_bytes[0] - plane.fixed_bytes, slope, region.primary_ceiling)
    return replace(
        region,
        primary=plane,
        primary_capacity_bytes=capacities_bytes[0],
        primary_ceiling=first,
        replica_ceilings=tuple(others),
    )


def _with_memory(problem: Problem, more_bytes: Sequence[int]) -> Problem:
    """Add memory to each device. Device 0's capacity also bounds its samples next to those of the other devices."""
    caps, region, grows = list(problem.region.ceilings), problem.region, False
    for index, (ceiling, more) in enumerate(zip(problem.ceilings, more_bytes, strict=True)):
        if not more or ceiling.limited_by in ("kernel", "time"):
            continue
        grows = True
        caps[index] += samples_within(more, _line(problem, index)[1], region.max_batch_size)
        if index == 0:
            region = replace(region, primary_capacity_bytes=region.primary_capacity_bytes + more)
    return with_ceilings(replace(problem, region=region), caps) if grows else problem


def _with_most(problem: Problem, most_samples: int) -> Problem:
    caps = list(problem.region.ceilings)
    for index, ceiling in enumerate(problem.ceilings):
        if caps[index] >= problem.region.max_batch_size:
            fixed_bytes, per_sample = _line(problem, index)
            held = samples_within(ceiling.capacity_bytes - fixed_bytes, per_sample, most_samples)
            caps[index] = max(caps[index], held)
    return with_ceilings(replace(problem, region=replace(problem.region, max_batch_size=most_samples)), caps)


def _with_effective(problem: Problem, most_samples: int) -> Problem:
    assert problem.effective_batch_sizes is not None, "a step has one forward of any size"
    return replace(problem, effective_batch_sizes=(problem.effective_batch_sizes[0], most_samples))


def _line(problem: Problem, index: int) -> tuple[float, float]:
    """Return the fixed bytes of a device and its bytes per sample."""
    if index > 0 or problem.ranks:
        return float(problem.ceilings[index].fixed_bytes), float(problem.ceilings[index].bytes_per_sample)
    plane = problem.region.primary
    return plane.fixed_bytes, plane.bytes_per_share + plane.bytes_per_batch


# Time


def _with_costs(problem: Problem, change: Change) -> Problem:
    cost, time = problem.cost, problem.cost.step_time
    if change.speeds is not None:
        pairs = zip(time.curves, change.speeds, strict=True)
        curves = tuple(TimeCurve(tuple((n, s / speed) for n, s in curve.points)) for curve, speed in pairs)
        time = replace(time, curves=curves)
    if change.links != 1.0:
        copies_s, gather_s = (
            tuple(s / change.links for s in values) for values in (time.copies_s, time.gather_s_per_sample)
        )
        time = replace(time, copies_s=copies_s, gather_s_per_sample=gather_s)
    if change.without == "update":
        time = replace(time, update_s=0.0)
    elif change.without is not None and problem.ranks:
        cost = replace(cost, all_reduce_s=0.0)
    elif change.without is not None:
        time = _without(time, change.without)
    same = time is problem.cost.step_time and cost is problem.cost
    return problem if same else replace(problem, cost=replace(cost, step_time=time))


def _without(time: StepTime, overhead: Overhead) -> StepTime:
    free = (0.0,) * len(time.curves)
    if overhead != "gather":
        time = replace(time, copies_s=free)
    if overhead != "copies":
        time = replace(time, gather_s_per_sample=free)
    if overhead == "overhead":
        time = replace(time, contention=min(1.0, time.contention), host_s=0.0, lead_s=0.0)
    return time
