"""A plan's charts, as SVG for a page: drawn by matplotlib, coloured by the page's own variables.

Each is drawn twice, for a narrow and for a wide page, so that its words are as large as the page's on both. No colour
is alone in saying something: what differs in colour differs in place, shape or hatching, too.
"""

from __future__ import annotations

import importlib
import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

from autosplit.errors import InputError
from autosplit.plan.explanation import Explanation
from autosplit.plan.plan import Plan
from autosplit.plan.record import PlanDevice
from autosplit.solve.memory import MemoryParts, Region
from autosplit.solve.search_space import Configuration, Space, Trial
from autosplit.solve.solver import Solver
from autosplit.solve.split import accumulation_steps
from autosplit.text import rate_text, size_text, visible

__all__ = ["LEVELS", "MEMORY_PARTS", "Chart", "charts_of", "check_drawing"]

WIDTHS = {"narrow": 310, "wide": 510}
"""Of the drawings, in pixels: what a phone of 360 leaves within its margins, and half of a laptop's page."""

FONT_PIXELS = 12
SMALL_PIXELS = 11

SHARES = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Of the best throughput: where the landscape changes its colour. A search is about what is near the best."""

LEVELS = len(SHARES) - 1
"""Colours of the landscape."""

GRID = 33
"""Places along each side of the landscape at which the model is asked."""

MOST_LINES = 6
"""Kinds of devices whose memory is drawn."""

MOST_UNLIKE = 6
"""Times the memory of the smallest device that the largest may have, for bars of bytes to show both."""

MOST_LABEL = 34
"""Characters of a name that fit beside its figures on a phone."""

MEMORY_PARTS = (
    ("parameters_bytes", "parameters", "c1"),
    ("gradients_bytes", "gradients", "c2"),
    ("optimizer_bytes", "optimizer state", "c3"),
    ("gathered_bytes", "gathered outputs", "c4"),
    ("activations_bytes", "activations and others", "c5"),
    ("untraced_bytes", "not traced", "c6"),
)
"""Of a `MemoryParts`: each part's attribute, what the page calls it, and its colour."""

# matplotlib knows no variables: each stands for a colour that nothing else has, and is put in its place afterwards.
_NAMES = ("ink", "muted", "grid", "paper", "c1", "c2", "c3", "c4", "c5", "c6", "accent", "bad")
_COLORS = {name: f"#0102{number:02x}" for number, name in enumerate((*_NAMES, *(f"l{i}" for i in range(LEVELS))), 16)}
_VARIABLES = {color: f"var(--{name})" for name, color in _COLORS.items()}

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"


@dataclass(frozen=True)
class Chart:
    """A chart for a page.

    Attributes:
        name: Of its place in the page: ``"memory"``.
        title: Its heading.
        said: What it shows, in a sentence or two: the text for who can't see it.
        narrow: An ``<svg>`` element for a narrow page; empty where nothing could be drawn, which `said` explains.
        wide: The same for a wide one.
    """

    name: str
    title: str
    said: str
    narrow: str = ""
    wide: str = ""


def check_drawing(what: str) -> None:
    """Refuse what needs matplotlib where that is not installed.

    Args:
        what: What would need it.

    Raises:
        InputError: It is not.
    """
    try:
        importlib.import_module("matplotlib.backends.backend_svg")
    except ImportError:
        raise InputError(
            f"{what} needs matplotlib, which is not installed; expected the extra; pip install 'autosplit[report]'"
        ) from None


