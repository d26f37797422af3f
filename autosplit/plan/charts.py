"""Draw the charts of a plan, for its page and for `Plan.plot`.

No information is in colour alone: colours also differ in position, shape or hatching.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from autosplit.plan.canvas import LEVELS, Canvas, Chart, check_drawing, compact, drawn, side_by_side, whole_ticks
from autosplit.plan.explanation import Explanation
from autosplit.plan.record import PlanDevice, PlanRecord
from autosplit.solve.memory import MemoryParts, Region
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.solver import Solver
from autosplit.solve.split import accumulation_steps
from autosplit.solve.step_time import Fit
from autosplit.solve.trial import Trial
from autosplit.text import counted_text, rate_text, size_text, tuple_text, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Boundaries of the colours in the landscape, as fractions of the best throughput. Most are near the best."""

GRID = 33
"""Points along each side of the landscape."""

MOST_LINES = 6
"""Most kinds of devices whose memory is drawn."""

MOST_UNLIKE = 6
"""Largest ratio of device memories at which bars are drawn in bytes. Above it, they are relative to each device."""

MOST_LABEL = 34
"""Most characters of a name next to its figures on a phone."""

MEMORY_PARTS = (
    ("parameters_bytes", "parameters", "c1"),
    ("gradients_bytes", "gradients", "c2"),
    ("optimizer_bytes", "optimizer state", "c3"),
    ("gathered_bytes", "gathered outputs", "c4"),
    ("activations_bytes", "activations and others", "c5"),
    ("untraced_bytes", "not traced", "c6"),
)
"""Parts of a `MemoryParts`: attribute, name on the page, colour."""

_ROLES = {"primary": "the first device", "replica": "a replica", "rank": "a rank", "eval": "evaluation"}


def charts_of(plan: PlanRecord, explanation: Explanation) -> tuple[Chart, ...]:
    """Draw the charts of a plan, in the page's order. A chart that can't be drawn has a text with the reason."""
    check_drawing("a chart")
    return (
        _devices_chart(plan),
        *_memory_charts(plan),
        _trials_chart(plan),
        _landscape_chart(plan),
        _rates_chart(plan, explanation),
    )


def figure_of(plan: PlanRecord) -> Figure:
    """Draw the memory of each device, and samples/s by batch size, as a matplotlib figure."""
    check_drawing("plan.plot()")
    height = max(_devices_height(plan), 300)
    return side_by_side(height, lambda canvas: _draw_devices(canvas, plan), lambda canvas: _draw_curve(canvas, plan))


# ------------------------------------------------------------------------------------------------------- drawing


def _short(name: str) -> str:
    """Return a name on one line, cut off to fit a phone's width."""
    text = " ".join(visible(name).split())
    return text if len(text) <= MOST_LABEL else f"{text[: MOST_LABEL - 1]}…"


def _unit_of(nbytes: float) -> tuple[str, int]:
    return ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20) if nbytes >= 2**20 else ("KiB", 2**10)


# --------------------------------------------------------------------------------------------------- memory, by device


def known_parts(device: PlanDevice) -> MemoryParts | None:
    """Return the parts of a device's peak, if they add up to exactly this peak."""
    return device.memory if device.memory is not None and device.memory.total_bytes == device.peak_bytes else None


def _devices_chart(plan: PlanRecord) -> Chart:
    text = (
        "Each bar is the memory of a device: the peak of the plan's step, the reserve, and the free rest. The table of "
        "devices has the figures."
    )
    draw = partial(_draw_devices, plan=plan)
    return drawn("devices", "Memory of each device", text, _devices_height(plan), draw)


def _devices_height(plan: PlanRecord) -> int:
    return 150 + 52 * len(plan.devices)


