"""The benchmark of the simulator runs without a GPU, names GPUs, summarises, and gives the package its figures."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType

import pytest
from folders import BENCHMARKS


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Load the benchmark under another name."""
    spec = importlib.util.spec_from_file_location("simulation_benchmark", BENCHMARKS / "simulation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = path
        del sys.modules[spec.name]


@pytest.mark.slow
def test_a_run_without_a_gpu_compares_memory_and_can_be_recorded_only_in_full(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "PRECISIONS", ("none",))
    monkeypatch.setattr(bench, "QUICK_CEILING_BYTES", 2**19)
    output = tmp_path / "simulation.json"
    assert bench.main(["--only", "mlp", "--output", str(output)]) == 0
    figures = json.loads(output.read_text(encoding="utf-8"))
    assert (figures["card"], figures["kind"], figures["quick"]) == (None, "cpu", True)
    (case,) = figures["cases"].values()
    assert [row["bytes_ratio"] for row in case["steps"]] == pytest.approx([1.0, 1.0], abs=0.01)
    assert not any("measured_s" in row for row in case["steps"])
    assert case["ceiling"]["ratio"] == pytest.approx(1.0, abs=0.01)
    assert figures["summary"]["samples_per_s"] == {"count": 0}
    assert "mlp, none: 2: bytes x" in capsys.readouterr().out
