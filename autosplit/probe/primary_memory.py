"""Fit a linear model of device 0's memory, for steps of all devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from autosplit.oom import OutOfMemoryError
from autosplit.probe.prober import Prober, balanced
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
    if prober.evidence == "steps":
        found = _fit_to_steps(prober, share, others, accumulates=accumulates)
        # If a step did not fit, count every sample of the batch as if it were on device 0.
        return found or MemoryFit(alone.fixed_bytes, alone.bytes_per_sample, alone.bytes_per_sample)
    predicted = _fit_to_predictions(prober, share, sum(others), accumulates=accumulates)
    if not alone.confirmed or not alone.batch_size:
        return predicted
    # Memory that predictions miss is added as a constant.
    missed_bytes = alone.peak_bytes - prober.predicted(prober.shapes(0, "primary", (), False)(alone.batch_size))[0]
    return replace(predicted, fixed_bytes=predicted.fixed_bytes + max(0, missed_bytes))


def _fit_to_predictions(prober: Prober, share: int, elsewhere: int, *, accumulates: bool) -> MemoryFit:
    """Fit device 0's peak memory to three predictions.

    At other sizes, the peak may come at another moment of the step, so the peak is only piecewise linear. Fit it near
    the limit, with about the largest number of samples on device 0 and on the other devices.
    """
    # A batch of one does not lie on the line through larger batches, see `runtime.linear_memory`.
    least = max(prober.least_batch, 2 if share > 2 else 1)
    share, elsewhere = max(share, least + 1), max(elsewhere, least + 1)
    less = max(least, share - max(1, share // 4))
    fewer = max(least, elsewhere - max(1, elsewhere // 2))

    def point(own: int, others: int) -> tuple[int, int, int]:
        return own, own + others, prober.predicted(balanced((own, others), accumulates=accumulates))[0]

    # If this prediction was wrong, the predictions below differ.
    prober.prediction_holds(balanced((share, elsewhere), accumulates=accumulates))
    # The second point has more samples on device 0. The third point has more samples on the other devices only.
    return MemoryFit.through(point(less, fewer), point(share, fewer), point(less, elsewhere))


def _fit_to_steps(prober: Prober, share: int, others: Sequence[int], *, accumulates: bool) -> MemoryFit | None:
    """Fit device 0's peak memory to three steps on all devices, with up to half of the samples that fit on each."""
    least = prober.least_batch

    def part(samples: int, quarters: int) -> int:
        return samples and max(least * quarters, samples * quarters // 4)

    def point(own: int, beside: int) -> tuple[int, int, int]:
        split = (part(max(1, share), own), *(part(samples, beside) for samples in others))
        shape = balanced(split, accumulates=accumulates)
        return split[0], sum(split), prober.peaks(shape)[0]

    try:
        return MemoryFit.through(point(1, 1), point(2, 1), point(1, 2))
    except OutOfMemoryError as error:
        _log.info("device 0 with the others: out of memory (%s)", error)
        prober.ooms += 1
        return None


def room_beside(
    prober: Prober, share: int, least: tuple[int, ...], most: tuple[int, ...], *, accumulates: bool
) -> tuple[int, ...]:
    """Return the largest numbers of samples on the other devices that leave enough memory for device 0's own."""

    def lowered(total: int) -> tuple[int, ...]:
        return proportional_split(total, tuple(max(1, n) for n in most), most)

    def peak(total: int) -> float:
        return prober.predicted(balanced((share, max(total, prober.least_batch)), accumulates=accumulates))[0]

    if prober.evidence == "steps":
        return least
    total = largest_fitting(
        peak, prober.worker.capacities_bytes[0], least=sum(least), most=sum(most), start=sum(least) + 1
    )
    grown = lowered(total)
    return grown if all(n >= floor for n, floor in zip(grown, least, strict=True)) else least
