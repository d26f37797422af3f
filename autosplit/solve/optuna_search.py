"""Search for the fastest configuration that fits, with the trials in an Optuna study.

The caller's proposals are enqueued in the study. Without a proposal, Optuna's TPE sampler chooses the trial. The study
stores every trial with its reason, so a killed search can resume.
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
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from autosplit.errors import InputError
from autosplit.notes import Note
from autosplit.solve.memory import Ceiling
from autosplit.solve.proposals import Proposal
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.trial import Trial, configuration_of
from autosplit.text import rate_text, without_passwords

_log = logging.getLogger(__name__)

Evaluate = Callable[[int, Configuration], Trial]
Propose = Callable[[Sequence[Trial]], Proposal]

_ENDED = "ended_at"
"""User attribute of a study: trials with a lower number belong to finished searches."""

_CEILINGS = "ceilings"
"""User attribute of a study: the ceilings of an unfinished search, by key."""

MOST_REPEATS = 3
"""Maximum number of repeated suggestions per requested trial, because a sampler may repeat configurations."""

STARTUP_TRIALS = 4
"""Number of trials before TPE stops drawing at random, including the cost model's trials at the start."""

_WHY = "why"
"""User attribute of a trial: the reason for it."""


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
    on_trouble: Callable[[Note], None] = lambda _: None,
) -> tuple[Trial, ...]:
    """Evaluate configurations until no gain is expected.

    Args:
        evaluate: ``evaluate(number, configuration) -> Trial``. If a configuration fails, it returns a failed trial.
        propose: ``propose(trials) -> Proposal``: the next configuration, or the end. If a proposal is outside the
            space, the sampler draws the trial instead.
        seed: Seed of TPE. Its draws depend only on the seed and the finished trials.
        sampler: An Optuna sampler that draws all `n_trials` trials. Then `propose` is not used.
        deadline_s: `time.monotonic()` after which no trial begins, except the first.
        storage: An Optuna URL for the study, or None for memory. A killed search continues from its trials there.
            Trials from before `CeilingStore.end` only guide the sampler, because their times may be out of date. Trials
            that a user enqueued run first.
        on_trouble: Called with a note if the storage fails. The search continues without the storage.

    Returns:
        The trials in order. Empty if nothing fits.

    Raises:
        InputError: Optuna can't open the storage.
    """
    if space.region.largest_batch < 1:
        return ()
    _imported()
    study = _opened(storage, study_name)
    running = _Search(space, evaluate, propose, n_trials, seed, sampler, deadline_s, on_trial)
    try:
        running.resume(study)
    except Exception as error:
        raise _unusable(storage, error) from error
    while not running.is_over():
        try:
            running.make_trial(study)
        except _StorageError as failure:
            if storage is None:
                raise failure.error from None
            text = f"{_unusable(storage, failure.error)} The search continued without it."
            on_trouble(Note("storage-failed", text))
            storage, study = None, _opened(None, study_name)
    return tuple(running.done.values())