def charts_of(plan: Plan, explanation: Explanation) -> tuple[Chart, ...]:
    """Draw a plan's charts.

    Args:
        plan: What is drawn.
        explanation: Of it, which takes long enough to be made once.

    Returns:
        All of them in the page's order; one that can't be drawn of this plan says why.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_drawing("a chart")
    return (
        _devices_chart(plan),
        *_memory_charts(plan),
        _trials_chart(plan),
        _landscape_chart(plan),
        _rates_chart(plan, explanation),
    )


# ------------------------------------------------------------------------------------------------------- drawing


class _Canvas:
    """A picture that is being drawn, and what its marks say when they are pointed at.

    Args:
        width: In pixels.
        height: In pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        figures = importlib.import_module("matplotlib.figure")
        # SVG has 72 units to an inch, which are the page's pixels.
        self.figure = figures.Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        self.axes = self.figure.add_subplot()
        self.width, self.height = width, height
        self.titles: dict[str, str] = {}
        self.axes.set_facecolor("none")
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)

    @property
    def is_narrow(self) -> bool:
        return self.width == WIDTHS["narrow"]

    def tell(self, artist: Any, text: str) -> None:
        """Let a mark say something when it is pointed at."""
        key = f"mark{len(self.titles)}"
        artist.set_gid(key)
        self.titles[key] = text

    def label(self, x: str, y: str) -> None:
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)

    def legend(self, columns: int = 2, handles: Sequence[Any] | None = None) -> None:
        """Put the legend below the axes, where it hides no mark."""
        given = {} if handles is None else {"handles": handles}
        self.figure.legend(
            loc="outside lower left", ncols=columns, frameon=False, handlelength=1.6, columnspacing=1.2, **given
        )

    def svg(self, chart: str, said: str) -> str:
        """Return the picture as an element of a page."""
        stream = io.StringIO()
        self.figure.patch.set_visible(False)
        self.figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        size = "narrow" if self.is_narrow else "wide"
        return _inlined(stream.getvalue(), f"{chart}-{size}", said, self.titles)


def _drawn(name: str, title: str, said: str, height: int | tuple[int, int], draw: Callable[[_Canvas], None]) -> Chart:
    """Draw a chart for both widths."""
    matplotlib = importlib.import_module("matplotlib")
    narrow, wide = height if isinstance(height, tuple) else (height, height)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that its own font lacks: the page's font draws them
        for size, pixels in (("narrow", narrow), ("wide", wide)):
            with matplotlib.rc_context(_settings()):
                canvas = _Canvas(WIDTHS[size], pixels)
                draw(canvas)
                found[size] = canvas.svg(name, said)
    return Chart(name, title, said, **found)


def _settings() -> dict[str, Any]:
    """Return all that the user's own settings of matplotlib might have changed, too."""
    matplotlib = importlib.import_module("matplotlib")
    ink, muted, grid = _COLORS["ink"], _COLORS["muted"], _COLORS["grid"]
    return {
        **{key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith(("backend", "date."))},
        "axes.axisbelow": True,
        "axes.edgecolor": muted,
        "axes.grid": True,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "font.size": FONT_PIXELS,
        "grid.color": grid,
        "grid.linewidth": 1,
        "hatch.linewidth": 1.2,
        "legend.fontsize": SMALL_PIXELS,
        "legend.labelcolor": ink,
        "svg.fonttype": "none",  # the page's font, and words that can be searched and read aloud
        "svg.hashsalt": "autosplit",  # the same plan gives the same page
        "text.color": ink,
        "text.parse_math": False,  # a name with dollars is a name
        "text.usetex": False,
        "xtick.color": muted,
        "xtick.labelcolor": ink,
        "xtick.labelsize": SMALL_PIXELS,
        "ytick.color": muted,
        "ytick.labelcolor": ink,
        "ytick.labelsize": SMALL_PIXELS,
    }


def _inlined(svg: str, prefix: str, said: str, titles: dict[str, str]) -> str:
    """Turn a file of matplotlib into an element: no styles of its own, ids that are this page's only, titles on marks.

    Args:
        svg: The file.
        prefix: Of the ids.
        said: The text alternative.
        titles: What marks say, by their ids.
    """
    root = ET.fromstring(svg)  # noqa: S314  # what matplotlib just wrote
    ids = {element.get("id") for element in root.iter()} - {None}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        _plain(element, prefix, ids)
        title = titles.get(str(element.get("id")).removeprefix(f"{prefix}-"))
        if title is not None:
            own = ET.Element(f"{{{_SVG}}}title")
            own.text = visible(title)
            element.insert(0, own)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", visible(said))
    root.set("class", "narrow" if prefix.endswith("narrow") else "wide")
    return _serialised(root)


def _plain(element: ET.Element, prefix: str, ids: set[str | None]) -> None:
    """Write an element's style as attributes, which a strict policy for styles lets be, and make its ids unique."""
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name and name != "font-family":  # the page's
            element.set(name, value)
    for name, value in list(element.attrib.items()):
        if name == "id":
            element.set(name, f"{prefix}-{value}")
        elif name.endswith("href") and value.removeprefix("#") in ids:
            del element.attrib[name]
            element.set("href", f"#{prefix}-{value[1:]}")
        elif value.startswith("url(#"):
            element.set(name, f"url(#{prefix}-{value[5:]}")
        elif value.lower() in _VARIABLES:
            element.set(name, _VARIABLES[value.lower()])


