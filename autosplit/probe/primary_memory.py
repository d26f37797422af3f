"""Fit a linear model of device 0's memory, for steps of all devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from autosplit.oom import OutOfMemoryError
from autosplit.probe.prober import Prober, balanced
from autosplit.runtime.protocol import StepShape
from autosplit.solve.memory import Ceiling, MemoryFit, largest_fitting
from autosplit.solve.split import proportional_split

_log = logging.getLogger(__name__)


def primary_fit(prober: Prober, alone: Ceiling, share: int, others: Sequence[int], *, accumulates: bool) -> MemoryFit:
    """Fit device 0's peak memory to its samples and the whole batch, with samples on the other devices.

    Args:
        alone: Device 0's ceiling without samples on the other devices.
        share: Estimated ceiling of device 0.
        others: Estimated ceilings of the other devices.
    """
    traced = _fit_by_traces(prober, share, sum(others), accumulates=accumulates) if prober.has_traces else None
    if prober.decides_by_steps:
        measured = fit_by_steps(prober, traced, share, others, accumulates=accumulates)
        if measured is not None:
            return measured
    if traced is None:  # Without traces, count every sample of the batch as if it were on device 0.
        return MemoryFit(alone.fixed_bytes, alone.bytes_per_sample, alone.bytes_per_sample)
    if not alone.confirmed or not alone.batch_size:
        return traced
    # Memory that traces miss (workspaces, fragmentation) is added as a constant.
    missed_bytes = alone.peak_bytes - prober.traced(prober.shapes(0, "primary", (), False)(alone.batch_size))[0]
    return replace(traced, fixed_bytes=traced.fixed_bytes + max(0, missed_bytes))


def _fit_by_traces(prober: Prober, share: int, elsewhere: int, *, accumulates: bool) -> MemoryFit:
    """Fit device 0's peak memory to three traces.

    At other sizes, the peak may come at another moment of the step, so the peak is only piecewise linear. Fit it near
    the limit, with about the largest number of samples on device 0 and on the other devices.
    """
    # A batch of one does not lie on the line through larger batches. See Note [A batch of one] in affine_traces.
    least = max(prober.least_batch(), 2 if share > 2 else 1)
    share, elsewhere = max(share, least + 1), max(elsewhere, least + 1)
    less = max(least, share - max(1, share // 4))
    fewer = max(least, elsewhere - max(1, elsewhere // 2))

    def point(own: int, others: int) -> tuple[int, int, int]:
        return own, own + others, prober.traced(balanced((own, others), accumulates=accumulates))[0]

    # If this prediction was wrong, the points below are traced instead of predicted.
    prober.foretold(balanced((share, elsewhere), accumulates=accumulates))
    # The second point has more samples on device 0. The third point has more samples on the other devices only.
    return MemoryFit.through(point(less, fewer), point(share, fewer), point(less, elsewhere))


def fit_by_steps(
    prober: Prober, traced: MemoryFit | None, share: int, others: Sequence[int], *, accumulates: bool
) -> MemoryFit | None:
    """Fit device 0's peak memory to real steps on all devices, with about half of the samples that fit on each device.

    Args:
        traced: The linear model from traces. Two steps are run to correct its slopes by a common factor. Without it,
            three steps are run to fit a new model.
    """
    least = prober.least_batch()

    def part(samples: int, quarters: int) -> int:
        return samples and max(least * quarters, samples * quarters // 4)

    def point(own: int, beside: int) -> tuple[StepShape, tuple[int, int, int]]:
        split = (part(max(1, share), own), *(part(samples, beside) for samples in others))
        shape = balanced(split, accumulates=accumulates)
        return shape, (split[0], sum(split), prober.confirmed_peaks(shape)[0])

    try:
        if traced is None:
            return MemoryFit.through(*(point(own, beside)[1] for own, beside in ((1, 1), (2, 1), (1, 2))))
        points = [point(1, 1), point(2, 2)]
    except OutOfMemoryError as error:
        _log.info("device 0 with the others: out of memory (%s)", error)
        prober.counts.ooms += 1
        return None
    (t0, y0), (t1, y1) = ((prober.traced(shape)[0], peak) for shape, (_, _, peak) in points)
    scale = max(0.0, (y1 - y0) / (t1 - t0)) if t1 > t0 else 1.0
    fixed_bytes = y1 - scale * (t1 - traced.fixed_bytes)
    return MemoryFit(fixed_bytes, scale * traced.bytes_per_share, scale * traced.bytes_per_batch)


def room_beside(
    prober: Prober, share: int, least: tuple[int, ...], most: tuple[int, ...], *, accumulates: bool
) -> tuple[int, ...]:
    """Return the largest numbers of samples on the other devices that leave enough memory for device 0's own."""

    def lowered(total: int) -> tuple[int, ...]:
        return proportional_split(total, tuple(max(1, n) for n in most), most)

    def peak(total: int) -> float:
        return prober.traced(balanced((share, max(total, prober.least_batch())), accumulates=accumulates))[0]

    if not prober.has_traces:
        return least
    total = largest_fitting(
        peak, prober.runtime.capacities_bytes[0], least=sum(least), most=sum(most), start=sum(least) + 1
    )
    grown = lowered(total)
    return grown if all(n >= floor for n, floor in zip(grown, least, strict=True)) else least
