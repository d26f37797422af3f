"""The cost model as one of Optuna's samplers; what it has nothing to say about is another's.

Imported where a search begins, since it imports Optuna.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from autosplit.solve.proposals import Proposal
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.trial import Trial

_ANY_NUMBER = IntDistribution(0, 2**31 - 1)
"""The bounds of a proposal; those that a trial suggests within are the search space's own."""

_PARAMETERS = ("accumulation_steps", "batch_size", "gpu0_bsz")

STARTUP_TRIALS = 4
"""Trials that TPE draws at random before it models them: the study begins with the model's own."""


class CostModelSampler(BaseSampler):
    """Sample the configuration that a cost model proposes; explore by an independent sampler where it has none.

    Args:
        space: A proposal outside it is left to the explorer.
        seed: Of the explorer, Optuna's TPE, which draws by it and the finished trials alone, so that a search that was
            killed and goes on draws the same.
    """

    def __init__(
        self,
        propose: Callable[[Sequence[Trial]], Proposal],
        trials: Callable[[], Collection[Trial]],
        space: Space,
        *,
        seed: int,
    ) -> None:
        self._propose, self._trials, self._space, self._seed = propose, trials, space, seed
        self._explorer = TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        self._proposed: tuple[int, Proposal] | None = None
        self.reason = ""

    def next(self) -> Proposal:
        """Return what to try after the trials so far; the model is solved once after each."""
        trials = self._trials()
        if self._proposed is None or self._proposed[0] != len(trials):
            self._proposed = len(trials), self._propose(tuple(trials))
        return self._proposed[1]

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """Return the parameters that the model proposes together; none where the explorer draws them."""
        del study, trial
        wanted = self._wanted()
        return {} if wanted is None else dict.fromkeys(_PARAMETERS, _ANY_NUMBER)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the model's proposal."""
        del trial
        if not search_space:
            finished = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))
            seed = zlib.crc32(f"{self._seed} {finished}".encode())
            self._explorer = TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
            self.reason = f"explored by {type(self._explorer).__name__}: {self.next().why}".removesuffix(": ")
            return {}
        wanted = self._wanted()
        assert wanted is not None, "the search space says so"
        self.reason = self.next().why
        return {name: getattr(wanted, name) for name in search_space}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Draw one parameter of a trial that the model has nothing to say about."""
        return self._explorer.sample_independent(study, trial, param_name, param_distribution)

    def _wanted(self) -> Configuration | None:
        wanted = self.next().configuration
        return wanted if wanted is not None and self._space.holds(wanted) else None
