"""Handwritten plans for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from noted import noted

from autosplit.plan.layout import Layout, PlanDevice, Seat, Strategy
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_layouts
from autosplit.probe.check_result import Check
from autosplit.solve.memory import Ceiling, MemoryFit, MemoryParts, Region
from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import Cost, Residual, StepTime, TimeCurve
from autosplit.solve.trial import Trial

GIB = 2**30

_OF_LAYOUT = {one.name for one in fields(Layout)}


def made_ceiling(label: str, batch_size: int, capacity_bytes: int, **changes: Any) -> Ceiling:
    ceiling = Ceiling(label, "replica", batch_size, "memory", GIB, 2**20, capacity_bytes - 2**20, capacity_bytes)
    return replace(ceiling, confirmed=True, **changes)


def made_device(
    index: int, *, kind: str = "cuda", name: str = "NVIDIA GeForce RTX 3090", memory_bytes: int = 24 * GIB
) -> PlanDevice:
    return PlanDevice(
        label=f"{kind}:{index}",
        kind=kind,
        index=index,
        name=name,
        memory_bytes=memory_bytes,
        capacity_bytes=memory_bytes,
        budgeted=kind != "cuda",
    )


def made_seat(device: PlanDevice, samples: int, **changes: Any) -> Seat:
    ceiling = made_ceiling(device.label, 2 * samples + 1, device.memory_bytes)
    return replace(Seat(device, samples, ceiling, device.memory_bytes * 3 // 4, 0.0412), **changes)


def made_ranks(devices: tuple[PlanDevice, ...], sizes: tuple[int, ...], effective: int, **changes: Any) -> Layout:
    """Return a layout for DDP with these batch sizes."""
    seats = tuple(
        Seat(device, size, made_ceiling(device.label, max(200, size), 24 * GIB), 20 * GIB)
        for device, size in zip(devices, sizes, strict=True)
    )
    return replace(
        Layout("ddp", seats, accumulation_steps(effective, sum(sizes)), effective, 9876.5, measured=False), **changes
    )


def made_plan(split: tuple[int, ...] = (100, 156), *, kind: str = "cuda", effective: int = 512, **changes: Any) -> Plan:
    """Return a plan with consistent numbers. `changes` replaces fields of the plan or of its main layout."""
    name = {"cuda": "NVIDIA GeForce RTX 3090", "sim": "RTX3090", "cpu": "cpu"}[kind]
    devices = tuple(made_device(index, kind=kind, name=name) for index in range(len(split)))
    batch_size = sum(split)
    steps = accumulation_steps(effective, batch_size)
    seats = tuple(made_seat(device, samples) for device, samples in zip(devices, split, strict=True))
    even_rate = None if kind == "cpu" else 7812.6
    plan = Plan(
        layouts=(
            Layout("balanced", seats, steps, effective, 10234.5, even_samples_per_s=even_rate),
            made_ranks(devices, (128,) * len(devices), 256 * len(devices)),
        ),
        precision="none",
        trials=(
            Trial(0, split[0], batch_size, steps, split, 10234.5),
            Trial(1, 1, len(split), 3, (1,) * len(split), failure="cuda:1"),
        ),
        real_steps=0 if kind == "sim" else 12,
        real_ooms=0 if kind == "sim" else 1,
    )
    return changed_plan(plan, **changes)


def changed_plan(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with other fields, of the plan or of its main layout."""
    of_layout = {name: value for name, value in changes.items() if name in _OF_LAYOUT}
    plan = replace(plan, **{name: value for name, value in changes.items() if name not in _OF_LAYOUT})
    return changed_layout(plan, plan.main.strategy, **of_layout) if of_layout else plan


def changed_layout(plan: Plan, which: Strategy = "ddp", /, **changes: Any) -> Plan:
    """Return the plan with other fields of one layout."""
    return with_layouts(plan, *(replace(one, **changes) if one.strategy == which else one for one in plan.layouts))


def changed_seats(plan: Plan, change: Callable[[int, Seat], Seat], *strategies: Strategy) -> Plan:
    """Return the plan with every seat changed by a function of its position, in these layouts or in all."""
    return with_layouts(
        plan,
        *(
            replace(one, seats=tuple(change(place, seat) for place, seat in enumerate(one.seats)))
            if not strategies or one.strategy in strategies
            else one
            for one in plan.layouts
        ),
    )


def on_devices(plan: Plan, *devices: PlanDevice) -> Plan:
    """Return the plan with these devices."""
    return changed_seats(plan, lambda place, seat: replace(seat, device=devices[place]))


def only_ddp(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with its layout for DDP only."""
    assert plan.ddp is not None
    return replace(plan, layouts=(replace(plan.ddp, **changes),), trials=())


def without_ddp(plan: Plan, why: str | None = None) -> Plan:
    """Return the plan without a layout for DDP."""
    assert plan.balanced is not None
    return replace(plan, layouts=(plan.balanced,), why_no_ddp=why)


def solved_plan(split: tuple[int, ...] = (100, 156), *, kind: str = "cuda", **changes: Any) -> Plan:
    """Return a plan with all results of a search: region, fit, trials, points of ceilings, and memory by category."""
    plan = made_plan(split, kind=kind)
    curve = TimeCurve(((1, 0.002), (64, 0.006), (400, 0.04)))
    count, most = len(split), 400
    copies_s = (0.0, *(0.001,) * (count - 1))
    step_time = StepTime((curve,) * count, copies_s, (0.0, *(1e-6,) * (count - 1)), 0.0005, adds_up=False)
    points = ((100, 3 * GIB, True), (200, 6 * GIB, False))
    parts = MemoryParts(GIB, GIB, 2 * GIB, GIB, 12 * GIB, GIB)
    plan = changed_seats(
        plan,
        lambda index, seat: replace(
            seat,
            device=replace(seat.device, capacity_bytes=23 * GIB),
            ceiling=replace(
                seat.ceiling, role="primary" if index == 0 else "replica", points=points, bytes_per_sample=30 * 2**20
            ),
            memory=parts,
        ),
        "balanced",
    )
    steps = accumulation_steps(512, 200)
    trials = (*plan.trials, Trial(2, 90, 200, steps, (90, 200 - 90, *(0,) * (count - 2))[:count], 9000.0, 0.02))
    solved = changed_plan(
        plan,
        trials=trials if count > 1 else (*plan.trials[:1], replace(plan.trials[1], split=(2,))),
        region=Region(MemoryFit(GIB, 50 * 2**20, 2**20), 23 * GIB, most, (most,) * (count - 1), most),
        cost=Cost(step_time, residuals=(Residual(split, 2, 0.05, 0.051),)),
        effective_batch_sizes=(512, 512),
        workload={"model": "Net"},
        checks=(
            Check("gradient", 0.0, 0.0, depends=False),
            Check("BatchNorm2d at 1", 0.5, None, depends=True, advice="freeze it"),
        ),
        notes=noted("a note"),
    )
    return changed_plan(solved, **changes)


def led_by_ddp(plan: Plan, *sizes: int) -> Plan:
    """Return a solved plan whose DDP ranks are twice as fast as its split, so that DDP is recommended."""
    sizes = sizes or (128, 128)
    ddp = made_ranks(plan.devices, sizes, plan.effective_batch_size)
    faster = replace(ddp, samples_per_s=20469.0, even_samples_per_s=10000.0, cost=plan.main.cost)
    return with_layouts(plan, plan.main, faster)
