"""The terminal: a console for a stream, a progress bar, and a stdout on which nothing but the answer appears.

rich is imported by what draws with it, not with this module.
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
"""Columns where there is no terminal, unless ``COLUMNS`` says otherwise."""

NARROW = 80
"""Below so many columns the bar itself gives way to what is being done; its share is told in percent."""

BAR_WIDTH = 12
"""Columns of the bar: so many leave the longest message of a tuning, of 51, in full on a terminal of 100."""

KEYS_SHOWN = 4
"""Columns that a bar leaves free: a terminal writes ``^C`` there, in two lines that no one would clear otherwise."""

SILENT_S = 10.0
"""What is over so soon says nothing on a stderr that is no terminal: scripts read what does."""

STOPPING = "stopping with the best so far, if any; Ctrl-C again ends at once"
"""What a bar says from the first Ctrl-C on: it may take as long as the step that runs."""

_stopping = threading.Event()
_DUMB = ("dumb", "unknown")


def console_for(stream: TextIO) -> Console:
    """Return a console for stdout or stderr: on a terminal in colour and of its width, otherwise plain text.

    Without a terminal lines are 100 columns wide unless ``COLUMNS`` is set, and no escape codes are written unless
    ``FORCE_COLOR`` asks for colour; ``NO_COLOR`` goes before it, and a ``TERM`` of ``dumb`` has none.
    """
    from rich.console import Console

    is_dumb = os.environ.get("TERM") in _DUMB
    if stream.isatty():
        # Of a dumb one rich takes 80 columns, unless it is told both.
        size: Any = {"width": width_of(stream), "height": 25} if is_dumb else {}
        return Console(file=stream, highlight=False, **size)
    coloured = os.environ.get("FORCE_COLOR", "") not in {"", "0"} and not os.environ.get("NO_COLOR") and not is_dumb
    colours: Literal["standard"] | None = "standard" if coloured else None
    return Console(file=stream, width=width_of(stream), force_terminal=coloured, color_system=colours, highlight=False)


def width_of(stream: TextIO) -> int:
    """Return how many columns a stream has: what ``COLUMNS`` says, what its terminal says, or `PLAIN_WIDTH`."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    if stream.isatty():
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or PLAIN_WIDTH
    return PLAIN_WIDTH


def streams_made_fit() -> None:
    """Make stdout and stderr take any text: where one is closed it goes nowhere, and what it can't encode is escaped.

    A closed descriptor is filled, too, or the next file that is opened would get its number and be printed to.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is closed, and now the lowest that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115, PTH123
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def sent_nowhere(stream: TextIO) -> None:
    """Let a stream that can't be written to take the rest: python would complain when it flushes at the end."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send to stderr what user code, C libraries and child processes write to stdout, which is for the answer."""
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as undoing:
        # Where a descriptor is closed there is nothing to keep clean.
        with contextlib.suppress(OSError):
            kept = os.dup(1)
            undoing.callback(os.close, kept)
            os.dup2(2, 1)
            undoing.callback(os.dup2, kept, 1)
            if sys.__stdout__ is not None:
                undoing.callback(sys.__stdout__.flush)
        yield


def _stage_lines() -> Callable[[Progress], None]:
    """Return what writes a line to stderr for each stage of what takes long."""
    last, begun_s = "", time.monotonic()

    def tell(progress: Progress) -> None:
        nonlocal last
        waits = progress.stage == "waiting"
        if progress.stage in (last, "done") or (not waits and time.monotonic() < begun_s + SILENT_S):
            return
        last, message = progress.stage, printable(progress.message)
        line = f"{message}; --profile off waits for nobody" if waits else f"{progress.fraction:4.0%}  {message}"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    return tell


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """Draw a bar on stderr if that is a terminal: what is being done, steps and OOMs so far, the best so far.

    It begins with what every command does first, to build the model. Elsewhere, as in a log, each stage of what takes
    long is a line.
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
            if _stopping.is_set():  # alone: beside figures there is no room for it
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


def bars_say_it_stops() -> None:
    """Let a bar say that Ctrl-C was heard, from when it is drawn next: from any thread, waiting for nothing."""
    _stopping.set()


def restored_terminal() -> None:
    """Take away a bar that is being drawn, for good, from any thread: nothing is written to stderr after this."""
    if os.environ.get("TERM") in _DUMB:
        return
    with contextlib.suppress(OSError):
        if os.isatty(2):
            kept = os.dup(2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # who draws the bar would draw it once more
            os.write(kept, b"\r\x1b[2K\x1b[?25h")  # the line is cleared, the cursor comes back
