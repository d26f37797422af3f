"""Plot the memory of each device against its batch size, for ``autosplit probe --plot``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autosplit.errors import InputError
from autosplit.solve.memory import Ceiling
from autosplit.text import size_text
from autosplit.tools.canvas import check_installed
from autosplit.tools.charts import unit_of


def check_plot(path: str) -> None:
    """Raise InputError if a plot can't be written to a path, before long work."""
    check_installed("matplotlib.figure", "--plot")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lstrip(".").lower() not in kinds:
        raise InputError(
            f"--plot {path} does not end in a known format ({', '.join(kinds)}). Write --plot plot.png.",
        )
    if not Path(path).parent.is_dir():
        raise InputError(
            f"--plot {path} is in a folder that does not exist. Create {Path(path).parent}, or choose another folder.",
        )


def plot_ceilings(ceilings: Sequence[Ceiling], path: str) -> None:
    """Plot the memory of each device against its batch size, and write the figure to a file."""
    from matplotlib.figure import Figure  # without pyplot, which shares state with user code

    found = [ceiling for ceiling in ceilings if ceiling.batch_size]
    columns = min(3, max(1, len(found)))
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(5.5 * columns, 4 * rows), layout="constrained")
    for position, ceiling in enumerate(found, 1):
        _draw_ceiling(figure.add_subplot(rows, columns, position), ceiling)
    try:
        figure.savefig(path)
    except OSError as error:
        raise InputError(
            f"The plot can't be written to {path} ({error.strerror}). Choose another file.",
        ) from error


def _draw_ceiling(axes: Any, ceiling: Ceiling) -> None:
    unit, factor = unit_of(ceiling.capacity_bytes)
    ends = (0, ceiling.batch_size)
    axes.plot(
        ends,
        [(ceiling.fixed_bytes + ceiling.bytes_per_sample * n) / factor for n in ends],
        color="tab:blue",
        label=f"{size_text(ceiling.fixed_bytes)} + {size_text(ceiling.bytes_per_sample)} per sample",
    )
    points = [point for point in ceiling.points if point[0] <= 2 * ceiling.batch_size]
    for ran, marker, label in ((False, "x", "predicted"), (True, "o", "ran")):
        chosen = [(n, nbytes / factor) for n, nbytes, it_ran in points if it_ran is ran]
        if chosen:
            axes.scatter(*zip(*chosen, strict=True), marker=marker, color="tab:blue", label=label)
    axes.axhline(ceiling.capacity_bytes / factor, color="tab:red", linestyle="--", label="capacity")
    axes.axvline(ceiling.batch_size, color="tab:gray", linestyle=":", label=f"ceiling {ceiling.batch_size:,}")
    axes.set(title=f"{ceiling.device} as {ceiling.role}", xlabel="samples", ylabel=unit, xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize="small", loc="lower right")
