"""Optuna, and only Optuna: which configuration of those that fit is the fastest?

The caller evaluates; nothing here runs a step. What the solver answered is tried first, its neighbours next, and
Optuna's sampler goes on where the model may be wrong.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from autosplit.errors import InputError
from autosplit.space import Configuration, Space, Trial

__all__ = ["PATIENCE", "search"]

PATIENCE = 12
"""Trials in a row that may bring nothing beyond noise before the search ends."""


Evaluate = Callable[[int, Configuration], Trial]


def search(
    space: Space,
    evaluate: Evaluate,
    *,
    first: Sequence[Configuration],
    n_trials: int,
    seed: int,
    patience: int = PATIENCE,
    deadline_s: float | None = None,
    storage: str | None = None,
    study_name: str = "autosplit",
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> tuple[Trial, ...]:
    """Evaluate configurations until there is nothing more to expect.

    Args:
        space: What may be searched.
        evaluate: ``evaluate(number, configuration) -> Trial``; a configuration that fails is a failed trial.
        first: Tried first, in this order; what is not in the space is left out.
        n_trials: At most so many.
        seed: Of Optuna's sampler.
        patience: Trials in a row that may bring nothing beyond noise before the search ends.
        deadline_s: `time.monotonic()` after which no trial begins; one is made in any case.
        storage: An Optuna URL to keep the study in; None keeps it in memory. What an earlier search left there guides
            the sampler; its times are of another moment, so `first` is evaluated again.
        study_name: Its name there.
        on_trial: Told of each trial.

    Returns:
        The trials in order, each configuration once; none where nothing fits.

    Raises:
        InputError: Optuna can't open the storage.
    """
    if space.region.largest_batch < 1:
        return ()
    optuna = _imported()
    study = _opened(storage, study_name, seed)
    _drop_waiting(study)
    for configuration in dict.fromkeys(first):
        if space.holds(configuration):
            study.enqueue_trial(_parameters(configuration))
    done: dict[Configuration, Trial] = {}
    asked = 0
    while len(done) < n_trials and asked < 4 * n_trials and not _over(deadline_s, done):
        asked += 1
        asking = study.ask()
        configuration = _suggested(asking, space)
        seen = done.get(configuration)
        try:
            trial = seen or evaluate(len(done), configuration)
        except BaseException:  # an interrupt, too: a trial that nobody ends would be running for ever in the storage
            study.tell(asking, state=optuna.trial.TrialState.FAIL)
            raise
        _tell(study, asking, trial)
        if seen is None:
            done[configuration] = trial
            on_trial(trial)
            if _settled(list(done.values()), patience):
                break
    return tuple(done.values())


def _imported() -> Any:
    """Import Optuna where nobody waits with a model in hand.

    While it is imported it catches the error of a database driver that is not there, and keeps it for later. An error
    keeps its frame, a frame the frames that called it, and these all their variables: for good, the copies of the
    process's first tuning. A new thread has no callers.
    """
    if "optuna" not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=("optuna",), name="autosplit-import")
        thread.start()
        thread.join()
    return importlib.import_module("optuna")


def _opened(storage: str | None, study_name: str, seed: int) -> Any:
    """Open the study, without Optuna's log line about it."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=4),
            storage=storage,
            study_name=study_name,
            load_if_exists=True,
        )
    except Exception as error:
        if storage is None:
            raise
        # Whatever the database's driver raises: the URL is the user's.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"storage is {storage!r} ({reason}); expected a URL that Optuna opens, such as 'sqlite:///study.db'; "
            "correct it, or leave it out"
        ) from error
    finally:
        optuna.logging.set_verbosity(verbosity)


def _drop_waiting(study: Any) -> None:
    """End what an interrupted search left to be tried: it may not be in this space."""
    import optuna

    while study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,)):
        study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)


def _over(deadline_s: float | None, done: dict[Configuration, Trial]) -> bool:
    return deadline_s is not None and bool(done) and time.monotonic() >= deadline_s


def _parameters(configuration: Configuration) -> dict[str, int]:
    return {
        "accumulation_steps": configuration.accumulation_steps,
        "batch_size": configuration.batch_size,
        "gpu0_bsz": configuration.gpu0_bsz,
    }


def _suggested(trial: Any, space: Space) -> Configuration:
    """Ask for the parameters one within the bounds that the one before leaves."""
    steps = trial.suggest_int("accumulation_steps", *space.steps_bounds())
    batches = space.batch_bounds(steps)
    while batches is None:  # no batch makes an effective batch in so many micro-steps: one fewer has larger ones
        steps -= 1
        batches = space.batch_bounds(steps)
    batch_size = trial.suggest_int("batch_size", *batches)
    shares = space.region.gpu0_bounds(batch_size)
    assert shares is not None, (batch_size, space)
    return Configuration(trial.suggest_int("gpu0_bsz", *shares), batch_size, steps)


def _tell(study: Any, asking: Any, trial: Trial) -> None:
    import optuna

    if trial.failure is not None:
        asking.set_user_attr("failure", trial.failure)
        study.tell(asking, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(asking, trial.samples_per_s)


def _settled(trials: list[Trial], patience: int) -> bool:
    """Tell whether the last trials, more than there are neighbours to try, brought nothing beyond noise."""
    good = [trial for trial in trials if trial.samples_per_s is not None]
    if len(trials) <= patience or not good:
        return False
    before = [trial.samples_per_s or 0.0 for trial in trials[:-patience]]
    since = [trial.samples_per_s or 0.0 for trial in trials[-patience:]]
    noise = max(0.001, *(trial.error_share for trial in good))
    return max(since) <= max(before) * (1 + noise)
