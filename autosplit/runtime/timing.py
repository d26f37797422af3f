"""Time a step that really runs.

    | warm-up | run | run | run | ... until the median stands within 1 %, or the budget is spent
              ^ the clock starts   ^ each run ends when its devices have

The median, because one run that the machine disturbed must not decide.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from autosplit.runtime.protocol import Measurement

TARGET_ERROR = 0.01
"""Repeat until the standard error of the median is under this share of it."""

MIN_REPEATS = 3
MAX_REPEATS = 50


def timed(run: Callable[[Callable[[str], None]], object], budget_s: float, *, warmups: int = 1) -> Measurement:
    """Run something repeatedly and take the median of its wall time.

    Args:
        run: Returns when its work is done, on whatever device. It is given `mark`, to call with ``"update"`` where
            the optimizer begins, everything before it being done.
        budget_s: No further repeat begins after this long, warm-up not counted; `MIN_REPEATS` are made in any case
            unless each takes longer alone; then two.
    """
    for _ in range(warmups):
        run(lambda _phase: None)
    seconds: list[float] = []
    update_s: list[float] = []
    begun_s = time.perf_counter()
    while not is_enough(seconds, time.perf_counter() - begun_s, budget_s):
        marks: dict[str, float] = {}
        start_s = time.perf_counter()
        run(lambda phase, marks=marks: marks.__setitem__(phase, time.perf_counter()))  # type: ignore[misc]
        end_s = time.perf_counter()
        seconds.append(end_s - start_s)
        update_s.append(end_s - marks.get("update", end_s))
    return Measurement(
        statistics.median(seconds),
        median_error(seconds),
        update_s=statistics.median(update_s),
        repeats=len(seconds),
    )


def is_enough(seconds: list[float], spent_s: float, budget_s: float) -> bool:
    """Tell whether repeats need no further one: the median stands, or `budget_s` is spent."""
    if len(seconds) >= MAX_REPEATS:
        return True
    if len(seconds) >= MIN_REPEATS and median_error(seconds) <= TARGET_ERROR * statistics.median(seconds):
        return True
    # Two at least, whatever the first took: it may have been the machine.
    return spent_s >= budget_s and (len(seconds) >= MIN_REPEATS or (len(seconds) > 1 and min(seconds) >= budget_s))


def median_error(values: list[float]) -> float:
    """Estimate the standard error of a median, in the values' unit; one value alone has an error as large as itself.

    For normal noise it is ``sqrt(pi / 2)`` times that of a mean; the spread is taken from the median absolute
    deviation, 1.4826 times which is the standard deviation of normal noise (Rousseeuw and Croux 1993), so that
    an outlier does not count.
    """
    if len(values) < 2:
        return values[0]
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return math.sqrt(math.pi / 2) * spread / math.sqrt(len(values))
