"""Draw `Plan.plot`, and compute the numbers that it shares with the report page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosplit.plan.layout import Layout, Seat
from autosplit.plan.record import PlanRecord
from autosplit.solve.memory import MemoryParts, Region
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.solver import Solver
from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import Cost
from autosplit.text import size_text, visible
from autosplit.tools.canvas import check_installed, side_by_side

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (50, 70, 80, 90, 95, 98)
"""Boundaries of the landscape's colours, in percent of the best throughput. Most are near 100%."""

GRID = 33
"""Number of points along each side of the landscape."""

MOST_LABEL = 34
"""Largest number of characters of a device name. Longer names do not fit next to their numbers on a phone."""

MEMORY_PARTS = (
    ("parameters_bytes", "parameters", "c1"),
    ("gradients_bytes", "gradients", "c2"),
    ("optimizer_bytes", "optimizer state", "c3"),
    ("gathered_bytes", "gathered outputs", "c4"),
    ("activations_bytes", "activations and others", "c5"),
    ("untraced_bytes", "not traced", "c6"),
)
"""Parts of a `MemoryParts`: attribute, name on the page, colour."""


@dataclass(frozen=True)
class Landscape:
    """The predicted throughput of a grid of configurations on two or more devices.

    Attributes:
        rates: Samples/s by `gpu0_bsz` and `batch_size`, for configurations that fit.
    """

    shares: list[int]
    batches: list[int]
    rates: dict[tuple[int, int], float]


def short(name: str) -> str:
    """Return a device's name on one line without its manufacturer, shortened to `MOST_LABEL` characters."""
    text = " ".join(visible(name).split()).removeprefix("NVIDIA ").removeprefix("GeForce ")
    return text if len(text) <= MOST_LABEL else f"{text[: MOST_LABEL - 1]}…"


def unit_of(nbytes: float) -> tuple[str, int]:
    """Return the unit (name and bytes) for an axis that ends at `nbytes`."""
    return ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20) if nbytes >= 2**20 else ("KiB", 2**10)


def known_parts(seat: Seat) -> MemoryParts | None:
    """Return the parts of a device's peak. Return None if they do not add up to exactly this peak."""
    return seat.memory if seat.memory is not None and seat.memory.total_bytes == seat.peak_bytes else None


def segments(seat: Seat) -> list[tuple[str, int]]:
    """Return the label and the bytes of each part of a device's memory, in order. Empty parts are left out."""
    parts, device = known_parts(seat), seat.device
    used = [("in use", seat.peak_bytes)]
    if parts is not None:
        used = [(label, getattr(parts, name)) for name, label, _ in MEMORY_PARTS]
    reserve = max(0, device.memory_bytes - device.capacity_bytes)
    free = max(0, device.memory_bytes - reserve - seat.peak_bytes)
    return [segment for segment in (*used, ("free", free), ("reserve", reserve)) if segment[1] > 0]


def line_of(layout: Layout, seat: Seat) -> tuple[float, float, bool]:
    """Return a device's memory line: fixed bytes, bytes per sample, and whether it is device 0 of several.

    For device 0 of several, the fixed bytes include the plan's samples on the other devices.
    """
    line = seat.ceiling
    if line.role != "primary" or layout.region is None or len(layout.seats) == 1:
        return line.fixed_bytes, line.bytes_per_sample, False
    plane, others = layout.region.primary, layout.batch_size - layout.split[0]
    return plane.fixed_bytes + plane.bytes_per_batch * others, plane.bytes_per_share + plane.bytes_per_batch, True


def landscape_of(plan: PlanRecord, cost: Cost, region: Region) -> Landscape:
    """Predict the samples/s of each configuration on a grid."""
    solver, most = _solver_of(plan, cost, region)
    shares, batches = _spread(0, min(most, region.primary_ceiling)), _spread(1, most)
    rates = {(share, batch): _rate_at(plan, solver, share, batch) for share in shares for batch in batches}
    return Landscape(shares, batches, {place: rate for place, rate in rates.items() if rate is not None})


