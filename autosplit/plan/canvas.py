"""Draw charts with matplotlib, either as SVG elements of an HTML page or as matplotlib figures."""

from __future__ import annotations

import importlib
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from autosplit.errors import InputError
from autosplit.text import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

WIDTH = 330
"""Width of the charts in pixels, for a phone 360 pixels wide. Wider pages scale the charts up."""

FONT_PIXELS = 12

LEVELS = 7
"""Number of colours in a colour scale. The page defines them as `--l0` and so on."""

LIGHT = {
    "ink": "#1b2129",
    "muted": "#566273",
    "grid": "#e3e7ec",
    "paper": "#ffffff",
    "accent": "#c2410c",
    "bad": "#b3261e",
    "c1": "#1f6fb2",
    "c2": "#e08a00",
    "c3": "#0b8a6a",
    "c4": "#8a4fbf",
    "c5": "#63b3e6",
    "c6": "#b9a12a",
    "l0": "#440154",
    "l1": "#443983",
    "l2": "#31688e",
    "l3": "#21918c",
    "l4": "#35b779",
    "l5": "#90d743",
    "l6": "#fde725",
}
"""The page's light colours, for matplotlib figures."""

# matplotlib has no CSS variables. So draw each with a unique placeholder colour, and replace it in the SVG.
COLORS = {name: f"#0102{number:02x}" for number, name in enumerate(LIGHT, 16)}

_VARIABLES = {color: f"var(--{name})" for name, color in COLORS.items()}


@dataclass(frozen=True)
class Chart:
    """A chart for a page.

    Attributes:
        name: Identifier of the chart.
        title: Title of the chart.
        text: Description of the chart in a few sentences, for readers who can't see it.
        svg: An ``<svg>`` element; empty if nothing could be drawn. Then `text` has the reason.
    """

    name: str
    title: str
    text: str
    svg: str = ""


def check_drawing(what: str) -> None:
    """Raise InputError if matplotlib, which `what` needs, is not installed."""
    check_installed("matplotlib.figure", what)


def check_installed(module: str, what: str) -> None:
    """Raise InputError if a module that `what` needs is not installed."""
    try:
        importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise InputError(
            f"{what} needs {name}, which is not installed. Install it: pip install {name}.", code="package-missing"
        ) from None


class Canvas:
    """A chart that is being drawn, with the tooltips of its marks."""

    def __init__(self, figure: Figure | SubFigure, colors: dict[str, str]) -> None:
        self.figure = figure
        self.colors = colors
        self.figure.patch.set_visible(False)
        self.axes: Any = self.figure.add_subplot()
        self.titles: dict[str, str] = {}
        self.axes.set_facecolor("none")
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)

    def tooltip(self, artist: Any, text: str) -> None:
        """Add a tooltip to a mark."""
        key = f"mark{len(self.titles)}"
        artist.set_gid(key)
        self.titles[key] = text

    def dots(self, marks: Iterable[tuple[float, float, str]], label: str, color: str, **style: Any) -> None:
        """Draw marks of one kind, each with a tooltip. The first mark gives the legend entry."""
        for x, y, text in marks:
            dot = self.axes.scatter(
                [x], [y], label=label, **{"color": self.colors[color], "s": 46, "zorder": 3, **style}
            )
            self.tooltip(dot, text)
            label = ""

    def star(self, x: float, y: float, text: str) -> None:
        """Mark this plan with a star."""
        paper = self.colors["paper"]
        self.dots([(x, y, text)], "this plan", "accent", marker="*", s=190, edgecolors=paper, zorder=5)

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

    def finish(self, x: str, y: str, columns: int, handles: Sequence[Any] | None = None) -> None:
        """Label the axes, and put the legend below them, so that it does not cover marks."""
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)
        given = {} if handles is None else {"handles": handles}
        place: Any = "outside lower left"
        self.figure.legend(loc=place, ncols=columns, frameon=False, handlelength=1.6, columnspacing=1.2, **given)