def _draw_devices(canvas: Canvas, plan: PlanRecord) -> None:
    most = max(device.memory_bytes for device in plan.devices)
    # Bars in bytes show which GPU is large. If a small GPU's bar would be too short, scale each bar to 100%.
    by_share = most > MOST_UNLIKE * min(device.memory_bytes for device in plan.devices)
    unit, factor = ("% of each device", 0.0) if by_share else _unit_of(most)
    texts = []
    labelled: set[str] = set()
    for row, device in enumerate(plan.devices):
        left = 0
        scale = max(1, device.memory_bytes) / 100 if by_share else factor
        for label, nbytes, style in _segments(canvas, device):
            own = "" if label in labelled else label
            bar = canvas.axes.barh(row, nbytes / scale, 0.42, left=left / scale, label=own, linewidth=0.8, **style)
            canvas.tooltip(bar.patches[0], f"{device.label}: {label}, {size_text(nbytes)}")
            labelled.add(label)
            left += nbytes
        name = f"{device.label} {_short(device.name)}" if device.kind != "cpu" else device.label
        texts.append((name, f"{size_text(device.peak_bytes)} of {size_text(device.memory_bytes)}"))
    canvas.rows(texts, 100 if by_share else most / factor)
    canvas.finish(f"memory, {unit}", "", 2)


def _segments(canvas: Canvas, device: PlanDevice) -> list[tuple[str, int, dict[str, Any]]]:
    """Return the parts of a device's bar that are not empty, with label, bytes and style."""
    parts = known_parts(device)
    used = [("in use", device.peak_bytes, "c1")]
    if parts is not None:
        used = [(label, getattr(parts, name), color) for name, label, color in MEMORY_PARTS]
    reserve = max(0, device.memory_bytes - device.capacity_bytes)
    free = max(0, device.memory_bytes - reserve - device.peak_bytes)
    empty = {"facecolor": "none", "edgecolor": canvas.colors["muted"]}
    filled = [
        (label, n, {"color": canvas.colors[color], "edgecolor": canvas.colors["paper"]}) for label, n, color in used
    ]
    segments = [*filled, ("free", free, empty), ("reserve", reserve, {**empty, "hatch": "////"})]
    return [segment for segment in segments if segment[1] > 0]


# ---------------------------------------------------------------------------------------- memory, against the batch


def _memory_charts(plan: PlanRecord) -> list[Chart]:
    """Draw one chart for each kind of device."""
    kinds: dict[object, list[PlanDevice]] = {}
    for device in plan.devices:
        line = device.ceiling
        kind = (device.name, device.capacity_bytes, line.role, line.batch_size, line.fixed_bytes, line.bytes_per_sample)
        kinds.setdefault(kind, []).append(device)
    return [_memory_chart(plan, index, alike) for index, alike in enumerate(list(kinds.values())[:MOST_LINES])]


def _line_of(plan: PlanRecord, device: PlanDevice) -> tuple[float, float, bool]:
    """Return fixed bytes, bytes per sample, and whether these include the plan's samples on other devices."""
    line = device.ceiling
    if line.role != "primary" or plan.region is None or len(plan.devices) == 1:
        return line.fixed_bytes, line.bytes_per_sample, False
    plane, others = plan.region.primary, plan.batch_size - plan.gpu0_bsz
    return plane.fixed_bytes + plane.bytes_per_batch * others, plane.bytes_per_share + plane.bytes_per_batch, True


def _memory_chart(plan: PlanRecord, index: int, alike: list[PlanDevice]) -> Chart:
    first, line = alike[0], alike[0].ceiling
    who = first.label if len(alike) == 1 else f"{first.label} and {counted_text(len(alike) - 1, 'identical device')}"
    name = "" if first.kind == "cpu" else f" ({_short(first.name)})"
    title = f"Memory by samples: {who}{name}"
    if line.batch_size < 1:
        return Chart(f"line{index}", title, f"Not even one sample fits on {who} in this plan, so there is no line.")
    limit = {
        "memory": "limited by memory",
        "max_batch_size": "the largest size that was tried",
        "kernel": "because a kernel accepts no larger tensors",
        "time": "because more samples would not raise the throughput",
    }[line.limited_by]
    fixed, slope, has_others = _line_of(plan, first)
    others, points = "", ""
    if has_others:
        others = " in addition to the samples of the other devices in this plan"
        points = " The points are for other devices at their ceilings."
    text = (
        f"The capacity of {who} is {size_text(line.capacity_bytes)}. As {_ROLES[line.role]}, a step uses about "
        f"{size_text(max(0, round(fixed)))}{others}, and {size_text(round(slope))} more for each sample. The ceiling "
        f"is {line.batch_size:,} samples, {limit}.{points}"
    )
    return drawn(f"line{index}", title, text, 300, lambda canvas: _draw_memory(canvas, plan, alike))


