"""Describe the charts of a plan's page in Vega-Lite, as dictionaries that Vega draws in the browser.

The charts show the recommended strategy. Only the comparison of throughputs also shows the other strategy. Colours are
CSS variables of the page. Marks also differ in shape or hatching, for readers who can't see the colours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from autosplit.plan.compute_explanation import explanation_of
from autosplit.plan.explanation import Explanation
from autosplit.plan.layout import Layout, PlanDevice, Seat
from autosplit.plan.record import PlanRecord
from autosplit.plan.rows import runs_of
from autosplit.solve.trial import Trial
from autosplit.text import counted_text, rate_text, size_text, tuple_text, visible
from autosplit.tools.charts import (
    MEMORY_PARTS,
    SHARES,
    Landscape,
    curve_of,
    landscape_of,
    line_of,
    segments,
    short,
    unit_of,
)

MOST_LINES = 6
"""Largest number of device kinds whose memory is drawn."""

Spec = dict[str, Any]
T = TypeVar("T")

_ROLES = {"primary": "the first device", "replica": "a replica", "rank": "a rank", "eval": "evaluation"}
_LIMITS = {
    "memory": "limited by memory",
    "max_batch_size": "the largest size that was tried",
    "kernel": "because a kernel accepts no larger tensors",
    "time": "because more samples would not raise the throughput",
}
_STAR = "M0,-1L0.24,-0.31L0.95,-0.31L0.38,0.12L0.59,0.81L0,0.38L-0.59,0.81L-0.38,0.12L-0.95,-0.31L-0.24,-0.31Z"
_INK, _MUTED, _GRID, _ACCENT, _BAD = (f"var(--{name})" for name in ("ink", "muted", "grid", "accent", "bad"))
_COLORS = {label: f"var(--{color})" for _, label, color in MEMORY_PARTS} | {
    "in use": "var(--c1)",
    "free": "transparent",
    "reserve": "url(#hatch)",
}
_AXIS = {"gridColor": _GRID, "domainColor": _MUTED, "tickColor": _MUTED, "tickCount": 5, "labelSeparation": 8}
_TEXT = {"labelColor": _INK, "titleColor": _INK, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
_LEGEND = {"orient": "bottom", "title": None, "columns": 2, "columnPadding": 24, "labelLimit": 0}
CONFIG = {
    "background": None,
    "font": "system-ui, sans-serif",
    "axis": {**_TEXT, **_AXIS},
    "legend": {**_TEXT, **_LEGEND},
    "text": {"color": _INK, "fontSize": 12},
    "view": {"stroke": None},
}
_TOOLTIP = {"field": "text"}
_COLOR = {"field": "color", "scale": None}
_ROW = {"field": "row", "type": "ordinal", "axis": None}

HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="1" y1="0" x2="1" y2="6" stroke="var(--c1)" stroke-width="2"></line></pattern>'
)
"""SVG pattern of hatched bars. The page defines it once."""


@dataclass(frozen=True)
class Chart:
    """A chart for a page.

    Attributes:
        text: Description of the chart in a few sentences, for readers who can't see it.
        spec: The chart in Vega-Lite.
    """

    name: str
    title: str
    text: str
    spec: Spec


def charts_of(plan: PlanRecord) -> tuple[Chart, ...]:
    """Describe the charts of a plan, in the page's order. A chart without data is left out."""
    layout = plan.recommended
    charts = (
        _devices_chart(layout),
        *_memory_charts(layout),
        _rates_chart(plan, explanation_of(plan, layout)),
        *((_trials_chart(plan), _tried_chart(plan)) if layout is plan.main else ()),
    )
    return tuple(chart for chart in charts if chart is not None)


def _chart(name: str, title: str, text: str, height: int | Spec, *layers: Spec) -> Chart:
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": text,
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "height": height,
        "layer": layers,
        "config": CONFIG,
    }
    return Chart(name, title, text, _visible(spec))


