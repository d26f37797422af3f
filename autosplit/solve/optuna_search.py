"""Search for the fastest configuration that fits, with the trials in an Optuna study.

The caller's proposals are enqueued in the study. Without a proposal, Optuna's TPE sampler chooses the trial.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autosplit.solve.proposals import Proposal
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.trial import Trial
from autosplit.text import rate_text

_log = logging.getLogger(__name__)

Evaluate = Callable[[int, Configuration], Trial]
Propose = Callable[[Sequence[Trial]], Proposal]

MOST_REPEATS = 3
"""Maximum number of repeated suggestions per requested trial, because a sampler may repeat configurations."""

STARTUP_TRIALS = 4
"""Number of trials before TPE stops drawing at random, including the cost model's trials at the start."""


def search(
    space: Space,
    evaluate: Evaluate,
    propose: Propose,
    *,
    n_trials: int,
    seed: int,
    sampler: Any = None,
    deadline_s: float | None = None,
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> tuple[Trial, ...]:
    """Evaluate configurations until no gain is expected.

    Args:
        evaluate: ``evaluate(number, configuration) -> Trial``. If a configuration fails, it returns a failed trial.
        propose: ``propose(trials) -> Proposal``: the next configuration, or the end. If a proposal is outside the
            space, the sampler draws the trial instead.
        seed: Seed of TPE. Its draws depend only on the seed and the finished trials.
        sampler: An Optuna sampler that draws all `n_trials` trials. Then `propose` is not used.
        deadline_s: `time.monotonic()` after which no trial begins, except the first.

    Returns:
        The trials in order. Empty if nothing fits.
    """
    if space.region.largest_batch < 1:
        return ()
    _imported()
    import optuna

    running = _Search(space, evaluate, propose, n_trials, seed, sampler, deadline_s, on_trial)
    with _quiet_optuna():
        study = optuna.create_study(direction="maximize")
    while not running.is_over():
        running.make_trial(study)
    return tuple(running.done.values())


@dataclass
class _Search:
    space: Space
    evaluate: Evaluate
    propose: Propose
    n_trials: int
    seed: int
    sampler: Any
    deadline_s: float | None
    on_trial: Callable[[Trial], None]
    done: dict[Configuration, Trial] = field(default_factory=dict)
    num_asked: int = 0
    _proposed: tuple[int, Proposal] | None = None

    def is_over(self) -> bool:
        if len(self.done) >= self.n_trials or self.num_asked >= (1 + MOST_REPEATS) * self.n_trials:
            why = f"{len(self.done)} of {self.n_trials} trials ran"
        elif self.deadline_s is not None and self.done and time.monotonic() >= self.deadline_s:
            why = "the time limit ended"
        elif self.sampler is None and self._next().enough:
            why = self._next().why
        else:
            return False
        _log.info("the search ends after %d trials: %s", len(self.done), why)
        return True

    def _next(self) -> Proposal:
        if self._proposed is None or self._proposed[0] != len(self.done):
            self._proposed = len(self.done), self.propose(tuple(self.done.values()))
        return self._proposed[1]

    def make_trial(self, study: Any) -> None:
        with _quiet_optuna():
            why = self._prepare(study)
            asked = study.ask()
            configuration = _suggested(asked, self.space)
        self.num_asked += 1
        if not self.space.holds(configuration):
            # No batch size gives the effective batch in this many micro-steps.
            self._tell(study, asked, None)
            return
        is_new = configuration not in self.done
        if is_new:
            self.done[configuration] = self.evaluate(len(self.done), configuration)
        trial = self.done[configuration]
        self._tell(study, asked, trial)
        if is_new:
            _log_trial(trial, why)
            self.on_trial(trial)

    def _prepare(self, study: Any) -> str:
        """Enqueue the proposal, or set the sampler. Return the reason for the next trial."""
        import optuna

        if self.sampler is not None:
            study.sampler = self.sampler
            return f"proposed by {type(self.sampler).__name__}"
        study.sampler = optuna.samplers.TPESampler(
            seed=zlib.crc32(f"{self.seed} {self.num_asked}".encode()), n_startup_trials=STARTUP_TRIALS
        )
        proposal = self._next()
        if proposal.configuration is not None and self.space.holds(proposal.configuration):
            study.enqueue_trial(asdict(proposal.configuration))
            return proposal.why
        return f"proposed by TPESampler: {proposal.why}".removesuffix(": ")

    @staticmethod
    def _tell(study: Any, asked: Any, trial: Trial | None) -> None:
        import optuna

        rate = None if trial is None else trial.samples_per_s
        if hasattr(asked, "set_constraint"):  # Optuna < 5 has no constraints: the trial is only pruned.
            asked.set_constraint("fits", 0.0 if trial is not None and trial.failure is None else 1.0)
        with _quiet_optuna():
            if rate is None:
                study.tell(asked, state=optuna.trial.TrialState.PRUNED)
            else:
                study.tell(asked, rate)


def _log_trial(trial: Trial, why: str) -> None:
    if trial.samples_per_s is None:
        gave = f"failed: {trial.failure}"
    else:
        gave = f"{rate_text(trial.samples_per_s)}, +/- {100 * trial.error_share:.1f}%"
    split, steps = trial.split, trial.accumulation_steps
    _log.info("trial %d, split %s x %d (%s): %s", trial.number, split, steps, why, gave)


def _imported() -> None:
    """Import Optuna in a new thread.

    During the import, Optuna stores the error of a missing database driver, which keeps the calling frames and their
    variables alive. In the caller's thread, that would include the model copies of the process's first tuning.
    """
    if "optuna" not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=("optuna",), name="autosplit-import")
        thread.start()
        thread.join()
    importlib.import_module("optuna")


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.ERROR))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _suggested(trial: Any, space: Space) -> Configuration:
    fewest, most = space.steps_bounds()
    steps = trial.suggest_int("accumulation_steps", fewest, most)
    batches = space.batch_bounds(max(1, steps)) or (1, 1)
    batch_size = trial.suggest_int("batch_size", *batches)
    shares = space.region_of(steps).gpu0_bounds(batch_size) or (0, 0)
    return Configuration(trial.suggest_int("gpu0_bsz", *shares), batch_size, steps)
