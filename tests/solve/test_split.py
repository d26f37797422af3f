"""The arithmetic of splits: sums, caps, proportions, and the fastest split against brute force."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raised import raises

from autosplit.errors import InputError
from autosplit.solve import fastest_split
from autosplit.solve import split as splits
from autosplit.solve.step_time import TimeCurve

batch_sizes = st.integers(0, 200)
device_counts = st.integers(1, 9)
shares = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@st.composite
def shares_and_ceilings(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """A batch, the proportions to split it in, and ceilings with room for it."""
    split = draw(shares.filter(any))
    ceilings = draw(st.lists(st.integers(0, 60), min_size=len(split), max_size=len(split)))
    return draw(st.integers(0, sum(ceilings))), split, ceilings


@st.composite
def curves(draw: st.DrawFn) -> tuple[int, list[list[int]], list[int], list[int]]:
    """A small problem: a batch, non-decreasing step curves up to their caps, the caps, and floors."""
    increments = draw(
        st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=7), min_size=1, max_size=3),
    )
    tables = [[0, *itertools.accumulate(steps)] for steps in increments]
    caps = [len(table) - 1 for table in tables]
    floors = [draw(st.integers(0, cap)) if draw(st.booleans()) else 0 for cap in caps]
    return draw(st.integers(sum(floors), sum(caps))), tables, caps, floors


def lookups(tables: Sequence[Sequence[float]]) -> list[Callable[[int], float]]:
    return [table.__getitem__ for table in tables]


def linear(fixed_s: float, per_sample_s: float) -> Callable[[int], float]:
    return lambda n: fixed_s + per_sample_s * n if n else 0.0


def one_by_one(
    batch_size: int, times: Sequence[Callable[[int], float]], caps: Sequence[int], floors: Sequence[int]
) -> tuple[int, ...]:
    """The rule in words: each next sample goes to the device that finishes it first, then to the smaller share, then in
    order.
    """
    given_out = list(floors)
    for _ in range(batch_size - sum(floors)):
        open_devices = [i for i, n in enumerate(given_out) if n < caps[i]]
        given_out[min(open_devices, key=lambda i: (times[i](given_out[i] + 1), given_out[i], i))] += 1
    return tuple(given_out)


@st.composite
def alike_devices(draw: st.DrawFn) -> tuple[int, list[TimeCurve], list[int], list[int]]:
    """Devices of one to three kinds with curves that are flat at first: a batch, curves, caps and floors."""
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = sorted(draw(st.sets(st.integers(1, 400), min_size=1, max_size=4)))
        seconds = itertools.accumulate(draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes))))
        kinds.append(TimeCurve(tuple(zip(sizes, (0.1 * (1 + s) for s in seconds), strict=True))))
    curves = [draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 6)))]
    caps = [draw(st.sampled_from((0, 3, 50, 400))) for _ in curves]
    floors = [min(cap, draw(st.sampled_from((0, 0, 0, 2)))) for cap in caps]
    return draw(st.integers(sum(floors), sum(caps))), curves, caps, floors


class TestEvenSplit:
    @given(batch_sizes, device_counts)
    def test_is_whole_and_within_one(self, batch_size: int, num_devices: int) -> None:
        split = splits.even_split(batch_size, num_devices)
        assert len(split) == num_devices
        assert sum(split) == batch_size
        assert max(split) - min(split) <= 1
        assert list(split) == sorted(split, reverse=True)


class TestSplitFromGpu0:
    @pytest.mark.parametrize(
        ("batch_size", "gpu0_bsz", "num_devices", "expected"),
        [
            # Device 0 may take the larger share; it must not silently become (5, 5).
            (10, 6, 2, (6, 4)),
            # gpu0_bsz holds; it must not become (3, 3, 3) with a device left out.
            (9, 2, 4, (2, 3, 2, 2)),
            # One device takes everything, whatever its proportion.
            (7, 3, 1, (7,)),
            # Short batches keep one entry per device.
            (5, 4, 4, (4, 1, 0, 0)),
            (3, 8, 3, (3, 0, 0)),
            # Nothing on device 0, also when there are fewer samples than other devices.
            (9, 0, 4, (0, 3, 3, 3)),
            (2, 0, 4, (0, 1, 1, 0)),
        ],
    )
    def test_cases(self, batch_size: int, gpu0_bsz: int, num_devices: int, expected: tuple[int, ...]) -> None:
        assert splits.split_from_gpu0(batch_size, gpu0_bsz, num_devices) == expected

    @given(batch_sizes, st.integers(0, 250), st.integers(2, 9))
    def test_device_0_gets_its_share_and_the_rest_is_even(
        self, batch_size: int, gpu0_bsz: int, num_devices: int
    ) -> None:
        first, *rest = splits.split_from_gpu0(batch_size, gpu0_bsz, num_devices)
        assert first == min(gpu0_bsz, batch_size)
        assert first + sum(rest) == batch_size
        assert len(rest) == num_devices - 1
        assert max(rest) - min(rest) <= 1


class TestProportionalSplit:
    @given(batch_sizes, shares.filter(any))
    def test_is_within_one_of_the_exact_proportion(self, batch_size: int, split: list[int]) -> None:
        result = splits.proportional_split(batch_size, split)
        assert sum(result) == batch_size
        for got, share in zip(result, split, strict=True):
            assert abs(got - Fraction(batch_size * share, sum(split))) < 1
            assert share or not got

    @given(shares)
    def test_the_whole_batch_gets_the_split_itself(self, split: list[int]) -> None:
        assert splits.proportional_split(sum(split), split) == tuple(split)
        assert splits.proportional_split(sum(split), split, split) == tuple(split)

    @given(shares_and_ceilings())
    def test_ceilings_hold(self, case: tuple[int, list[int], list[int]]) -> None:
        batch_size, split, ceilings = case
        result = splits.proportional_split(batch_size, split, ceilings)
        assert sum(result) == batch_size
        assert all(got <= ceiling for got, ceiling in zip(result, ceilings, strict=True))
        positive_full = all(
            got == ceiling for got, share, ceiling in zip(result, split, ceilings, strict=True) if share
        )
        if not positive_full:
            assert not any(got for got, share in zip(result, split, strict=True) if not share)

    @given(shares_and_ceilings())
    def test_devices_below_their_ceilings_keep_their_proportions(self, case: tuple[int, list[int], list[int]]) -> None:
        batch_size, split, ceilings = case
        result = splits.proportional_split(batch_size, split, ceilings)
        room = [i for i, share in enumerate(split) if share and result[i] < ceilings[i]]
        if room:
            placed, weight = sum(result[i] for i in room), sum(split[i] for i in room)
            # One sample of rounding, and one more if a device reached its ceiling by rounding.
            assert all(abs(result[i] - Fraction(placed * split[i], weight)) <= 2 for i in room)

    @pytest.mark.parametrize(
        ("batch_size", "split", "ceilings", "expected"),
        [
            (7, (4, 6, 6), None, (2, 3, 2)),  # quotas 1.75, 2.625, 2.625: the tie goes to the lower index
            (20, (4, 6, 6), (4, 9, 7), (4, 9, 7)),
            (12, (4, 6, 6), (2, 9, 9), (2, 5, 5)),
            (10, (0, 5, 5), (9, 3, 9), (0, 3, 7)),  # device 2 has room, so device 0 keeps its nothing
            (10, (0, 5, 5), (9, 3, 4), (3, 3, 4)),  # nothing else has room
            (10, (0, 0, 5), (4, 8, 4), (2, 4, 4)),  # shared out by their ceilings
            (0, (0, 0), None, (0, 0)),
        ],
    )
    def test_cases(
        self, batch_size: int, split: tuple[int, ...], ceilings: tuple[int, ...] | None, expected: tuple[int, ...]
    ) -> None:
        assert splits.proportional_split(batch_size, split, ceilings) == expected


class TestCapSplit:
    @given(shares_and_ceilings())
    def test_moves_only_the_overflow(self, case: tuple[int, list[int], list[int]]) -> None:
        _, sizes, ceilings = case
        if sum(sizes) > sum(ceilings):
            with raises(InputError, str(sum(ceilings))):
                splits.cap_split(sizes, ceilings)
            return
        result = splits.cap_split(sizes, ceilings)
        assert sum(result) == sum(sizes)
        for got, size, ceiling in zip(result, sizes, ceilings, strict=True):
            assert min(size, ceiling) <= got <= ceiling
        assert splits.cap_split(result, ceilings) == result


class TestFastestSplit:
    @given(curves())
    def test_equals_brute_force(self, case: tuple[int, list[list[int]], list[int], list[int]]) -> None:
        batch_size, tables, caps, floors = case
        got = fastest_split.fastest_split(batch_size, lookups(tables), caps, floors)
        assert sum(got) == batch_size
        assert all(least <= n <= most for least, n, most in zip(floors, got, caps, strict=True))
        ranges = (range(least, most + 1) for least, most in zip(floors, caps, strict=True))
        best = min(
            max(table[n] for table, n in zip(tables, candidate, strict=True))
            for candidate in itertools.product(*ranges)
            if sum(candidate) == batch_size
        )
        assert max(table[n] for table, n in zip(tables, got, strict=True)) == best

    @given(alike_devices())
    def test_devices_that_are_alike_are_asked_once_and_served_alike(
        self, case: tuple[int, list[TimeCurve], list[int], list[int]]
    ) -> None:
        """Eight equal GPUs once took 20 seconds to explain: each was evaluated, and flat curves were bisected to the
        end.
        """
        batch_size, curves, caps, floors = case
        expected = one_by_one(batch_size, curves, caps, floors)
        assert fastest_split.fastest_split(batch_size, curves, caps, floors) == expected
        apart = [TimeCurve(curve.points) for curve in curves]  # equal curves in different objects
        assert fastest_split.fastest_split(batch_size, apart, caps, floors) == expected

    def test_a_device_that_would_only_slow_the_step_down_gets_nothing(self) -> None:
        assert fastest_split.fastest_split(8, [linear(0, 1.0), linear(100.0, 1.0)], [10, 10]) == (8, 0)

    @pytest.mark.parametrize("batch_size", [7, 1000])
    def test_alike_devices_share_evenly_also_where_time_is_flat(self, batch_size: int) -> None:
        expected = splits.even_split(batch_size, 3)
        assert fastest_split.fastest_split(batch_size, [linear(0.1, 0.01)] * 3, [batch_size] * 3) == expected
        assert fastest_split.fastest_split(batch_size, [linear(0.1, 0.0)] * 3, [batch_size] * 3) == expected
        assert fastest_split.fastest_split(batch_size, [linear(0.0, 0.0)] * 3, [batch_size] * 3) == expected

    def test_a_huge_cap_costs_nothing(self) -> None:
        assert fastest_split.fastest_split(4, [linear(1, 1)] * 2, [2**62, 2**62]) == (2, 2)

    def test_ten_thousand_devices(self) -> None:
        times = [linear(0.001 + i % 97 / 10_000, 0.0001 + i % 89 / 100_000) for i in range(10_000)]
        start_s = time.process_time()
        got = fastest_split.fastest_split(2_500_000, times, [3_000_000] * len(times))
        elapsed_s = time.process_time() - start_s
        assert sum(got) == 2_500_000
        slowest_s = max(f(n) for f, n in zip(times, got, strict=True))
        # Optimal: no device could finish one more sample before the slowest device ends.
        assert all(f(n + 1) >= slowest_s for f, n in zip(times, got, strict=True))
        assert elapsed_s < 10  # about 1 s of this process, however busy the machine is


class TestShortSplits:
    """A share that shrinks from 2 or more to 1 cannot train a BatchNorm."""

    @given(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any), st.data())
    def test_leave_nobody_alone_where_that_can_be(self, split: list[int], data: st.DataObject) -> None:
        batch_size = data.draw(st.integers(0, sum(split)))
        shares = splits.short_split(batch_size, split)
        assert sum(shares) == batch_size
        assert all(0 <= share <= most for share, most in zip(shares, split, strict=True))
        reachable = {0}
        for most in split:
            reachable = {n + share for n in reachable for share in range(most + 1) if share != 1}
        assert 1 not in shares or 1 in split or batch_size not in reachable

    @pytest.mark.parametrize(
        ("batch_size", "split", "shares"),
        [
            (2, (4, 4), (2, 0)),
            (3, (2, 6), (0, 3)),
            (3, (2, 2), (2, 1)),
            (1, (2, 6), (0, 1)),
        ],
    )
    def test_cases(self, batch_size: int, split: tuple[int, ...], shares: tuple[int, ...]) -> None:
        assert splits.short_split(batch_size, split) == shares


class TestMicroBatches:
    @given(st.integers(1, 500), st.integers(1, 600))
    def test_add_up_exactly(self, effective_batch_size: int, batch_size: int) -> None:
        sizes = splits.micro_batch_sizes(effective_batch_size, batch_size)
        assert sum(sizes) == effective_batch_size
        assert len(sizes) == splits.accumulation_steps(effective_batch_size, batch_size)
        assert all(size == batch_size for size in sizes[:-1])
        assert 1 <= sizes[-1] <= batch_size


ONE = linear(1, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: splits.even_split(-1, 2), "batch_size is -1. Expected a whole number of at least 0"),
        (lambda: splits.even_split(True, 2), "batch_size is True"),
        (lambda: splits.split_from_gpu0(4, -2, 2), "gpu0_bsz is -2"),
        (
            lambda: splits.proportional_split(4, (0, 0)),
            "split is (0, 0), so no device would get any of the batch's 4 samples",
        ),
        (lambda: splits.proportional_split(4, (2, -1)), "split[1] is -1"),
        (lambda: splits.proportional_split(4, ()), "split is empty"),
        (lambda: splits.proportional_split(4, 4), "split is 4. Expected one whole number per device"),
        (
            lambda: splits.proportional_split(4, (2, 2), (2,)),
            "ceilings is (2,). Expected one whole number for each",
        ),
        (
            lambda: splits.proportional_split(9, (2, 2), (4, 3)),
            "batch_size is 9, but the ceilings (4, 3) allow at most",
        ),
        (lambda: fastest_split.fastest_split(4, [], []), "times is empty"),
        (lambda: fastest_split.fastest_split(9, [ONE, ONE], [4, 4]), "the caps (4, 4) allow at most 8"),
        (
            lambda: fastest_split.fastest_split(4, [ONE], [4, 4]),
            "caps is (4, 4). Expected one whole number for each",
        ),
        (lambda: fastest_split.fastest_split(4, [ONE, ONE], [4, 4], [3, 2]), "the floors (3, 2) need 5"),
        (lambda: fastest_split.fastest_split(4, [ONE, ONE], [1, 4], [2, 0]), "floors[0] is 2, above the cap of 1"),
        (lambda: fastest_split.fastest_split(2, [lambda n: float("nan")], [4]), "times[0](1) is nan. Expected finite"),
        (lambda: fastest_split.fastest_split(99, [lambda n: n and float("inf")], [99]), "times[0](99) is inf"),
        (lambda: splits.micro_batch_sizes(0, 4), "effective_batch_size is 0. Expected a whole number of at least 1"),
    ],
)
def test_bad_input_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
