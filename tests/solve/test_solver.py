"""The solver's closed form agrees with brute force within the cost model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from raised import raises

from autosplit.errors import InputError
from autosplit.solve.memory import Ceiling, MemoryFit, Region
from autosplit.solve.problem import Problem
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.solver import Solver, geometric
from autosplit.solve.step_time import Cost, StepTime, TimeCurve
from autosplit.solve.trial import KNEE_SHARE, LEAST_DIFFERENCE

RATES = st.tuples(st.floats(0.0, 2.0), st.floats(0.05, 3.0))


def line(fixed: float, per_sample: float) -> TimeCurve:
    return TimeCurve.of([(n, fixed + per_sample * n) for n in (1, 64)])


def sizes_of(effective: int | tuple[int, int] | None) -> tuple[int, int] | None:
    return (effective, effective) if isinstance(effective, int) else effective


RANGES = st.tuples(st.integers(1, 30), st.integers(0, 20)).map(lambda ends: (ends[0], sum(ends)))


@st.composite
def solvers(draw: st.DrawFn, effective: st.SearchStrategy[int | None], gathers=(0.0, 0.1)) -> Solver:
    replicas = draw(st.lists(st.integers(0, 6), max_size=2).map(tuple))
    region = Region(
        MemoryFit(5.0, draw(st.floats(0.5, 4.0)), draw(st.floats(0.0, 1.0))),
        draw(st.integers(8, 30)),
        draw(st.integers(1, 8)),
        replicas,
        draw(st.integers(1, 18)),
    )
    curves = tuple(line(*draw(RATES)) for _ in range(1 + len(replicas)))
    shared = draw(st.sampled_from([0.0, 0.5, 4.0]))
    others, gather = len(curves) - 1, draw(st.sampled_from(gathers))
    step_time = StepTime(curves, (0.0, *(shared,) * others), (0.0, *(gather,) * others), 0.25, adds_up=False)
    return Solver(Space(region, sizes_of(draw(effective)), 6), step_time)


def splits_of(solver: Solver, batch_size: int) -> Iterator[tuple[int, ...]]:
    """Every split of a batch within the bounds."""
    bounds = solver.space.region.gpu0_bounds(batch_size)
    if bounds is None:
        return
    ranges = [range(bounds[0], bounds[1] + 1), *(range(c + 1) for c in solver.space.region.replica_ceilings)]
    yield from (split for split in itertools.product(*ranges) if sum(split) == batch_size)


@given(solvers(st.none(), gathers=[0.0]), st.integers(1, 18))
def test_the_split_of_a_batch_is_the_fastest_of_all(solver, batch_size):
    times = [solver.step_time.seconds([split]) for split in splits_of(solver, batch_size)]
    answer = solver.fastest_of(batch_size, 1)
    if not times:
        assert answer is None
        return
    split = solver.split_of(answer)
    assert sum(split) == batch_size
    assert solver.space.holds(answer)
    assert solver.step_time.seconds([split]) == pytest.approx(min(times))


@given(solvers(st.none(), gathers=[0.0]), st.data())
def test_the_split_beside_a_given_share_is_the_fastest_of_all(solver, data):
    largest = solver.space.region.largest_batch
    if largest < 1:
        return
    batch_size = data.draw(st.integers(1, largest))
    share = data.draw(st.integers(*solver.space.region.gpu0_bounds(batch_size)))
    split = solver.split_of(Configuration(share, batch_size))
    assert split[0] == share
    times = [solver.step_time.seconds([s]) for s in splits_of(solver, batch_size) if s[0] == share]
    assert solver.step_time.seconds([split]) == pytest.approx(min(times))


@given(solvers(st.none()))
def test_without_an_effective_batch_the_answer_is_the_knee(solver):
    ranked = solver.ranked()
    if not ranked:
        assert solver.space.region.largest_batch == 0
        return
    top = max(map(solver.samples_per_s, ranked))
    assert solver.samples_per_s(ranked[0]) >= KNEE_SHARE * top
    assert all(c.batch_size >= ranked[0].batch_size for c in ranked if solver.samples_per_s(c) >= KNEE_SHARE * top)


@given(solvers(st.one_of(st.integers(1, 40), RANGES)))
def test_with_an_effective_batch_the_answer_is_near_the_best_of_the_space(solver):
    ranked = solver.ranked()
    fewest, most = solver.space.steps_bounds()
    space = [
        c
        for c in itertools.starmap(Configuration, itertools.product(range(19), range(1, 19), range(fewest, most + 1)))
        if solver.space.holds(c)
    ]
    assert bool(ranked) == bool(space)
    if space:
        assert ranked[1:] == sorted(ranked[1:], key=solver.samples_per_s, reverse=True)
        fastest = max(map(solver.samples_per_s, ranked))
        assert solver.samples_per_s(ranked[0]) >= (1 - LEAST_DIFFERENCE) * fastest
        assert solver.samples_per_s(ranked[0]) >= 0.85 * max(map(solver.samples_per_s, space))


@given(solvers(st.one_of(st.none(), st.integers(1, 40), RANGES)))
def test_the_micro_steps_add_up(solver):
    for configuration in solver.ranked():
        splits = solver.splits_of(configuration)
        assert len(splits) == configuration.accumulation_steps
        total = sum(map(sum, splits))
        assert total == solver.space.effective_of(configuration)
        least, most = solver.space.effective_batch_sizes or (configuration.batch_size,) * 2
        assert least <= total <= most
        assert all(n <= m for split in splits for n, m in zip(split, splits[0], strict=True)), "the last one is smaller"


def test_measured_times_make_no_odd_answer_and_the_plainest_has_its_chance():
    """On a busy machine, 64 samples on two equal devices became (27, 27) twice. Once, (32, 32) was not even tried."""
    space = Space(Region(MemoryFit(0.0, 1.0), 64, 64, (64,), 64), (64, 64), 4)

    def solver(slower: float, least_difference: float) -> Solver:
        """Noise made the largest sizes seem slower than they are."""
        curve = TimeCurve.of([(1, 1.1), (28, 3.8), (32, slower * 4.2), (64, slower * 7.4)])
        step_time = StepTime((curve, curve), (0.0, 0.0), (0.0, 0.0), 0.1, adds_up=False)
        return Solver(space, step_time, least_difference=least_difference)

    once = Configuration(32, 64, 1)
    assert solver(1.55, 0.001).ranked()[0] != once
    assert once not in solver(1.55, 0.001).first_trials()
    assert solver(1.0, 0.03).ranked()[0] == once
    assert once in solver(1.55, 0.03).first_trials(), "a fifth slower by the model, which may be wrong"


def unlike(copies_s: tuple[float, ...], *, effective: int = 48) -> Solver:
    """Four equally fast devices, some of them with slow links."""
    region = Region(MemoryFit(0.0, 1.0), 1000, 200, (200, 200, 200), 1000)
    step_time = StepTime.bare((line(0.5, 0.1),) * 4, 0.0, adds_up=False)
    for index, seconds in enumerate(copies_s):
        step_time = step_time.with_costs_of(index + 1, seconds, 0.001)
    return Solver(Space(region, (effective, effective), 4), step_time)


def test_devices_behind_links_that_cost_more_than_they_bring_are_left_out():
    best = unlike((0.1, 50.0, 50.0)).ranked()[0]
    split = unlike((0.1, 50.0, 50.0)).split_of(best)
    assert split[2:] == (0, 0)
    assert min(split[:2]) > 0


def test_device_0_is_left_out_where_each_device_waits_for_its_turn_with_the_host():
    """Three of four GPUs fit the batch and were 22% faster than all four. Device 0 was never left out."""
    region = Region(MemoryFit(0.0, 1.0), 1000, 8, (8, 8, 8), 1000)
    step_time = StepTime.bare((line(0.9, 0.2), *(line(0.5, 0.1),) * 3), 0.0, adds_up=False)
    in_turn = Solver(Space(region, (48, 48), 4), replace(step_time, host_s=1.0))
    at_once = Solver(Space(region, (48, 48), 4), step_time)
    assert in_turn.split_of(in_turn.ranked()[0]) == (0, 8, 8, 8)
    assert 0 not in at_once.split_of(at_once.ranked()[0])


def test_where_the_host_bounds_a_step_its_last_micro_step_is_short():
    """After the last launch only its backward remains. Equal micro-steps were 5.6% slower."""
    region = Region(MemoryFit(0.0, 1.0), 1000, 8, (10, 10, 10), 1000)
    step_time = StepTime.bare((line(1.8, 1.05),) * 4, 0.0, adds_up=False)
    in_turn = Solver(Space(region, (48, 48), 4), replace(step_time, host_s=2.7))
    at_once = Solver(Space(region, (48, 48), 4), step_time)
    assert in_turn.ranked()[0].batch_size > 24
    assert at_once.ranked()[0].batch_size == 24
    assert {one.ranked()[0].accumulation_steps for one in (in_turn, at_once)} == {2}


def test_devices_that_share_a_processor_split_evenly_as_far_as_they_can():
    region = Region(MemoryFit(0.0, 1.0), 100, 3, (50,), 100)
    solver = Solver(Space(region, None), StepTime.bare((line(0, 1), line(0, 9)), 0.0, adds_up=True))
    assert solver.split_of(solver.fastest_of(4, 1)) == (2, 2)
    assert solver.split_of(solver.fastest_of(10, 1)) == (3, 7)


def ranks(
    curves: tuple[TimeCurve, ...],
    caps: tuple[int, ...],
    sizes: tuple[int, int] | None,
    *,
    all_reduce_s: float = 0.0,
    update_s: float = 0.0,
    adds_up: bool = False,
) -> Problem:
    ceilings = tuple(Ceiling(f"cuda:{i}", "rank", cap, "memory", 0, 1, cap, cap) for i, cap in enumerate(caps))
    fit = Cost(StepTime.bare(curves, update_s, adds_up=adds_up), all_reduce_s)
    return Problem.of(fit, ceilings, None, effective_batch_sizes=sizes, max_batch_size=64, accumulates=True)


def test_a_time_that_is_not_finite_is_an_error():
    """The solver treated each error as a batch that does not fit."""
    endless = TimeCurve(((1, float("inf")),))
    step_time = StepTime.bare((line(1, 0.1), endless), 0.25, adds_up=False)
    solver = Solver(Space(Region(MemoryFit(0.0, 1.0), 64, 16, (16,), 32), (20, 20), 1), step_time)
    with raises(InputError, "inf"):
        solver.fastest_of(20, 1)


def test_a_fit_keeps_the_throughput_of_the_loader():
    space = Space(Region(MemoryFit(0.0, 1.0), 64, 64, (), 64), None)
    solver = Solver(space, StepTime.bare((line(1, 0.1),), 0.25, adds_up=False), most_samples_per_s=0.5)
    assert solver.ranked()[0].batch_size == 1
    assert solver.refitted([]).ranked() == solver.ranked()


class TestRanks:
    @given(
        st.lists(st.tuples(RATES, st.integers(1, 6)), min_size=1, max_size=3),
        st.one_of(st.none(), st.integers(1, 30), RANGES),
        st.booleans(),
    )
    def test_every_rank_has_samples_within_its_ceiling(self, drawn, effective, adds_up):
        curves, ceilings = tuple(line(*rates) for rates, _ in drawn), tuple(ceiling for _, ceiling in drawn)
        answer = ranks(curves, ceilings, sizes_of(effective), all_reduce_s=0.1, update_s=0.1, adds_up=adds_up).solve()
        if answer is None:
            assert sizes_of(effective) is not None
            assert sizes_of(effective)[1] < len(curves)
            return
        assert all(1 <= n <= ceiling for n, ceiling in zip(answer.split, ceilings, strict=True))
        total = sum(answer.split)
        least, most = sizes_of(effective) or (total, total)
        assert least <= answer.effective_batch_size <= most
        assert answer.accumulation_steps == -(-answer.effective_batch_size // total)
        assert answer.samples_per_s > 0


@given(st.integers(1, 100_000))
@example(65536)
def test_a_geometric_grid_ends_at_the_largest(largest):
    sizes = geometric(largest)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, largest)
    assert all(later <= earlier * 1.25 + 1 for earlier, later in itertools.pairwise(sizes))
    assert {2**k for k in range(17) if 2**k <= largest} <= set(sizes), "65535 was the answer where 65536 is plain"


def test_where_two_teams_are_as_fast_the_one_of_fewer_devices_is_the_answer():
    """A useless device was kept. With two kinds, the order of teams is not the order of their devices."""
    flat = TimeCurve.of([(1, 1.0), (64, 1.0)])
    region = Region(MemoryFit(0.0, 1.0), 64, 64, (64, 64, 32, 32), 64)
    solver = Solver(Space(region, (64, 64), 1), StepTime.bare((flat,) * 5, 0.1, adds_up=False))
    assert sum(map(bool, solver.split_of(Configuration(1, 33, 1))[1:])) == 1
    assert sum(map(bool, solver.split_of(Configuration(1, 64, 1))[1:])) == 1
    assert sum(map(bool, solver.split_of(Configuration(1, 100, 1))[1:])) == 2
