"""Set up the terminal: a console for a stream, a progress bar, and a stdout that gets only the answer.

The functions that need rich import it, because importing rich takes time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TextIO

from autosplit.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task

    from autosplit.tuning.progress import Progress

PLAIN_WIDTH = 100
"""Width in columns without a terminal, unless ``COLUMNS`` is set."""

NARROW = 80
"""Smallest width in columns for a progress bar. A narrower terminal shows a percentage."""

BAR_WIDTH = 12
"""Width of the bar in columns. On a terminal of 100, the longest message of a tuning (51) fits next to it."""

KEYS_SHOWN = 4
"""Columns that a bar leaves free for the terminal's ``^C``, which would otherwise break the line."""

SILENT_S = 10.0
"""Time in seconds before anything is written to a stderr that is not a terminal.

Scripts may read stderr, so short commands leave it empty.
"""

STOPPING = "Stopping with the best plan so far, if any. Press Ctrl-C again to exit."
"""Text of a bar after the first Ctrl-C. It may be shown until the current step ends."""

_stopping = threading.Event()
DUMB = ("dumb", "unknown")


def console_for(stream: TextIO) -> Console:
    """Return a console for stdout or stderr, with colours and width of the terminal, or for plain text.

    Without a terminal, lines are 100 columns wide unless ``COLUMNS`` is set. Escape codes are written only if
    ``FORCE_COLOR`` is set. ``NO_COLOR`` and a ``TERM`` of ``dumb`` override it.
    """
    from rich.console import Console

    is_dumb = os.environ.get("TERM") in DUMB
    if stream.isatty():
        # For a dumb terminal, rich uses 80 columns unless both width and height are set.
        size: Any = {"width": width_of(stream), "height": 25} if is_dumb else {}
        return Console(file=stream, highlight=False, **size)
    coloured = os.environ.get("FORCE_COLOR", "") not in {"", "0"} and not os.environ.get("NO_COLOR") and not is_dumb
    colours: Literal["standard"] | None = "standard" if coloured else None
    return Console(file=stream, width=width_of(stream), force_terminal=coloured, color_system=colours, highlight=False)


def width_of(stream: TextIO) -> int:
    """Return the width of a stream in columns: ``COLUMNS``, the width of the terminal, or `PLAIN_WIDTH`."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    if stream.isatty():
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or PLAIN_WIDTH
    return PLAIN_WIDTH


def streams_made_fit() -> None:
    """Make stdout and stderr accept any text. Discard text for a closed stream, and escape characters it can't encode.

    Closed descriptors are opened, too. Otherwise the next file that is opened would get the number of stdout or stderr,
    and output would go into this file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # The descriptor is closed, so open() returns its number.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115, PTH123
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def sent_nowhere(stream: TextIO) -> None:
    """Redirect an unwritable stream to /dev/null. Otherwise Python reports an error when it flushes at the end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def clean_stdout() -> Iterator[None]:
    """Redirect stdout of user code, C libraries and child processes to stderr, because stdout is for the answer."""
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as undoing:
        # A closed stdout needs no redirection.
        with contextlib.suppress(OSError):
            saved = os.dup(1)
            undoing.callback(os.close, saved)
            os.dup2(2, 1)
            undoing.callback(os.dup2, saved, 1)
            if sys.__stdout__ is not None:
                undoing.callback(sys.__stdout__.flush)
        yield


def _stage_lines() -> Callable[[Progress], None]:
    last, begun_s = "", time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal last
        if progress.stage in (last, "done") or time.monotonic() < begun_s + SILENT_S:
            return
        last, message = progress.stage, printable(progress.message)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{progress.fraction:4.0%}  {message}\n")
            sys.stderr.flush()

    return report


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """Draw a progress bar on stderr if it is a terminal: the current stage, steps and OOMs, the best trial so far.

    The first message is about building the model, because every command begins with this. If stderr is not a terminal,
    write one line for each stage of a long command.
    """
    if not sys.stderr.isatty():
        yield _stage_lines()
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column, Table
    from rich.text import Text

    from autosplit.tuning.progress import SHORTEST_S

    console, narrow = console_for(sys.stderr), width_of(sys.stderr) < NARROW

    class Narrower(Bar):
        def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
            if _stopping.is_set():  # no room for figures next to this text
                table = Table.grid()
                table.add_row(Text(STOPPING))
            else:
                table = super().make_tasks_table(tasks)
            table.width = max(1, console.width - KEYS_SHOWN)
            return table

    bar = Narrower(
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"), markup=False),
        TextColumn("{task.percentage:.0f}%", markup=False) if narrow else BarColumn(bar_width=BAR_WIDTH),
        TextColumn("{task.fields[counts]}", table_column=Column(no_wrap=True), markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        expand=True,
        refresh_per_second=1 / SHORTEST_S,
    )
    task = bar.add_task("building the model", total=1.0, counts="")

    def advance(progress: Progress) -> None:
        counts = progress.found.replace(" samples/s", "/s").replace("best ", "" if narrow else "best ")
        bar.update(task, completed=progress.fraction, description=printable(progress.message), counts=counts)

    with bar:
        yield advance


def show_stopping() -> None:
    """Show in the progress bar that Ctrl-C was received. Any thread may call this. It returns at once."""
    _stopping.set()


def restored_terminal() -> None:
    """Remove a progress bar for good, from any thread. Nothing is written to stderr after this."""
    if os.environ.get("TERM") in DUMB:
        return
    with contextlib.suppress(OSError):
        if os.isatty(2):
            saved = os.dup(2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # otherwise the bar would be drawn again
            os.write(saved, b"\r\x1b[2K\x1b[?25h")  # clear the line, show the cursor
