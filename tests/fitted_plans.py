"""Plans whose devices have known times and ceilings, so that a test knows the results."""

from __future__ import annotations

from dataclasses import replace

from handmade import GIB, changed_layout, changed_plan, changed_seats, made_plan, made_ranks

from autosplit.plan.layout import Seat
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_layouts
from autosplit.solve.memory import Ceiling, MemoryFit, Region
from autosplit.solve.step_time import Cost, StepTime, TimeCurve

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

    def fitted(index: int, seat: Seat) -> Seat:
        cap = caps[index]
        limit = "memory" if cap < largest else "max_batch_size"
        peak_bytes, label = split[index] * PER_SAMPLE, seat.device.label
        most_here = max(min(cap, largest), split[index])
        ceiling = Ceiling(label, "replica", most_here, limit, 0, PER_SAMPLE, peak_bytes, cap * PER_SAMPLE)
        device = replace(seat.device, name=f"card {index}", capacity_bytes=cap * PER_SAMPLE)
        return replace(seat, device=device, samples=split[index], ceiling=ceiling, peak_bytes=peak_bytes)

    ranks = made_ranks(plan.devices, split, effective or sum(split))
    plan = changed_seats(with_layouts(plan, plan.main, ranks), fitted)
    plan = changed_layout(plan, samples_per_s=1000.0)
    plan = changed_plan(
        plan,
        region=region,
        cost=Cost(step_time),
        effective_batch_sizes=sizes,
        max_batch_size=most,
        even_samples_per_s=None,
    )
    return changed_plan(plan, **changes)