def _serialised(root: ET.Element) -> str:
    """Write an element without the namespaces' prefixes, which HTML does not have."""
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        for name in [name for name in element.attrib if name.startswith(f"{{{_XLINK}}}")]:
            element.set(name.removeprefix(f"{{{_XLINK}}}"), element.attrib.pop(name))
    return ET.tostring(root, encoding="unicode", short_empty_elements=False)


def _short(name: str) -> str:
    """Return what is drawn of a name: on one line, and not longer than a phone is wide."""
    text = " ".join(visible(name).split())
    return text if len(text) <= MOST_LABEL else f"{text[: MOST_LABEL - 1]}…"


def _unit_of(nbytes: float) -> tuple[str, int]:
    return ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20) if nbytes >= 2**20 else ("KiB", 2**10)


# --------------------------------------------------------------------------------------------------- memory, by device


def known_parts(device: PlanDevice) -> MemoryParts | None:
    """Return what a device's peak is made of, if that is known of this very peak."""
    return device.memory if device.memory is not None and device.memory.total_bytes == device.peak_bytes else None


def _devices_chart(plan: Plan) -> Chart:
    title = "Memory of each device"
    said = (
        "A bar for each device, as long as its memory: what the plan holds of it at its fullest, what is kept free on "
        "purpose, and what is left. The figures are in the table of devices."
    )
    rows = len(plan.devices)
    return _drawn(
        "devices", title, said, (150 + 52 * rows, 132 + 52 * rows), lambda canvas: _draw_devices(canvas, plan)
    )


def _draw_devices(canvas: _Canvas, plan: Plan) -> None:
    axes, devices = canvas.axes, plan.devices
    most = max(device.memory_bytes for device in devices)
    # Bytes tell large cards from small ones; where a small one would be a line, each bar is the whole of its own.
    by_share = most > MOST_UNLIKE * min(device.memory_bytes for device in devices)
    unit, factor = ("% of the device's own", 0.0) if by_share else _unit_of(most)
    shown: dict[str, Any] = {}
    for row, device in enumerate(devices):
        left = 0
        scale = max(1, device.memory_bytes) / 100 if by_share else factor
        for label, nbytes, style in _segments(device):
            bar = axes.barh(row, nbytes / scale, 0.42, left=left / scale, **style)
            canvas.tell(bar.patches[0], f"{device.label}: {label}, {size_text(nbytes)}")
            shown.setdefault(label, bar)
            left += nbytes
        text = f"{device.label} {_short(device.name)}" if device.kind != "cpu" else device.label
        figures = f"{size_text(device.peak_bytes)} of {size_text(device.memory_bytes)}"
        axes.text(0, row - 0.34, text, va="bottom", fontsize=SMALL_PIXELS if canvas.is_narrow else FONT_PIXELS)
        axes.annotate(
            figures, (1, row - 0.34), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=SMALL_PIXELS
        )
    axes.set_ylim(len(devices) - 0.4, -0.85)
    axes.set_yticks([])
    axes.set_xlim(0, 100 if by_share else most / factor)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    canvas.label(f"memory, {unit}", "")
    handles = [shown[label] for label in _legend_order(shown)]
    for handle, label in zip(handles, _legend_order(shown), strict=True):
        handle.set_label(label)
    canvas.legend(1 if canvas.is_narrow else 2, handles)


def _segments(device: PlanDevice) -> list[tuple[str, int, dict[str, Any]]]:
    """Return the parts of a device's bar, each with what it is called and how it is drawn; none is empty."""
    edge = {"edgecolor": _COLORS["paper"], "linewidth": 0.8}
    parts = known_parts(device)
    if parts is None:
        used = [("in use", device.peak_bytes, {"color": _COLORS["c1"], **edge})]
    else:
        used = [(label, getattr(parts, name), {"color": _COLORS[c], **edge}) for name, label, c in MEMORY_PARTS]
    reserve = max(0, device.memory_bytes - device.capacity_bytes)
    free = max(0, device.memory_bytes - reserve - device.peak_bytes)
    hatched = {"facecolor": "none", "edgecolor": _COLORS["muted"], "hatch": "////", "linewidth": 0.8}
    empty = {"facecolor": "none", "edgecolor": _COLORS["muted"], "linewidth": 0.8}
    return [one for one in (*used, ("free", free, empty), ("reserve", reserve, hatched)) if one[1] > 0]


