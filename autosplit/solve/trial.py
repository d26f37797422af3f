"""Choose the best among the trials of a search. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from autosplit.solve.search_space import Configuration, Space

KNEE_SHARE = 0.97
"""Share of the best throughput that the smallest batch reaches to be the answer, with no effective batch asked for."""

LEAST_DIFFERENCE = 0.001
"""Least difference, as a share of samples/s, that an odd configuration is taken for, however exact the times are."""

LEAST_MEASURED_DIFFERENCE = 0.03
"""The same for what a model predicts from measured times: three times the error of each (`timing.TARGET_ERROR`)."""

ERRORS_APART = 2.0
"""Standard errors by which trials have to differ: one in twenty that are alike seems to."""


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
