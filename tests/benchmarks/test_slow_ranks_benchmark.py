"""The benchmark of slow ranks runs in a short form. Its times mean nothing then, but its weights are exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from folders import BENCHMARKS, ROOT


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    output = tmp_path / "slow_ranks.json"
    words = [sys.executable, str(BENCHMARKS / "slow_ranks.py"), "--window", "20", "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    committed = json.loads((BENCHMARKS / "results" / "slow_ranks.json").read_text(encoding="utf-8"))
    assert found.keys() == committed.keys()
    assert [*map(sum, found["splits"])] == [32, 32]
    assert found["weights_apart"] < 1e-9