def _legend_order(shown: Iterable[str]) -> list[str]:
    order = ["in use", *(label for _, label, _ in MEMORY_PARTS), "free", "reserve"]
    return sorted(shown, key=order.index)


# ---------------------------------------------------------------------------------------- memory, against the batch


def _memory_charts(plan: Plan) -> list[Chart]:
    """Draw a chart for each kind of device."""
    kinds: dict[object, list[PlanDevice]] = {}
    for device in plan.devices:
        line = device.ceiling
        kind = (device.name, device.capacity_bytes, line.role, line.batch_size, line.fixed_bytes, line.bytes_per_sample)
        kinds.setdefault(kind, []).append(device)
    return [_memory_chart(plan, index, alike) for index, alike in enumerate(list(kinds.values())[:MOST_LINES])]


@dataclass(frozen=True)
class _Line:
    """A device's bytes against its samples: the fitted line, and the points that were looked at."""

    fixed_bytes: float
    bytes_per_sample: float
    points: tuple[tuple[int, int, bool], ...]
    points_note: str = ""


def _line_of(plan: Plan, device: PlanDevice) -> _Line:
    """Return a device's line; the first's depends on what the others have, and is taken as they have it in the plan."""
    line = device.ceiling
    if line.role != "primary" or plan.region is None or len(plan.devices) == 1:
        return _Line(line.fixed_bytes, line.bytes_per_sample, line.points)
    plane, others = plan.region.primary, plan.batch_size - plan.gpu0_bsz
    slope = plane.bytes_per_share + plane.bytes_per_batch
    return _Line(plane.fixed_bytes + plane.bytes_per_batch * others, slope, line.points, ", others at their ceilings")


def _memory_chart(plan: Plan, index: int, alike: list[PlanDevice]) -> Chart:
    first, line = alike[0], alike[0].ceiling
    who = _runs_text([device.label for device in alike])
    name = "" if first.kind == "cpu" else f" ({_short(first.name)})"
    title = f"Memory against samples: {who}{name}"
    if line.batch_size < 1:
        return Chart(f"line{index}", title, f"{who}: not even one sample fits in this plan, and there is no line.")
    how = {
        "memory": f"The ceiling is {line.batch_size:,} samples, where its memory ends.",
        "max_batch_size": f"{line.batch_size:,} samples fit, and no more were looked for.",
        "kernel": f"The ceiling is {line.batch_size:,} samples: a kernel takes no larger tensors.",
        "time": f"The ceiling is {line.batch_size:,} samples: more would bring no more throughput.",
    }[line.limited_by]
    drawn = _line_of(plan, first)
    beside = ", beside what the others have in this plan" if drawn.points_note else ""
    how += " The points were taken with the others at their ceilings." if drawn.points_note else ""
    said = (
        f"What {who} may hold is {size_text(line.capacity_bytes)}; a step takes about "
        f"{size_text(max(0, round(drawn.fixed_bytes)))} of it, and {size_text(round(drawn.bytes_per_sample))} more for "
        f"each sample, in the role of {_ROLES[line.role]}{beside}. {how}"
    )
    return _drawn(f"line{index}", title, said, 300, lambda canvas: _draw_memory(canvas, alike, drawn))


_ROLES = {"primary": "the first device", "replica": "a replica", "rank": "a rank", "eval": "evaluation"}


def _runs_text(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} like it"


