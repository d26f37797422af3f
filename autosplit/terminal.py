"""The terminal: a console for a stream, a progress bar, and a stdout on which nothing but the answer appears.

rich is imported by what draws with it, not with this module.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from autosplit.printed import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

    from autosplit.tuning import Progress

__all__ = ["PLAIN_WIDTH", "console_for", "progress_bar", "stdout_kept_clean"]

PLAIN_WIDTH = 100
"""Columns where there is no terminal, unless ``COLUMNS`` says otherwise."""


def console_for(stream: TextIO) -> Console:
    """Return a console for a stream: on a terminal in colour and of its width, otherwise plain text.

    Args:
        stream: ``sys.stdout`` or ``sys.stderr``. Without a terminal no escape codes are written, whatever the
            environment says, and lines are 100 columns wide unless ``COLUMNS`` is set.
    """
    from rich.console import Console

    if stream.isatty():
        return Console(file=stream, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) > 0 else PLAIN_WIDTH
    return Console(file=stream, width=width, force_terminal=False, color_system=None, highlight=False)


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


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None] | None]:
    """Draw a bar on stderr if that is a terminal: what is being done, steps and OOMs so far, the best so far."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    bar = Bar(
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"), markup=False),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[counts]}", table_column=Column(no_wrap=True), markup=False),
        TimeElapsedColumn(),
        console=console_for(sys.stderr),
        transient=True,
        expand=True,
    )
    task = bar.add_task("starting", total=1.0, counts="")
    with bar:
        yield functools.partial(_advance, bar, task)


def _advance(bar: Bar, task: Any, progress: Progress) -> None:
    counts = f"{progress.steps} steps, {progress.ooms} OOM"
    if progress.best_samples_per_s is not None:
        counts += f", best {_rate_text(progress.best_samples_per_s)}/s"
    bar.update(task, completed=progress.fraction, description=printable(progress.message), counts=counts)


def _rate_text(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