def _draw_memory(canvas: Canvas, plan: PlanRecord, alike: list[PlanDevice]) -> None:
    axes, line = canvas.axes, alike[0].ceiling
    fixed, slope, has_others = _line_of(plan, alike[0])
    points = [point for point in line.points if point[0] <= 1.5 * line.batch_size]
    most = max(line.batch_size, *(device.share for device in alike), *(n for n, _, _ in points), 1)
    # A GPU with a much larger capacity would flatten the chart, so its capacity is a text.
    highest = max(line.peak_bytes, *(device.peak_bytes for device in alike), *(nbytes for _, nbytes, _ in points), 1)
    has_capacity = line.capacity_bytes <= 4 * highest
    top = max(highest, line.capacity_bytes if has_capacity else 0)
    unit, factor = _unit_of(top)
    ends = [fixed / factor, (fixed + slope * most) / factor]
    (fitted,) = axes.plot([0, most], ends, color=canvas.colors["c1"], linewidth=2, label="fitted line")
    canvas.tooltip(fitted, f"{size_text(round(fixed))} + {size_text(round(slope))} per sample")
    note = ", others at their ceilings" if has_others else ""
    for it_ran, marker, label in ((False, "x", "traced"), (True, "o", "measured")):
        marks = (
            (n, nbytes / factor, f"{n:,} samples: {size_text(nbytes)}, {label}{note}")
            for n, nbytes, ran in points
            if ran is it_ran
        )
        canvas.dots(marks, label, "c1", marker=marker, zorder=1)
    if has_capacity:
        height = line.capacity_bytes / factor
        axes.axhline(height, color=canvas.colors["bad"], linestyle="--", linewidth=1.6, label="capacity")
    else:
        far = f"capacity {size_text(line.capacity_bytes)}, far above"
        axes.text(0.02, 0.98, far, transform=axes.transAxes, va="top")
    axes.axvline(line.batch_size, color=canvas.colors["muted"], linestyle=":", linewidth=1.6, label="ceiling")
    plans = (
        (
            one.share,
            one.peak_bytes / factor,
            f"{one.label} in this plan: {one.share:,} samples, {size_text(one.peak_bytes)}",
        )
        for one in alike
    )
    canvas.dots(plans, "this plan", "accent", marker="D", s=62, edgecolors=canvas.colors["paper"], zorder=4)
    axes.set_xlim(0, 1.06 * most)
    axes.set_ylim(0, 1.1 * top / factor)
    whole_ticks(axes.xaxis)
    canvas.finish("samples", f"memory, {unit}", 3)


# --------------------------------------------------------------------------------------------------------- trials


def _trials_chart(plan: PlanRecord) -> Chart:
    title = "Throughput over the trials"
    ran = [trial.samples_per_s for trial in plan.trials if trial.samples_per_s is not None]
    if not plan.trials:
        return Chart("trials", title, "There were no trials. The plan was computed from measurements of each device.")
    if not ran:
        return Chart("trials", title, "No trial finished.")
    failed = len(plan.trials) - len(ran)
    text = f"{counted_text(len(ran), 'trial')} ran. The best reached {rate_text(max(ran))} ({_measured(plan)})."
    text += f" {failed} failed (crosses)." if failed else ""
    return drawn("trials", title, text, 290, lambda canvas: _draw_trials(canvas, plan))


def _measured(plan: PlanRecord) -> str:
    return "simulated" if plan.simulated else "measured"