def _draw_memory(canvas: _Canvas, alike: list[PlanDevice], known: _Line) -> None:
    axes, line = canvas.axes, alike[0].ceiling
    points = [point for point in known.points if point[0] <= 1.5 * line.batch_size]
    most = max(line.batch_size, *(device.share for device in alike), *(n for n, _, _ in points), 1)
    # A card that the batch does not nearly fill would flatten everything against the axis.
    highest = max(line.peak_bytes, *(device.peak_bytes for device in alike), *(nbytes for _, nbytes, _ in points), 1)
    has_capacity = line.capacity_bytes <= 4 * highest
    top = max(highest, line.capacity_bytes if has_capacity else 0)
    unit, factor = _unit_of(top)
    ends = (0, most)
    fitted = [(known.fixed_bytes + known.bytes_per_sample * n) / factor for n in ends]
    (drawn,) = axes.plot(ends, fitted, color=_COLORS["c1"], linewidth=2, label="fitted line")
    canvas.tell(drawn, f"{size_text(round(known.fixed_bytes))} + {size_text(round(known.bytes_per_sample))} per sample")
    for it_ran, marker, label in ((False, "x", "traced"), (True, "o", "measured")):
        for n, nbytes, ran in points:
            if ran is it_ran:
                dot = axes.scatter([n], [nbytes / factor], marker=marker, color=_COLORS["c1"], s=46, label=label)
                canvas.tell(dot, f"{n:,} samples: {size_text(nbytes)}, {label.strip('_')}{known.points_note}")
                label = "_" + label
    if has_capacity:
        axes.axhline(
            line.capacity_bytes / factor, color=_COLORS["bad"], linestyle="--", linewidth=1.6, label="capacity"
        )
    axes.axvline(line.batch_size, color=_COLORS["muted"], linestyle=":", linewidth=1.6, label="ceiling")
    for number, device in enumerate(alike):
        label = "this plan" if number == 0 else "_plan"
        style = {"marker": "D", "s": 62, "color": _COLORS["accent"], "edgecolors": _COLORS["paper"], "zorder": 4}
        dot = axes.scatter([device.share], [device.peak_bytes / factor], label=label, **style)
        canvas.tell(dot, f"{device.label} in this plan: {device.share:,} samples, {size_text(device.peak_bytes)}")
    if not has_capacity:
        note = f"capacity {size_text(line.capacity_bytes)}, far above"
        axes.text(0.02, 0.98, note, transform=axes.transAxes, va="top", fontsize=SMALL_PIXELS)
    axes.set_xlim(0, 1.06 * most)
    axes.set_ylim(0, 1.1 * top / factor)
    _whole_ticks(axes.xaxis)
    canvas.label("samples", f"memory, {unit}")
    canvas.legend(3)


def _whole_ticks(axis: Any) -> None:
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))


# --------------------------------------------------------------------------------------------------------- trials


def _trials_chart(plan: Plan) -> Chart:
    title = "Throughput over the trials"
    ran = [trial for trial in plan.trials if trial.samples_per_s is not None]
    if not plan.trials:
        return Chart("trials", title, "There were no trials: the answer was computed from each device's measurements.")
    if not ran:
        return Chart("trials", title, "No trial ran to its end.")
    failed = len(plan.trials) - len(ran)
    how = "simulated" if plan.simulated else "measured"
    best = max(trial.samples_per_s or 0.0 for trial in ran)
    said = f"{len(ran)} trials ran, of which the best had {rate_text(best)} ({how})."
    said += f" {failed} failed: the crosses." if failed else ""
    return _drawn("trials", title, said, 290, lambda canvas: _draw_trials(canvas, plan))


def _draw_trials(canvas: _Canvas, plan: Plan) -> None:
    axes = canvas.axes
    ran = [(trial, trial.samples_per_s) for trial in plan.trials if trial.samples_per_s is not None]
    best = list(itertools.accumulate((rate for _, rate in ran), max))
    numbers = [trial.number for trial, _ in ran]
    ends = [*numbers, max(trial.number for trial in plan.trials)]
    axes.step(ends, [*best, best[-1]], where="post", color=_COLORS["muted"], linewidth=1.4, label="best so far")
    label = "simulated" if plan.simulated else "measured"
    for trial, rate in ran:
        if trial.error_share:
            axes.errorbar(trial.number, rate, yerr=trial.error_share * rate, color=_COLORS["c1"], capsize=3, zorder=2)
        dot = axes.scatter([trial.number], [rate], color=_COLORS["c1"], s=46, zorder=3, label=label)
        canvas.tell(dot, _trial_text(trial))
        label = "_trial"
    rates = [rate for _, rate in ran]
    room = max(0.05 * max(rates), 0.25 * (max(rates) - min(rates)))  # what differs little is not drawn as if it did
    floor = max(0.0, min(rates) - 3 * room)
    label = "failed"
    for trial in plan.trials:
        if trial.samples_per_s is None:
            cross = axes.scatter([trial.number], [floor], marker="x", color=_COLORS["bad"], s=56, label=label, zorder=3)
            cross.set_clip_on(False)
            canvas.tell(cross, _trial_text(trial))
            label = "_failed"
    chosen = next((trial for trial, rate in ran if trial.split == plan.split and rate == plan.samples_per_s), None)
    if chosen is not None:
        star = _star(axes, chosen.number, plan.samples_per_s)
        canvas.tell(star, f"this plan: {_trial_text(chosen)}")
    axes.set_ylim(floor, max(rates) + room)
    axes.set_xlim(-0.5, ends[-1] + 0.5)
    _whole_ticks(axes.xaxis)
    _compact_ticks(axes.yaxis)
    canvas.label("trial", "samples/s")
    canvas.legend(2 if canvas.is_narrow else 4)


