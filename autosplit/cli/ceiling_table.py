"""Print ceilings, and plot the memory that they were found by."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.cli.tables import add_row, bullet_table, counted_text, plain_table, print_plain
from autosplit.errors import InputError
from autosplit.solve.memory import Ceiling
from autosplit.text import size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["check_plot", "plot_ceilings", "print_ceilings"]


_REASONS = {"memory": "memory", "max_batch_size": "max_batch_size", "kernel": "a kernel", "time": "time"}


def print_ceilings(ceilings: Sequence[Ceiling], notes: Iterable[str], console: Console, *, simulated: bool) -> None:
    """Print a table of ceilings: what limits them, what they hold, and how they were found.

    A `batch_size` of 0 is what does not fit.
    """
    from rich.text import Text

    if simulated:
        print_plain(Text("simulated: predicted for cards that are not here", "yellow"), console)
    print_plain(_ceiling_table(ceilings, simulated=simulated), console)
    if lines := list(notes):
        print_plain(bullet_table(lines), console)


def _ceiling_table(ceilings: Sequence[Ceiling], *, simulated: bool) -> Table:
    headings = ("device", "role", "ceiling", "limited by", "fixed", "per sample", "headroom", "found with")
    table = plain_table(*headings, figures=("ceiling", "fixed", "per sample", "headroom"))
    for ceiling in ceilings:
        sizes = (ceiling.fixed_bytes, ceiling.bytes_per_sample, ceiling.headroom_bytes)
        add_row(
            table,
            ceiling.device,
            ceiling.role,
            f"{ceiling.batch_size:,}",
            _REASONS[ceiling.limited_by],
            *(size_text(n) if ceiling.batch_size else "-" for n in sizes),
            _found_text(ceiling, simulated=simulated),
        )
    return table


def _found_text(ceiling: Ceiling, *, simulated: bool) -> str:
    if not ceiling.batch_size:
        return "does not fit"
    if simulated:
        return "traces"
    sure = "confirmed" if ceiling.confirmed else "predicted"
    return f"{counted_text(ceiling.steps, 'step')}, {ceiling.ooms} OOM, {sure}"


def check_plot(path: str) -> None:
    """Refuse a plot that can't be drawn, for want of matplotlib or by its suffix, before what takes long."""
    kinds = sorted(_canvas(1, 1).get_supported_filetypes())
    if Path(path).suffix.lstrip(".").lower() not in kinds:
        raise InputError(f"--plot {path}: expected a file that ends in one of {', '.join(kinds)}; write it as plot.png")
    if not Path(path).parent.is_dir():
        raise InputError(f"--plot {path}: expected a folder that exists; make {Path(path).parent}, or choose another")


def plot_ceilings(ceilings: Sequence[Ceiling], path: str) -> None:
    """Draw bytes against batch for each ceiling above 0: its line, what was looked at, what ran, and the capacity."""
    found = [ceiling for ceiling in ceilings if ceiling.batch_size]
    columns = min(3, max(1, len(found)))
    rows = math.ceil(len(found) / columns)
    canvas = _canvas(columns, rows)
    for position, ceiling in enumerate(found, 1):
        _draw_ceiling(canvas.figure.add_subplot(rows, columns, position), ceiling)
    try:
        canvas.figure.savefig(path)
    except OSError as error:
        raise InputError(
            f"the plot can't be written to {path} ({error.strerror}); expected a file that can be; choose another"
        ) from error


def _canvas(columns: int, rows: int) -> Any:
    """Return an empty picture, without pyplot: no window, and no state shared with the user's own plots."""
    try:
        figures = importlib.import_module("matplotlib.figure")
        agg = importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError:
        raise InputError(
            "--plot needs matplotlib, which is not installed; expected it, for it draws; pip install matplotlib"
        ) from None
    return agg.FigureCanvasAgg(figures.Figure(figsize=(5.5 * columns, 4 * rows), layout="constrained"))


def _draw_ceiling(axes: Any, ceiling: Ceiling) -> None:
    unit, factor = ("GiB", 2**30) if ceiling.capacity_bytes >= 2**30 else ("MiB", 2**20)
    ends = (0, ceiling.batch_size)
    axes.plot(
        ends,
        [(ceiling.fixed_bytes + ceiling.bytes_per_sample * n) / factor for n in ends],
        color="tab:blue",
        label=f"{size_text(ceiling.fixed_bytes)} + {size_text(ceiling.bytes_per_sample)} per sample",
    )
    points = [point for point in ceiling.points if point[0] <= 2 * ceiling.batch_size]
    for ran, marker, label in ((False, "x", "traced"), (True, "o", "ran")):
        chosen = [(n, nbytes / factor) for n, nbytes, it_ran in points if it_ran is ran]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), marker=marker, color="tab:blue", label=label)
    axes.axhline(ceiling.capacity_bytes / factor, color="tab:red", linestyle="--", label="capacity")
    axes.axvline(ceiling.batch_size, color="tab:gray", linestyle=":", label=f"ceiling {ceiling.batch_size:,}")
    axes.set(title=f"{ceiling.device} as {ceiling.role}", xlabel="samples", ylabel=unit, xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize="small", loc="lower right")
