"""Where a tuning stands, for whoever draws a bar; in a notebook that is IPython's own display."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autosplit.text import escaped

__all__ = ["Progress", "fraction_of", "notebook_bar", "part_of"]

_STAGES = {"ceilings": (0.0, 0.3), "times": (0.3, 0.45), "search": (0.45, 1.0), "done": (1.0, 1.0)}
"""Where on the whole each stage begins and ends, roughly."""

SHORTEST_S = 0.1
"""Between two drawings: each is sent to a browser."""


@dataclass(frozen=True)
class Progress:
    """Where a tuning stands.

    Attributes:
        stage: ``"waiting"`` for another process, ``"checks"``, ``"ceilings"``, ``"times"``, ``"search"`` or ``"done"``.
        message: What is being done, in a few words.
        fraction: Of the whole, 0 to 1, as far as it can be told.
        steps: Real training steps so far.
        ooms: How many of them ran out of memory.
        best_samples_per_s: The best trial so far.
    """

    stage: str
    message: str
    fraction: float
    steps: int = 0
    ooms: int = 0
    best_samples_per_s: float | None = None


def fraction_of(stage: str, done_share: float = 0.0) -> float:
    """Return how much of a whole tuning is done, given the share of its stage that is, as far as it can be told."""
    begin, end = _STAGES[stage]
    return begin + (end - begin) * min(1.0, done_share)


def part_of(progress: Callable[[Progress], None], number: int, count: int, name: object) -> Callable[[Progress], None]:
    """Report one tuning of several, called by a name, as its part of the whole."""

    def tell(part: Progress) -> None:
        progress(replace(part, message=f"{name}: {part.message}", fraction=(number + part.fraction) / count))

    return tell


def notebook_bar() -> Callable[[Progress], None] | None:
    """Return what draws a bar below the running cell; None outside of a notebook."""
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
