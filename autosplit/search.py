"""Optuna, and only Optuna: which configuration of those that fit is the fastest?

The caller evaluates, and proposes what it can tell by itself; nothing here runs a step or knows a model. What is
proposed is enqueued. Where nothing is, Optuna's sampler chooses. The study keeps every trial with all there is to it,
so that a search that was killed goes on where it was: its trials are not run again.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from autosplit.errors import InputError
from autosplit.printed import without_passwords
from autosplit.proposals import Proposal
from autosplit.sizes import rate_text
from autosplit.space import Configuration, Space, Trial

__all__ = ["check_storage", "search"]

_log = logging.getLogger(__name__)

Evaluate = Callable[[int, Configuration], Trial]
Propose = Callable[[Sequence[Trial]], Proposal]

_ENDED = "ended_at"
"""A study's attribute: trials with a lower number are those of searches that came to their end."""

MOST_REPEATS = 3
"""For each trial so many more are asked for, at most: a sampler may suggest over and over what was tried already."""


def search(
    space: Space,
    evaluate: Evaluate,
    propose: Propose,
    *,
    n_trials: int,
    seed: int,
    deadline_s: float | None = None,
    storage: str | None = None,
    study_name: str = "autosplit",
    on_trial: Callable[[Trial], None] = lambda _: None,
    on_trouble: Callable[[str], None] = lambda _: None,
) -> tuple[Trial, ...]:
    """Evaluate configurations until there is nothing more to expect.

    Args:
        space: What may be searched.
        evaluate: ``evaluate(number, configuration) -> Trial``; a configuration that fails is a failed trial.
        propose: ``propose(trials) -> Proposal``: what to try after these, or that it is enough. What is not in the
            space is left to the sampler.
        n_trials: At most so many.
        seed: Of Optuna's sampler; what it draws depends on the seed and the trials before, and on nothing else.
        deadline_s: `time.monotonic()` after which no trial begins; one is made in any case.
        storage: An Optuna URL to keep the study in; None keeps it in memory. A search that was killed goes on from the
            trials that it left there. Those of a search that came to its end only guide the sampler: their times are
            of another moment.
        study_name: Its name there.
        on_trial: Told of each trial, also of those that a killed search left.
        on_trouble: Told why the storage is done without, where it fails in mid-search.

    Returns:
        The trials in order, each configuration once; none where nothing fits.

    Raises:
        InputError: Optuna can't open the storage.
    """
    if space.region.largest_batch < 1:
        return ()
    _imported()
    kept = _Kept(storage, study_name, on_trouble)
    done, asked = _resumed(kept.study, space)
    for trial in done.values():
        on_trial(trial)
        _log_trial(trial, "of the search that was cut off")
    while len(done) < n_trials and asked < (1 + MOST_REPEATS) * n_trials and not _over(deadline_s, done):
        proposal = propose(tuple(done.values()))
        if proposal.enough:
            _log.info("the search ends after %d trials: %s", len(done), proposal.why)
            break
        sampler = _sampler(seed, asked)
        asked += 1
        asking, configuration = kept.ask(space, proposal.configuration, sampler)
        seen = done.get(configuration)
        try:
            trial = seen or evaluate(len(done), configuration)
        except BaseException:  # an interrupt, too: a trial that nobody ends would be running for ever in the storage
            kept.tell(asking, None)
            raise
        kept.tell(asking, trial)
        if seen is None:
            done[configuration] = trial
            _log_trial(trial, proposal.why if configuration == proposal.configuration else "drawn by Optuna's sampler")
            on_trial(trial)
    kept.end()
    return tuple(done.values())


def _log_trial(trial: Trial, why: str) -> None:
    """Say what a trial gave, and why it was made."""
    if trial.samples_per_s is None:
        gave = f"failed: {trial.failure}"
    else:
        gave = f"{rate_text(trial.samples_per_s)}, give or take {100 * trial.error_share:.1f} %"
    split, steps = trial.split, trial.accumulation_steps
    _log.info("trial %d, split %s x %d (%s): %s", trial.number, split, steps, why, gave)