class _StorageError(Exception):
    """An error of the study, not of the caller's functions."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@contextlib.contextmanager
def _talking_to_optuna() -> Iterator[None]:
    with _quiet_optuna():
        try:
            yield
        except Exception as error:
            raise _StorageError(error) from error


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

    def resume(self, study: Any) -> None:
        for trial in study.get_trials(deepcopy=False, states=(_state("RUNNING"),)):
            study.tell(trial.number, state=_state("FAIL"), skip_if_finished=True)
        self.done, self.num_asked = _resumed(study, self.space)
        for trial in self.done.values():
            self.on_trial(trial)
            _log_trial(trial, "from the interrupted search")

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
        self.num_asked += 1
        drawn = self._prepare(study)
        with _talking_to_optuna():
            asked = study.ask()
            is_enqueued = "fixed_params" in study.get_trials(deepcopy=False)[asked.number].system_attrs
            why = asked.user_attrs.get(_WHY, "enqueued in the study") if is_enqueued else drawn
            asked.set_user_attr(_WHY, why)
            configuration = _suggested(asked, self.space)
            if not self.space.holds(configuration):
                # No batch size gives the effective batch in this many micro-steps, or a user enqueued an invalid trial.
                _set_fits(asked, fits=False)
                asked.set_user_attr("failure", "not in the search space; see the bounds of its parameters")
                study.tell(asked, state=_state("PRUNED"))
                return
        is_new = configuration not in self.done
        if is_new:
            try:
                self.done[configuration] = self.evaluate(len(self.done), configuration)
            except BaseException:
                with contextlib.suppress(Exception):
                    study.tell(asked, state=_state("FAIL"))
                raise
        trial = self.done[configuration]
        try:
            with _talking_to_optuna():
                _tell(study, asked, trial)
        finally:  # store the trial in the study first, because the caller may raise KeyboardInterrupt
            if is_new:
                _log_trial(trial, why)
                self.on_trial(trial)

    def _prepare(self, study: Any) -> str:
        """Enqueue the proposal, or set the sampler. Return the reason for a trial that the sampler draws."""
        import optuna

        if self.sampler is not None:
            study.sampler = self.sampler
            return f"proposed by {type(self.sampler).__name__}"
        proposal, wanted = self._next(), self._next().configuration
        with _talking_to_optuna():
            is_free = not study.get_trials(deepcopy=False, states=(_state("WAITING"),))
            if wanted is not None and self.space.holds(wanted) and is_free:
                study.enqueue_trial(asdict(wanted), user_attrs={_WHY: proposal.why})
            finished = len(study.get_trials(deepcopy=False, states=(_state("COMPLETE"), _state("PRUNED"))))
        seed = zlib.crc32(f"{self.seed} {finished}".encode())
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
        return f"proposed by TPESampler: {proposal.why}".removesuffix(": ")


def _state(name: str) -> Any:
    import optuna

    return optuna.trial.TrialState[name]


def _tell(study: Any, asked: Any, trial: Trial) -> None:
    asked.set_user_attr("split", list(trial.split))
    asked.set_user_attr("error_share", trial.error_share)
    asked.set_user_attr("peak_bytes", list(trial.peak_bytes))
    _set_fits(asked, fits=trial.failure is None)
    if trial.samples_per_s is None:
        asked.set_user_attr("failure", trial.failure)
        asked.set_user_attr("failed_device", trial.failed_device)
        study.tell(asked, state=_state("PRUNED"))
    else:
        study.tell(asked, trial.samples_per_s)


def _log_trial(trial: Trial, why: str) -> None:
    if trial.samples_per_s is None:
        gave = f"failed: {trial.failure}"
    else:
        gave = f"{rate_text(trial.samples_per_s)}, +/- {100 * trial.error_share:.1f}%"
    split, steps = trial.split, trial.accumulation_steps
    _log.info("trial %d, split %s x %d (%s): %s", trial.number, split, steps, why, gave)


class CeilingStore:
    """Store the ceilings of a search in its study, so that a resumed search need not measure them again."""

    def __init__(self, storage: str, study_name: str) -> None:
        _imported()
        self._study = _opened(storage, study_name)
        try:
            self._study.set_user_attr("opened_by", "autosplit")
            kept = self._study.user_attrs.get(_CEILINGS)
            self._kept = dict(kept) if isinstance(kept, dict) else {}  # other programs may have changed the database
        except Exception as error:
            raise _unusable(storage, error) from error

    def get(self, key: str, largest_batch: int) -> Ceiling | None:
        """Return a ceiling of a killed search, or None if there is no valid ceiling for this key."""
        try:
            found = msgspec.convert(self._kept[key], Ceiling)
        except (KeyError, msgspec.ValidationError):
            return None
        return found if 0 <= found.batch_size <= largest_batch else None

    def put(self, key: str, ceiling: Ceiling) -> None:
        """Store a ceiling. Ignore errors of the storage, because the search reports them."""
        self._kept[key] = msgspec.to_builtins(ceiling)
        with contextlib.suppress(Exception):
            self._study.set_user_attr(_CEILINGS, self._kept)

    def end(self) -> None:
        """Mark the search as finished. Later searches do not resume it, because its times may be out of date."""
        with contextlib.suppress(Exception):
            self._study.set_user_attr(_ENDED, len(self._study.get_trials(deepcopy=False)))
            self._study.set_user_attr(_CEILINGS, {})


def _unusable(storage: str | None, error: Exception) -> InputError:
    told: BaseException = error
    while told.__cause__ is not None:
        told = told.__cause__
    reason = (str(told).strip().splitlines() or [type(told).__name__])[0]
    shown = without_passwords(str(storage))
    reason = without_passwords(reason.replace(str(storage), shown))
    return InputError(
        f"storage is {shown!r} ({reason[:200]}). Expected a URL that Optuna can open and write to, such as "
        "'sqlite:///study.db'.",
        code="storage-unusable",
    )


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
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.ERROR))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _resumed(study: Any, space: Space) -> tuple[dict[Configuration, Trial], int]:
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
    told = {**frozen.user_attrs, **frozen.params, "number": number, "samples_per_s": frozen.value}
    try:
        return replace(msgspec.convert(told, Trial))  # convert() leaves defaults unset, and JSON omits them
    except msgspec.ValidationError:
        return None


def _set_fits(trial: Any, *, fits: bool) -> None:
    """Report to Optuna, as a constraint, whether a trial's configuration fits.

    Optuna < 5 has no such constraints, and its samplers avoid the trial only because it is pruned.
    """
    if hasattr(trial, "set_constraint"):
        trial.set_constraint("fits", 0.0 if fits else 1.0)


def _suggested(trial: Any, space: Space) -> Configuration:
    fewest, most = space.steps_bounds()
    steps = trial.suggest_int("accumulation_steps", fewest, most)
    batches = space.batch_bounds(max(1, steps)) or (1, 1)
    batch_size = trial.suggest_int("batch_size", *batches)
    shares = space.region_of(steps).gpu0_bounds(batch_size) or (0, 0)
    return Configuration(trial.suggest_int("gpu0_bsz", *shares), batch_size, steps)
