"""Report the progress of a tuning: in a notebook with IPython's display, on a terminal as a line on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from autosplit.text import escaped, printable, rate_text

_SHARES = {
    "building": 0.06,
    "preparing": 0.08,
    "checks": 0.10,
    "ceilings": 0.16,
    "times": 0.22,
    "search": 0.32,
    "confirming": 0.06,
}
"""Fraction of a tuning's time for each stage, in order.

A small GPT and a CNN on a CPU with two budgets took 36 s and 73 s (times 0.18 and 0.37, search 0.47 and 0.35). On two
simulated GPUs they took 15 s (checks up to 0.57). The values are between these measurements, closer to the CPU's,
because its tunings take longer.
"""

_ENDS = dict(zip(_SHARES, accumulate(_SHARES.values()), strict=True))

USUAL_TRIALS = 8
"""Number of trials of a typical search (4 to 13 in the same tunings). A search may have three times as many."""

USUAL_SIZES = 8
"""Number of sizes at which a device is timed, for most workloads."""

SHORTEST_S = 0.1
"""Shortest time in seconds between two updates, because each update is sent to a browser."""


@dataclass(frozen=True)
class Progress:
    """The progress of a tuning.

    Attributes:
        stage: ``"building"``, ``"preparing"``, ``"checks"``, ``"ceilings"``, ``"times"``, ``"search"``,
            ``"confirming"``, ``"lengths"`` of samples or ``"done"``.
        message: A short description: ``"probing device 1 of 2: cuda:0 as primary"``.
        fraction: Estimated fraction of the whole tuning, 0 to 1, which never falls.
        steps: Number of real training steps so far.
        ooms: Number of these steps that ran out of memory.
        best_samples_per_s: Throughput of the best trial so far. None if there is none.
    """

    stage: str
    message: str
    fraction: float
    steps: int = 0
    ooms: int = 0
    best_samples_per_s: float | None = None

    @property
    def found(self) -> str:
        """The steps and the best trial so far, in words: ``"31 steps, 1 OOM, best 1,235 samples/s"``."""
        parts = [f"{self.steps} step{'s' * (self.steps > 1)}"] if self.steps else []
        parts += [f"{self.ooms} OOM"] if self.ooms else []
        parts += [] if self.best_samples_per_s is None else [f"best {rate_text(self.best_samples_per_s)}"]
        return ", ".join(parts)


def fraction_of(stage: str, done_share: float = 0.0) -> float:
    """Convert the fraction of a stage that is done to the fraction of the whole tuning."""
    if stage == "done":
        return 1.0
    return _ENDS[stage] - _SHARES[stage] * (1.0 - min(1.0, max(0.0, done_share)))


def searched_share(num_trials: int, most_trials: int) -> float:
    """Estimate the fraction of a search that is done. A search may end after any trial."""
    return max(num_trials / most_trials, num_trials / (num_trials + USUAL_TRIALS / 2))


def never_falling(progress: Callable[[Progress], None]) -> Callable[[Progress], None]:
    """Return a progress function whose fraction never falls."""
    furthest = 0.0

    def listen(part: Progress) -> None:
        nonlocal furthest
        furthest = max(furthest, part.fraction)
        progress(replace(part, fraction=furthest))

    return listen


class Reporter:
    """Report the stages of one tuning, after its workload is prepared.

    Args:
        tell: Function that is called with the progress.
        counts: Function that returns the numbers of real steps and of out-of-memory errors so far.
        num_devices: Number of devices that this process measures.
        n_trials: Largest number of trials.

    Attributes:
        stage: The current stage, see `Progress`.
        rates: Samples/s of each trial so far. None for a trial that failed.
    """

    def __init__(
        self,
        listen: Callable[[Progress], None],
        counts: Callable[[], tuple[int, int]],
        *,
        num_devices: int,
        n_trials: int,
    ) -> None:
        self.stage = "ceilings"
        self.rates: list[float | None] = []
        self._listener, self._counts = listen, counts
        self._num_devices, self._n_trials = num_devices, n_trials
        self._reports: Counter[str] = Counter()  # Number of reports by stage.

    def __call__(self, message: str) -> None:
        """Report a step of the current stage."""
        if self.stage == "confirming":
            message = f"confirming: {message}"
        self.begin(self.stage, message, self._done_share())
        self._reports[self.stage] += 1

    def begin(self, stage: str, message: str, done_share: float = 0.0) -> None:
        """Report a stage, of which a fraction is done."""
        best = max((rate for rate in self.rates if rate is not None), default=None)
        self._listener(Progress(stage, message, fraction_of(stage, done_share), *self._counts(), best))

    def trial(self) -> None:
        """Report the next trial."""
        self(f"searching, trial {min(len(self.rates) + 1, self._n_trials)}")

    def _done_share(self) -> float:
        if self.stage == "search":
            return searched_share(len(self.rates), self._n_trials)
        # Each device has one ceiling as a rank, and one as primary or replica.
        usual = {"ceilings": 2 * self._num_devices, "times": USUAL_SIZES * self._num_devices}
        return self._reports[self.stage] / usual.get(self.stage, 2 * self._num_devices)


def part_of(progress: Callable[[Progress], None], index: int, count: int, name: object) -> Callable[[Progress], None]:
    """Return a progress function that reports one of several tunings as a part of the whole."""

    def listen(part: Progress) -> None:
        message = f"{index + 1} of {count}, {name}: {part.message}"
        progress(replace(part, message=message, fraction=(index + part.fraction) / count))

    return listen


@contextlib.contextmanager
def progress_listener(progress: Callable[[Progress], None] | None) -> Iterator[Callable[[Progress], None] | None]:
    """Yield the function that shows the progress: `progress`, a bar in a notebook, a line on a terminal, or None."""
    listener = progress or notebook_bar()
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    if (
        listener is None and is_terminal and os.environ.get("RANK", "0") == "0"
    ):  # Only such a terminal can clear a line.
        try:
            yield _now_and_then(_draw_line, at_once=False)
        finally:
            _write_line("")
    else:
        yield listener


def _now_and_then(draw: Callable[[Progress, str], None], *, at_once: bool) -> Callable[[Progress], None]:
    """Return a progress function that draws at most every `SHORTEST_S` seconds.

    Args:
        draw: Function that is called with the progress, and with its counts and the elapsed time as a string.
        at_once: Whether to draw the first report at once.
    """
    begun_s = time.monotonic()
    drawn_s = float("-inf") if at_once else begun_s

    def listen(progress: Progress) -> None:
        nonlocal drawn_s
        now_s = time.monotonic()
        if now_s - drawn_s >= SHORTEST_S or progress.fraction >= 1.0:
            drawn_s = now_s
            draw(progress, ", ".join(filter(None, (progress.found, f"{now_s - begun_s:.0f} s"))))

    return listen


def _draw_line(progress: Progress, counts: str) -> None:
    text = printable(f"{progress.fraction:4.0%}  {progress.message} ({counts})")
    with contextlib.suppress(OSError, ValueError):
        _write_line(text[: (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1])


def _write_line(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def notebook_bar() -> Callable[[Progress], None] | None:
    """Return a function that draws a bar below the running cell. Return None outside of a notebook."""
    ipython = sys.modules.get("IPython")  # A running cell has imported IPython.
    shell = None if ipython is None else ipython.get_ipython()
    # IPython in a terminal has no kernel, and can't show HTML.
    if ipython is None or getattr(shell, "kernel", None) is None:
        return None
    display: Any = ipython.display
    handle: Any = None

    def draw(progress: Progress, counts: str) -> None:
        nonlocal handle
        share = min(1.0, max(0.0, progress.fraction))
        shown = display.HTML(
            f'<div><progress value="{share:.3f}" max="1" aria-label="tuning"></progress> '
            f"{escaped(progress.message)} <small>({escaped(counts)})</small></div>"
        )
        if handle is None:
            handle = display.display(shown, display_id=True)
        else:
            handle.update(shown)

    return _now_and_then(draw, at_once=True)
