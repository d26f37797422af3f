"""The recommended effective batch for a noise scale, compared with handwritten arithmetic."""

from __future__ import annotations

import math

import pytest
from handmade import made_plan, solved_plan
from hypothesis import given
from hypothesis import strategies as st
from raised import raises

from autosplit.errors import InputError, PlanError
from autosplit.tools.noise_scale import NoiseScale


@given(noise=st.floats(0, 1e5))
def test_the_recommended_batch_is_the_curves_highest(noise):
    plan = solved_plan()
    found = plan.goodput(noise)
    best = max(found.curve, key=lambda point: point.goodput)
    assert found.effective_batch_size == best.effective_batch_size
    assert found.gain >= 1
    own = plan.compare_with(plan.split, 2)  # the plan's own: 512 samples
    now = next(point for point in found.curve if point.effective_batch_size == 512)
    assert (now.efficiency, now.goodput) == (1, pytest.approx(own.samples_per_s))
    ratio = best.effective_batch_size / 512
    assert best.efficiency == pytest.approx((noise + 512) / (noise + best.effective_batch_size))
    assert found.learning_rate_factor == pytest.approx(ratio * best.efficiency)


def test_the_interval_is_that_of_the_noise_scale():
    noise = NoiseScale()
    for scatter in (1900.0, 2100.0, 2000.0, 2050.0):
        noise.add((scatter + 64 * 40, 2, 40.0), 64)
    found = solved_plan().goodput(noise)
    low, high = (solved_plan().goodput(end).effective_batch_size for end in noise.interval)
    assert found.interval == (low, high)
    assert low <= found.effective_batch_size <= high
    assert f"({low:,} to {high:,})" in str(found)


def test_what_cannot_be_told_says_why():
    with raises(InputError, "inf"):
        solved_plan().goodput(math.inf)
    with raises(InputError, "'400'"):
        solved_plan().goodput("400")
    with raises(PlanError):
        made_plan().goodput(10)
