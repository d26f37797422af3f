"""Compare another split with a plan, by the plan's own models."""

from __future__ import annotations

import pytest
from handmade import GIB, made_plan, only_ddp, solved_plan
from raised import raises
from workloads import char_gpt

import autosplit
from autosplit.errors import InputError, PlanError
from autosplit.plan.plan import Plan


class TestByHand:
    def test_it_is_the_fits_arithmetic(self):
        found = solved_plan().compare_with((64, 0))
        assert found.samples_per_s == pytest.approx(64 / (0.006 + 0.0005))
        both = solved_plan().compare_with((64, 64))
        assert both.samples_per_s == pytest.approx(128 / (0.006 + 0.001 + 64e-6 + 0.0005))
        assert both.peak_bytes[0] == GIB + 64 * 50 * 2**20 + 128 * 2**20
        assert both.gain == pytest.approx(both.plan_samples_per_s / both.samples_per_s)

    def test_gradients_that_wait_are_counted(self):
        plan = solved_plan(accumulation_steps=1, effective_batch_size=256, effective_batch_sizes=None)
        one, two = plan.compare_with((64, 64)), plan.compare_with((64, 64), 2)
        assert [b - a for a, b in zip(one.peak_bytes, two.peak_bytes, strict=True)] == [GIB, GIB]

    def test_a_share_that_does_not_fit_is_named(self):
        found = solved_plan().compare_with((800, 10))
        assert (found.too_large, found.fits) == (("cuda:0",), False)
        assert str(found).endswith("it does not fit cuda:0")

    @pytest.mark.parametrize(
        "split",
        [
            (4,),
            (0, 0),
            (1, -1),
        ],
    )
    def test_what_is_no_split_is_refused(self, split):
        with raises(InputError):
            solved_plan().compare_with(split)

    def test_ranks_all_take_part(self):
        with raises(InputError, "1"):
            only_ddp(solved_plan(), cost=solved_plan().main.cost).compare_with((64, 0))

    def test_a_plan_without_a_fit_says_what_to_do(self):
        with raises(PlanError):
            made_plan().compare_with((64, 64))


@pytest.mark.slow
@pytest.mark.usefixtures("exact_allocator")  # the gaps of so little memory are no line
def test_it_is_near_what_measure_finds():
    """Also after the plan was saved and loaded."""
    workload, devices = char_gpt(width=64, depth=2), "sim:RTX3090+RTX2080Ti"
    plan = autosplit.tune(workload, devices=devices, effective_batch_size=128, n_trials=3, profile="off")
    found = Plan.from_json(plan.to_json()).compare_with((64, 64))
    measured = autosplit.measure(workload, devices=devices, split=(64, 64))
    assert found.samples_per_s == pytest.approx(measured.samples_per_s, rel=0.05)
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05)
