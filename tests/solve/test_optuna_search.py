"""The search finds the optimum, is reproducible, repeats no trial, and handles failures and time limits."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import optuna
import pytest
from handmade import made_ceiling
from raised import raises
from sqlalchemy import Engine, event

from autosplit.errors import InputError
from autosplit.solve.memory import MemoryFit, Region
from autosplit.solve.optuna_search import CeilingStore, search
from autosplit.solve.proposals import Proposal
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.trial import Trial

REGION = Region(MemoryFit(0.0, 1.0, 0.05), 40, 32, (48, 48), 128)
SPACE = Space(REGION, (256, 256), 8)


optuna_5 = pytest.mark.skipif(
    not hasattr(optuna.Trial, "set_constraint"),
    reason=f"optuna {optuna.__version__} has no constraints of trials, and draws and times them differently",
)


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk():
    """Make SQLite's commits not wait for the disk, which would take most of the time of these tests."""

    def connected(connection, _record) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", connected)
    yield
    event.remove(Engine, "connect", connected)


def rate(configuration: Configuration) -> float:
    """A rate with its maximum at 14 of 86 samples in 3 micro-steps."""
    distance = abs(configuration.gpu0_bsz - 14) / 32 + abs(configuration.batch_size - 86) / 128
    return 1000.0 * math.exp(-distance) / (1 + 0.05 * (configuration.accumulation_steps - 3))


class Evaluation:
    """Evaluates a formula, and records its calls."""

    def __init__(self, formula=rate, failing=lambda configuration: False) -> None:
        self.asked: list[Configuration] = []
        self.formula, self.failing = formula, failing

    def __call__(self, number: int, configuration: Configuration) -> Trial:
        assert number == len(self.asked)  # of new trials only, because saved trials keep their times
        self.asked.append(configuration)
        c = configuration
        split = (c.gpu0_bsz, c.batch_size - c.gpu0_bsz, 0)
        if self.failing(c):
            return Trial(number, c.gpu0_bsz, c.batch_size, c.accumulation_steps, split, failure="sim:0 ran out")
        rate_of_c, peaks = self.formula(c), (1, 2, 3)
        return Trial(number, c.gpu0_bsz, c.batch_size, c.accumulation_steps, split, rate_of_c, peak_bytes=peaks)


def proposing(first, patience: int | None = None):
    """Propose configurations in order. Then use the sampler until a number of trials brought no gain."""

    def propose(trials) -> Proposal:
        tried = set(configurations(trials))
        rates = [trial.samples_per_s or 0.0 for trial in trials]
        if patience is not None and len(rates) > patience and max(rates[-patience:]) <= max(rates[:-patience]):
            return Proposal(enough=True)
        return Proposal(next((c for c in first if c not in tried), None))

    return propose


def run(
    evaluation: Evaluation,
    *,
    space: Space = SPACE,
    first=(),
    n_trials: int = 24,
    seed: int = 0,
    patience=None,
    **options,
):
    first = [c for c in first if space.holds(c)]
    return search(space, evaluation, proposing(first, patience), n_trials=n_trials, seed=seed, **options)


def configurations(trials: tuple[Trial, ...]) -> list[Configuration]:
    return [Configuration(t.gpu0_bsz, t.batch_size, t.accumulation_steps) for t in trials]


def url_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def test_every_trial_is_in_the_space_and_none_is_repeated():
    trials = run(Evaluation(), n_trials=40)
    found = configurations(trials)
    assert all(map(SPACE.holds, found))
    assert len(set(found)) == len(found)
    assert [t.number for t in trials] == list(range(len(trials)))


@pytest.mark.parametrize("seed", range(3))
def test_improves_on_a_first_guess_that_is_off(seed):
    guess, top = Configuration(20, 90, 3), Configuration(14, 86, 3)
    assert rate(guess) < 0.81 * rate(top)
    first = [guess, Configuration(21, 90, 3), Configuration(19, 90, 3)]
    trials = run(Evaluation(), first=first, n_trials=24, seed=seed)
    assert max(t.samples_per_s for t in trials) >= 0.88 * rate(top)


@optuna_5
def test_finds_the_optimum_of_a_small_space():
    space = Space(Region(MemoryFit(0.0, 1.0), 6, 6, (4,), 8), None)
    trials = run(Evaluation(lambda c: 100 - (c.gpu0_bsz - 3) ** 2 - (c.batch_size - 7) ** 2), space=space, n_trials=40)
    best = max(trials, key=lambda t: t.samples_per_s)
    assert (best.gpu0_bsz, best.batch_size) == (3, 7)


