"""Lay out tables, lists and short lines for the reports and tables of `cli`.

Everything is built from `Text`, so brackets in a name are not
markup. Text from other programs passes `text.printable`, so it can't control the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from autosplit.text import printable

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