def _draw_trials(canvas: Canvas, plan: PlanRecord) -> None:
    axes = canvas.axes
    ran = [(trial, trial.samples_per_s) for trial in plan.trials if trial.samples_per_s is not None]
    rates = [rate for _, rate in ran]
    best = list(itertools.accumulate(rates, max))
    ends = [*(trial.number for trial, _ in ran), max(trial.number for trial in plan.trials)]
    axes.step(ends, [*best, best[-1]], where="post", color=canvas.colors["muted"], linewidth=1.4, label="best so far")
    for trial, rate in ran:
        if trial.error_share:
            axes.errorbar(
                trial.number, rate, yerr=trial.error_share * rate, color=canvas.colors["c1"], capsize=3, zorder=2
            )
    canvas.dots(((trial.number, rate, _trial_text(trial)) for trial, rate in ran), _measured(plan), "c1")
    room = max(0.05 * max(rates), 0.25 * (max(rates) - min(rates)))  # keep small differences small
    floor = max(0.0, min(rates) - 3 * room)
    failed = (trial for trial in plan.trials if trial.samples_per_s is None)
    crosses = ((trial.number, floor, _trial_text(trial)) for trial in failed)
    canvas.dots(crosses, "failed", "bad", marker="x", s=56, clip_on=False)
    chosen = next((trial for trial, rate in ran if trial.split == plan.split and rate == plan.samples_per_s), None)
    if chosen is not None:
        canvas.star(chosen.number, plan.samples_per_s, f"this plan: {_trial_text(chosen)}")
    axes.set_ylim(floor, max(rates) + room)
    axes.set_xlim(-0.5, ends[-1] + 0.5)
    whole_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter(compact)
    canvas.finish("trial", "samples/s", 2)


def _trial_text(trial: Trial) -> str:
    split = f"split {tuple_text(trial.split)}" if len(trial.split) > 1 else f"batch {trial.batch_size}"
    what = f"trial {trial.number}: {split}, {counted_text(trial.accumulation_steps, 'forward')} per step"
    return f"{what}: {trial.failure}" if trial.samples_per_s is None else f"{what}: {rate_text(trial.samples_per_s)}"


# ------------------------------------------------------------------------------------------------------- landscape


def _landscape_chart(plan: PlanRecord) -> Chart:
    if len(plan.devices) == 1:
        return _curve_chart(plan)
    title = "Throughput by gpu0_bsz and batch_size"
    if plan.fit is None or plan.region is None:
        why = "DDP ranks have no gpu0_bsz" if plan.region is None else "the plan has no time model"
        return Chart("landscape", title, f"There is no landscape, because {why}.")
    shares, batches, rates = _landscape(plan, plan.fit, plan.region)
    known = {rate for row in rates for rate in row if not math.isnan(rate)}
    if min(len(shares), len(batches), len(known)) < 2:
        return Chart("landscape", title, "There is no landscape, because only one configuration fits.")
    text = (
        "Predicted throughput for each gpu0_bsz and batch_size, as a percentage of the best. Configurations that do "
        "not fit are empty. Dots are trials, crosses are failed trials, and the star is this plan."
    )
    draw = partial(_draw_landscape, plan=plan, shares=shares, batches=batches, rates=rates, best=max(known))
    return drawn("landscape", title, text, 380, draw)


def _landscape(plan: PlanRecord, fit: Fit, region: Region) -> tuple[list[int], list[int], list[list[float]]]:
    """Predict the samples/s of each configuration on a grid. Return NaN for configurations that do not fit."""
    solver, most = _solver_of(plan, fit, region)
    shares, batches = _spread(0, min(most, region.primary_ceiling)), _spread(1, most)
    return shares, batches, [[_rate_at(plan, solver, share, batch) for share in shares] for batch in batches]


def _solver_of(plan: PlanRecord, fit: Fit, region: Region) -> tuple[Solver, int]:
    """Return a solver for the plan's request, and the largest batch."""
    sizes = plan.effective_batch_sizes
    most = region.largest_batch if sizes is None else min(region.largest_batch, sizes[1])
    return Solver(Space(region, sizes), fit.step_time), most


def _steps_of(plan: PlanRecord, batch: int) -> int | None:
    """Return the forwards of an optimizer step with this batch, or None if only one forward is allowed."""
    steps = 1 if plan.effective_batch_sizes is None else accumulation_steps(plan.effective_batch_size, batch)
    return steps if plan.accumulates or steps == 1 else None


