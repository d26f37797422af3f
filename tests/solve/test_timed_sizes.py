"""From timed sizes to a curve: exact times stay, noise is averaged, and non-linear times stay non-linear."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.solve.timed_sizes import TimedSize, curve_of, pooled

SIZES = (2, 4, 8, 16, 32)


def line(fixed_s: float, sample_s: float, *, error: float = 0.0) -> list[TimedSize]:
    return [TimedSize(n, t, error * t) for n in SIZES for t in [fixed_s + sample_s * n]]


def disturbed(timed: list[TimedSize], noise: float, generator: random.Random) -> list[TimedSize]:
    found = []
    for size in timed:
        seconds = size.seconds * (1 + generator.gauss(0, noise))
        found.append(TimedSize(size.samples, seconds, noise * seconds))
    return found


def misses(timed: list[TimedSize], truth: list[TimedSize]) -> float:
    curve = curve_of(timed)
    return statistics.fmean((curve(size.samples) / size.seconds - 1) ** 2 for size in truth) ** 0.5


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.001, 10)), min_size=1, unique_by=lambda point: point[0]))
def test_exact_times_stay(points):
    timed = [TimedSize(n, seconds) for n, seconds in sorted(points)]
    curve = curve_of(timed)
    tallest = 0.0
    for size in timed:
        tallest = max(tallest, size.seconds)
        assert curve(size.samples) == tallest, "a larger batch is never faster; nothing else is changed"


def test_a_line_under_noise_comes_nearer_to_the_truth():
    generator, truth = random.Random(0), line(0.01, 0.002)
    noisy = [disturbed(truth, 0.03, generator) for _ in range(200)]
    before = statistics.fmean(
        statistics.fmean((a.seconds / b.seconds - 1) ** 2 for a, b in zip(one, truth, strict=True)) for one in noisy
    )
    after = statistics.fmean(misses(one, truth) ** 2 for one in noisy)
    assert after < 0.6 * before


def test_what_is_no_line_stays_none():
    """A GPU that takes a constant time until it is full, and then twice as much."""
    stairs = [TimedSize(n, 0.01 if n < 16 else 0.03, 0.0001) for n in SIZES]
    assert misses(stairs, stairs) < 0.01


sizes = st.lists(
    st.builds(TimedSize, st.integers(1, 500), st.floats(1e-9, 10), st.floats(0, 1)),
    min_size=1,
    unique_by=lambda size: size.samples,
)


@given(sizes)
def test_time_passes_at_every_size(timed):
    # A line through noisy times reached zero above one sample, so the plan was rejected for a negative time.
    curve = curve_of(sorted(timed, key=lambda size: size.samples))
    assert all(seconds > 0 for _, seconds in curve.points)


class TestPooled:
    def test_alike_devices_that_differ_by_noise_are_one(self):
        generator, truth = random.Random(1), line(0.01, 0.002)
        timed = [disturbed(truth, 0.02, generator) for _ in range(4)]
        found = pooled(timed, ["card"] * 4)
        assert all(sizes == found[0] for sizes in found)
        assert found[0][0].seconds == pytest.approx(statistics.fmean(sizes[0].seconds for sizes in timed))
        assert found[0][0].error_s == pytest.approx(0.01 * truth[0].seconds, rel=0.1), "half of each one's"

    def test_a_hot_one_stays_apart(self):
        timed = [line(0.01, 0.002, error=0.01), line(0.012, 0.0024, error=0.01)]
        assert pooled(timed, ["card"] * 2) == timed

    def test_so_do_unlike_ones_and_other_sizes(self):
        timed = [line(0.01, 0.002, error=0.5), line(0.01, 0.0021, error=0.5), line(0.01, 0.002, error=0.5)[:3]]
        assert pooled(timed, ["one", "another", "one"]) == timed
