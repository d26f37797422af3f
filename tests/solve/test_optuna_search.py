"""The search finds the optimum, is reproducible, repeats no trial, and handles failures and time limits."""

from __future__ import annotations

import math

import optuna
import pytest

from autosplit.solve.memory import MemoryFit, Region
from autosplit.solve.optuna_search import search
from autosplit.solve.proposals import Proposal
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.trial import Trial

REGION = Region(MemoryFit(0.0, 1.0, 0.05), 40, 32, (48, 48), 128)
SPACE = Space(REGION, (256, 256), 8)


optuna_5 = pytest.mark.skipif(
    not hasattr(optuna.Trial, "set_constraint"),
    reason=f"optuna {optuna.__version__} has no constraints of trials, and draws and times them differently",
)


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


def test_every_trial_is_in_the_space_and_none_is_repeated():
    trials = run(Evaluation(), n_trials=40)
    found = configurations(trials)
    assert all(map(SPACE.holds, found))
    assert len(set(found)) == len(found)
    assert [t.number for t in trials] == list(range(len(trials)))


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


@optuna_5
def test_a_failed_trial_breaks_a_constraint_and_has_no_value(monkeypatch):
    studies, create = [], optuna.create_study
    monkeypatch.setattr(optuna, "create_study", lambda **options: studies.append(create(**options)) or studies[-1])
    trials = run(Evaluation(failing=lambda c: c.batch_size > 86), n_trials=8)
    (study,) = studies
    failed = [t for t in study.trials if t.constraints["fits"] > 0]
    assert {t.params["batch_size"] for t in failed} == {t.batch_size for t in trials if t.failure is not None}
    assert any(t.failure is not None for t in trials)
    assert all(t.value is None for t in failed)
    assert study.best_trial not in failed


@pytest.mark.slow
def test_micro_steps_that_no_batch_gives_are_not_evaluated():
    """If no batch size fits the requested micro-steps, another number ran than the trial reported."""
    space = Space(Region(MemoryFit(0.0, 1.0), 10, 10, (), 10), (10, 10), 10)
    evaluation = Evaluation(lambda c: 1.0 + c.batch_size)
    run(evaluation, space=space, n_trials=8)
    assert all(map(space.holds, evaluation.asked))


class TestDeadline:
    @optuna_5
    def test_no_trial_begins_after_it(self, monkeypatch):
        now = iter(range(100))
        monkeypatch.setattr("autosplit.solve.optuna_search.time.monotonic", lambda: next(now))
        assert len(run(Evaluation(), deadline_s=4)) == 5


def test_optunas_own_log_level_is_left_as_it_was():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        run(Evaluation(), n_trials=1)
        assert optuna.logging.get_verbosity() == optuna.logging.ERROR
    finally:
        optuna.logging.set_verbosity(before)
