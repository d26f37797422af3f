"""Test the search for even ranks: it respects every ceiling, is exact if possible, and finds the best settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.integrations.even_ranks import EvenProblem, EvenRanks
from autosplit.solve.memory import Ceiling, Region
from autosplit.solve.problem import Problem
from autosplit.solve.solver import MOST_STEPS
from autosplit.solve.step_time import Cost, StepTime, TimeCurve


def line(per_sample_s: float, fixed_s: float = 0.0) -> TimeCurve:
    return TimeCurve(((1, fixed_s + per_sample_s), (10**6, fixed_s + 10**6 * per_sample_s)))


def fit_of(*curves: TimeCurve, all_reduce_s: float = 0.0, update_s: float = 0.0, adds_up: bool = False) -> Cost:
    return Cost(StepTime.bare(curves, update_s, adds_up=adds_up), all_reduce_s)


def even_problem(
    ceilings: tuple[int, ...],
    effective: int,
    sizes: tuple[int, int] | None,
    fit: Cost,
    *,
    max_batch_size: int | None = None,
    least_batch: int = 1,
    accumulates: bool = True,
) -> EvenProblem:
    """Return the problem of ranks with these ceilings."""
    found = tuple(Ceiling(f"cuda:{i}", "rank", n, "memory", 0, 1, n, n) for i, n in enumerate(ceilings))
    region = Region.apart(ceilings, sum(ceilings) if max_batch_size is None else max_batch_size, least_batch)
    return EvenProblem(Problem(fit, found, region, True, sizes, accumulates), effective)


def identical(count: int, ceiling: int, effective: int, *, fit: Cost | None = None, **changes) -> EvenProblem:
    """Return ranks that take 1 ms per sample and 5 ms per forward."""
    sizes = changes.pop("sizes", (effective, effective))
    fit = fit or fit_of(*(line(1e-3, 5e-3),) * count)
    return even_problem((ceiling,) * count, effective, sizes, fit, **changes)


@pytest.mark.parametrize(
    ("problem", "batch_size", "steps"),
    [
        (identical(2, 100, 400), 100, 2),
        # 7 forwards of 90 keep 1260 exactly, 6 of 100 do not.
        (identical(2, 100, 1260), 90, 7),
        # Without a requested effective batch: one forward of as much as fits.
        (identical(2, 100, 1000, accumulates=False), 100, 1),
        (identical(2, 100, 400, max_batch_size=160), 50, 4),
        (identical(2, 9, 2, least_batch=2), 2, 1),
    ],
)
def test_known_answers(problem, batch_size, steps):
    even = problem.best()
    assert (even.batch_size, even.accumulation_steps) == (batch_size, steps)


class TestWithoutSlow:
    def test_a_card_that_is_too_slow_is_left_out(self):
        fit = fit_of(line(1e-3), line(10e-3), line(1e-3))
        kept, even = even_problem((100, 100, 100), 120, (120, 120), fit).without_slow()
        assert kept == (0, 2)
        assert (even.num_ranks, even.batch_size) == (2, 60)
        assert even.samples_per_s == pytest.approx(2000)


problems = st.builds(
    lambda ceilings, effective, more, per_sample, fixed, **changes: even_problem(
        tuple(ceilings),
        effective,
        None if more is None else (max(1, effective - more), effective + more),
        fit_of(*(line(per_sample * (1 + i), fixed) for i in range(len(ceilings)))),
        **changes,
    ),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 400),
    st.none() | st.integers(0, 9),
    st.sampled_from([1e-3, 1e-2]),
    st.sampled_from([0.0, 1e-2, 1.0]),
    max_batch_size=st.none() | st.integers(1, 90),
    least_batch=st.integers(1, 3),
    accumulates=st.booleans(),
)


def key(problem: EvenProblem, even: EvenRanks) -> tuple[bool, int]:
    least, most = problem.problem.effective_batch_sizes or (0, 10**9)
    step = even.effective_batch_size
    return not least <= step <= most, abs(step - problem.effective_batch_size)


@given(problems)
def test_no_ceiling_is_exceeded_and_nothing_better_is_left(problem):
    region = problem.problem.region
    ranks, least, accumulates = len(region.ceilings), region.least_share, problem.problem.accumulates
    most = min(*region.ceilings, region.max_batch_size // ranks)
    even = problem.best()
    assert (even is None) == (most < least)
    if even is None:
        assert problem.exact() is None
        return
    assert least <= even.batch_size <= most
    assert even.num_ranks == ranks
    assert accumulates or even.accumulation_steps == 1
    exact = problem.exact()
    assert exact is None or exact.effective_batch_size == problem.effective_batch_size
    fewest = -(-problem.effective_batch_size // (ranks * most))
    for steps in range(fewest, fewest + MOST_STEPS + 1) if accumulates else (1,):
        for size in range(least, most + 1):
            rate = problem.rate(size, steps)
            other = EvenRanks(ranks, size, steps, rate)
            nearer = key(problem, other) < key(problem, even)
            faster = rate > even.samples_per_s * (1 + 1e-5)
            assert not (nearer and rate >= even.samples_per_s), (even, other)
            assert not (faster and key(problem, other) == key(problem, even)), (even, other)


@given(st.integers(1, 4), st.integers(1, 10**18), st.integers(1, 10**18))
def test_extreme_numbers_take_no_time(count, effective, ceiling):
    """A plan's file may hold any numbers."""
    even = identical(count, ceiling, effective, sizes=None).best()
    assert 1 <= even.batch_size <= ceiling
