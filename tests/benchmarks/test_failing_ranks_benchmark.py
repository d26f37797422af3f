"""The benchmark of failing ranks runs. It fails if a job does not end, or if the report does not name the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from folders import BENCHMARKS, ROOT
from marks import for_release


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, for_release(3)])
def test_the_benchmark_runs(number, tmp_path):
    """It measures the first ways to fail. tests/ddp/test_ddp_faults.py has all of them."""
    output = tmp_path / "failing_ranks.json"
    committed = json.loads((BENCHMARKS / "results" / "failing_ranks.json").read_text(encoding="utf-8"))
    ways = [*committed["seconds"]][:number]
    words = [sys.executable, str(BENCHMARKS / "failing_ranks.py"), "--repetitions", "1", "--output", str(output)]
    words += ["--ways", *ways]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=580, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found.keys() == committed.keys()
    assert [*found["seconds"]] == ways
