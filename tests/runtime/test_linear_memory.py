"""Steps of few samples predict the storages of a step, and so the parts of each device's peak."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autosplit.runtime.linear_memory import CountedStep, predicted_parts, predicts
from autosplit.runtime.memory_tracker import Entry
from autosplit.solve.memory import MemoryParts

Law = tuple[str, int, int]
"""Kind, fixed bytes and bytes per sample of a storage."""

LAWS: list[Law] = [("parameters", 1000, 0), ("activations", 0, 100), ("gradients", 1000, 0)]


def counted(split: tuple[int, ...], *entries: tuple[str, int, int]) -> CountedStep:
    return CountedStep.of(split, [Entry(*entry) for entry in entries])


def step(samples: int, laws: list[Law] = LAWS) -> CountedStep:
    """Return a step on one device that allocates storages, and then frees the activations."""
    made = [(kind, 0, fixed + slope * samples) for kind, fixed, slope in laws]
    return counted((samples,), *made, *((kind, 0, -nbytes) for kind, _, nbytes in made if kind == "activations"))


class TestParts:
    def test_are_rounded_to_blocks(self):
        assert step(2).parts() == (MemoryParts(1024, 1024, 0, 0, 512),)

    def test_are_those_of_the_moment_with_the_most_memory(self):
        entries = [("parameters", 0, 512), ("activations", 0, 2048), ("activations", 0, -2048), ("gradients", 0, 1024)]
        assert counted((1,), *entries).parts() == (MemoryParts(512, 0, 0, 0, 2048),)

    def test_of_each_device_are_at_its_own_peak(self):
        entries = [("activations", 0, 512), ("activations", 1, 1024), ("activations", 0, -512), ("gathered", 0, 1024)]
        first, second = counted((1, 2), *entries).parts()
        assert first == MemoryParts(0, 0, 0, 1024, 0)
        assert second == MemoryParts(0, 0, 0, 0, 1024)

    def test_what_is_left_from_an_earlier_step_counts_as_parameters(self):
        (parts,) = counted((1,), ("parameters", 0, 512), ("left", 0, 512), ("optimizer", 0, 512)).parts()
        assert parts == MemoryParts(1024, 0, 512, 0, 0)

    def test_of_an_idle_device_are_nothing(self):
        assert counted((2, 0), ("activations", 0, 512)).parts()[1] == MemoryParts(0, 0, 0, 0, 0)


class TestPrediction:
    def test_rounds_each_storage_after_the_line(self):
        """2 and 4 samples take one block each. A line through these peaks would be flat."""
        assert step(2).parts() == step(4).parts()
        assert predicted_parts([step(2), step(4)], (100,)) == (MemoryParts(1024, 1024, 0, 0, 10_240),)

    @given(
        st.lists(st.tuples(st.sampled_from(["activations", "gradients"]), *[st.integers(0, 9000)] * 2), min_size=1),
        st.integers(2, 8),
        st.integers(1, 10_000),
    )
    def test_is_the_step(self, laws, few, samples):
        """All storages are linear in the samples."""
        steps = [step(few, laws), step(2 * few, laws), step(3 * few, laws)]
        assert predicted_parts(steps[:2], (samples,)) == step(samples, laws).parts()
        assert predicted_parts(steps, (samples,)) == step(samples, laws).parts()

    def test_three_steps_show_a_loss_over_all_pairs_of_samples(self):
        def pairs(samples):
            return counted((samples,), ("parameters", 0, 512), ("activations", 0, 4 * samples**2))

        assert predicted_parts([pairs(4), pairs(8), pairs(12)], (1000,)) == (MemoryParts(512, 0, 0, 0, 4_000_256),)

    def test_such_a_loss_has_the_samples_of_all_devices(self):
        """Device 0 gathers all outputs. Without the product of both sizes, its ceiling was a third too low."""

        def pairs(first, second):
            made = [("activations", 0, 512 * first), ("gathered", 0, 4 * (first + second) ** 2)]
            return counted((first, second), *made, ("activations", 1, 512 * second))

        steps = [pairs(4, 4), pairs(8, 4), pairs(12, 4), pairs(4, 8)]
        assert predicted_parts(steps, (600, 400)) == pairs(600, 400).parts()

    def test_each_device_has_its_own_slope(self):
        """Device 0 also gathers the outputs of all samples."""

        def both(first, second):
            made = [("activations", 0, 512 * first), ("gathered", 0, 1024 * (first + second))]
            return counted((first, second), *made, ("activations", 1, 2048 * second))

        found = predicted_parts([both(2, 2), both(4, 2), both(2, 4)], (10, 100))
        assert found == (MemoryParts(0, 0, 0, 112_640, 5120), MemoryParts(0, 0, 0, 0, 204_800))

    def test_a_device_that_does_not_change_needs_one_step(self):
        assert predicted_parts([step(3)], (3,)) == step(3).parts()

    def test_steps_with_different_storages_give_a_line_through_their_peaks(self):
        """A kernel that is chosen by the size allocates an additional block."""
        small = counted((2,), ("parameters", 0, 512), ("activations", 0, 1024))
        large = counted((4,), ("parameters", 0, 512), ("activations", 0, 1024), ("activations", 0, 1024))
        assert predicted_parts([small, large], (10,)) == (MemoryParts(512, 0, 0, 0, 5120),)

    def test_a_peak_below_what_a_step_holds_has_no_known_parts(self):
        large = counted((4,), ("parameters", 0, 4096), ("activations", 0, 1024))
        larger = counted((8,), ("activations", 0, 9216), ("parameters", 0, 0), ("gradients", 0, 0))
        assert predicted_parts([large, larger], (3,)) == (MemoryParts(4096, 0, 0, 0, 0),)
        assert predicted_parts([large, larger], (1,)) == (MemoryParts(0, 0, 0, 0, 2048),)


class TestConfirmation:
    def test_is_exact(self):
        assert predicts([step(2), step(4)], step(7))
        assert not predicts([step(2), step(4)], step(7, [*LAWS[:2], ("gradients", 1001, 0)]))

    def test_shows_that_a_kernel_rounds_its_blocks(self):
        """oneDNN rounds an LSTM's block. The curve through three of these steps predicted ten times the memory."""
        sizes = {4: 114_688, 8: 204_800, 12: 299_008, 16: 389_120}
        *steps, last = (counted((samples,), ("activations", 0, nbytes)) for samples, nbytes in sizes.items())
        assert not predicts(steps, last)

    def test_needs_the_same_storages(self):
        assert not predicts([step(2), step(4)], step(6, LAWS[:2]))
