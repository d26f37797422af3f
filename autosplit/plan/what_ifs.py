"""List what could limit a layout: each what-if is the layout's problem with one property changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autosplit.plan.explanation import BINDING_SHARE, Changed, WhatIf
from autosplit.plan.layout import Layout
from autosplit.plan.record import PlanRecord
from autosplit.solve.change import NO_LIMIT_BYTES, Change, changed
from autosplit.solve.problem import Problem

GIB = 2**30

FASTER = 2.0
"""Factor by which a what-if makes a device faster, or an optimizer step larger."""

MOST_KINDS = 8
"""Largest number of device kinds whose gains are computed separately."""

RemovableCost = Literal["link", "copies", "gather", "overhead", "update"]


@dataclass(frozen=True)
class Relaxed:
    """A change of one property of a layout's problem.

    Attributes:
        what: The property, as in `WhatIf`.
        device: Label of the changed device. None for all devices, or if the property concerns no single device.
        indices: Positions of the changed devices.
    """

    what: Changed
    device: str | None
    indices: tuple[int, ...]
    change: Change


def relaxations(
    plan: PlanRecord, layout: Layout, problem: Problem, costs: Sequence[RemovableCost]
) -> Iterator[Relaxed]:
    """Yield changes: without one of the bounds, with 1 GiB more memory, and with a single device.

    Args:
        costs: The costs between devices that can be changed separately.
    """
    labels, several = [device.label for device in layout.devices], len(layout.seats) > 1
    every = tuple(range(len(labels)))

    def of_devices(indices: Sequence[int], value: float, other: float) -> tuple[float, ...]:
        return tuple(value if index in indices else other for index in every)

    def more(indices: Sequence[int], nbytes: int) -> Change:
        return Change(more_bytes=tuple(nbytes * (index in indices) for index in every))

    kinds = _kinds_of(layout)
    for index in kinds:
        yield Relaxed("memory", labels[index], (index,), more((index,), NO_LIMIT_BYTES))
    if several:
        full = tuple(index for index in every if layout.seats[index].ceiling.limited_by == "memory")
        yield Relaxed("memory", None, full, more(every, NO_LIMIT_BYTES))
    yield from _larger_batches(plan, problem)
    fullest = max(every, key=lambda index: _fullness(layout, index))
    yield Relaxed("one_gib_more", labels[fullest], (fullest,), more((fullest,), GIB))
    if problem.step_time.adds_up and several:
        yield Relaxed("device", None, every, Change(speeds=of_devices(every, FASTER, 1.0)))
    else:
        for index in kinds:
            yield Relaxed("device", labels[index], (index,), Change(speeds=of_devices((index,), FASTER, 1.0)))
    for cost in costs:
        yield Relaxed(cost, None, every, Change(links=FASTER) if cost == "link" else Change(without=cost))
    for index, ceiling in _alone_of(plan, layout) if several and not layout.shares_processor else ():
        yield Relaxed("alone", labels[index], (index,), Change(alone=index, alone_ceiling=ceiling))


def _larger_batches(plan: PlanRecord, problem: Problem) -> Iterator[Relaxed]:
    limit, most = plan.max_batch_size, None if plan.effective_batch_sizes is None else plan.effective_batch_sizes[1]
    if limit is not None and (most is None or limit < most):
        larger = Change(most_samples=int(FASTER * limit) if most is None else most)
        yield Relaxed("max_batch_size", None, (), larger)
    if most is not None:
        twice = int(FASTER * most)
        # If the effective batch size limited the forward, the forward may also grow.
        grows = problem.region.max_batch_size >= most
        larger = Change(most_effective=twice, most_samples=min(twice, limit or twice) if grows else None)
        yield Relaxed("effective_batch_size", None, (), larger)


def what_ifs_of(relaxed: Iterable[Relaxed], base: float, rate: Callable[[Relaxed], float]) -> Iterator[WhatIf]:
    """Yield the samples/s of changed problems. A problem that no batch fits (a rate of 0) is left out.

    Unlimited memory on all devices is tried only if unlimited memory on a single device does not raise the rate.
    """
    binds = False
    for one in relaxed:
        found = 0.0 if binds and (one.what, one.device) == ("memory", None) else rate(one)
        binds = binds or (one.what == "memory" and found > base * (1 + BINDING_SHARE))
        if found > 0:
            yield WhatIf(one.what, one.device, found)


def predicted_rate(problem: Problem, relaxed: Relaxed) -> float:
    """Predict the highest samples/s after a change. Return 0 if nothing fits, or if 1 GiB more changes no ceiling."""
    found = changed(problem, relaxed.change)
    # More memory does not raise a ceiling that a kernel or the time limits.
    return 0.0 if relaxed.what == "one_gib_more" and found is problem else found.best()


def _fullness(layout: Layout, index: int) -> float:
    seat = layout.seats[index]
    return seat.peak_bytes / max(1, seat.device.capacity_bytes)


def _kinds_of(layout: Layout) -> list[int]:
    firsts: dict[object, int] = {}
    for index, seat in enumerate(layout.seats):
        device = seat.device
        firsts.setdefault((index == 0, device.name, device.capacity_bytes, seat.ceiling.batch_size), index)
    return list(firsts.values())[:MOST_KINDS]


def _alone_of(plan: PlanRecord, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield the first device of each model, with the ceiling of a plain model there."""
    names = set()
    ranks = (0,) * len(layout.seats) if plan.ddp is None else plan.ddp.ceilings
    for index, seat in enumerate(layout.seats):
        ceiling = layout.region.primary_ceiling if index == 0 and layout.region is not None else ranks[index]
        if ceiling >= 1 and seat.device.name not in names:
            names.add(seat.device.name)
            yield index, ceiling
