"""Propose trials: the solver's best configuration, its neighbours, and the best predictions of the refitted model.

The proposals come in three phases::

    solver's best, neighbours, even split, torch's split | best untried prediction | neighbours of the best, sampler
                                                           ^ while it gains          ^ while the model is inaccurate
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autosplit.solve.search_space import Configuration
from autosplit.solve.solver import WITHIN_REACH, Solver
from autosplit.solve.trial import KNEE_SHARE, Trial, best_trial, configuration_of

PATIENCE = 8
"""If the model is inaccurate, the search ends after this many trials in a row without a gain beyond noise."""

LEAST_GAIN = 0.001
"""Minimum gain, as a fraction, that justifies the time of a trial."""

BESIDE_SHARE = 0.005
"""Step, as a fraction of the samples on device 0, for neighbours of the best trial. Smaller steps need more trials."""

KNEE_STEP = 0.1
"""Precision of the search for the smallest fast batch, as a fraction of the batch size."""

LEAST_MODEL_ERROR = 0.01
"""Minimum assumed error of the model, as a fraction. A smaller error of a few fitted trials is chance.

At this error or less, no sampler is used, because its batches of one or two samples would need new traces.
"""

FITTED = 3
"""Number of fitted parameters. The model fits that many trials exactly, whatever they measured."""


@dataclass(frozen=True)
class Proposal:
    """The next trial, or the end of the search. If `configuration` is None, a sampler chooses."""

    configuration: Configuration | None = None
    enough: bool = False
    why: str = field(default="", compare=False)


class Proposer:
    """Propose one trial after another."""

    def __init__(self, solver: Solver, *, patience: int = PATIENCE) -> None:
        self.solver = solver
        self.patience = patience
        self.first = solver.first_trials()

    def __call__(self, trials: Sequence[Trial]) -> Proposal:
        """Propose the next trial."""
        tried = {configuration_of(trial) for trial in trials}
        for configuration in self.first:
            if configuration not in tried:
                return Proposal(configuration, why="the solver's best configuration and its neighbours")
        solver = self.solver.refitted(trials)
        best = best_trial(solver.space, steadied(solver, trials), solver.samples_per_s)
        if best is None:  # all trials failed, but a smaller batch may run
            enough = len(trials) > len(self.first) + self.patience
            return Proposal(
                self._smaller(trials, tried), enough, "every trial has failed so far, but a smaller batch may fit"
            )
        top = max(trials, key=lambda trial: trial.samples_per_s or 0.0)
        noise = max(LEAST_GAIN, top.error_share)
        promised = self._promised(solver, trials, tried, best, top, noise)
        if promised is not None:
            return Proposal(promised, why="the model that is fitted to the trials predicts more")
        error = error_of(solver, trials)
        if error <= noise:
            return Proposal(enough=True, why="the model matches every trial and predicts no improvement")
        beside = self._beside(solver, tried, best, noise)
        rates = [trial.samples_per_s or 0.0 for trial in trials]
        before, last = rates[: -self.patience], rates[-self.patience :]
        stale = bool(before) and max(last) <= max(before) * (1 + noise)
        if beside is None and (stale or error <= LEAST_MODEL_ERROR):
            return Proposal(
                enough=True, why="the last trials brought no improvement" if stale else "the model is accurate"
            )
        return Proposal(beside, why="the model is inaccurate, so try neighbours of the best")

    def _promised(
        self,
        solver: Solver,
        trials: Sequence[Trial],
        tried: set[Configuration],
        best: Trial,
        top: Trial,
        noise: float,
    ) -> Configuration | None:
        """Return the untried configuration with the highest prediction of the refitted model, if it promises a gain."""
        ranked = solver.ranked()
        candidates = [c for c in (*ranked, *solver.neighbours(configuration_of(best))) if c not in tried]
        candidates = [c for c in candidates if not _hopeless(solver, c, trials)]
        if not candidates:
            return None
        if solver.space.effective_batch_sizes is None:
            smaller = self._smaller_batch(solver, trials, candidates, best)
            if smaller is not None:
                return smaller
        # Scale the predictions by the model's error at the fastest trial. The error may differ for another set of
        # devices, so predictions for other sets stay unscaled.
        scale = (top.samples_per_s or 0.0) / solver.samples_per_s(configuration_of(top))

        def alike(c: Configuration) -> bool:
            return list(map(bool, solver.split_of(c))) == list(map(bool, top.split))

        rates = {c: (scale if alike(c) else 1.0) * solver.samples_per_s(c) for c in candidates}
        foremost = max(rates, key=lambda c: (rates[c], -c.batch_size))
        return foremost if rates[foremost] > (top.samples_per_s or 0.0) * (1 + noise) else None

    @staticmethod
    def _smaller_batch(
        solver: Solver, trials: Sequence[Trial], candidates: Sequence[Configuration], best: Trial
    ) -> Configuration | None:
        """Return an untried configuration below the best batch that may reach `KNEE_SHARE` of the top, or None.

        Skip batch sizes that trials have shown to be too slow. Return the smallest batch size whose prediction is high
        enough. Otherwise, because the model may be inaccurate, return the middle of those with at least `WITHIN_REACH`
        of the needed throughput.
        """
        rates: dict[int, float] = {}  # the highest of each batch size, because its trials have different splits
        for trial in trials:
            rates[trial.batch_size] = max(rates.get(trial.batch_size, 0.0), trial.samples_per_s or 0.0)
        needed_rate = KNEE_SHARE * max(rates.values())
        too_small = max((n for n, rate in rates.items() if rate < needed_rate and n < best.batch_size), default=0)
        between = [c for c in candidates if too_small < c.batch_size < best.batch_size * (1 - KNEE_STEP)]
        scale = (best.samples_per_s or 0.0) / solver.samples_per_s(configuration_of(best))
        predicted = {c: scale * solver.samples_per_s(c) for c in between}
        within_reach = sorted(
            (c for c in between if predicted[c] >= WITHIN_REACH * needed_rate), key=lambda c: c.batch_size
        )
        fast_enough = [c for c in within_reach if predicted[c] >= needed_rate]
        if fast_enough:
            return fast_enough[0]
        return within_reach[len(within_reach) // 2] if within_reach else None

    def _beside(self, solver: Solver, tried: set[Configuration], best: Trial, noise: float) -> Configuration | None:
        """Return the best trial's configuration with slightly more or fewer samples on device 0, or None if both ran.

        The model's error is about the same for all three. Moving one of many samples would make no difference.
        """
        least = best.gpu0_bsz * BESIDE_SHARE
        if solver.step_time.adds_up or best.gpu0_bsz * noise >= max(1.0, least):
            return None
        distance = max(1, round(least))
        moved = (replace(configuration_of(best), gpu0_bsz=best.gpu0_bsz + by) for by in (distance, -distance))
        near = [c for c in moved if c not in tried and c.gpu0_bsz >= 0 and solver.holds(c)]
        return max(near, key=solver.samples_per_s, default=None)

    def _smaller(self, trials: Sequence[Trial], tried: set[Configuration]) -> Configuration | None:
        untried = [c for c in self.solver.ranked() if c not in tried and not _hopeless(self.solver, c, trials)]
        return min(untried, key=lambda c: (-c.batch_size, c.gpu0_bsz), default=None)


def error_of(solver: Solver, trials: Sequence[Trial]) -> float:
    """Return the root mean square of the model's relative errors over the trials that ran."""
    ran = [(configuration_of(trial), trial.samples_per_s) for trial in trials if trial.samples_per_s is not None]
    return statistics.fmean((solver.samples_per_s(one) / rate - 1) ** 2 for one, rate in ran) ** 0.5 if ran else 0.0