def _solver_of(plan: PlanRecord, cost: Cost, region: Region) -> tuple[Solver, int]:
    sizes = plan.effective_batch_sizes
    most = region.largest_batch if sizes is None else min(region.largest_batch, sizes[1])
    return Solver(Space(region, sizes), cost.step_time), most


def _steps_of(plan: PlanRecord, batch: int) -> int | None:
    """Return the forwards of an optimizer step with this batch, or None if it needs more than are allowed."""
    steps = 1 if plan.effective_batch_sizes is None else accumulation_steps(plan.effective_batch_size, batch)
    return steps if plan.accumulates or steps == 1 else None


def _spread(least: int, most: int) -> list[int]:
    return sorted({round(least + (most - least) * i / (GRID - 1)) for i in range(GRID)})


def _rate_at(plan: PlanRecord, solver: Solver, share: int, batch: int) -> float | None:
    steps = _steps_of(plan, batch)
    bounds = None if steps is None else solver.space.region.gpu0_bounds(batch)
    if steps is None or bounds is None or not bounds[0] <= share <= min(batch, bounds[1]):
        return None
    return solver.samples_per_s(Configuration(share, batch, steps))


def curve_of(plan: PlanRecord) -> dict[int, float]:
    """Predict the samples/s of each batch size at its fastest split. Return an empty dict without a cost model."""
    layout = plan.main
    if layout.cost is None or layout.region is None:
        return {}
    solver, most = _solver_of(plan, layout.cost, layout.region)
    rates = {}
    for batch in _spread(1, max(1, most)):
        steps = _steps_of(plan, batch)
        fastest = None if steps is None else solver.fastest_of(batch, steps)
        if fastest is not None:
            rates[batch] = solver.samples_per_s(fastest)
    return rates


# ------------------------------------------------------------------------------------------------------- Plan.plot


def figure_of(plan: PlanRecord) -> Figure:
    """Draw the memory of each device, and samples/s by batch size, as a matplotlib figure."""
    check_installed("matplotlib.figure", "plan.plot()")
    height = max(4.2, 2 + 0.7 * len(plan.devices))
    return side_by_side(height, lambda axes: _draw_devices(axes, plan), lambda axes: _draw_curve(axes, plan))


def _draw_devices(axes: Any, plan: PlanRecord) -> None:
    names = []
    labelled: set[str] = set()
    unit, factor = unit_of(max(device.memory_bytes for device in plan.devices))
    colors = {label: f"C{index}" for index, (_, label, _) in enumerate(MEMORY_PARTS)} | {"in use": "C0"}
    for row, seat in enumerate(plan.main.seats):
        left, device = 0.0, seat.device
        for label, nbytes in segments(seat):
            axes.barh(
                row,
                nbytes / factor,
                left=left,
                label="" if label in labelled else label,
                facecolor=colors.get(label, "none"),
                edgecolor="gray",
                hatch="////" if label == "reserve" else None,
            )
            labelled.add(label)
            left += nbytes / factor
        name = f"{device.label} {short(device.name)}" if device.kind != "cpu" else device.label
        names.append(f"{name}\n{size_text(seat.peak_bytes)} of {size_text(device.memory_bytes)}")
    axes.set_yticks(range(len(names)), labels=names)
    axes.invert_yaxis()
    axes.set_xlabel(f"memory, {unit}")


def _draw_curve(axes: Any, plan: PlanRecord) -> None:
    known = curve_of(plan)
    if known:
        axes.plot(list(known), list(known.values()), label="predicted")
    ran = [(trial.batch_size, trial.samples_per_s) for trial in plan.trials if trial.samples_per_s is not None]
    if ran:
        axes.scatter(*zip(*ran, strict=True), color="white", edgecolors="black", label="trial", zorder=3)
    axes.scatter([plan.batch_size], [plan.samples_per_s], s=190, marker="*", color="C3", label="this plan", zorder=5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch_size, samples")
    axes.set_ylabel("samples/s")
