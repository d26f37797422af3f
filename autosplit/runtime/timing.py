"""Time a real step by the median of repeated runs.

    | warm-up | run | run | run | ... until the median's error is below 1%, or the budget is spent
              ^ the clock starts   ^ each run ends when its devices are idle

The median ignores a single run that other load on the machine disturbed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

from autosplit.runtime.protocol import Measurement

TARGET_ERROR = 0.01
"""Repeat until the standard error of the median is below this fraction of the median."""

MIN_REPEATS = 3
MAX_REPEATS = 50


def timed(run: Callable[[Callable[[str], None]], object], budget_s: float, *, warmups: int = 1) -> Measurement:
    """Run a function repeatedly, and return the median of its wall time.

    Args:
        run: Returns when its work on all devices is done. It gets a function `mark`, and calls it with ``"update"``
            when all work before the optimizer is done.
        budget_s: No repeat begins after this time, which excludes the warm-up. At least `MIN_REPEATS` run, or two if
            each takes longer than the budget.
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
    """Return whether no more repeats are needed: the median is exact enough, or `budget_s` is spent."""
    if len(seconds) >= MAX_REPEATS:
        return True
    if len(seconds) >= MIN_REPEATS and median_error(seconds) <= TARGET_ERROR * statistics.median(seconds):
        return True
    # Run at least twice, because the first run may have been disturbed.
    return spent_s >= budget_s and (len(seconds) >= MIN_REPEATS or (len(seconds) > 1 and min(seconds) >= budget_s))


def median_error(values: list[float]) -> float:
    """Estimate the standard error of a median, in the unit of the values. For a single value, return the value.

    For normal noise, the error is ``sqrt(pi / 2)`` times the error of a mean. To ignore outliers, the standard
    deviation is estimated as 1.4826 times the median absolute deviation (Rousseeuw and Croux 1993).
    """
    if len(values) < 2:
        return values[0]
    middle = statistics.median(values)
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return math.sqrt(math.pi / 2) * spread / math.sqrt(len(values))