def _star(axes: Any, x: float, y: float) -> Any:
    return axes.scatter(
        [x], [y], marker="*", s=190, color=_COLORS["accent"], edgecolors=_COLORS["paper"], label="this plan", zorder=5
    )


def _compact_ticks(axis: Any) -> None:
    """Write 120000 as 120k, so that the words leave the marks some room."""
    ticker = importlib.import_module("matplotlib.ticker")
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _compact(value)))


def _compact(value: float) -> str:
    for factor, suffix in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if abs(value) >= factor:
            return f"{value / min(factor, 10**3 if suffix == 'k' else factor):.4g}{suffix}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _trial_text(trial: Trial) -> str:
    split = f"split ({', '.join(map(str, trial.split))})" if len(trial.split) > 1 else f"batch {trial.batch_size}"
    what = f"trial {trial.number}: {split}, {trial.accumulation_steps} forwards a step"
    return f"{what}: {trial.failure}" if trial.samples_per_s is None else f"{what}: {rate_text(trial.samples_per_s)}"


# ------------------------------------------------------------------------------------------------------- landscape


def _landscape_chart(plan: Plan) -> Chart:
    if len(plan.devices) == 1:
        return _curve_chart(plan)
    title = "The landscape: gpu0_bsz and batch_size"
    if plan.fit is None or plan.region is None:
        why = "the ranks of DDP have no gpu0_bsz" if plan.region is None else "the plan holds no fit"
        return Chart("landscape", title, f"There is no landscape to draw: {why}.")
    field = _field(plan, plan.region)
    if field is None:
        return Chart("landscape", title, "There is no landscape to draw: only one configuration fits.")
    said = (
        "Throughput that the fitted model predicts for each share of device 0 (gpu0_bsz) and each batch, as a share of "
        "the best; what does not fit is left empty. Dots are trials, crosses failed ones, and the star is this plan."
    )
    return _drawn("landscape", title, said, (380, 380), lambda canvas: _draw_landscape(canvas, plan, field))


@dataclass(frozen=True)
class _Field:
    """Predictions of the model on a grid: a row for each batch; None where it does not fit."""

    shares: tuple[int, ...]
    batches: tuple[int, ...]
    rates: tuple[tuple[float | None, ...], ...]


def _field(plan: Plan, region: Region) -> _Field | None:
    """Ask the model all over the landscape."""
    assert plan.fit is not None
    sizes = plan.effective_batch_sizes
    most = region.largest_batch if sizes is None else min(region.largest_batch, sizes[1])
    steps = 1 if sizes is None else max(1, accumulation_steps(sizes[1], 1))
    solver = Solver(Space(region, sizes, steps if plan.accumulates else 1), plan.fit.step_time)
    batches = _spread(1, most)
    shares = _spread(0, min(most, region.primary_ceiling))
    rates = tuple(tuple(_rate_at(plan, solver, share, batch) for share in shares) for batch in batches)
    known = [rate for row in rates for rate in row if rate is not None]
    if min(len(batches), len(shares)) < 2 or len(set(known)) < 2:
        return None
    return _Field(shares, batches, rates)


def _spread(least: int, most: int) -> tuple[int, ...]:
    return tuple(sorted({round(least + (most - least) * i / (GRID - 1)) for i in range(GRID)}))


def _rate_at(plan: Plan, solver: Solver, share: int, batch: int) -> float | None:
    if share > batch:
        return None
    steps = 1 if plan.effective_batch_sizes is None else accumulation_steps(plan.effective_batch_size, batch)
    bounds = solver.space.region.gpu0_bounds(batch) if plan.accumulates or steps == 1 else None
    if bounds is None or not bounds[0] <= share <= bounds[1]:
        return None
    return solver.samples_per_s(Configuration(share, batch, steps))


