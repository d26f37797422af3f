"""The search by Optuna: which configuration of those that fit is the fastest?

The caller evaluates and proposes; nothing here runs a step or knows a model. The loop, the storage and the resumption
are Optuna's. The study keeps every trial with its reason, so that a search that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from autosplit.errors import InputError
from autosplit.solve.memory import Ceiling
from autosplit.solve.proposals import Proposal
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.trial import Trial, configuration_of
from autosplit.text import rate_text, without_passwords

_log = logging.getLogger(__name__)

Evaluate = Callable[[int, Configuration], Trial]
Propose = Callable[[Sequence[Trial]], Proposal]

_ENDED = "ended_at"
"""A study's attribute: trials with a lower number are those of tunings that came to their end."""

_CEILINGS = "ceilings"
"""A study's attribute: the ceilings, by key, of a search that did not come to its end."""

MOST_REPEATS = 3
"""Trials asked for, at most, beyond each one made: a sampler may suggest over and over what was tried already."""


def search(
    space: Space,
    evaluate: Evaluate,
    propose: Propose,
    *,
    n_trials: int,
    seed: int,
    sampler: Any = None,
    deadline_s: float | None = None,
    storage: str | None = None,
    study_name: str = "autosplit",
    on_trial: Callable[[Trial], None] = lambda _: None,
    on_trouble: Callable[[str], None] = lambda _: None,
) -> tuple[Trial, ...]:
    """Evaluate configurations until there is nothing more to expect.

    Args:
        evaluate: ``evaluate(number, configuration) -> Trial``; a configuration that fails is a failed trial.
        propose: ``propose(trials) -> Proposal``: what to try after these, or that it is enough. What is not in the
            space is left to the explorer.
        seed: Of the explorer, which draws by it and the trials before, and by nothing else.
        sampler: One of Optuna's, which draws every trial instead; then nothing is proposed, and all trials are made.
        deadline_s: `time.monotonic()` after which no trial begins; one is made in any case.
        storage: An Optuna URL to keep the study in; None keeps it in memory. A search that was killed goes on from the
            trials that it left there. Those before `CeilingStore.end` only guide the sampler: their times are of
            another moment. Trials that somebody enqueued there are made first.
        on_trouble: Told why the storage is done without, where it fails in mid-search.

    Raises:
        InputError: Optuna can't open the storage.
    """
    if space.region.largest_batch < 1:
        return ()
    _imported()
    running = _Search(space, evaluate, propose, n_trials, seed, sampler, deadline_s, on_trial)
    study = _opened(storage, study_name)
    try:
        running.resume(study)
    except Exception as error:
        raise _unusable(storage, error) from error
    while not running.is_over:
        try:
            running.optimize(study)
        except Exception as error:
            if error is running.raised or storage is None:
                raise
            on_trouble(f"{_unusable(storage, error)}; the search went on without it")
            storage, study = None, _opened(None, study_name)
    return tuple(running.done.values())


@dataclass
class _Search:
    """The objective that Optuna's loop calls; its arguments are those of `search`."""

    space: Space
    evaluate: Evaluate
    propose: Propose
    n_trials: int
    seed: int
    sampler: Any
    deadline_s: float | None
    on_trial: Callable[[Trial], None]
    done: dict[Configuration, Trial] = field(default_factory=dict)
    asked: int = 0
    raised: BaseException | None = None
    fresh: tuple[Trial, str] | None = None

    def __post_init__(self) -> None:
        from autosplit.solve.cost_model_sampler import CostModelSampler

        self.model: CostModelSampler | None = None
        if self.sampler is None:
            model = CostModelSampler(self.propose, self.done.values, self.space, seed=self.seed)
            self.sampler = self.model = model

    def resume(self, study: Any) -> None:
        """Take over the trials of a search that did not come to its end; what it left running is failed."""
        import optuna

        for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
        done, self.asked = _resumed(study, self.space)
        self.done.update(done)
        for trial in done.values():
            self.on_trial(trial)
            _log_trial(trial, "of the search that was cut off")

    def optimize(self, study: Any) -> None:
        """Let Optuna ask and tell until the search is over."""
        study.sampler = self.sampler
        try:
            with _quiet_optuna():
                study.optimize(self._objective, callbacks=[self._told])
        finally:
            self._tell_fresh()  # it ran, whatever became of its place in the study

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to try, or no more time to."""
        if len(self.done) >= self.n_trials or self.asked >= (1 + MOST_REPEATS) * self.n_trials:
            return True
        if self.deadline_s is not None and self.done and time.monotonic() >= self.deadline_s:
            return True
        return self.model is not None and self.model.next().enough

    def _told(self, study: Any, _trial: Any) -> None:
        """Tell of the trial that the study has now, and end the loop where it was the last."""
        self._tell_fresh()
        if self.is_over:
            proposal = Proposal() if self.model is None else self.model.next()
            why = proposal.why if proposal.enough else "there are no more trials to make, or no time"
            _log.info("the search ends after %d trials: %s", len(self.done), why)
            study.stop()

    def _tell_fresh(self) -> None:
        """Tell of the trial that was evaluated last, once."""
        if self.fresh is not None:
            (trial, why), self.fresh = self.fresh, None
            _log_trial(trial, why)
            with self._ours():
                self.on_trial(trial)

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        """Remember what the evaluation raises, or who is told: whatever else ends Optuna's loop is the storage's."""
        try:
            yield
        except BaseException as error:
            self.raised = error
            raise

    def _objective(self, asking: Any) -> float:
        """Evaluate what Optuna suggests, and prune what can't run; what was evaluated before is told again, not run."""
        import optuna

        self.asked += 1
        enqueued = asking.study.get_trials(deepcopy=False)[asking.number].system_attrs.get("fixed_params")
        try:
            configuration = _suggested(asking, self.space)
        finally:
            drawn = f"drawn by {type(self.sampler).__name__}" if self.model is None else self.model.reason
            why = drawn if enqueued is None else "enqueued in the study"
            asking.set_user_attr("why", why)
        trial = self.done.get(configuration)
        if trial is None:
            with self._ours():
                trial = self.evaluate(len(self.done), configuration)
            self.done[configuration] = trial
            self.fresh = trial, why
        asking.set_user_attr("split", list(trial.split))
        asking.set_user_attr("error_share", trial.error_share)
        asking.set_user_attr("peak_bytes", list(trial.peak_bytes))
        _set_fits(asking, fits=trial.failure is None)
        if trial.samples_per_s is None:
            asking.set_user_attr("failure", trial.failure)
            asking.set_user_attr("failed_device", trial.failed_device)
            raise optuna.TrialPruned(trial.failure)
        return trial.samples_per_s


