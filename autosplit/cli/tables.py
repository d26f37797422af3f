"""Lay out tables, lists and short lines for the reports and tables of `cli`.

Only this module converts bytes to GiB and seconds to ms. Everything is built from `Text`, so brackets in a name are not
markup. Text from other programs passes `text.printable`, so it can't control the terminal.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from autosplit.text import printable, tuple_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


def print_plain(what: RenderableType, console: Console) -> None:
    """Print without cropping, because a line to paste may be long. Strip trailing blanks of plain text."""
    if console.is_terminal:
        console.print(what, crop=False)
        return
    with console.capture() as captured:
        console.print(what, crop=False)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def plain_table(*headings: str, figures: Container[str] = ()) -> Table:
    """Return an empty table with bold headings, one line below them, and figures aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in figures else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Add cells as plain text. Brackets are not markup, and control characters are escaped.

    Percentages are printed as ``50%``, because rich would break the line between a number and ``%``.
    """
    from rich.text import Text

    table.add_row(*(Text(_cell(cell)) if isinstance(cell, str) else cell for cell in cells))


def _cell(text: str) -> str:
    return re.sub(r"(?<=\d) %", "%", printable(text))


def pairs_table(rows: Iterable[tuple[str, str]], styles: Mapping[str, str] = MappingProxyType({})) -> Table:
    """Return a table with a name and its text in each row. `styles` has the style of the text by its name."""
    from rich.text import Text

    return _grid(((name, Text(_cell(text), styles[name]) if name in styles else text) for name, text in rows), 2)


def bullet_table(lines: Iterable[str]) -> Table:
    """Return lines with a hanging indent."""
    return _grid((("-", line) for line in lines), 1)


def _grid(rows: Iterable[tuple[str, str | Text]], blanks: int) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, blanks))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        add_row(grid, *row)
    return grid


def print_bullets(lines: Iterable[str], console: Console) -> None:
    """Print lines with a hanging indent, if there are any."""
    if given := list(lines):
        print_plain(bullet_table(given), console)


def short_name(name: str) -> str:
    """Remove the manufacturer from a device's name."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def shares_text(split: Sequence[int]) -> str:
    """Format a split. With more than four devices, group equal numbers: ``3 x 1024, 5 x 512``."""
    if len(split) <= 4:
        return tuple_text(split)
    return ", ".join(f"{len([*run])} x {share}" for share, run in itertools.groupby(split))


def rates_text(labels: Sequence[str], rates: Sequence[str]) -> str:
    """Return the sources of simulated GPUs' speeds. If all sources are equal, return the source once."""
    if len(set(rates)) == 1:
        return rates[0]
    return "; ".join(f"{label} {rate}" for label, rate in zip(labels, rates, strict=True))


def short_bytes_text(nbytes: int) -> str:
    """Format bytes as GiB with one decimal, or whole MiB, or whole KiB."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.0f} KiB"


def memory_text(peak_bytes: int, capacity_bytes: int) -> str:
    """Return ``18.2 of 24.0 GiB (75%)``. The percentage is rounded down, so that only a full memory has 100%."""
    peak, capacity = short_bytes_text(peak_bytes), short_bytes_text(capacity_bytes)
    if peak[-3:] == capacity[-3:]:
        peak = peak[:-4]
    share = 100 * peak_bytes // capacity_bytes if capacity_bytes else 0
    return f"{peak} of {capacity} ({share}%)"
