"""From sizes that were timed to a curve: what is noise, by its own measure, is averaged out. Pure.

    each size's median and its error | alike devices averaged | drawn towards the line through all sizes | TimeCurve

What is exact stays what it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from autosplit.solve.step_time import TimeCurve

LEAST_LINE_ERROR = 0.01
"""Least error of a line through the sizes that is assumed, as a share of its time."""

MOST_ERRORS_APART = 3.0
"""Errors by which alike devices may differ: beyond, one may be hot, or on a slower slot."""


@dataclass(frozen=True)
class TimedSize:
    """A batch size that was timed on one device: the median, and its standard error, which is 0 where it is exact."""

    samples: int
    seconds: float
    error_s: float = 0.0


def pooled(timed: Sequence[Sequence[TimedSize]], kinds: Sequence[Hashable]) -> list[list[TimedSize]]:
    """Average what devices of equal kinds took, where they differ by no more than noise; all get the same averages."""
    found = [list(sizes) for sizes in timed]
    for kind in dict.fromkeys(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        averages = _averages([timed[place] for place in places])
        for place in places if averages is not None else ():
            found[place] = list(averages or ())
    return found


def _averages(timed: Sequence[Sequence[TimedSize]]) -> list[TimedSize] | None:
    """Return the averages of devices timed at the same sizes; None where they are not alike."""
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
    """Make a curve; each size that has an error is averaged with the line through all, by inverse variances.

    The line's own variance is what the sizes lie beside it beyond their errors, so that a curve which is none stays.
    """
    return TimeCurve.of([(size.samples, size.seconds) for size in _steadied(timed)])


def _steadied(timed: Sequence[TimedSize]) -> Sequence[TimedSize]:
    told = [size for size in timed if size.error_s < size.seconds]  # the others are less than their own noise
    if len(told) < 3 or not any(size.error_s for size in timed):
        return timed
    line = _line(told)
    if line is None:
        return timed
    fixed_s, sample_s = line
    misses = [(fixed_s + sample_s * size.samples) / size.seconds - 1 for size in told]
    noise = statistics.fmean((size.error_s / size.seconds) ** 2 for size in told)
    variance = max(LEAST_LINE_ERROR**2, sum(miss**2 for miss in misses) / (len(told) - 2) - noise)

    def steadied(size: TimedSize) -> TimedSize:
        own = variance / (variance + (size.error_s / size.seconds) ** 2)
        return replace(size, seconds=own * size.seconds + (1 - own) * (fixed_s + sample_s * size.samples))

    return [steadied(size) if size.error_s else size for size in timed]


def _line(timed: Sequence[TimedSize]) -> tuple[float, float] | None:
    """Return fixed seconds, from 0, and seconds per sample by least squares of relative errors; None where it falls."""
    # Of ``fixed / t + per_sample * n / t = 1``, a row for each size.
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