class _Kept:
    """A study, and what becomes of it when its storage fails: the search goes on in memory.

    Args:
        storage: An Optuna URL, or None.
        study_name: Its name there.
        on_trouble: Told why the storage is done without.

    Raises:
        InputError: Optuna can't open the storage.
    """

    def __init__(self, storage: str | None, study_name: str, on_trouble: Callable[[str], None]) -> None:
        self.storage, self.study_name, self.on_trouble = storage, study_name, on_trouble
        self.study = _opened(storage, study_name)
        try:
            _end_unfinished(self.study)
        except Exception as error:
            raise _unusable(storage, error) from error

    def ask(self, space: Space, wanted: Configuration | None, sampler: Any) -> tuple[Any, Configuration]:
        """Begin a trial of what is wanted, or else of what the sampler likes."""
        try:
            return _asked(self.study, space, wanted, sampler)
        except Exception as error:  # noqa: BLE001  # whatever the database's driver raises
            self._do_without(error)
            return _asked(self.study, space, wanted, sampler)

    def tell(self, asking: Any, trial: Trial | None) -> None:
        """End a trial; None is one that was broken off."""
        import optuna

        try:
            if trial is None:
                self.study.tell(asking, state=optuna.trial.TrialState.FAIL)
            else:
                _tell(self.study, asking, trial)
        except optuna.exceptions.UpdateFinishedTrialError:
            pass  # another search of the same study took it for one that was cut off
        except Exception as error:  # noqa: BLE001  # whatever the database's driver raises
            self._do_without(error)

    def end(self) -> None:
        """Mark the search as one that came to its end."""
        try:
            self.study.set_user_attr(_ENDED, len(self.study.get_trials(deepcopy=False)))
        except Exception as error:  # noqa: BLE001  # whatever the database's driver raises
            self._do_without(error)

    def _do_without(self, error: Exception) -> None:
        if self.storage is None:
            raise error
        self.on_trouble(f"{_unusable(self.storage, error)}; the search went on without it")
        self.storage, self.study = None, _opened(None, self.study_name)


def check_storage(storage: str, study_name: str) -> None:
    """Open a storage, before anything is measured for it.

    Raises:
        InputError: Optuna can't open it, or write to it.
    """
    _imported()
    study = _opened(storage, study_name)
    try:
        study.set_user_attr("opened_by", "autosplit")
    except Exception as error:
        raise _unusable(storage, error) from error


def _unusable(storage: str | None, error: Exception) -> InputError:
    """Say that a storage can't be used, by what the database's driver says; a password in its URL is not shown."""
    told: BaseException = error
    while told.__cause__ is not None:
        told = told.__cause__
    reason = (str(told).strip().splitlines() or [type(told).__name__])[0]
    shown = without_passwords(str(storage))
    reason = without_passwords(reason.replace(str(storage), shown))
    return InputError(
        f"storage is {shown!r} ({reason[:200]}); expected a URL that Optuna opens and may write to, such as "
        "'sqlite:///study.db'; correct it, or leave it out"
    )


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