def _log_trial(trial: Trial, why: str) -> None:
    """Say what a trial gave, and why it was made."""
    if trial.samples_per_s is None:
        gave = f"failed: {trial.failure}"
    else:
        gave = f"{rate_text(trial.samples_per_s)}, give or take {100 * trial.error_share:.1f} %"
    split, steps = trial.split, trial.accumulation_steps
    _log.info("trial %d, split %s x %d (%s): %s", trial.number, split, steps, why, gave)


class CeilingStore:
    """Keeps the ceilings of a search in its study, so that one which was killed need not measure them again."""

    def __init__(self, storage: str, study_name: str) -> None:
        _imported()
        self._study = _opened(storage, study_name)
        try:
            self._study.set_user_attr("opened_by", "autosplit")
            kept = self._study.user_attrs.get(_CEILINGS)
            self._kept = dict(kept) if isinstance(kept, dict) else {}  # a database is anybody's to change
        except Exception as error:
            raise _unusable(storage, error) from error

    def get(self, key: str, largest_batch: int) -> Ceiling | None:
        """Return a ceiling that a killed search left; None where there is none, or what is there can't be one."""
        try:
            found = msgspec.convert(self._kept[key], Ceiling)
        except (KeyError, msgspec.ValidationError):
            return None
        return found if 0 <= found.batch_size <= largest_batch else None

    def put(self, key: str, ceiling: Ceiling) -> None:
        """Keep a ceiling; a storage that fails is the search's to tell of."""
        self._kept[key] = msgspec.to_builtins(ceiling)
        with contextlib.suppress(Exception):
            self._study.set_user_attr(_CEILINGS, self._kept)

    def end(self) -> None:
        """Let no later search go on from what is there: the plan is found, and one after it is of another moment."""
        with contextlib.suppress(Exception):
            self._study.set_user_attr(_ENDED, len(self._study.get_trials(deepcopy=False)))
            self._study.set_user_attr(_CEILINGS, {})


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


def _imported() -> None:
    """Import Optuna in a new thread, which has no callers.

    While it is imported it keeps the error of a database driver that is not there, and with that the frames that called
    it and all their variables: for good, the copies of the process's first tuning.
    """
    if "optuna" not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=("optuna",), name="autosplit-import")
        thread.start()
        thread.join()
    importlib.import_module("optuna")


def _opened(storage: str | None, study_name: str) -> Any:
    import optuna

    with _quiet_optuna():
        try:
            return optuna.create_study(
                direction="maximize", storage=storage, study_name=study_name, load_if_exists=True
            )
        except Exception as error:
            if storage is None:
                raise
            raise _unusable(storage, error) from error


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Keep Optuna's log to what a user has to know: each trial is in our own."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.ERROR))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


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
        trial = _remembered(frozen, len(done))
        if trial is None or len(trial.split) != len(space.region.ceilings):
            continue
        configuration = configuration_of(trial)
        if configuration not in done and space.holds(configuration):
            done[configuration] = trial
    return done, asked


def _remembered(frozen: Any, number: int) -> Trial | None:
    """Return a trial that an earlier process told the study of; None for one that is not whole."""
    told = {**frozen.user_attrs, **frozen.params, "number": number, "samples_per_s": frozen.value}
    try:
        trial = replace(msgspec.convert(told, Trial))  # that leaves defaults to the class, and JSON without them
    except msgspec.ValidationError:
        return None
    return trial if _is_sound(trial) else None


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


def _set_fits(trial: Any, *, fits: bool) -> None:
    """Tell Optuna as a constraint whether a trial's configuration fits.

    Optuna < 5 has no such constraints. There its samplers avoid the trial only because it is pruned.
    """
    if hasattr(trial, "set_constraint"):
        trial.set_constraint("fits", 0.0 if fits else 1.0)


LEAST_RATE = 1e-9
"""Samples per second below which, and above whose inverse, nothing was measured."""


def _suggested(trial: Any, space: Space) -> Configuration:
    """Ask for the parameters one within the bounds that the one before leaves; prune what is not in the space."""
    import optuna

    fewest, most = space.steps_bounds()
    steps = trial.suggest_int("accumulation_steps", fewest, most)
    batches = space.batch_bounds(max(1, steps)) or (1, 1)
    batch_size = trial.suggest_int("batch_size", *batches)
    shares = space.region_of(steps).gpu0_bounds(batch_size) or (0, 0)
    configuration = Configuration(trial.suggest_int("gpu0_bsz", *shares), batch_size, steps)
    if not space.holds(configuration):
        # No batch makes an effective batch in so many micro-steps, or somebody enqueued what does not fit.
        _set_fits(trial, fits=False)
        trial.set_user_attr("failure", "not in the search space: see the bounds of its parameters")
        raise optuna.TrialPruned(trial.user_attrs["failure"])
    return configuration
