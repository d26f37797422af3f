"""Draw the figures of plans with matplotlib: `Plan.plot` and `Goodput.plot`."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autosplit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

WIDTH = 330
"""Width of a chart in points."""

FONT_POINTS = 12

COLORS = {
    "ink": "#1b2129",
    "muted": "#566273",
    "grid": "#e3e7ec",
    "paper": "#ffffff",
    "accent": "#c2410c",
    "c1": "#1f6fb2",
    "c2": "#e08a00",
    "c3": "#0b8a6a",
    "c4": "#8a4fbf",
    "c5": "#63b3e6",
    "c6": "#b9a12a",
}
"""The light colours of the report's page."""


def check_drawing(what: str) -> None:
    """Raise InputError if matplotlib, which `what` needs, is not installed."""
    check_installed("matplotlib.figure", what)


def check_installed(module: str, what: str, package: str | None = None) -> None:
    """Raise InputError if a module that `what` needs is not installed. `package` is its name for pip."""
    try:
        importlib.import_module(module)
    except ImportError:
        name = package or module.partition(".")[0]
        raise InputError(
            f"{what} needs {name}, which is not installed. Install it: pip install {name}.", code="package-missing"
        ) from None


class Canvas:
    """A chart that is being drawn."""

    def __init__(self, figure: SubFigure) -> None:
        self.figure = figure
        self.axes: Any = self.figure.add_subplot()
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)

    def star(self, x: float, y: float) -> None:
        """Mark this plan with a star."""
        style = {"color": COLORS["accent"], "marker": "*", "s": 190, "edgecolors": COLORS["paper"], "zorder": 5}
        self.axes.scatter([x], [y], label="this plan", **style)

    def rows(self, texts: Sequence[tuple[str, str]], right: float) -> None:
        """Set up horizontal bars, each with its name and figures above."""
        for row, (name, figures) in enumerate(texts):
            self.axes.text(0, row - 0.34, name, va="bottom")
            place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
            self.axes.annotate(figures, (1, row - 0.34), **place)
        self.axes.set_ylim(len(texts) - 0.4, -0.85)
        self.axes.set_yticks([])
        self.axes.set_xlim(0, right)
        self.axes.grid(visible=False, axis="y")
        self.axes.spines["left"].set_visible(False)

    def finish(self, x: str, y: str, columns: int) -> None:
        """Label the axes, and put the legend below them, so that it does not cover marks."""
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)
        place: Any = "outside lower left"
        self.figure.legend(loc=place, ncols=columns, frameon=False, handlelength=1.6, columnspacing=1.2)


def side_by_side(height: int, *draws: Callable[[Canvas], None]) -> Figure:
    """Draw charts next to each other as one figure in light colours, without pyplot, its windows and its state."""
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that notebooks display."""

        def _repr_png_(self) -> bytes:
            stream = io.BytesIO()
            self.savefig(stream, format="png")
            return stream.getvalue()

    with _style():
        figure = Shown(figsize=(len(draws) * WIDTH / 72, height / 72), dpi=100, layout="constrained")
        for part, draw in zip(figure.subfigures(1, len(draws), squeeze=False).flat, draws, strict=True):
            draw(Canvas(part))
    return figure


@contextmanager
def _style() -> Iterator[None]:
    """Replace the user's matplotlib settings within a ``with`` block."""
    import matplotlib as mpl

    muted, ink = COLORS["muted"], COLORS["ink"]
    with warnings.catch_warnings(), mpl.rc_context():
        warnings.simplefilter("ignore")  # matplotlib's font lacks some glyphs
        mpl.rcdefaults()
        mpl.rc("axes", axisbelow=True, edgecolor=muted, grid=True, labelcolor=ink)
        mpl.rc("xtick", color=muted, labelcolor=ink, labelsize=FONT_POINTS)
        mpl.rc("ytick", color=muted, labelcolor=ink, labelsize=FONT_POINTS)
        mpl.rc("font", size=FONT_POINTS)
        mpl.rc("grid", color=COLORS["grid"], linewidth=1)
        mpl.rc("hatch", linewidth=1.2)
        mpl.rc("legend", fontsize=FONT_POINTS, labelcolor=ink)
        mpl.rc("text", color=ink, parse_math=False)  # device names may contain dollar signs
        yield


def whole_ticks(axis: Any) -> None:
    """Set ticks of an axis at whole numbers."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))


def compact(value: float, _position: int | None = None) -> str:
    """Format 120000 as 120k, to leave room for the marks. matplotlib accepts this function as an axis formatter."""
    for least, factor, suffix in ((10**9, 10**9, "G"), (10**6, 10**6, "M"), (10**4, 10**3, "k")):
        if abs(value) >= least:
            return f"{value / factor:.4g}{suffix}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
