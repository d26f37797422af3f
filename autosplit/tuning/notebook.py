"""Where a tuning stands, in a notebook: one line with a bar, drawn anew in its place by IPython's own display."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from autosplit.text import escaped
from autosplit.tuning.progress import Progress

__all__ = ["notebook_bar"]

SHORTEST_S = 0.1
"""Between two drawings: each is sent to a browser."""


def notebook_bar() -> Callable[[Progress], None] | None:
    """Return what draws a bar below the running cell; None outside of a notebook.

    Neither widgets nor scripts are needed: it works in Jupyter, in editors, and in a notebook that runs without a page.
    """
    ipython = sys.modules.get("IPython")  # whoever runs a cell has loaded it
    shell = None if ipython is None else ipython.get_ipython()
    # IPython in a terminal has no kernel, and shows no HTML.
    return _Bar(ipython) if getattr(shell, "kernel", None) is not None else None


class _Bar:
    """Draws each state in the place of the one before."""

    def __init__(self, ipython: Any) -> None:
        self._display = ipython.display
        self._handle: Any = None
        self._begun_s = time.monotonic()
        self._drawn_s = 0.0

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if self._handle is not None and progress.fraction < 1.0 and now_s - self._drawn_s < SHORTEST_S:
            return
        self._drawn_s = now_s
        shown = self._display.HTML(_line(progress, now_s - self._begun_s))
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)


def _line(progress: Progress, seconds: float) -> str:
    """Write a state as HTML."""
    counts = f"{progress.steps} steps, {progress.ooms} OOM, {seconds:.0f} s"
    if progress.best_samples_per_s is not None:
        counts += f", best {progress.best_samples_per_s:,.4g} samples/s"
    share = min(1.0, max(0.0, progress.fraction))
    return (
        f'<div><progress value="{share:.3f}" max="1" aria-label="tuning"></progress> '
        f"{escaped(progress.message)} <small>({escaped(counts)})</small></div>"
    )
