"""Even ranks: under every ceiling, exact where that is in reach, and nothing better left lying."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.solve.even_ranks import EvenProblem, EvenRanks
from autosplit.solve.memory import Ceiling
from autosplit.solve.problem import Problem
from autosplit.solve.solver import MOST_STEPS, WITHIN_REACH
from autosplit.solve.step_time import Fit, StepTime, TimeCurve


def line(per_sample_s: float, fixed_s: float = 0.0) -> TimeCurve:
    return TimeCurve(((1, fixed_s + per_sample_s), (10**6, fixed_s + 10**6 * per_sample_s)))


def fit_of(*curves: TimeCurve, all_reduce_s: float = 0.0, update_s: float = 0.0, adds_up: bool = False) -> Fit:
    return Fit(StepTime.bare(curves, update_s, adds_up=adds_up), all_reduce_s)


def alike(count: int, ceiling: int, effective: int, **changes) -> EvenProblem:
    """Ranks that take 1 ms a sample and 5 ms a forward."""
    sizes = (effective, effective)
    fit = fit_of(*(line(1e-3, 5e-3),) * count)
    return EvenProblem((ceiling,) * count, effective, sizes, **{"fit": fit, **changes})


@pytest.mark.parametrize(
    ("problem", "batch_size", "steps"),
    [
        (alike(2, 100, 200), 100, 1),
        (alike(2, 100, 400), 100, 2),
        (alike(3, 100, 600), 100, 2),
        # 7 forwards of 90 keep 1260 exactly, 6 of 100 do not.
        (alike(2, 100, 1260), 90, 7),
        (alike(1, 64, 1000), 50, 20),
        # Without an effective batch that was asked for, one forward of as much as fits.
        (alike(2, 100, 1000, accumulates=False), 100, 1),
        (alike(2, 100, 90, accumulates=False), 45, 1),
        (alike(2, 100, 400, max_batch_size=160), 50, 4),
        (alike(4, 7, 1), 1, 1),
        (alike(2, 9, 2, least_batch=2), 2, 1),
    ],
)
def test_known_answers(problem, batch_size, steps):
    even = problem.best()
    assert (even.batch_size, even.accumulation_steps) == (batch_size, steps)


def test_three_ranks_take_the_step_nearest_to_one_that_they_do_not_divide():
    even = alike(3, 50, 100).best()
    assert even.effective_batch_size == 99
    assert alike(3, 50, 100).exact() is None


def test_an_exact_step_in_forwards_of_one_sample_is_out_of_reach():
    """1018 is twice a prime: its only even steps are one forward too large, and 509 of a sample each."""
    problem = alike(2, 500, 1018)
    even, exact = problem.best(), problem.exact()
    assert even.effective_batch_size in (1016, 1020)
    assert even.accumulation_steps == 2
    assert (exact.batch_size, exact.accumulation_steps) == (1, 509)
    assert exact.samples_per_s < WITHIN_REACH * even.samples_per_s


def test_without_a_fit_no_more_than_twice_the_forwards_are_taken_for_an_exact_step():
    assert alike(2, 500, 1018, fit=None).best().accumulation_steps <= 4
    assert alike(2, 500, 1018, fit=None).best().samples_per_s is None
    assert alike(2, 100, 1260, fit=None).best().effective_batch_size == 1260


def test_what_was_asked_for_comes_before_what_is_nearest():
    problem = replace(alike(4, 100, 203), effective_batch_sizes=(203, 300))
    assert problem.best().effective_batch_size == 204
    assert replace(problem, effective_batch_sizes=(150, 203)).best().effective_batch_size == 200


def test_a_ceiling_of_none_has_no_answer():
    assert alike(2, 0, 10).best() is None
    assert alike(2, 1, 10, least_batch=2).best() is None
    assert alike(2, 9, 10, max_batch_size=1).best() is None


class TestWithoutSlow:
    def test_a_card_that_is_too_slow_is_left_out(self):
        fit = fit_of(line(1e-3), line(10e-3), line(1e-3))
        kept, even = EvenProblem((100, 100, 100), 120, (120, 120), fit=fit).without_slow()
        assert kept == (0, 2)
        assert (even.num_ranks, even.batch_size) == (2, 60)
        assert even.samples_per_s == pytest.approx(2000)

    def test_one_that_remains_has_nothing_to_reduce(self):
        fit = fit_of(line(1e-3), line(1e-3), all_reduce_s=10.0)
        kept, even = EvenProblem((100, 100), 100, (100, 100), fit=fit).without_slow()
        assert kept == (0,)
        assert even.samples_per_s == pytest.approx(1000)

    @pytest.mark.parametrize(
        "problem",
        [
            alike(3, 100, 300),
            alike(1, 100, 300),
            alike(3, 100, 300, fit=None),
            alike(2, 100, 300, fit=fit_of(line(1e-3), line(1.0), adds_up=True)),
            alike(2, 0, 300),
        ],
    )
    def test_nothing_is_gained(self, problem):
        assert problem.without_slow() is None


def test_the_prediction_is_that_of_the_uneven_ranks():
    fit = fit_of(line(1e-3, 2e-3), line(3e-3, 1e-3), all_reduce_s=0.5, update_s=0.01)
    ceilings = tuple(Ceiling(f"cuda:{i}", "rank", 64, "memory", 0, 1, 64, 64) for i in range(2))
    for adds_up in (False, True):
        used = replace(fit, step_time=replace(fit.step_time, adds_up=adds_up))
        known = Problem.of(used, ceilings, None, effective_batch_sizes=(96, 96), max_batch_size=None, accumulates=True)
        even = EvenProblem((64, 64), 96, (96, 96), fit=used)
        assert even.rate(16, 3) == pytest.approx(known.rate((16, 16), 96))


problems = st.builds(
    lambda ceilings, effective, more, most, least, accumulates, per_sample, fixed, fitted: EvenProblem(
        ceilings=tuple(ceilings),
        effective_batch_size=effective,
        effective_batch_sizes=None if more is None else (max(1, effective - more), effective + more),
        max_batch_size=most,
        least_batch=least,
        accumulates=accumulates,
        fit=fit_of(*(line(per_sample * (1 + i), fixed) for i in range(len(ceilings)))) if fitted else None,
    ),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 400),
    st.none() | st.integers(0, 9),
    st.none() | st.integers(1, 90),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1e-3, 1e-2]),
    st.sampled_from([0.0, 1e-2, 1.0]),
    st.booleans(),
)


def key(problem: EvenProblem, even: EvenRanks) -> tuple[bool, int]:
    least, most = problem.effective_batch_sizes or (0, 10**9)
    step = even.effective_batch_size
    return not least <= step <= most, abs(step - problem.effective_batch_size)


@given(problems)
def test_no_ceiling_is_exceeded_and_nothing_better_is_left(problem):
    ranks = len(problem.ceilings)
    most = min(problem.ceilings)
    if problem.max_batch_size is not None:
        most = min(most, problem.max_batch_size // ranks)
    even = problem.best()
    assert (even is None) == (most < problem.least_batch)
    if even is None:
        assert problem.exact() is None
        return
    assert problem.least_batch <= even.batch_size <= most
    assert even.num_ranks == ranks
    assert problem.accumulates or even.accumulation_steps == 1
    exact = problem.exact()
    assert exact is None or exact.effective_batch_size == problem.effective_batch_size
    if problem.fit is None:
        return
    fewest = -(-problem.effective_batch_size // (ranks * most))
    for steps in range(fewest, fewest + MOST_STEPS + 1) if problem.accumulates else (1,):
        for size in range(problem.least_batch, most + 1):
            rate = problem.rate(size, steps)
            other = EvenRanks(ranks, size, steps, rate)
            nearer = key(problem, other) < key(problem, even)
            faster = rate > even.samples_per_s * (1 + 1e-5)
            assert not (nearer and rate >= even.samples_per_s), (even, other)
            assert not (faster and key(problem, other) == key(problem, even)), (even, other)


@given(problems, st.integers(1, 10**18), st.integers(1, 10**18))
def test_absurd_numbers_take_no_time(problem, effective, ceiling):
    """A plan is somebody's file: its numbers may be anything."""
    huge = replace(problem, effective_batch_size=effective, effective_batch_sizes=None, max_batch_size=None)
    even = replace(huge, ceilings=(ceiling,) * len(problem.ceilings), least_batch=1).best()
    assert 1 <= even.batch_size <= ceiling
