"""The search space and its trials: configurations, their bounds, and the best of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from autosplit.solve.memory import Region
from autosplit.solve.split import accumulation_steps

KNEE_SHARE = 0.97
"""Share of the best throughput that the smallest batch reaches to be the answer, with no effective batch asked for."""


LEAST_DIFFERENCE = 0.001
"""Least difference, as a share of samples/s, that an odd configuration is taken for, however exact the times are."""

LEAST_MEASURED_DIFFERENCE = 0.03
"""The same for what a model predicts from measured times: three times the error of each (`timing.TARGET_ERROR`)."""

ERRORS_APART = 2.0
"""Standard errors by which trials have to differ: one in twenty that are alike seems to."""


@dataclass(frozen=True, order=True)
class Configuration:
    """A point of the search: what the user sets."""

    gpu0_bsz: int
    batch_size: int
    accumulation_steps: int = 1


@dataclass(frozen=True)
class Trial:
    """The outcome of a configuration.

    Attributes:
        number: Its place in the search, from 0.
        gpu0_bsz: Samples per forward on device 0.
        batch_size: Samples per forward.
        accumulation_steps: Forwards per optimizer step.
        split: Samples per device in a full forward.
        samples_per_s: Throughput of whole optimizer steps; None where it failed.
        error_share: Standard error of that, as a share of it; 0 where it is exact.
        peak_bytes: The most each device held; empty where it was not measured.
        failure: Why it failed, in a sentence that names the device; None where it did not.
        failed_device: Position of the device that ran out of memory; None where none did, or nobody knows which.
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


@dataclass(frozen=True)
class Space:
    """The configurations that may be searched.

    Attributes:
        effective_batch_sizes: The least and the most samples per optimizer step, equal where a number was asked for;
            None for one micro-step of any size.
        max_steps: The most accumulation steps worth a look.
        accumulating: Which splits fit where a step takes several micro-steps, if those are others.
    """

    region: Region
    effective_batch_sizes: tuple[int, int] | None
    max_steps: int = 1
    accumulating: Region | None = None

    def region_of(self, steps: int) -> Region:
        """Return which splits fit in an optimizer step of so many micro-steps."""
        return self.region if steps == 1 or self.accumulating is None else self.accumulating

    def effective_of(self, configuration: Configuration) -> int:
        """Return the samples of a configuration's optimizer step: full micro-steps, as far as there are so many."""
        full = configuration.batch_size * configuration.accumulation_steps
        return full if self.effective_batch_sizes is None else min(full, self.effective_batch_sizes[1])

    def plainness(self, configuration: Configuration) -> tuple[int, bool, int]:
        """Return what makes a configuration less plain: micro-steps, uneven ones, and how large equal ones are."""
        uneven = self.effective_of(configuration) % configuration.batch_size != 0
        return configuration.accumulation_steps, uneven, 0 if uneven else configuration.batch_size

    def batch_bounds(self, steps: int) -> tuple[int, int] | None:
        """Return the least and the largest batch that make an optimizer step in so many micro-steps, and that fit."""
        most = self.region_of(steps).largest_batch
        if self.effective_batch_sizes is None:
            return (1, most) if most >= 1 else None
        fewest_samples, most_samples = self.effective_batch_sizes
        least = -(-fewest_samples // steps)
        # The last micro-step has at least one sample.
        upper = most_samples if steps == 1 else -(-most_samples // (steps - 1)) - 1
        return (least, min(upper, most)) if least <= min(upper, most) else None

    def steps_bounds(self) -> tuple[int, int]:
        """Return the fewest and the most accumulation steps."""
        if self.effective_batch_sizes is None:
            return 1, 1
        fewest_samples, most_samples = self.effective_batch_sizes
        fewest = accumulation_steps(fewest_samples, max(1, self.region.largest_batch))
        if fewest > 1 and self.accumulating is not None:
            fewest = max(2, accumulation_steps(fewest_samples, max(1, self.accumulating.largest_batch)))
        return fewest, max(fewest, min(self.max_steps, most_samples))

    def holds(self, configuration: Configuration) -> bool:
        """Tell whether a configuration is in the space."""
        fewest, most = self.steps_bounds()
        if not fewest <= configuration.accumulation_steps <= most:
            return False
        batches = self.batch_bounds(configuration.accumulation_steps)
        if batches is None or not batches[0] <= configuration.batch_size <= batches[1]:
            return False
        shares = self.region_of(configuration.accumulation_steps).gpu0_bounds(configuration.batch_size)
        return shares is not None and shares[0] <= configuration.gpu0_bsz <= shares[1]


def best_trial(
    space: Space, trials: Sequence[Trial], rate: Callable[[Configuration], float] | None = None
) -> Trial | None:
    """Choose the answer among trials; failed ones never count.

    The highest samples/s; among those that can't be told from it the plainest: the fewest micro-steps, then equal ones
    (of these the smallest), then shares as the speeds say. Where no effective batch was asked for, the knee: the
    smallest `batch_size` that has at least `KNEE_SHARE` of the highest samples/s.

    Args:
        rate: Predicts samples/s, to tell apart what noise can't. Default: each trial's own.
    """
    rates = {trial: trial.samples_per_s for trial in trials if trial.samples_per_s is not None}
    if not rates:
        return None
    top = max(rates, key=lambda trial: rates[trial])
    if space.effective_batch_sizes is None:
        near = [trial for trial in rates if rates[trial] >= KNEE_SHARE * rates[top]]
        return min(near, key=lambda trial: (trial.batch_size, -rates[trial], trial.number))
    near = [trial for trial in rates if rates[trial] >= rates[top] * (1 - told_apart(top, trial))]

    def plainness(trial: Trial) -> tuple[float, ...]:
        configuration = configuration_of(trial)
        predicted = rates[trial] if rate is None else rate(configuration)
        return (*space.plainness(configuration), -predicted, trial.number)

    return min(near, key=plainness)


def told_apart(one: Trial, other: Trial) -> float:
    """Return by how much two trials have to differ to be told apart, as a share of their samples/s."""
    return max(LEAST_DIFFERENCE, ERRORS_APART * math.hypot(one.error_share, other.error_share))
