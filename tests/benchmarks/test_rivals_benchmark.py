"""The comparison with other estimators: the search for the largest batch, and the errors."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from folders import BENCHMARKS


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")  # published.py sets it; monkeypatch restores it
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("rivals_benchmark", BENCHMARKS / "rivals.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_errors_are_counted_from_the_nearest_end_of_the_bracket(bench):
    bracket = bench.Bracket("any", fits=64, fails=96)
    found = bench.errors([(64, bracket), (95, bracket), (96, bracket), (32, bracket)])
    assert found == {
        "brackets": 4,
        "inside": 0.5,
        "below": 0.25,
        "above": 0.25,
        "median": 1.0,
        "factor of 90%": 2.0,
    }
    assert bench.ratio(190, bracket) == 2
    assert bench.errors([(0, bracket)])["factor of 90%"] == bench.LARGEST
    assert bench.errors([]) == {"brackets": 0}


@pytest.mark.parametrize("largest", [1, 32, 700, 5000])
def test_the_search_finds_the_largest_batch_of_lines_and_of_bent_lines(bench, largest):
    def straight(batch):
        return 7 + 3 * batch

    def bent(batch):
        return max(50 + batch, 3 * batch)

    for peak in (straight, bent):
        assert bench.largest_searched(peak, peak(largest) + 0.5) == min(largest, bench.LARGEST)
    assert bench.largest_line(7, 3, straight(largest)) == min(largest, bench.LARGEST)