def _spread(least: int, most: int) -> list[int]:
    return sorted({round(least + (most - least) * i / (GRID - 1)) for i in range(GRID)})


def _rate_at(plan: PlanRecord, solver: Solver, share: int, batch: int) -> float:
    steps = _steps_of(plan, batch)
    bounds = None if steps is None else solver.space.region.gpu0_bounds(batch)
    if steps is None or bounds is None or not bounds[0] <= share <= min(batch, bounds[1]):
        return math.nan
    return solver.samples_per_s(Configuration(share, batch, steps))


def _draw_landscape(
    canvas: Canvas, plan: PlanRecord, shares: list[int], batches: list[int], rates: list[list[float]], best: float
) -> None:
    axes = canvas.axes
    edges = [share * best for share in SHARES[:-1]] + [1.0001 * best]
    # Give each level its colour. A colormap would choose colours by the width of the levels.
    palette = [canvas.colors[f"l{i}"] for i in range(LEVELS)]
    levels = axes.contourf(shares, batches, rates, edges, colors=palette)
    levels.set_edgecolor("face")  # avoids a visible seam between two colours
    bar = canvas.figure.colorbar(levels, ax=axes, location="bottom", aspect=24, shrink=0.96, pad=0.02)
    bar.set_label(f"predicted, % of the best ({compact(best)} samples/s)")
    bar.set_ticks(edges, labels=[f"{100 * share:.0f}" for share in SHARES])
    bar.outline.set_edgecolor(canvas.colors["muted"])
    _draw_ran(canvas, [(trial.gpu0_bsz, trial.batch_size, trial) for trial in plan.trials])
    failed = (trial for trial in plan.trials if trial.samples_per_s is None)
    crosses = ((trial.gpu0_bsz, trial.batch_size, _trial_text(trial)) for trial in failed)
    canvas.dots(crosses, "failed", "bad", marker="x", s=60, linewidths=2)
    text = f"this plan: gpu0_bsz {plan.gpu0_bsz}, batch_size {plan.batch_size}"
    canvas.star(plan.gpu0_bsz, plan.batch_size, text)
    axes.set_xlim(0, 1.04 * max(shares[-1], *(trial.gpu0_bsz for trial in plan.trials), plan.gpu0_bsz))
    axes.set_ylim(0, 1.06 * max(batches[-1], *(trial.batch_size for trial in plan.trials), plan.batch_size))
    whole_ticks(axes.xaxis)
    whole_ticks(axes.yaxis)
    canvas.finish("gpu0_bsz, samples", "batch_size, samples", 3)


def _draw_ran(canvas: Canvas, places: Iterable[tuple[float, float, Trial]]) -> None:
    """Mark the trials that ran, on top of a prediction."""
    marks = ((x, y, _trial_text(trial)) for x, y, trial in places if trial.samples_per_s is not None)
    canvas.dots(marks, "trial", "paper", s=40, edgecolors=canvas.colors["ink"])


def _curve_chart(plan: PlanRecord) -> Chart:
    """Draw throughput by batch size, in place of the landscape, for a plan with one device."""
    title = "Throughput by batch_size"
    if plan.fit is None or plan.region is None:
        return Chart("landscape", title, "There is no curve, because the plan has no time model.")
    text = (
        f"Samples per second of {plan.devices[0].label} by samples per forward. The line is the prediction, dots are "
        "trials, and the star is this plan."
    )
    return drawn("landscape", title, text, 300, lambda canvas: _draw_curve(canvas, plan))


def _curve(plan: PlanRecord) -> dict[int, float]:
    """Predict the samples/s of each batch at its fastest split. Return an empty dict if the plan has no fit."""
    if plan.fit is None or plan.region is None:
        return {}
    solver, most = _solver_of(plan, plan.fit, plan.region)
    rates = {}
    for batch in _spread(1, max(1, most)):
        steps = _steps_of(plan, batch)
        fastest = None if steps is None else solver.fastest_of(batch, steps)
        if fastest is not None:
            rates[batch] = solver.samples_per_s(fastest)
    return rates


