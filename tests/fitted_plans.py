"""Plans whose devices have known times and ceilings, so that a test knows the results."""

from __future__ import annotations

from dataclasses import replace

from handmade import GIB, made_plan

from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpPlan, RankSettings
from autosplit.solve.memory import Ceiling, MemoryFit, Region
from autosplit.solve.step_time import Fit, StepTime, TimeCurve

MS = 1e-3
PER_SAMPLE = GIB // 20
"""Bytes: one GiB holds 20 samples."""


def line(per_sample_s: float, fixed_s: float = 0.0) -> TimeCurve:
    return TimeCurve(((1, fixed_s + per_sample_s), (10**7, fixed_s + 10**7 * per_sample_s)))


def fitted_plan(
    split: tuple[int, ...],
    per_sample_ms: tuple[float, ...],
    caps: tuple[int, ...],
    *,
    effective: int | None = 100,
    fixed_ms: float = 0.0,
    copies_ms: float = 0.0,
    gather_ms: float = 0.0,
    update_ms: float = 0.0,
    most: int | None = None,
    kind: str = "cuda",
    **changes,
) -> Plan:
    """Return a plan for devices that take `fixed_ms + per_sample_ms * n`. 20 samples fit in a GiB."""
    sizes = None if effective is None else (effective, effective)
    bounds = [n for n in (effective, most) if n is not None]
    largest = min(bounds) if bounds else 65536
    plane = MemoryFit(0.0, float(PER_SAMPLE))
    region = Region(
        plane, caps[0] * PER_SAMPLE, min(largest, caps[0]), tuple(min(largest, c) for c in caps[1:]), largest
    )
    curves = tuple(line(ms * MS, fixed_ms * MS) for ms in per_sample_ms)
    # Shared by the whole machine.
    others = len(curves) - 1
    copies, gather = (0.0, *(copies_ms * MS / max(1, others),) * others), (0.0, *(gather_ms * MS,) * others)
    step_time = StepTime(curves, copies, gather, update_ms * MS, adds_up=kind == "cpu")
    plan = made_plan(split, kind=kind, effective=effective or sum(split))
    devices = []
    for device, cap in zip(plan.devices, caps, strict=True):
        limit = "memory" if cap < largest else "max_batch_size"
        peak_bytes = device.share * PER_SAMPLE
        ceiling = Ceiling(
            device.label, "replica", min(cap, largest), limit, 0, PER_SAMPLE, peak_bytes, cap * PER_SAMPLE
        )
        named = replace(device, name=f"card {device.index}", ceiling=ceiling)
        devices.append(replace(named, capacity_bytes=cap * PER_SAMPLE, peak_bytes=peak_bytes))
    ranks = tuple(RankSettings(d.index, d.label, d.share, 1, d.ceiling, d.peak_bytes) for d in devices)
    plan = replace(
        plan,
        devices=tuple(devices),
        ceilings=split,
        region=region,
        fit=Fit(step_time),
        effective_batch_sizes=sizes,
        max_batch_size=most,
        even_samples_per_s=None,
        ddp=DdpPlan(ranks, 1000.0),
    )
    return replace(plan, **changes)
