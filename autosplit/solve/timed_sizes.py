"""Make a time curve from measured batch sizes, and average out the noise.

Each size has a median and its standard error, which is 0 for exact times. Three steps lead to the curve:

1. Average the times of identical devices.
2. Move each noisy time towards the line through all sizes.
3. Make a `TimeCurve` of the points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from autosplit.solve.step_time import TimeCurve

LEAST_LINE_ERROR = 0.01
"""Minimum error of the line through the sizes, as a fraction of its time."""

MOST_ERRORS_APART = 3.0
"""Maximum difference between the times of identical devices, in standard errors.

Times that differ more are not averaged, because one device may be hot, or in a slower slot.
"""


@dataclass(frozen=True)
class TimedSize:
    """A batch size that was timed on one device: the median, and its standard error (0 for an exact time)."""

    samples: int
    seconds: float
    error_s: float = 0.0


def pooled(timed: Sequence[Sequence[TimedSize]], kinds: Sequence[Hashable]) -> list[list[TimedSize]]:
    """Average the times of devices of the same kind if they differ only by noise. All of them get the averages."""
    found = [list(sizes) for sizes in timed]
    for kind in dict.fromkeys(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        averages = _averages([timed[place] for place in places])
        for place in places if averages is not None else ():
            found[place] = list(averages or ())
    return found


def _averages(timed: Sequence[Sequence[TimedSize]]) -> list[TimedSize] | None:
    if len(timed) < 2 or len({tuple(size.samples for size in sizes) for sizes in timed}) > 1:
        return None
    averages = []
    for sizes in zip(*timed, strict=True):
        mean_s = statistics.fmean(size.seconds for size in sizes)
        if any(abs(size.seconds - mean_s) > MOST_ERRORS_APART * size.error_s for size in sizes):
            return None
        error_s = math.sqrt(sum(size.error_s**2 for size in sizes)) / len(sizes)
        averages.append(TimedSize(sizes[0].samples, mean_s, error_s))
    return averages


def curve_of(timed: Sequence[TimedSize]) -> TimeCurve:
    """Make a time curve. Average each inexact time with the line through all times, weighted by 1 / variance.

    The variance of the line is the scatter of the times around it, minus the variance of the times. A curve that is not
    linear has a large scatter, so the average keeps its shape.
    """
    return TimeCurve.of([(size.samples, size.seconds) for size in _steadied(timed)])


def _steadied(timed: Sequence[TimedSize]) -> Sequence[TimedSize]:
    clear = [size for size in timed if size.error_s < size.seconds]  # leave out times that are smaller than their error
    if len(clear) < 3 or not any(size.error_s for size in timed):
        return timed
    line = _line(clear)
    if line is None:
        return timed
    fixed_s, sample_s = line
    misses = [(fixed_s + sample_s * size.samples) / size.seconds - 1 for size in clear]
    noise = statistics.fmean((size.error_s / size.seconds) ** 2 for size in clear)
    variance = max(LEAST_LINE_ERROR**2, sum(miss**2 for miss in misses) / (len(clear) - 2) - noise)

    def steadied(size: TimedSize) -> TimedSize:
        own = variance / (variance + (size.error_s / size.seconds) ** 2)
        return replace(size, seconds=own * size.seconds + (1 - own) * (fixed_s + sample_s * size.samples))

    return [steadied(size) if size.error_s else size for size in timed]


def _line(timed: Sequence[TimedSize]) -> tuple[float, float] | None:
    """Fit a fixed time (0 or more) and a time per sample, in seconds, by relative least squares.

    Return None if the time falls.
    """
    # Each size t(n) gives the row ``fixed / t + per_sample * n / t = 1``.
    rows = [(1 / size.seconds, size.samples / size.seconds) for size in timed]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 0:
        return None
    fixed_s, sample_s = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if fixed_s < 0:
        return 0.0, b / bb
    return None if sample_s < 0 else (fixed_s, sample_s)