def test_the_first_are_tried_first_in_order_without_what_is_not_in_the_space():
    first = [Configuration(10, 86, 3), Configuration(99, 86, 3), Configuration(12, 86, 3), Configuration(10, 86, 3)]
    evaluation = Evaluation()
    run(evaluation, first=first, n_trials=5)
    assert evaluation.asked[:2] == [first[0], first[2]]
    assert len(evaluation.asked) == 5


def test_the_same_seed_tries_the_same_and_another_seed_does_not():
    first = run(Evaluation(), seed=3)
    assert run(Evaluation(), seed=3) == first != run(Evaluation(), seed=4)


def test_a_small_space_is_tried_whole_and_the_search_ends():
    space = Space(Region(MemoryFit(0.0, 1.0), 4, 4, (), 4), None)
    trials = run(Evaluation(), space=space, n_trials=24)
    assert sorted(configurations(trials)) == [Configuration(n, n, 1) for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("effective", [None, 8])
def test_nothing_is_tried_where_nothing_fits(effective):
    space = Space(Region(MemoryFit(0.0, 1.0), 0, 0, (), 4), effective and (effective, effective))
    assert run(Evaluation(), space=space) == ()


def test_ends_where_it_is_enough():
    trials = run(Evaluation(lambda c: 100.0), n_trials=100, patience=5)
    assert len(trials) == 6


def test_goes_on_while_it_is_not():
    rising = iter(range(1, 1000))
    assert len(run(Evaluation(lambda c: 10.0 * next(rising)), n_trials=36, patience=5)) == 36


def test_what_is_proposed_outside_the_space_is_left_to_the_sampler():
    evaluation = Evaluation()
    search(SPACE, evaluation, lambda trials: Proposal(Configuration(99, 86, 3)), n_trials=3, seed=0)
    assert len(evaluation.asked) == 3
    assert all(map(SPACE.holds, evaluation.asked))


@optuna_5
def test_a_failed_trial_breaks_a_constraint_and_has_no_value(tmp_path):
    trials = run(Evaluation(failing=lambda c: c.batch_size > 86), n_trials=8, storage=url_of(tmp_path))
    study = optuna.load_study(study_name="autosplit", storage=url_of(tmp_path))
    failed = [t for t in study.trials if t.constraints["fits"] > 0]
    assert {t.user_attrs["failure"] for t in failed} == {"sim:0 ran out"}
    assert {t.params["batch_size"] for t in failed} == {t.batch_size for t in trials if t.failure is not None}
    assert any(t.failure is not None for t in trials)
    assert all(t.value is None for t in failed)
    assert study.best_trial not in failed


def test_what_somebody_enqueued_is_made_first_and_counts(tmp_path):
    """They failed without a run, as if a killed search had left them."""
    study = optuna.create_study(study_name="autosplit", storage=url_of(tmp_path), direction="maximize")
    study.enqueue_trial({"gpu0_bsz": 20, "batch_size": 80, "accumulation_steps": 4})
    study.enqueue_trial({"accumulation_steps": 4})
    trials = run(Evaluation(), first=[Configuration(14, 86, 3)], n_trials=4, storage=url_of(tmp_path))
    assert configurations(trials)[0] == Configuration(20, 80, 4)
    assert trials[1].accumulation_steps == 4, "TPE draws the other parameters"
    kept = study.get_trials()
    assert [trial.user_attrs["why"] for trial in kept[:2]] == ["enqueued in the study"] * 2
    assert kept[0].value == rate(Configuration(20, 80, 4))


def test_what_somebody_enqueued_that_is_not_in_the_space_is_pruned_and_says_why(tmp_path):
    study = optuna.create_study(study_name="autosplit", storage=url_of(tmp_path), direction="maximize")
    study.enqueue_trial({"gpu0_bsz": 10, "batch_size": 86, "accumulation_steps": 7})
    evaluation = Evaluation()
    with pytest.warns(UserWarning, match="out of range"):  # Optuna's own term
        trials = run(evaluation, first=[Configuration(14, 86, 3)], n_trials=2, storage=url_of(tmp_path))
    assert len(trials) == 2
    assert all(map(SPACE.holds, evaluation.asked))
    assert "not in the search space" in study.get_trials()[0].user_attrs["failure"]


def test_every_trial_of_the_study_says_why_it_was_made(tmp_path):
    proposed = proposing([Configuration(14, 86, 3)])
    reasons = iter(["the model promises it"])

    def propose(trials) -> Proposal:
        return replace(proposed(trials), why=next(reasons, "")) if not trials else proposed(trials)

    search(SPACE, Evaluation(), propose, n_trials=3, seed=0, storage=url_of(tmp_path))
    study = optuna.load_study(study_name="autosplit", storage=url_of(tmp_path))
    assert [trial.user_attrs["why"] for trial in study.trials] == [
        "the model promises it",
        "proposed by TPESampler",
        "proposed by TPESampler",
    ]


def test_a_sampler_of_ones_own_draws_every_trial_in_the_models_place(tmp_path):
    def propose(trials) -> Proposal:
        raise AssertionError("nobody asks the model")

    sampler = optuna.samplers.RandomSampler(seed=1)
    trials = search(SPACE, Evaluation(), propose, n_trials=6, seed=0, sampler=sampler, storage=url_of(tmp_path))
    assert len(trials) == 6
    study = optuna.load_study(study_name="autosplit", storage=url_of(tmp_path))
    assert {trial.user_attrs["why"] for trial in study.trials} == {"proposed by RandomSampler"}


@pytest.mark.slow
def test_the_study_says_the_accumulation_steps_that_ran(tmp_path):
    """If no batch size fits the requested micro-steps, another number ran than the trial reported."""
    space = Space(Region(MemoryFit(0.0, 1.0), 10, 10, (), 10), (10, 10), 10)
    evaluation = Evaluation(lambda c: 1.0 + c.batch_size)
    run(evaluation, space=space, n_trials=8, storage=url_of(tmp_path))
    study = optuna.load_study(study_name="autosplit", storage=url_of(tmp_path))
    told = {Configuration(**trial.params) for trial in study.trials if trial.value is not None}
    assert told == set(evaluation.asked)
    assert {trial.params["accumulation_steps"] for trial in study.trials} - {c.accumulation_steps for c in told}


def test_told_of_each_trial_once():
    told = []
    assert run(Evaluation(), n_trials=8, on_trial=told.append) == tuple(told)


class TestDeadline:
    def test_one_trial_is_made_in_any_case(self):
        assert len(run(Evaluation(), deadline_s=time.monotonic() - 1)) == 1

    @optuna_5
    def test_no_trial_begins_after_it(self, monkeypatch):
        now = iter(range(100))
        monkeypatch.setattr("autosplit.solve.optuna_search.time.monotonic", lambda: next(now))
        assert len(run(Evaluation(), deadline_s=4)) == 5


class Killed(BaseException):
    """Ends a search at the place of a signal."""


def killed_after(evaluation: Evaluation, trials: int, folder: Path, **options) -> None:
    """Run a search that is killed in a trial without a message to the study."""

    def evaluate(number: int, configuration: Configuration) -> Trial:
        if number == trials:
            raise Killed
        return evaluation(number, configuration)

    tell = optuna.study.Study.tell

    def telling(study, trial, *values, state=None, **more):
        if state == optuna.trial.TrialState.FAIL and isinstance(trial, optuna.trial.Trial):
            return None  # a killed search reports nothing
        return tell(study, trial, *values, state=state, **more)

    with mock.patch.object(optuna.study.Study, "tell", telling), pytest.raises(Killed):
        run(evaluate, storage=url_of(folder), **options)


class TestStorage:
    @pytest.mark.slow
    def test_a_second_search_keeps_the_first_ones_trials_and_measures_its_own_answers_again(self, tmp_path):
        first = [Configuration(14, 86, 3)]
        run(Evaluation(), first=first, n_trials=6, storage=url_of(tmp_path))
        CeilingStore(url_of(tmp_path), "autosplit").end()
        evaluation = Evaluation()
        trials = run(evaluation, first=first, n_trials=6, storage=url_of(tmp_path))
        assert evaluation.asked[0] == first[0]
        assert len(set(configurations(trials))) == 6
        study = optuna.load_study(study_name="autosplit", storage=url_of(tmp_path))
        assert len([t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]) >= 12

    @pytest.mark.slow
    def test_a_killed_search_goes_on_where_it_was(self, tmp_path):
        (tmp_path / "whole").mkdir()
        failing = {"failing": lambda c: c.gpu0_bsz > 25}
        first = [Configuration(20, 90, 3), Configuration(30, 90, 3)]
        uninterrupted = run(Evaluation(**failing), first=first, n_trials=12, storage=url_of(tmp_path / "whole"))
        begun, ended = Evaluation(**failing), Evaluation(**failing)
        killed_after(begun, 3, tmp_path, first=first, n_trials=12)
        ended.asked = list(begun.asked)
        trials = run(ended, first=first, n_trials=12, storage=url_of(tmp_path))
        assert trials == uninterrupted
        assert len(set(ended.asked)) == len(ended.asked) == 12, "nothing is run twice"

    def test_a_trial_that_was_running_when_it_was_killed_is_failed(self, tmp_path):
        killed_after(Evaluation(), 2, tmp_path, n_trials=4)
        states = optuna.trial.TrialState
        study = optuna.load_study(study_name="autosplit", storage=url_of(tmp_path))
        assert [t.state for t in study.trials] == [states.COMPLETE, states.COMPLETE, states.RUNNING]
        run(Evaluation(), n_trials=1, storage=url_of(tmp_path))
        assert study.trials[2].state == states.FAIL

    def test_trials_of_a_foreign_study_that_are_not_whole_are_not_taken_over(self, tmp_path):
        study = optuna.create_study(study_name="autosplit", storage=url_of(tmp_path), direction="maximize")
        asked = study.ask()
        asked.suggest_int("gpu0_bsz", 1, 4)
        study.tell(asked, 5.0)
        evaluation = Evaluation()
        assert len(run(evaluation, n_trials=3, storage=url_of(tmp_path))) == len(evaluation.asked) == 3

    @pytest.mark.parametrize("odd", ["x", [1], None, 3, {"of": 3}, {"of": {"batch_size": "x"}}])
    def test_ceilings_that_somebody_else_wrote_there_are_none(self, tmp_path, odd):
        """A valid storage was rejected, because its attribute was not a dict."""
        study = optuna.create_study(study_name="autosplit", storage=url_of(tmp_path), direction="maximize")
        study.set_user_attr("ceilings", odd)
        assert CeilingStore(url_of(tmp_path), "autosplit").get("of", 64) is None

    @pytest.mark.parametrize("batch_size", [-5, 10**15])
    def test_a_ceiling_that_can_be_none_is_none(self, tmp_path, batch_size):
        """A ceiling above the largest size filled the memory with traces. A ceiling below 1 ended in "does not fit"."""
        store = CeilingStore(url_of(tmp_path), "autosplit")
        store.put("of", made_ceiling("sim:0", 64, 2**30))
        assert CeilingStore(url_of(tmp_path), "autosplit").get("of", 64).batch_size == 64
        store.put("of", made_ceiling("sim:0", batch_size, 2**30))
        assert CeilingStore(url_of(tmp_path), "autosplit").get("of", 64) is None

    def test_what_an_interrupted_search_left_to_be_tried_is_dropped(self, tmp_path):
        def interrupt(number: int, configuration: Configuration) -> Trial:
            raise KeyboardInterrupt

        # None of these is in the smaller space of the search after it.
        first = [Configuration(10, n, 3) for n in (86, 90, 94)]
        with pytest.raises(KeyboardInterrupt):
            run(interrupt, first=first, n_trials=6, storage=url_of(tmp_path))
        smaller = Space(Region(MemoryFit(0.0, 1.0), 8, 8, (), 8), (16, 16), 4)
        trials = run(Evaluation(), space=smaller, n_trials=4, storage=url_of(tmp_path))
        assert all(map(smaller.holds, configurations(trials)))
        study = optuna.load_study(study_name="autosplit", storage=url_of(tmp_path))
        assert all(t.state.is_finished() for t in study.trials)

    @pytest.mark.parametrize("storage", ["nonsense", "sqlite:////proc/nowhere/study.db", "nosuchdb://x/y"])
    def test_a_url_that_can_not_be_opened_is_named(self, storage):
        with raises(InputError, "storage-unusable") as caught:
            run(Evaluation(), storage=storage)
        assert storage in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("url", ["nosuchdb://ann:sec/ret@host/db", "nosuchdb://host/db?user=ann&password=sec/ret"])
    def test_a_password_in_it_is_not_shown(self, url):
        with pytest.raises(InputError) as caught:
            run(Evaluation(), storage=url)
        assert "ret" not in str(caught.value).replace("interpret", "")
        assert "***" in str(caught.value)


def test_optunas_own_log_level_is_left_as_it_was():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        run(Evaluation(), n_trials=1)
        assert optuna.logging.get_verbosity() == optuna.logging.ERROR
    finally:
        optuna.logging.set_verbosity(before)
