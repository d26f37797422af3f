"""A plan explains its limits and alternatives, in cases with known results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fitted_plans import fitted_plan
from handmade import GIB, changed_layout, changed_plan, made_plan, only_ddp
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import char_gpt

from autosplit import tune
from autosplit.errors import PlanError
from autosplit.plan.explanation import Bound
from autosplit.plan.plan import Plan
from autosplit.plan.solve_again import problem_of
from autosplit.solve.change import NO_LIMIT_BYTES, Change, changed
from autosplit.solve.step_time import Cost, Residual
from autosplit.solve.trial import Trial
from autosplit.text import rate_text


def limits_of(plan: Plan) -> list[tuple[str, str | None, float]]:
    """Return the limits of the batch size, with their gains to two digits."""
    sizes = ("memory", "max_batch_size", "effective_batch_size")
    return [(b.what, b.device, round(b.gain, 2)) for b in plan.explain().bounds if b.what in sizes]


def bound_of(plan: Plan, what: str, device: str | None = None) -> Bound | None:
    return next((b for b in plan.explain().bounds if (b.what, b.device) == (what, device)), None)


class TestWhatBounds:
    """Times are in ms. The step has 100 samples, and the slowest device decides."""

    def test_the_memory_of_device_0(self):
        # (20, 80) takes 80 * 4, (80, 20) would take 80.
        plan = fitted_plan((20, 80), (1.0, 4.0), (20, 1000), accumulates=False)
        assert limits_of(plan) == [("memory", "cuda:0", 4.0)]
        assert plan.explain().predicted_samples_per_s == pytest.approx(100 / 0.320)
        limit, other = plan.explain().reasons()
        assert limit == "The memory of cuda:0 limits the batch: +300% without this limit."
        assert other.startswith("Apart from that, the plan would be faster with ")

    def test_the_memory_of_all_devices_where_none_by_itself_helps(self):
        # Five forwards of (10, 10) at 20 each. More samples on one device alone still take 1 ms each.
        plan = fitted_plan((10, 10), (1.0, 1.0), (10, 10), fixed_ms=10.0)
        assert limits_of(plan) == [("memory", None, round(100 / 60, 2))]
        assert "The memory of all devices together" in str(plan.explain())

    def test_time_of_the_devices(self):
        plan = fitted_plan((80, 20), (1.0, 4.0), (1000, 1000))
        assert limits_of(plan) == []
        # The rates, 1 and 1/4 per ms, add up.
        assert bound_of(plan, "device", "cuda:0").gain == pytest.approx(2.25 / 1.25, rel=0.01)
        assert bound_of(plan, "device", "cuda:1").gain == pytest.approx(1.5 / 1.25, rel=0.02)
        assert str(plan.explain()).startswith(
            "Not memory-bound. The plan would be faster with cuda:0 twice as fast (+80%), "
        )

    def test_a_gain_below_the_noise_is_not_told(self):
        """On a busy machine, an unlimited change promised +18,896%, because the step was shorter than its error."""
        plan = fitted_plan((20, 20), (0.01, 0.01), (20, 20), fixed_ms=100.0, effective=10_000)
        sure, vague = (
            changed_plan(plan, cost=replace(plan.main.cost, residuals=(Residual((20, 20), 250, 1.0, predicted_s),)))
            for predicted_s in (1.001, 1.1)
        )
        assert max(gain for _, _, gain in limits_of(sure)) > 20
        assert limits_of(vague) == []

    @pytest.mark.parametrize(
        ("overhead", "what"), [("copies_ms", "overhead"), ("update_ms", "update"), ("gather_ms", "overhead")]
    )
    def test_what_a_step_takes_beside_the_devices(self, overhead, what):
        # 50 of each device, and 50 more for each of the other's samples, where they are gathered. On device 0 alone,
        # nothing would be copied or gathered, and it would take 100 as well.
        amount = 1.0 if overhead == "gather_ms" else 50.0
        plan = fitted_plan((50, 50), (1.0, 1.0), (99, 99), accumulates=False, **{overhead: amount})
        assert bound_of(plan, what).gain == pytest.approx(2.0)

    def test_what_devices_cost_each_other_is_one_thing(self):
        """A step shows its total time, not the cause. All of it was attributed to the gather of a single number."""
        plan = fitted_plan((50, 50), (1.0, 1.0), (1000, 1000))
        slow = changed_plan(plan, cost=Cost(replace(plan.main.cost.step_time, contention=1.5, copies_s=(0.0, 0.025))))
        assert bound_of(plan, "overhead") is None
        assert bound_of(slow, "overhead").gain == pytest.approx(2.0)
        assert "no overhead between devices (+100%)" in str(slow.explain())

    def test_max_batch_size_within_a_step(self):
        # Ten forwards of (5, 5) at 15, or one of (50, 50) at 60.
        plan = fitted_plan((5, 5), (1.0, 1.0), (1000, 1000), fixed_ms=10.0, most=10)
        assert limits_of(plan) == [("max_batch_size", None, 2.5)]
        assert "max_batch_size limits the batch: up to +150% with a larger one." in str(plan.explain())

    def test_a_larger_max_batch_size_is_no_more_than_memory_holds(self):
        # Ceilings were searched up to 10, and 12 fit in memory. (12, 8) of 20 takes 22, (10, 10) takes 20.
        plan = fitted_plan((5, 5), (1.0, 1.0), (6, 12), fixed_ms=10.0, most=10, effective=None)
        # 16 samples in (6, 10) take 20, and 18 in (6, 12) take 22. 20 do not fit, so 18 is the largest.
        rate = max(16 / 20, 17 / 21, 18 / 22)
        assert limits_of(plan)[-1] == ("max_batch_size", None, round(rate / (10 / 15), 2))

    def test_the_effective_batch_against_twice_as_much(self):
        # 100 in 50 + 60 against 200 in 100 + 60.
        plan = fitted_plan((50, 50), (1.0, 1.0), (1000, 1000), update_ms=60.0)
        assert limits_of(plan) == [("effective_batch_size", None, round((200 / 160) / (100 / 110), 2))]
        assert "A larger effective batch is faster: up to +38% at twice the size." in str(plan.explain())

    def test_a_ceiling_of_time_is_no_lack_of_memory(self):
        plan = fitted_plan((20, 80), (1.0, 4.0), (20, 1000), accumulates=False)
        first, second = plan.main.seats
        timed = replace(first, ceiling=replace(first.ceiling, limited_by="time"))
        assert limits_of(changed_plan(plan, seats=(timed, second))) == []

    def test_ranks(self):
        # As for device 0: the all-reduce, 50 after a backward of 2/3 of 320, is hidden. Without the bound it is not.
        plan = fitted_plan((20, 80), (1.0, 4.0), (20, 1000), accumulates=False)
        ranks = only_ddp(plan, cost=replace(plan.main.cost, all_reduce_s=0.05))
        assert limits_of(ranks) == [("memory", "cuda:0", 4.0)]
        assert ranks.explain().predicted_samples_per_s == pytest.approx(100 / 0.320)
        waiting = only_ddp(plan, cost=replace(plan.main.cost, all_reduce_s=0.640))
        assert bound_of(waiting, "copies").gain == pytest.approx((320 + 640 - 2 / 3 * 320) / 320)


class TestWhatElseThereIs:
    def test_an_even_split(self):
        plan = fitted_plan((80, 20), (1.0, 4.0), (1000, 1000))
        even = plan.explain().even
        assert (even.split, even.accumulation_steps, even.measured) == ((50, 50), 1, False)
        assert even.samples_per_s == pytest.approx(100 / 0.200)
        assert even.gain == pytest.approx(2.5)

    def test_an_even_split_that_was_measured_has_no_other_rate(self):
        """The README had two rates for one split: 40,262 predicted and 41,397 simulated."""
        plan = fitted_plan((80, 20), (1.0, 4.0), (1000, 1000), samples_per_s=1300.0, even_samples_per_s=520.0)
        explanation = plan.explain()
        assert explanation.even is None
        assert explanation.even_measured.gain == pytest.approx(2.5)
        assert explanation.even_measured.measured
        assert "520 samples/s (measured)" in str(explanation)
        assert str(explanation).count("even split") == 1

    def test_each_device_alone(self):
        alone = fitted_plan((80, 20), (1.0, 4.0), (1000, 1000)).explain().alone
        assert [one.devices for one in alone] == [("cuda:0",), ("cuda:1",)]
        assert [one.gain for one in alone] == pytest.approx([100 / 80, 400 / 80])

    def test_nothing_is_claimed_on_a_shared_processor(self):
        explanation = fitted_plan((50, 50), (1.0, 1.0), (1000, 1000), kind="cpu").explain()
        assert explanation.even is explanation.fastest is None
        assert explanation.alone == ()
        assert "autosplit reports no gain over an even split or a single device" in str(explanation)

    def test_a_gib_more_on_device_0(self):
        more = fitted_plan((20, 80), (1.0, 4.0), (20, 1000), accumulates=False).explain().more_memory
        assert (more.device, more.gain) == ("cuda:0", pytest.approx(320 / 240))

    def test_a_gib_more_brings_nothing_where_time_bounds(self):
        explanation = fitted_plan((80, 20), (1.0, 4.0), (1000, 1000)).explain()
        assert not explanation.more_memory.pays
        assert "1 GiB more on cuda:0, the fullest device, would not help." in str(explanation)

    def test_the_smallest_batch_that_is_hardly_slower(self):
        """A plan without a requested batch had 1,217 samples, other than its fastest trial. No text explained it."""
        larger = Trial(0, 50, 200, 1, (50, 150), 102.0)
        own = Trial(1, 2, 6, 1, (2, 4), 100.0)
        plan = made_plan((2, 4), effective=6, samples_per_s=100.0, trials=(larger, own))
        said = "6 is the smallest tried batch with 97% of the best throughput (102 samples/s with 200)."
        assert plan.explain().sentences()["knee"] == said
        asked = replace(plan, request={**plan.request, "effective_batch_size": 6})
        slower = replace(plan, trials=(replace(larger, samples_per_s=110.0), own))
        untried = replace(plan, trials=(larger,))  # the loader or less memory changed it
        assert asked.explain().knee is slower.explain().knee is untried.explain().knee is None

    @pytest.mark.parametrize(("rate", "fastest"), [(900.0, "balanced"), (1100.0, "ddp")])
    def test_the_faster_of_two(self, rate, fastest):
        plan = fitted_plan((80, 20), (1.0, 4.0), (1000, 1000), samples_per_s=1000.0)
        plan = changed_layout(plan, samples_per_s=rate)
        assert plan.fastest == plan.explain().fastest == fastest
        said = "BalancedDataParallel is 1.11 times as fast as DDP" if rate < 1000 else "DDP is 1.10 times as fast as"
        assert said in str(plan.explain())
        assert f"DistributedDataParallel {rate_text(rate)} (predicted)" in str(plan.explain())


class TestAdvice:
    def test_the_learning_rate_has_the_users_own_batch_as_its_base(self):
        """It was relative to the sample batch, whose size is arbitrary."""
        text = str(fitted_plan((50, 50), (1.0, 1.0), (1000, 1000), sample_batch_size=8).explain())
        assert "tuned for B samples per step, scale it. For SGD with warm-up, multiply by 100 / B" in text
        assert "sample batch" not in text

    def test_the_fit_is_held_against_the_trials(self):
        plan = fitted_plan((50, 50), (1.0, 1.0), (1000, 1000))
        residuals = tuple(Residual((50, 50), 1, 1.0, seconds) for seconds in (0.9, 1.02, 1.0))
        trials = tuple(Trial(i, 50, 100, 1, (50, 50), 100.0, share) for i, share in enumerate((0.01, 0.03, 0.02)))
        failed = Trial(3, 60, 100, 1, (60, 40), failure="cuda:0 ran out of memory")
        plan = changed_plan(plan, cost=replace(plan.main.cost, residuals=residuals), trials=(*trials, failed))
        quality = plan.explain().fit
        assert (quality.median_share, quality.largest_share) == pytest.approx((0.02, 0.1))
        assert (quality.count, quality.noise_share) == (3, 0.02)

    def test_a_plan_without_a_fit_says_what_it_knows(self):
        explanation = made_plan((100, 156)).explain()
        assert (explanation.bounds, explanation.alone, explanation.predicted_samples_per_s) == ((), (), None)
        assert explanation.even_measured.gain == pytest.approx(10234.5 / 7812.6)
        assert "Data loading was not measured" in str(explanation)


# Any plan

MILLISECONDS = st.floats(0.01, 20.0)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count = draw(st.integers(1, 3))
    caps = tuple(draw(st.integers(3, 60)) for _ in range(count))
    split = tuple(draw(st.integers(1, min(cap, 20))) for cap in caps)
    return fitted_plan(
        split,
        tuple(draw(MILLISECONDS) for _ in range(count)),
        caps,
        effective=draw(st.one_of(st.none(), st.integers(sum(split), 200))),
        fixed_ms=draw(st.floats(0.0, 20.0)),
        copies_ms=draw(st.floats(0.0, 20.0)),
        gather_ms=draw(st.floats(0.0, 1.0)),
        update_ms=draw(st.floats(0.0, 20.0)),
        most=draw(st.one_of(st.none(), st.integers(sum(split), 300))),
    )


@given(plans())
@settings(max_examples=25)
@pytest.mark.slow
def test_a_loaded_plan_is_explained_as_the_one_that_was_saved(plan):
    assert Plan.from_json(plan.to_json()).explain() == plan.explain()


@pytest.mark.slow
@given(plans(), st.booleans())
@settings(max_examples=40)
def test_without_a_bound_the_rate_is_never_lower(plan, ranks):
    if ranks:
        plan = only_ddp(plan, cost=plan.main.cost)
    problem = problem_of(plan, plan.main)
    count = len(plan.split)
    changes = [Change(without=overhead) for overhead in ("copies", "gather", "overhead", "update")]
    changes += [Change(speeds=(*(1.0,) * index, 2.0, *(1.0,) * (count - index - 1))) for index in range(count)]
    relaxed = [changed(problem, change) for change in changes]
    # The split is the fastest for full forwards, not for the shorter last one.
    assert min(one.best() for one in relaxed) >= 0.98 * problem.best()
    explanation = plan.explain()
    assert all(bound.gain > 1 for bound in explanation.bounds)
    assert explanation.more_memory.samples_per_s >= explanation.predicted_samples_per_s


@given(plans(), st.sampled_from([1, GIB, NO_LIMIT_BYTES]), st.integers(0, 2), st.integers(1, 200))
def test_more_memory_takes_no_split_away(plan, more_bytes, index, batch_size):
    problem, count = problem_of(plan, plan.main), len(plan.split)
    more = changed(problem, Change(more_bytes=tuple(more_bytes * (place == index % count) for place in range(count))))
    assert more.region.largest_batch >= problem.region.largest_batch
    before, after = problem.region.gpu0_bounds(batch_size), more.region.gpu0_bounds(batch_size)
    if before is not None:
        assert after[0] <= before[0] <= before[1] <= after[1]
    ceilings = zip(more.region.replica_ceilings, problem.region.replica_ceilings, strict=True)
    assert all(larger >= ceiling for larger, ceiling in ceilings)


PLAIN = fitted_plan((20, 80), (1.0, 4.0), (20, 1000), update_ms=5.0, most=150).to_dict()
NUMBERS = st.sampled_from([0, 1, -1, 2**63 - 1, 2**62, 0.0, 1e-300, 1e300, None, [], [1], [[1, 1.0]]])


@given(st.data())
def test_a_plan_with_anything_changed_is_explained_or_refused(data):
    plain = json.loads(json.dumps(PLAIN))
    node, key = plain, data.draw(st.sampled_from(["layouts", "effective_batch_sizes", "max_batch_size"]))
    while isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 4)):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    node[key] = data.draw(NUMBERS)
    try:
        plan = Plan.from_json(json.dumps(plain))
    except PlanError:
        return
    assert "Data loading" in str(plan.explain())


# Really tuned


@pytest.mark.slow
def test_a_gib_more_is_what_tuning_with_it_finds():
    def tuned(gib: int) -> Plan:
        devices = f"sim:1xRTX2080Ti+1xH100-80GB@{gib}GiB"
        return tune(char_gpt(loss_scope="batch"), devices=devices, effective_batch_size=2048, n_trials=6, profile="off")

    explanation, more = tuned(2).explain(), tuned(3)
    assert (explanation.bounds[0].what, explanation.bounds[0].device) == ("memory", "sim:1")
    assert explanation.more_memory.device == "sim:1"
    assert explanation.more_memory.gain > 1.35
    # A tenth of the memory is left for gaps of the allocator.
    assert more.samples_per_s * 0.95 < explanation.more_memory.samples_per_s <= more.samples_per_s


@pytest.mark.slow
def test_a_plan_of_a_processor_claims_no_gain():
    plan = tune(
        char_gpt(depth=1, width=32),
        devices="cpu:40MiB,cpu:30MiB",
        effective_batch_size=64,
        n_trials=2,
        profile="off",
    )
    explanation = plan.explain()
    assert explanation.shares_processor
    assert explanation.fastest is None
    assert plan.sample_batch_size == 8
    assert explanation.predicted_samples_per_s == pytest.approx(plan.samples_per_s, rel=0.5)
    assert explanation.fit.count >= 1
    assert Plan.from_json(plan.to_json()).explain() == explanation
