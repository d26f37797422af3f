"""The search space has exactly the feasible settings, and the objective's rules choose the best trial."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from autosplit.solve.memory import MemoryFit, Region
from autosplit.solve.search_space import Configuration, Space
from autosplit.solve.trial import ERRORS_APART, KNEE_SHARE, LEAST_DIFFERENCE, Trial, best_trial


def space_of(effective: int | tuple[int, int] | None, *, largest: int = 40, max_steps: int = 8) -> Space:
    """One device that runs up to `largest` samples."""
    sizes = (effective, effective) if isinstance(effective, int) else effective
    return Space(Region(MemoryFit(0.0, 1.0), largest, largest, (), 1000), sizes, max_steps)


class TestSpace:
    @given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 30))
    def test_holds_what_makes_the_effective_batch_in_so_many_steps(self, effective, largest, max_steps):
        space = space_of(effective, largest=largest, max_steps=max_steps)
        fewest, most = space.steps_bounds()
        assert fewest == -(-effective // min(largest, effective))
        for batch, steps in itertools.product(range(1, 70), range(1, most + 3)):
            makes_it = -(-effective // batch) == steps and batch <= effective
            expected = makes_it and batch <= largest and fewest <= steps <= most
            assert space.holds(Configuration(batch, batch, steps)) == expected, (batch, steps)

    @given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 30), st.integers(1, 12))
    def test_holds_what_makes_a_step_within_a_range(self, least, more, largest, max_steps):
        space = space_of((least, least + more), largest=largest, max_steps=max_steps)
        fewest, most = space.steps_bounds()
        for batch, steps in itertools.product(range(1, 40), range(1, most + 3)):
            configuration = Configuration(batch, batch, steps)
            # As many full micro-steps as the range allows. The last is shorter if that is one too many.
            effective = min(batch * steps, least + more)
            makes_it = effective >= least and -(-effective // batch) == steps and batch <= min(largest, least + more)
            assert space.holds(configuration) == (makes_it and fewest <= steps <= most), configuration
            if space.holds(configuration):
                assert space.effective_of(configuration) == effective

    @given(st.integers(1, 60))
    def test_without_an_effective_batch_any_size_of_one_step(self, largest):
        space = space_of(None, largest=largest)
        assert space.steps_bounds() == (1, 1)
        assert space.batch_bounds(1) == (1, largest)
        assert not space.holds(Configuration(1, 1, 2))

    def test_device_0s_share_is_bounded(self):
        space = Space(Region(MemoryFit(0.0, 10.0), 50, 5, (4,), 100), (9, 9), 4)
        assert space.holds(Configuration(5, 9, 1))
        assert not space.holds(Configuration(4, 9, 1)), "the other device holds 4"
        assert not space.holds(Configuration(6, 9, 1)), "device 0 holds 5"


STEP = space_of(64, largest=64)
KNEE = space_of(None, largest=64)


def trial(number: int, batch_size: int, rate: float | None, error: float = 0.0) -> Trial:
    failure = None if rate is not None else "cuda:0 ran out of memory"
    return Trial(number, batch_size, batch_size, 1, (batch_size,), rate, error, failure=failure)


class TestBestTrial:
    def test_within_noise_the_plainest(self):
        """A step of 64 samples became (32, 31) and a single sample, because 63 seemed as fast as 64."""
        once, twice = trial(0, 64, 100.0, 0.01), replace(trial(1, 63, 101.0, 0.01), accumulation_steps=2)
        assert best_trial(STEP, [once, twice]) is once, "in one micro-step"
        even, odd = (replace(trial(n, size, 100.0, 0.01), accumulation_steps=2) for n, size in ((2, 32), (3, 33)))
        assert best_trial(STEP, [twice, odd, even]) is even, "in equal ones"
        slow = trial(4, 64, 90.0, 0.01)
        assert best_trial(STEP, [slow, twice]) is twice, "but not where it is slower"

    def test_without_noise_nothing_odd_is_taken_for_a_thousandth(self):
        once, twice = trial(0, 64, 100.0), replace(trial(1, 63, 100.05), accumulation_steps=2)
        assert best_trial(STEP, [once, twice]) is once
        assert best_trial(STEP, [once, replace(twice, samples_per_s=100.2)]).number == 1

    def test_without_an_effective_batch_the_knee(self):
        trials = [trial(0, 64, 1000.0), trial(1, 32, 970.0), trial(2, 16, 969.0)]
        assert best_trial(KNEE, trials).number == 1

    def test_failed_trials_never_count(self):
        assert best_trial(STEP, [trial(0, 4, None), trial(1, 8, 1.0)]).number == 1
        assert best_trial(STEP, [trial(0, 4, None)]) is None
        assert best_trial(KNEE, []) is None

    @given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.1, 1e6), st.floats(0, 0.05)), min_size=1, max_size=12))
    def test_is_never_slower_than_the_rule_allows(self, drawn):
        trials = [trial(number, *numbers) for number, numbers in enumerate(drawn)]
        top = max(one.samples_per_s for one in trials)
        knee = best_trial(KNEE, trials)
        assert knee.samples_per_s >= KNEE_SHARE * top
        assert knee.batch_size == min(one.batch_size for one in trials if one.samples_per_s >= KNEE_SHARE * top)
        assert best_trial(STEP, trials).samples_per_s >= top * (1 - ERRORS_APART * 0.05 * 2**0.5 - LEAST_DIFFERENCE)