def steadied(solver: Solver, trials: Sequence[Trial]) -> list[Trial]:
    """Average each trial's throughput with the cost model's prediction, to reduce noise.

    The weights are 1 / variance. The variance of the model is its squared error minus the noise of the trials. Trials
    that failed or have no noise stay unchanged.
    """
    ran = [trial for trial in trials if trial.samples_per_s is not None]
    if len(ran) < 2:
        return list(trials)
    noise = statistics.fmean(trial.error_share**2 for trial in ran)
    missed = error_of(solver, ran) ** 2 * len(ran) / max(1, len(ran) - FITTED)
    model = max(LEAST_MODEL_ERROR**2, missed - noise)

    def averaged(trial: Trial) -> Trial:
        if trial.samples_per_s is None or trial.error_share == 0:
            return trial
        own, other = 1 / trial.error_share**2, 1 / model
        rate = (own * trial.samples_per_s + other * solver.samples_per_s(configuration_of(trial))) / (own + other)
        return replace(trial, samples_per_s=rate, error_share=(own + other) ** -0.5)

    return [averaged(trial) for trial in trials]


def _hopeless(solver: Solver, configuration: Configuration, trials: Sequence[Trial]) -> bool:
    """Return whether a failed trial shows that this configuration can't fit.

    This configuration has at least as many samples as the trial on the device that failed, or on all devices if that
    device is unknown. For device 0, which gathers the whole batch, its batch is at least as large, too.
    """
    split: tuple[int, ...] | None = None
    for trial in trials:
        if trial.failure is None or (trial.accumulation_steps > 1) > (configuration.accumulation_steps > 1):
            continue
        if not solver.holds(configuration_of(trial)):
            continue  # the trial failed with too few samples, which shows nothing about more samples
        split = split or solver.split_of(configuration)
        no_less = [asked >= failed for asked, failed in zip(split, trial.split, strict=True)]
        no_less[0] = no_less[0] and configuration.batch_size >= trial.batch_size
        if all(no_less) if trial.failed_device is None else no_less[trial.failed_device]:
            return True
    return False