def _draw_curve(canvas: Canvas, plan: PlanRecord) -> None:
    axes, known = canvas.axes, _curve(plan)
    if known:
        axes.plot(list(known), list(known.values()), color=canvas.colors["c1"], linewidth=2, label="predicted")
    _draw_ran(canvas, [(trial.batch_size, trial.samples_per_s or 0.0, trial) for trial in plan.trials])
    canvas.star(plan.batch_size, plan.samples_per_s, f"this plan: {rate_text(plan.samples_per_s)}")
    tops = [*known.values(), *(trial.samples_per_s or 0.0 for trial in plan.trials), plan.samples_per_s]
    axes.set_ylim(0, 1.15 * max(tops))
    axes.set_xlim(0, 1.06 * max(*known, *(trial.batch_size for trial in plan.trials), plan.batch_size, 1))
    whole_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter(compact)
    canvas.finish("batch_size, samples", "samples/s", 3)


# ------------------------------------------------------------------------------------------------------ comparison


def _rates_of(plan: PlanRecord, explanation: Explanation) -> list[tuple[str, float, bool]]:
    """Return the plan and the alternatives: name, samples/s, and whether they were measured rather than predicted."""
    is_ddp = plan.region is None and len(plan.devices) > 1
    rates = [("this plan (DDP)" if is_ddp else "this plan", plan.samples_per_s, not is_ddp or plan.ddp.measured)]
    if explanation.even_measured is not None:
        rates.append(("even split, same batch", explanation.even_measured.samples_per_s, True))
    elif explanation.even is not None:
        rates.append(("even split that fits", explanation.even.samples_per_s, False))
    if plan.ddp.ranks and not is_ddp and len(plan.devices) > 1:
        rates.append(("DDP", plan.ddp.samples_per_s, plan.ddp.measured))
        if plan.ddp.even_samples_per_s is not None:
            rates.append(("DDP with equal ranks", plan.ddp.even_samples_per_s, False))
    names = {device.label: device.name for device in plan.devices}
    for alone in explanation.alone:
        label = alone.devices[0]
        rates.append((f"{label} alone ({_short(names[label])})", alone.samples_per_s, False))
    return rates


def _rates_chart(plan: PlanRecord, explanation: Explanation) -> Chart:
    title = "Compared with an even split"
    if len(plan.devices) == 1:
        return Chart("rates", title, "There is only one device, so there is nothing to split.")
    if explanation.shares_processor:
        return Chart("rates", title, "The devices share one CPU, so no gain over an even split is claimed.")
    rates = _rates_of(plan, explanation)
    if len(rates) == 1:
        return Chart("rates", title, "No other option was measured or predicted.")
    texts = [f"{name}: {rate_text(rate)} ({_measured(plan) if ran else 'predicted'})" for name, rate, ran in rates]
    text = f"Samples per second. {'; '.join(texts)}."
    return drawn("rates", title, text, 110 + 50 * len(rates), lambda canvas: _draw_rates(canvas, plan, rates))


def _draw_rates(canvas: Canvas, plan: PlanRecord, rates: Sequence[tuple[str, float, bool]]) -> None:
    from matplotlib.patches import Patch

    legend = {}
    for row, (name, rate, ran) in enumerate(rates):
        how = _measured(plan) if ran else "predicted"
        bar = canvas.axes.barh(row, rate, 0.42, **_filled_or_hatched(canvas, "c1" if row else "accent", ran))
        canvas.tooltip(bar.patches[0], f"{name}: {rate_text(rate)}, {how}")
        legend[how] = Patch(label=how, **_filled_or_hatched(canvas, "c1", ran))
    canvas.rows([(name, rate_text(rate)) for name, rate, _ in rates], 1.02 * max(rate for _, rate, _ in rates))
    canvas.axes.xaxis.set_major_formatter(compact)
    canvas.finish("samples/s", "", 2, list(legend.values()))


def _filled_or_hatched(canvas: Canvas, color: str, ran: bool) -> dict[str, Any]:
    edge = canvas.colors[color]
    return {"facecolor": edge, "edgecolor": edge} if ran else {"facecolor": "none", "edgecolor": edge, "hatch": "////"}