def _opened(storage: str | None, study_name: str) -> Any:
    """Open the study, without Optuna's log line about it."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(direction="maximize", storage=storage, study_name=study_name, load_if_exists=True)
    except Exception as error:
        if storage is None:
            raise
        raise _unusable(storage, error) from error
    finally:
        optuna.logging.set_verbosity(verbosity)


def _sampler(seed: int, asked: int) -> Any:
    """Make the sampler of one trial: what it draws must not depend on how often the search was killed before."""
    import optuna

    mixed = zlib.crc32(f"{seed} {asked}".encode())
    return optuna.samplers.TPESampler(seed=mixed, n_startup_trials=4)


def _end_unfinished(study: Any) -> None:
    """Fail what a killed search left waiting or running: nobody else ends it."""
    import optuna

    states = optuna.trial.TrialState
    while study.get_trials(deepcopy=False, states=(states.WAITING,)):
        study.tell(study.ask(), state=states.FAIL)
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        study.tell(trial.number, state=states.FAIL)


def _resumed(study: Any, space: Space) -> tuple[dict[Configuration, Trial], int]:
    """Return the trials of a search that did not come to its end, and how many it had asked for."""
    import optuna

    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    done: dict[Configuration, Trial] = {}
    asked = 0
    ended = study.user_attrs.get(_ENDED, 0)
    for frozen in study.get_trials(deepcopy=False, states=states):
        if isinstance(ended, int) and frozen.number < ended:
            continue
        asked += 1
        found = _remembered(frozen, len(done))
        others = len(space.region.replica_ceilings)
        if found is not None and found[0] not in done and space.holds(found[0]) and len(found[1].split) == 1 + others:
            done[found[0]] = found[1]
    return done, asked


def _remembered(frozen: Any, number: int) -> tuple[Configuration, Trial] | None:
    """Return a trial that an earlier process told the study of; None for one that is not whole."""
    attributes = frozen.user_attrs
    try:
        configuration = Configuration(**{name: int(frozen.params[name]) for name in _PARAMETERS})
        trial = Trial(
            number,
            configuration.gpu0_bsz,
            configuration.batch_size,
            configuration.accumulation_steps,
            split=tuple(int(share) for share in attributes["split"]),
            samples_per_s=frozen.value,
            error_share=float(attributes["error_share"]),
            peak_bytes=tuple(int(nbytes) for nbytes in attributes["peak_bytes"]),
            failure=attributes.get("failure"),
        )
    except (KeyError, TypeError, ValueError):
        return None
    return (configuration, trial) if _is_sound(trial) else None


def _is_sound(trial: Trial) -> bool:
    """Tell whether a trial may be what a search told its study: a database is anybody's to change."""
    count = len(trial.split)
    return (
        (trial.samples_per_s is None) == (trial.failure is not None)
        and (trial.samples_per_s is None or LEAST_RATE <= trial.samples_per_s <= 1 / LEAST_RATE)
        and 0 <= trial.error_share <= 1
        and sum(trial.split) == trial.batch_size
        and trial.split[0] == trial.gpu0_bsz
        and min(trial.split) >= 0
        and len(trial.peak_bytes) in ((count,) if trial.failure is None else (0, count))
        and min(trial.peak_bytes, default=0) >= 0
    )


LEAST_RATE = 1e-9
"""Samples per second below which, and above whose inverse, nothing was measured."""


def _over(deadline_s: float | None, done: dict[Configuration, Trial]) -> bool:
    return deadline_s is not None and bool(done) and time.monotonic() >= deadline_s


_PARAMETERS = ("accumulation_steps", "batch_size", "gpu0_bsz")


def _parameters(configuration: Configuration) -> dict[str, int]:
    return {name: getattr(configuration, name) for name in _PARAMETERS}


def _asked(study: Any, space: Space, wanted: Configuration | None, sampler: Any) -> tuple[Any, Configuration]:
    study.sampler = sampler
    if wanted is not None and space.holds(wanted):
        study.enqueue_trial(_parameters(wanted))
    asking = study.ask()
    return asking, _suggested(asking, space)


def _suggested(trial: Any, space: Space) -> Configuration:
    """Ask for the parameters one within the bounds that the one before leaves."""
    steps = trial.suggest_int("accumulation_steps", *space.steps_bounds())
    batches = space.batch_bounds(steps)
    while batches is None:  # no batch makes an effective batch in so many micro-steps: one fewer has larger ones
        steps -= 1
        batches = space.batch_bounds(steps)
    batch_size = trial.suggest_int("batch_size", *batches)
    shares = space.region_of(steps).gpu0_bounds(batch_size)
    assert shares is not None, (batch_size, space)
    return Configuration(trial.suggest_int("gpu0_bsz", *shares), batch_size, steps)


def _tell(study: Any, asking: Any, trial: Trial) -> None:
    """Tell the study of a trial: one that failed breaks a constraint, and has no value that it could be taken for."""
    import optuna

    asking.set_user_attr("split", list(trial.split))
    asking.set_user_attr("error_share", trial.error_share)
    asking.set_user_attr("peak_bytes", list(trial.peak_bytes))
    asking.set_constraint("fits", 0.0 if trial.failure is None else 1.0)
    if trial.failure is None:
        study.tell(asking, trial.samples_per_s)
    else:
        asking.set_user_attr("failure", trial.failure)
        study.tell(asking, state=optuna.trial.TrialState.PRUNED)
