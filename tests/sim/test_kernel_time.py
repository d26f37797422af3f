"""The time of kernels: the effects of shapes, kernel classes and the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.devices.catalog import find_card
from autosplit.sim.kernel_time import host_seconds, kernel_rates
from autosplit.sim.op_cost import OpCost, Work

A100 = find_card("A100-40GB")


def product(rows: int, columns: int, inner: int, *, kind: str = "matmul", rate: str = "float16") -> OpCost:
    return OpCost(2 * rows * columns * inner, 2, rate, kind, (rows, columns, inner, 1))


@given(*[st.integers(1, 20000)] * 3)
def test_no_product_exceeds_what_a_card_sustains(rows, columns, inner):
    cost = product(rows, columns, inner)
    reached = kernel_rates().kinds["matmul"].reached
    assert cost.seconds(A100) >= cost.flops / (A100.sustained_flops("float16") * reached)


def test_a_wave_that_is_not_full_takes_as_long_as_a_full_one_unless_smaller_tiles_are_taken():
    # 108 multiprocessors: one tile of 256 x 128 more than a wave of them takes a second wave, or smaller tiles.
    full, more = (product(256 * count, 128, 4096).seconds(A100) for count in (108, 109))
    assert more > 1.15 * full
    unknown = replace(A100, multiprocessors=None)
    smooth = [product(256 * count, 128, 4096).seconds(unknown) for count in (108, 109)]
    assert smooth[1] < 1.02 * smooth[0]


def test_products_of_a_card_of_70_watts_run_faster_beside_kernels_that_draw_less():
    card = find_card("L4")
    large, moved = product(8192, 8192, 8192, rate="float32"), OpCost(0, 10**9, "float32")
    alone_s, moved_s = large.seconds(card), moved.seconds(card)

    def step_s(copies: int) -> float:
        return Work.of(0, [large, *[moved] * copies]).seconds(card)

    assert step_s(1) == pytest.approx(alone_s + card.memory_power * moved_s)
    assert step_s(100) == pytest.approx(alone_s * card.sustained["float32"] + 100 * moved_s)  # the full clock
    steady = replace(card, memory_power=1.0)
    assert Work.of(0, [large, moved]).seconds(steady) == pytest.approx(alone_s + moved_s)


def test_one_interpreter_starts_the_forwards_of_all_replicas():
    work = Work.of(0, [OpCost(0, 8, "float32", part=part) for part in ("forward", "backward", "none")])
    one, four = (host_seconds(work.numbers, work.codes, A100, replicas=count) for count in (1, 4))
    assert four[0] == pytest.approx(4 * one[0])
    assert (four[1], four[2]) == (one[1], 0.0)