def drawn(name: str, title: str, text: str, height: int, draw: Callable[[Canvas], None]) -> Chart:
    """Draw a chart for a page."""
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with _style(COLORS, name):
        # SVG has 72 units per inch. They are the page's pixels.
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
        canvas = Canvas(figure, COLORS)
        draw(canvas)
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return Chart(name, title, text, _inlined(stream.getvalue(), text, canvas.titles))


def side_by_side(height: int, *draws: Callable[[Canvas], None]) -> Figure:
    """Draw charts next to each other as one figure in light colours, without pyplot, its windows and its state."""
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that notebooks display."""

        def _repr_png_(self) -> bytes:
            stream = io.BytesIO()
            self.savefig(stream, format="png")
            return stream.getvalue()

    with _style(LIGHT, "figure"):
        figure = Shown(figsize=(len(draws) * WIDTH / 72, height / 72), dpi=100, layout="constrained")
        figure.set_facecolor(LIGHT["paper"])
        for part, draw in zip(figure.subfigures(1, len(draws), squeeze=False).flat, draws, strict=True):
            draw(Canvas(part, LIGHT))
    return figure


@contextmanager
def _style(colors: dict[str, str], salt: str) -> Iterator[None]:
    """Replace the user's matplotlib settings within a ``with`` block."""
    import matplotlib as mpl

    muted, ink = colors["muted"], colors["ink"]
    with warnings.catch_warnings(), mpl.rc_context():
        warnings.simplefilter("ignore")  # matplotlib's font lacks some glyphs, which the page's font has
        mpl.rcdefaults()
        mpl.rc("axes", axisbelow=True, edgecolor=muted, grid=True, labelcolor=ink)
        mpl.rc("xtick", color=muted, labelcolor=ink, labelsize=FONT_PIXELS)
        mpl.rc("ytick", color=muted, labelcolor=ink, labelsize=FONT_PIXELS)
        mpl.rc("font", size=FONT_PIXELS)
        mpl.rc("grid", color=colors["grid"], linewidth=1)
        mpl.rc("hatch", linewidth=1.2)
        mpl.rc("legend", fontsize=FONT_PIXELS, labelcolor=ink)
        # Keep text as text in the SVG, so that it uses the page's font and can be searched and read aloud. With the
        # salt, the same plan gives the same page, and no two charts have the same ids.
        mpl.rc("svg", fonttype="none", hashsalt=salt)
        mpl.rc("text", color=ink, parse_math=False)  # device names may contain dollar signs
        yield


def _inlined(svg: str, text: str, titles: dict[str, str]) -> str:
    """Convert matplotlib's SVG file to an element of a page. The page forbids inline styles, so use attributes."""
    root = ET.fromstring(svg)  # noqa: S314  # written by matplotlib
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    for element in list(root.iter()):
        title = titles.get(element.get("id", ""))
        element.attrib = _page_attributes(element.attrib, used)
        element.tag = element.tag.rpartition("}")[2]  # HTML has no namespaces
        for child in list(element):
            if child.tag.endswith(("}metadata", "}style")):
                element.remove(child)
        if title is not None:
            own = ET.Element("title")
            own.text = visible(title)
            element.insert(0, own)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": visible(text)}
    return ET.tostring(root, encoding="unicode", short_empty_elements=False)


def _page_attributes(attributes: dict[str, str], used: set[str]) -> dict[str, str]:
    """Return an element's attributes and its style as attributes. Drop ids that nothing refers to."""
    found = {name.rpartition("}")[2]: value for name, value in attributes.items() if name != "style"}
    if found.get("id") not in used:
        found.pop("id", None)
    for declaration in attributes.get("style", "").split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name and name != "font-family":  # the page sets the font
            found[name] = value
    return {name: _VARIABLES.get(value.lower(), value) for name, value in found.items()}


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