def _draw_landscape(canvas: _Canvas, plan: Plan, field: _Field) -> None:
    axes = canvas.axes
    colors = importlib.import_module("matplotlib.colors")
    known = [rate for row in field.rates for rate in row if rate is not None]
    best = max(known)
    edges = [share * best for share in SHARES[:-1]] + [1.0001 * best]
    palette = colors.ListedColormap([_COLORS[f"l{i}"] for i in range(LEVELS)])
    drawn = axes.contourf(
        field.shares,
        field.batches,
        [[math.nan if rate is None else rate for rate in row] for row in field.rates],
        edges,
        cmap=palette,
    )
    drawn.set_edgecolor("face")  # or a seam shows between two colours
    bar = canvas.figure.colorbar(drawn, ax=axes, location="bottom", aspect=24, shrink=0.96, pad=0.02)
    bar.set_label(f"predicted, % of the best ({_compact(best)} samples/s)", fontsize=SMALL_PIXELS)
    bar.set_ticks(edges, labels=[f"{100 * share:.0f}" for share in SHARES])
    bar.ax.tick_params(labelsize=SMALL_PIXELS)
    bar.outline.set_edgecolor(_COLORS["muted"])
    label = "trial"
    for trial in plan.trials:
        if trial.samples_per_s is not None:
            style = {"color": _COLORS["paper"], "edgecolors": _COLORS["ink"], "s": 40, "zorder": 3}
            dot = axes.scatter([trial.gpu0_bsz], [trial.batch_size], label=label, **style)
            canvas.tell(dot, _trial_text(trial))
            label = "_trial"
    label = "failed"
    for trial in plan.trials:
        if trial.samples_per_s is None:
            style = {"color": _COLORS["bad"], "s": 60, "linewidths": 2, "marker": "x", "zorder": 3}
            cross = axes.scatter([trial.gpu0_bsz], [trial.batch_size], label=label, **style)
            canvas.tell(cross, _trial_text(trial))
            label = "_failed"
    star = _star(axes, plan.gpu0_bsz, plan.batch_size)
    canvas.tell(star, f"this plan: gpu0_bsz {plan.gpu0_bsz}, batch_size {plan.batch_size}")
    axes.margins(0.03)
    axes.set_xlim(0, 1.04 * max(field.shares[-1], *(trial.gpu0_bsz for trial in plan.trials), plan.gpu0_bsz))
    axes.set_ylim(0, 1.06 * max(field.batches[-1], *(trial.batch_size for trial in plan.trials), plan.batch_size))
    for axis in (axes.xaxis, axes.yaxis):
        _whole_ticks(axis)
    canvas.label("gpu0_bsz, samples", "batch_size, samples")
    canvas.legend(3)


def _curve_chart(plan: Plan) -> Chart:
    """Draw throughput against the batch, which is all the landscape that one device has."""
    title = "Throughput against batch_size"
    if plan.fit is None or plan.region is None:
        return Chart("landscape", title, "There is no curve to draw: the plan holds no fit.")
    said = (
        f"Samples per second of {plan.devices[0].label} against the batch of a forward: the line is the fitted "
        "model's, dots are trials, and the star is this plan."
    )
    return _drawn("landscape", title, said, 300, lambda canvas: _draw_curve(canvas, plan, plan.region))


def _draw_curve(canvas: _Canvas, plan: Plan, region: Region | None) -> None:
    assert plan.fit is not None
    assert region is not None
    axes, sizes = canvas.axes, plan.effective_batch_sizes
    most = max(1, region.largest_batch if sizes is None else min(region.largest_batch, sizes[1]))
    solver = Solver(Space(region, sizes, 1 if sizes is None else sizes[1]), plan.fit.step_time)
    batches = _spread(1, most)
    rates = [_rate_at(plan, solver, batch, batch) for batch in batches]
    pairs = [(batch, rate) for batch, rate in zip(batches, rates, strict=True) if rate is not None]
    axes.plot(*zip(*pairs, strict=True), color=_COLORS["c1"], linewidth=2, label="predicted")
    label = "trial"
    for trial in plan.trials:
        if trial.samples_per_s is not None:
            style = {"color": _COLORS["paper"], "edgecolors": _COLORS["ink"], "s": 44, "zorder": 3}
            dot = axes.scatter([trial.batch_size], [trial.samples_per_s], label=label, **style)
            canvas.tell(dot, _trial_text(trial))
            label = "_trial"
    canvas.tell(_star(axes, plan.batch_size, plan.samples_per_s), f"this plan: {rate_text(plan.samples_per_s)}")
    tops = [rate for _, rate in pairs] + [trial.samples_per_s or 0.0 for trial in plan.trials] + [plan.samples_per_s]
    axes.set_ylim(0, 1.15 * max(tops))
    axes.set_xlim(0, 1.06 * max(most, plan.batch_size))
    _whole_ticks(axes.xaxis)
    _compact_ticks(axes.yaxis)
    canvas.label("batch_size, samples", "samples/s")
    canvas.legend(3)


