"""Handwritten plans for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from noted import noted

from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpPlan, PlanDevice, RankSettings
from autosplit.probe.check_result import Check
from autosplit.solve.memory import Ceiling, MemoryFit, MemoryParts, Region
from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import Fit, Residual, StepTime, TimeCurve
from autosplit.solve.trial import Trial

GIB = 2**30


def made_ceiling(label: str, batch_size: int, capacity_bytes: int, **changes: Any) -> Ceiling:
    ceiling = Ceiling(label, "replica", batch_size, "memory", GIB, 2**20, capacity_bytes - 2**20, capacity_bytes)
    return replace(ceiling, confirmed=True, **changes)


def made_device(
    index: int, share: int, *, kind: str = "cuda", name: str = "NVIDIA GeForce RTX 3090", memory_bytes: int = 24 * GIB
) -> PlanDevice:
    label = f"{kind}:{index}"
    return PlanDevice(
        label=label,
        kind=kind,
        index=index,
        name=name,
        memory_bytes=memory_bytes,
        capacity_bytes=memory_bytes,
        budgeted=kind != "cuda",
        share=share,
        peak_bytes=memory_bytes * 3 // 4,
        busy_s=0.0412,
        ceiling=made_ceiling(label, 2 * share + 1, memory_bytes),
    )


def made_plan(split: tuple[int, ...] = (100, 156), *, kind: str = "cuda", effective: int = 512, **changes: Any) -> Plan:
    """Return a plan with consistent numbers. `changes` replaces fields."""
    name = {"cuda": "NVIDIA GeForce RTX 3090", "sim": "RTX3090", "cpu": "cpu"}[kind]
    devices = tuple(made_device(index, share, kind=kind, name=name) for index, share in enumerate(split))
    batch_size = sum(split)
    steps = accumulation_steps(effective, batch_size)
    ranks = tuple(
        RankSettings(index, device.label, 128, 2, made_ceiling(device.label, 200, 24 * GIB), 20 * GIB)
        for index, device in enumerate(devices)
    )
    plan = Plan(
        split=split,
        gpu0_bsz=split[0],
        batch_size=batch_size,
        accumulation_steps=steps,
        effective_batch_size=effective,
        samples_per_s=10234.5,
        even_samples_per_s=None if kind == "cpu" else 7812.6,
        ceilings=tuple(device.ceiling.batch_size for device in devices),
        devices=devices,
        trials=(
            Trial(0, split[0], batch_size, steps, split, 10234.5),
            Trial(1, 1, len(split), 3, (1,) * len(split), failure="cuda:1"),
        ),
        ddp=DdpPlan(ranks, 9876.5),
        precision="none",
        simulated=kind == "sim",
        real_steps=0 if kind == "sim" else 12,
        real_ooms=0 if kind == "sim" else 1,
    )
    return replace(plan, **changes)


def solved_plan(split: tuple[int, ...] = (100, 156), *, kind: str = "cuda", **changes: Any) -> Plan:
    """Return a plan with all results of a search: region, fit, trials, points of ceilings, and memory by category."""
    plan = made_plan(split, kind=kind)
    curve = TimeCurve(((1, 0.002), (64, 0.006), (400, 0.04)))
    count, most = len(split), 400
    copies_s = (0.0, *(0.001,) * (count - 1))
    step_time = StepTime((curve,) * count, copies_s, (0.0, *(1e-6,) * (count - 1)), 0.0005, adds_up=False)
    points = ((100, 3 * GIB, True), (200, 6 * GIB, False))
    parts = MemoryParts(GIB, GIB, 2 * GIB, GIB, 12 * GIB, GIB)
    devices = tuple(
        replace(
            device,
            capacity_bytes=23 * GIB,
            ceiling=replace(
                device.ceiling, role="primary" if index == 0 else "replica", points=points, bytes_per_sample=30 * 2**20
            ),
            memory=parts,
        )
        for index, device in enumerate(plan.devices)
    )
    steps = accumulation_steps(512, 200)
    trials = (*plan.trials, Trial(2, 90, 200, steps, (90, 200 - 90, *(0,) * (count - 2))[:count], 9000.0, 0.02))
    solved = replace(
        plan,
        devices=devices,
        trials=trials if count > 1 else (*plan.trials[:1], replace(plan.trials[1], split=(2,))),
        region=Region(MemoryFit(GIB, 50 * 2**20, 2**20), 23 * GIB, most, (most,) * (count - 1), most),
        fit=Fit(step_time, residuals=(Residual(split, 2, 0.05, 0.051),)),
        effective_batch_sizes=(512, 512),
        workload={"model": "Net"},
        checks=(
            Check("gradient", 0.0, 0.0, depends=False),
            Check("BatchNorm2d at 1", 0.5, None, depends=True, advice="freeze it"),
        ),
        notes=noted("a note"),
    )
    return replace(solved, **changes)


def led_by_ddp(plan: Plan, *sizes: int) -> Plan:
    """Return a solved plan whose DDP settings are twice as fast as its split, so that DDP is recommended."""
    ranks = tuple(
        replace(rank, batch_size=size) for rank, size in zip(plan.ddp.ranks, sizes or (128, 128), strict=True)
    )
    ddp = replace(plan.ddp, ranks=ranks, samples_per_s=20469.0, even_samples_per_s=10000.0, fit=plan.fit)
    return replace(plan, ddp=ddp)
