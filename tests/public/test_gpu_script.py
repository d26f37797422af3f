"""Without a GPU, the script for GPU machines plans for a simulated GPU and reports that it checked nothing.

The version lanes run this with builds of torch for CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from folders import BENCHMARKS, ROOT


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.slow
def test_it_plans_and_reports_that_there_is_no_gpu(tmp_path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--output", str(output)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EMULATED")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "no GPU: nothing was checked\n"), done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["gpu"] is None
    assert found["versions"]["torch"] == str(torch.__version__)
    (stage,) = found["stages"]
    assert sum(stage["findings"][0]["split"]) == 64
