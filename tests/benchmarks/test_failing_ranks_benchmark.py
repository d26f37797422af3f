"""The benchmark of failing ranks runs. It fails if a job does not end, or if the report does not name the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from folders import BENCHMARKS, ROOT


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path):
    output = tmp_path / "failing_ranks.json"
    words = [sys.executable, str(BENCHMARKS / "failing_ranks.py"), "--repetitions", "1", "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=580, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    committed = json.loads((BENCHMARKS / "results" / "failing_ranks.json").read_text(encoding="utf-8"))
    assert found.keys() == committed.keys()
    assert found["seconds"].keys() == committed["seconds"].keys()
