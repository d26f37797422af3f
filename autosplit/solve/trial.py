"""Choose the best trial of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from autosplit.solve.search_space import Configuration, Space

KNEE_SHARE = 0.97
"""Fraction of the best throughput that the chosen batch must reach if there is no effective batch size."""

LEAST_DIFFERENCE = 0.001
"""Minimum gain in samples/s, as a fraction, that justifies a less simple configuration, even with exact times."""

LEAST_MEASURED_DIFFERENCE = 0.03
"""`LEAST_DIFFERENCE` for predictions from measured times: three times the error of a time (`timing.TARGET_ERROR`)."""

ERRORS_APART = 2.0
"""Minimum relevant difference of two trials, in standard errors. Noise alone exceeds it in one of twenty pairs."""


@dataclass(frozen=True)
class Trial:
    """The result of trying a configuration.

    Attributes:
        number: Position of the trial in the search, from 0.
        gpu0_bsz: Samples per forward on device 0.
        batch_size: Samples per forward.
        accumulation_steps: Forwards per optimizer step.
        split: Samples per device in a full forward.
        samples_per_s: Throughput of whole optimizer steps. None if the trial failed.
        error_share: Standard error of the throughput, as a fraction of it. 0 if it is exact.
        peak_bytes: Peak memory of each device. Empty if it was not measured.
        failure: Sentence with the reason for the failure and the device. None if the trial ran.
        failed_device: Position of the device that ran out of memory. None if no device did, or if it is unknown.
    """

    number: int
    gpu0_bsz: int
    batch_size: int
    accumulation_steps: int
    split: tuple[int, ...]
    samples_per_s: Annotated[float, Meta(gt=0)] | None = None
    error_share: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    failure: str | None = None
    failed_device: int | None = None


def configuration_of(trial: Trial) -> Configuration:
    """Return the configuration of a trial."""
    return Configuration(trial.gpu0_bsz, trial.batch_size, trial.accumulation_steps)


def best_trial(
    space: Space, trials: Sequence[Trial], rate: Callable[[Configuration], float] | None = None
) -> Trial | None:
    """Return the best trial, or None if no trial ran.

    Choose among the trials that are as fast as the fastest within their errors. Prefer the smallest number of
    micro-steps, then equal micro-steps (the smallest ones), then the highest prediction. Without an effective batch
    size, choose the smallest `batch_size` with at least `KNEE_SHARE` of the highest samples/s.

    Args:
        rate: Function that predicts the samples/s of a configuration, to order trials that differ only by noise.
            Default: the measured samples/s.
    """
    rates = {trial: trial.samples_per_s for trial in trials if trial.samples_per_s is not None}
    if not rates:
        return None
    top = max(rates, key=lambda trial: rates[trial])
    if space.effective_batch_sizes is None:
        near = [trial for trial in rates if rates[trial] >= KNEE_SHARE * rates[top]]
        return min(near, key=lambda trial: (trial.batch_size, -rates[trial], trial.number))
    near = [trial for trial in rates if rates[trial] >= rates[top] * (1 - noticeable_difference(top, trial))]

    def plainness(trial: Trial) -> tuple[float, ...]:
        configuration = configuration_of(trial)
        predicted = rates[trial] if rate is None else rate(configuration)
        return (*space.plainness(configuration), -predicted, trial.number)

    return min(near, key=plainness)


def noticeable_difference(one: Trial, other: Trial) -> float:
    """Return the minimum relative difference in samples/s that is more than noise for these two trials."""
    return max(LEAST_DIFFERENCE, ERRORS_APART * math.hypot(one.error_share, other.error_share))
