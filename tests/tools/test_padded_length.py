"""Batches of similar lengths: none exceeds the memory, each sample comes once, and steps have the requested samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raised import raises

from autosplit.errors import InputError
from autosplit.solve.length_plan import LengthPlan, LengthPoint
from autosplit.tools.padded_length import (
    FULL_ENOUGH,
    SHORTER,
    checked_lengths,
    cut_epoch,
    predicted_lengths,
    shares_of,
)


def memory(length: int, linear: float, square: float) -> float:
    return linear * length + square * length**2


@st.composite
def plans(draw: st.DrawFn, longest: int = 512) -> tuple[LengthPlan, float, float]:
    """A plan for a model whose memory per sample grows with the length, its square, or something between."""
    linear, square = draw(st.floats(0.1, 10)), draw(st.floats(0, 0.1))
    full = memory(longest, linear, square)
    lengths = [longest >> power for power in range(draw(st.integers(1, 6)))]
    points = tuple(
        LengthPoint(n, full / memory(n, linear, square), 100 * longest / n, 90 * longest / n) for n in lengths
    )
    return LengthPlan(points, 1.0, 1.0, 0.0, 0.0), linear, square


epochs = st.lists(st.integers(1, 512), min_size=1, max_size=200)
splits = st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(any)


@given(plans(), st.integers(1, 512))
def test_no_length_takes_more_memory_than_the_longest(made, length):
    plan, linear, square = made
    times = plan.times_at(length)
    assert times * memory(length, linear, square) <= memory(512, linear, square) * (1 + 1e-9)
    assert min(plan.batch_seconds(n, length, 4) for n in range(1, int(4 * times) + 1)) > 0


@given(plans())
def test_at_a_point_it_is_what_was_measured(made):
    plan = made[0]
    for point in plan.points:
        assert plan.times_at(point.length) == pytest.approx(point.times)
        own, most = 1000, 1000 * point.times
        assert own / plan.batch_seconds(own, point.length, own) == pytest.approx(point.own_samples_per_s)
        if most > own:
            assert most / plan.batch_seconds(most, point.length, own) == pytest.approx(point.samples_per_s)
    assert plan.is_sound


@given(plans(), splits, st.integers(1, 512))
def test_a_batch_of_max_tokens_fits_at_any_length(made, split, length):
    plan, linear, square = made
    length = max(length, plan.points[-1].length)
    for share in split:
        held = plan.tokens_of(share) // length * memory(length, linear, square)
        assert held <= share * memory(512, linear, square) * (1 + 1e-9)


@given(plans(), epochs, splits, st.none() | st.integers(1, 60), st.randoms())
def test_every_sample_comes_once_in_batches_that_fit(made, lengths, split, effective, shuffled):
    plan = made[0]
    order = [*range(len(lengths))]
    shuffled.shuffle(order)
    steps = cut_epoch(plan, lengths, order, split, effective)
    batches = [batch for step in steps for batch in step]
    assert sorted(sample for batch in batches for sample in batch) == [*range(len(lengths))]
    for batch in batches:
        longest = lengths[batch[0]]
        assert longest == max(lengths[sample] for sample in batch)
        most = plan.split_of(longest, split)
        shares = shares_of(plan, len(batch), longest, split)
        assert sum(shares) == len(batch)
        assert all(share <= bound for share, bound in zip(shares, most, strict=True))
        if len(batch) > 1 + FULL_ENOUGH * sum(most):
            # Samples of similar length fill the batch. The others would have started a separate batch.
            assert all(lengths[sample] >= SHORTER * longest for sample in batch[int(1 + FULL_ENOUGH * sum(most)) :])
    if effective is not None:
        taken = [sorted(sample for batch in step for sample in batch) for step in steps]
        assert taken == [sorted(order[begin : begin + effective]) for begin in range(0, len(order), effective)]
    else:
        assert all(len(step) == 1 for step in steps)


def test_what_is_foretold_is_by_the_padding_of_the_very_batches():
    points = (LengthPoint(8, 1.0, 10.0, 10.0), LengthPoint(4, 2.0, 20.0, 20.0))
    found = predicted_lengths(points, [8, 4] * 50, (4,), 100)
    # 50 samples of 8 at 10/s and 50 of 4 at 20/s, without padding; batches of 4 in any order nearly all have an 8.
    assert found.samples_per_s == pytest.approx(100 / 7.5)
    assert found.padding_share == 0
    assert 10 <= found.fixed_samples_per_s < 10.7
    assert 0.2 < found.fixed_padding_share <= 0.25


def test_a_longer_sample_than_the_plan_knows_is_refused():
    plan = LengthPlan((LengthPoint(8, 1.0, 10.0, 10.0),), 1.0, 1.0, 0.0, 0.0)
    with raises(InputError, "9", "8"):
        plan.times_at(9)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([], "lengths are empty. Expected a length of at least 1"),
        ([3, 0], "lengths contain 0 at position 1. Expected"),
        ([3, True], r"lengths is \[3, True\]. Expected a whole number for each sample"),
        ([4, 10**30], f"lengths contain {10**30}. Expected at most 16777216 each"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths, said):
    with pytest.raises(InputError, match=said):
        checked_lengths(lengths)