def _visible(value: Any) -> Any:
    """Replace invisible characters in all strings of a chart, because device names may come from the user."""
    if isinstance(value, dict):
        return {name: _visible(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_visible(part) for part in value]
    return visible(value) if isinstance(value, str) else value


def _layer(values: Iterable[Spec], mark: Spec, **encoding: Any) -> Spec:
    return {"data": {"values": list(values)}, "mark": mark, "encoding": encoding}


def _axis(title: str, field: str = "x", *, zero: bool = True, **axis: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, "scale": {"zero": zero}, "axis": axis}


def _kinds(shown: dict[str, str], **legend: Any) -> Spec:
    scale = {"domain": list(shown), "range": list(shown.values())}
    return {"field": "kind", "type": "nominal", "scale": scale, "legend": legend}


def _named(names: Iterable[tuple[str, str]]) -> Iterator[Spec]:
    values = [{"row": row, "name": name, "figures": figures} for row, (name, figures) in enumerate(names)]
    for field, align, x in (("name", "left", 0), ("figures", "right", "width")):
        mark = {"type": "text", "align": align, "dy": -22}
        yield _layer(values, mark, y=_ROW, x={"value": x}, text={"field": field})


# --------------------------------------------------------------------------------------------------- memory, by device


def _tried_chart(plan: PlanRecord) -> Chart | None:
    return _landscape_chart(plan) if len(plan.devices) > 1 else _curve_chart(plan)


def _devices_chart(layout: Layout) -> Chart:
    text = (
        "Each bar is the memory of a device: the peak of the plan's step, the free rest, and the reserve. The thick "
        "line is the peak at the device's ceiling. Equal devices have one bar. The table of devices has the figures."
    )
    bars, ceilings, names = [], [], []
    unit, factor = unit_of(max(device.memory_bytes for device in layout.devices))
    figures = [(one.samples, one.device.memory_bytes, segments(one), one.ceiling.peak_bytes) for one in layout.seats]
    place = 0
    for row, (name, count, _) in enumerate(runs_of(layout, figures)):
        seat, end = layout.seats[place], 0
        who, place = _who(seat.device, count), place + count
        for kind, nbytes in segments(seat):
            start, end = end, end + nbytes
            said = f"{who}: {kind}, {size_text(nbytes)}"
            bars.append({"row": row, "kind": kind, "x": start / factor, "end": end / factor, "text": said})
        line = seat.ceiling
        said = f"{who}: ceiling {line.batch_size:,} samples, {size_text(line.peak_bytes)}"
        ceilings.append({"row": row, "x": line.peak_bytes / factor, "text": said})
        names.append((name, f"{size_text(seat.peak_bytes)} of {size_text(seat.device.memory_bytes)}"))
    shown = {kind: color for kind, color in _COLORS.items() if any(bar["kind"] == kind for bar in bars)}
    x = _axis(f"memory, {unit}", grid=False)
    legend = {"symbolStrokeColor": _MUTED, "symbolStrokeWidth": 1}
    bar = {"type": "bar", "size": 24, "stroke": _MUTED, "strokeWidth": 1}
    tick = {"type": "tick", "thickness": 4, "size": 30, "color": _ACCENT}
    return _chart(
        "devices",
        "Memory of each device",
        text,
        60 * len(names),
        _layer(bars, bar, x=x, x2={"field": "end"}, y=_ROW, color=_kinds(shown, **legend), tooltip=_TOOLTIP),
        _layer(ceilings, tick, x=x, y=_ROW, tooltip=_TOOLTIP),
        *_named(names),
    )


# ---------------------------------------------------------------------------------------- memory, against the batch


def _memory_charts(layout: Layout) -> list[Chart]:
    kinds: dict[object, list[Seat]] = {}
    for seat in layout.seats:
        device, line = seat.device, seat.ceiling
        kind = (device.name, device.capacity_bytes, line.role, line.batch_size, line.fixed_bytes, line.bytes_per_sample)
        kinds.setdefault(kind, []).append(seat)
    shown = [seats for seats in kinds.values() if seats[0].ceiling.batch_size][:MOST_LINES]
    return [_memory_chart(layout, f"line{index}", seats) for index, seats in enumerate(shown)]


def _who(device: PlanDevice, count: int) -> str:
    return device.label if count == 1 else f"each {short(device.name)}"


def _memory_chart(layout: Layout, place: str, seats: list[Seat]) -> Chart:
    first, line = seats[0], seats[0].ceiling
    who = _who(first.device, len(seats))
    title = (
        f"Memory by samples: {first.device.label} {short(first.device.name)}"
        if len(seats) == 1
        else (f"Memory by samples: {len(seats)} x {short(first.device.name)}")
    )
    fixed, slope, has_others = line_of(layout, first)
    has_capacity = line.capacity_bytes <= 4 * max(line.peak_bytes, first.peak_bytes)  # else it would flatten the line
    dashed = " (dashed)" if has_capacity else ", far above the chart"
    others = " in addition to the samples of the other devices in this plan" if has_others else ""
    text = (
        f"The capacity of {who} is {size_text(line.capacity_bytes)}{dashed}. As {_ROLES[line.role]}, a step uses "
        f"about {size_text(max(0, round(fixed)))}{others}, and {size_text(round(slope))} more for each sample. The "
        f"ceiling is {line.batch_size:,} samples (dotted), {_LIMITS[line.limited_by]}."
        + (" The points are for other devices at their ceilings." if has_others else "")
    )
    unit, factor = unit_of(line.peak_bytes)
    marks = [
        _mark("measured" if ran else "predicted", n, nbytes / factor, f"{n:,} samples: {size_text(nbytes)}")
        for n, nbytes, ran in line.points
        if n <= 1.5 * line.batch_size
    ] + [
        _mark("this plan", one.samples, one.peak_bytes / factor, f"{one.device.label} in this plan: {one.samples:,} "
              f"samples, {size_text(one.peak_bytes)}")
        for one in seats
    ]  # fmt: skip
    most = max(line.batch_size, *(mark["x"] for mark in marks))
    fitted = [{"x": n, "y": (fixed + slope * n) / factor} for n in (0, most)]
    x, y = _axis("samples"), _axis(f"memory, {unit}", "y")
    rules = [_layer([{"x": line.batch_size}], {"type": "rule", "strokeDash": [2, 3], "color": _MUTED, "size": 2}, x=x)]
    if has_capacity:
        rule = {"type": "rule", "strokeDash": [6, 4], "color": _BAD, "size": 2}
        rules.append(_layer([{"y": line.capacity_bytes / factor}], rule, y=y))
    line_mark = {"type": "line", "color": "var(--c1)"}
    return _chart(place, title, text, 230, _layer(fitted, line_mark, x=x, y=y), *rules, _marks(marks, x, y))


_MARKS = {
    "measured": ("circle", "var(--c1)", 80),
    "simulated": ("circle", "var(--c1)", 80),
    "predicted": ("triangle-up", "var(--c1)", 80),
    "failed": ("cross", _BAD, 80),
    "this plan": (_STAR, _ACCENT, 350),
}
"""Shape, colour and size of each kind of mark."""


def _mark(kind: str, x: float, y: float, text: str) -> Spec:
    _, color, size = _MARKS[kind]
    return {"kind": kind, "x": x, "y": y, "text": f"{text} ({kind})", "color": color, "size": size}


def _marks(marks: Sequence[Spec], x: Spec, y: Spec) -> Spec:
    """Return a layer of marks with tooltips and a legend. This plan's mark is drawn last, above the others."""
    shapes = {kind: shape for kind, (shape, _, _) in _MARKS.items() if any(mark["kind"] == kind for mark in marks)}
    mark = {"type": "point", "filled": True, "opacity": 1, "stroke": "var(--paper)", "strokeWidth": 1}
    shape = _kinds(shapes, symbolFillColor=_INK, symbolStrokeColor=_INK)
    size = {"field": "size", "type": "quantitative", "scale": None}
    values = sorted(marks, key=lambda one: list(_MARKS).index(one["kind"]))
    return _layer(values, mark, x=x, y=y, shape=shape, color=_COLOR, size=size, tooltip=_TOOLTIP)


# --------------------------------------------------------------------------------------------------------- trials


def _measured(plan: PlanRecord) -> str:
    return "simulated" if plan.simulated else "measured"


def _trial_text(trial: Trial) -> str:
    split = f"split {tuple_text(trial.split)}" if len(trial.split) > 1 else f"batch {trial.batch_size}"
    what = f"trial {trial.number}: {split}, {counted_text(trial.accumulation_steps, 'forward')} per step"
    return f"{what}: {trial.failure}" if trial.samples_per_s is None else f"{what}: {rate_text(trial.samples_per_s)}"


def _kind_of(plan: PlanRecord, trial: Trial) -> str:
    if trial.samples_per_s is None:
        return "failed"
    is_plan = trial.split == plan.split and trial.samples_per_s == plan.samples_per_s
    return "this plan" if is_plan else _measured(plan)


def _trials_chart(plan: PlanRecord) -> Chart | None:
    ran = [(trial, trial.samples_per_s) for trial in plan.trials if trial.samples_per_s is not None]
    if not ran:
        return None
    rates = [rate for _, rate in ran]
    failed = len(plan.trials) - len(ran)
    text = f"{counted_text(len(ran), 'trial')} ran. The best reached {rate_text(max(rates))} ({_measured(plan)}). "
    text += "The line is the best so far." + (f" {failed} failed (crosses)." if failed else "")
    best = [
        {"x": trial.number, "y": rate} for (trial, _), rate in zip(ran, itertools.accumulate(rates, max), strict=True)
    ]
    marks = [
        _mark(_kind_of(plan, trial), trial.number, trial.samples_per_s or min(rates), _trial_text(trial))
        for trial in plan.trials
    ]
    errors = [
        {"x": trial.number, "low": rate * (1 - trial.error_share), "y": rate * (1 + trial.error_share)}
        for trial, rate in ran
        if trial.error_share
    ]
    x, y = _axis("trial", zero=False, format="d", tickMinStep=1), _axis("samples/s", "y", zero=False)
    line = {"type": "line", "interpolate": "step-after", "color": _MUTED}
    layers = [_layer(best, line, x=x, y=y), _marks(marks, x, y)]
    if errors:
        layers.insert(1, _layer(errors, {"type": "rule", "color": "var(--c1)"}, x=x, y=y, y2={"field": "low"}))
    return _chart("trials", "Throughput over the trials", text, 230, *layers)


# ------------------------------------------------------------------------------------------------------- landscape


def _landscape_chart(plan: PlanRecord) -> Chart | None:
    layout = plan.main
    if layout.cost is None or layout.region is None:  # ranks of DDP have no gpu0_bsz
        return None
    found = landscape_of(plan, layout.cost, layout.region)
    if min(len(found.shares), len(found.batches), len(set(found.rates.values()))) < 2:
        return None
    text = (
        f"gpu0_bsz is the batch size of {plan.devices[0].label}. Colours are predicted percentages of the best "
        "throughput. Configurations that do not fit are empty. Dots are trials, crosses are failed trials. The star is "
        "this plan."
    )
    marks = [
        _mark(_kind_of(plan, trial), trial.gpu0_bsz, trial.batch_size, _trial_text(trial)) for trial in plan.trials
    ]
    said = f"gpu0_bsz {plan.gpu0_bsz:,}, batch_size {plan.batch_size:,}"
    marks.append(_mark("this plan", plan.gpu0_bsz, plan.batch_size, said))
    scale = {"type": "threshold", "domain": list(SHARES), "range": [f"var(--l{i})" for i in range(len(SHARES) + 1)]}
    legend = {"title": "% of the best", "gradientLength": 260, "orient": "top"}
    color = {"field": "share", "type": "quantitative", "scale": scale, "legend": legend}
    x, y = _axis("gpu0_bsz, samples"), _axis("batch_size, samples", "y")
    ends = {"x2": {"field": "right"}, "y2": {"field": "top"}}
    cells = _layer(_cells(found), {"type": "rect", "aria": False}, x=x, y=y, **ends, color=color, tooltip=_TOOLTIP)
    title = "Throughput by gpu0_bsz and batch_size"
    return _chart("landscape", title, text, 300, cells, _marks(marks, x, y))


def _cells(found: Landscape) -> Iterator[Spec]:
    best = max(found.rates.values())
    wide, high = ((sizes[-1] - sizes[0]) / (len(sizes) - 1) for sizes in (found.shares, found.batches))
    for (share, batch), rate in found.rates.items():
        percent = 100 * rate / best
        text = f"gpu0_bsz {share:,}, batch_size {batch:,}: {rate_text(rate)} predicted, {percent:.1f}% of the best"
        yield {
            "x": max(0, share - wide / 2),
            "right": share + wide / 2,
            "y": max(0, batch - high / 2),
            "top": batch + high / 2,
            "share": percent,
            "text": text,
        }


def _curve_chart(plan: PlanRecord) -> Chart | None:
    known = curve_of(plan)
    if not known:
        return None
    text = (
        f"Samples per second of {plan.devices[0].label} by samples per forward. The line is the prediction, dots are "
        "trials, and the star is this plan."
    )
    ran = [(trial, trial.samples_per_s) for trial in plan.trials if trial.samples_per_s is not None]
    marks = [_mark(_kind_of(plan, trial), trial.batch_size, rate, _trial_text(trial)) for trial, rate in ran]
    marks.append(_mark("this plan", plan.batch_size, plan.samples_per_s, rate_text(plan.samples_per_s)))
    line = [{"x": n, "y": rate, "text": f"{n:,} samples: {rate_text(rate)} predicted"} for n, rate in known.items()]
    x, y = _axis("batch_size, samples"), _axis("samples/s", "y")
    mark = {"type": "line", "color": "var(--c1)", "point": {"color": "var(--c1)", "size": 16}}
    layers = _layer(line, mark, x=x, y=y, tooltip=_TOOLTIP), _marks(marks, x, y)
    return _chart("landscape", "Throughput by batch_size", text, 230, *layers)


# ------------------------------------------------------------------------------------------------------ comparison


_STRATEGIES = {"balanced": "BalancedDataParallel", "ddp": "DDP"}


def _rates_of(plan: PlanRecord, explanation: Explanation) -> Iterator[tuple[str, float, bool]]:
    """Yield the name and samples/s of each option, and whether they are measured. The recommended one comes first."""
    layout = plan.recommended
    what = "this plan" if plan.fastest is None else "recommended"
    yield f"{_STRATEGIES[layout.strategy]} ({what})", layout.samples_per_s, layout.measured
    if not layout.measured and layout.even_samples_per_s is not None:
        yield "DDP with equal ranks", layout.even_samples_per_s, False
    elif explanation.even_measured is not None:
        yield "even split, same batch", explanation.even_measured.samples_per_s, True
    elif explanation.even is not None:
        yield "even split that fits", explanation.even.samples_per_s, False
    if plan.fastest is not None:
        yield from ((_STRATEGIES[one.strategy], one.samples_per_s, one.measured) for one in plan.layouts[1:])
    names = {device.label: device.name for device in plan.devices}
    for alone in explanation.alone:
        label = alone.devices[0]
        yield f"{label} alone ({short(names[label])})", alone.samples_per_s, alone.measured


def _rates_chart(plan: PlanRecord, explanation: Explanation) -> Chart | None:
    if len(plan.devices) == 1 or explanation.shares_processor:
        return None
    rates = list(_rates_of(plan, explanation))
    if len(rates) == 1:
        return None
    kinds = [_measured(plan) if ran else "predicted" for _, _, ran in rates]
    texts = [f"{name}: {rate_text(rate)} ({kind})" for (name, rate, _), kind in zip(rates, kinds, strict=True)]
    gains = [f"{rates[0][1] / rate:.2f} times {text}" for (_, rate, _), text in zip(rates, texts, strict=True)]
    colors = ["url(#hatch)" if not ran else "var(--c1)" if row else _ACCENT for row, (_, _, ran) in enumerate(rates)]
    bars = [{"row": row, "x": rate, "text": texts[row], "color": colors[row]} for row, (_, rate, _) in enumerate(rates)]
    bar = {"type": "bar", "size": 22, "stroke": "var(--c1)", "strokeWidth": 1}
    return _chart(
        "rates",
        "Throughput compared",
        f"Hatched bars are predicted. {texts[0]}. That is {'; '.join(gains[1:])}.",
        54 * len(rates),
        _layer(bars, bar, x=_axis("samples/s", grid=False), y=_ROW, color=_COLOR, tooltip=_TOOLTIP),
        *_named((name, rate_text(rate)) for name, rate, _ in rates),
    )