# ------------------------------------------------------------------------------------------------------ comparison


@dataclass(frozen=True)
class _Rate:
    """A bar of the comparison."""

    label: str
    samples_per_s: float
    known: bool
    own: bool = False


def _rates_of(plan: Plan, explanation: Explanation) -> list[_Rate]:
    """Return what the plan is compared with: measured where it was, predicted where not."""
    is_ddp = plan.region is None and len(plan.devices) > 1
    rates = [
        _Rate(
            "this plan" if not is_ddp else "this plan (DDP)",
            plan.samples_per_s,
            not is_ddp or plan.ddp.measured,
            own=True,
        )
    ]
    if explanation.even_measured is not None:
        rates.append(_Rate("even split, same batch", explanation.even_measured.samples_per_s, known=True))
    elif explanation.even is not None:
        rates.append(_Rate("even split that fits", explanation.even.samples_per_s, known=False))
    if plan.ddp.ranks and not is_ddp and len(plan.devices) > 1:
        rates.append(_Rate("DDP", plan.ddp.samples_per_s, plan.ddp.measured))
    names = {device.label: device.name for device in plan.devices}
    for alone in explanation.alone:
        label = alone.devices[0]
        rates.append(_Rate(f"{label} alone ({_short(names[label])})", alone.samples_per_s, known=False))
    return rates


def _rates_chart(plan: Plan, explanation: Explanation) -> Chart:
    title = "Beside an even split"
    if len(plan.devices) == 1:
        return Chart("rates", title, "There is one device, and nothing to split.")
    if explanation.shares_processor:
        return Chart("rates", title, "These devices share one processor: no gain over an even split is claimed.")
    rates = _rates_of(plan, explanation)
    if len(rates) == 1:
        return Chart("rates", title, "Nothing was measured or predicted that this plan could be compared with.")
    kinds = "simulated" if plan.simulated else "measured"
    texts = [
        f"{rate.label}: {rate_text(rate.samples_per_s)} ({kinds if rate.known else 'predicted'})" for rate in rates
    ]
    said = f"Samples per second. {'; '.join(texts)}."
    return _drawn("rates", title, said, 110 + 50 * len(rates), lambda canvas: _draw_rates(canvas, plan, rates))


def _draw_rates(canvas: _Canvas, plan: Plan, rates: Sequence[_Rate]) -> None:
    axes = canvas.axes
    kinds = {True: "simulated" if plan.simulated else "measured", False: "predicted"}
    seen: set[bool] = set()
    for row, rate in enumerate(rates):
        color = _COLORS["accent" if rate.own else "c1"]
        style = {"color": color} if rate.known else {"facecolor": "none", "edgecolor": color, "hatch": "////"}
        bar = axes.barh(row, rate.samples_per_s, 0.42, **style)
        canvas.tell(bar.patches[0], f"{rate.label}: {rate_text(rate.samples_per_s)}, {kinds[rate.known]}")
        axes.text(0, row - 0.34, rate.label, va="bottom", fontsize=SMALL_PIXELS if canvas.is_narrow else FONT_PIXELS)
        axes.annotate(
            rate_text(rate.samples_per_s),
            (1, row - 0.34),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=SMALL_PIXELS,
        )
        seen.add(rate.known)
    patches = importlib.import_module("matplotlib.patches")
    handles = [
        patches.Patch(facecolor=_COLORS["c1"], label=kinds[True]),
        patches.Patch(facecolor="none", edgecolor=_COLORS["c1"], hatch="////", label=kinds[False]),
    ]
    axes.set_ylim(len(rates) - 0.4, -0.85)
    axes.set_yticks([])
    axes.set_xlim(0, 1.02 * max(rate.samples_per_s for rate in rates))
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    _compact_ticks(axes.xaxis)
    canvas.label("samples/s", "")
    canvas.legend(2, [handle for handle, known in zip(handles, (True, False), strict=True) if known in seen])
