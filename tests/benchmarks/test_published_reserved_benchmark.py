"""The benchmark of reserved memory reads its table, and predicts a step."""

from __future__ import annotations

import importlib
import sys

import pytest
from folders import BENCHMARKS

from autosplit.devices.catalog import find_card


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")  # `published` sets it; monkeypatch restores it
    yield importlib.import_module("published_reserved")
    for name in ("published_reserved", "reserved_models", "reserved_gpt", "published"):
        sys.modules.pop(name, None)


def test_every_compared_row_has_a_builder_and_a_gpu(bench):
    from reserved_models import BUILDERS

    compared = [row for row in bench.rows() if not row.needs]
    assert len(compared) >= 40
    for row in compared:
        assert row.recipe in BUILDERS
        assert find_card(row.simulated).memory_bytes > 0
        assert (row.kind == "process") == bool(row.context_mib)


def test_halves_are_equal_and_leave_other_rows_out(bench):
    drawn = bench.drawn_halves(["", "FSDP", "", "", ""])
    assert drawn[1] == ""
    assert sorted(drawn[:1] + drawn[2:]) == ["kept apart", "kept apart", "tuned", "tuned"]


def test_the_step_of_an_output_layer_keeps_its_logits(bench):
    row = next(row for row in bench.rows() if row.recipe == "head" and not row.needs)
    allocated_bytes, _ = bench.memory(row)
    assert allocated_bytes / 1e9 == pytest.approx(row.allocated_gb, rel=0.01)


def test_summary(bench):
    assert bench.summary([0.9, 1.02, 1.2]) == {
        "rows": 3,
        "within 5%": 1,
        "within 10%": 2,
        "median error": 0.1,
        "most too low": -0.1,
    }
