"""The examples of the integrations as `autosplit launch` starts them: a process for each rank, and one job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from folders import EXAMPLES, TESTS

pytest.importorskip("accelerate", reason="needs accelerate (the extra `integrations`)")
pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
pytest.importorskip("lightning", reason="needs lightning (the extra `integrations`)")

import shared_training as shared
import torch

LAUNCHED = TESTS / "launched.py"
LIMIT_S = 280
"""It takes 18 s, and three processes that load their tools on a busy machine took 150 s."""


def launched(script: Path, plan: Any, folder: Path, *, alone: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a script with a plan, as a user would from a shell: nothing of a job or of a CPU is in its environment."""
    plan.save(folder / "plan.json")
    start = [sys.executable] if alone else [sys.executable, "-m", "autosplit", "launch", "--plan", "plan.json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "AUTOSPLIT_PROFILE": "plan.json"}
    process = subprocess.Popen(
        [*start, str(LAUNCHED), str(script), str(folder)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun, and the ranks with it
        told, _ = process.communicate()
        pytest.fail(f"{script.name} did not end: {told[-2000:]}")
    return subprocess.CompletedProcess(process.args, process.returncode, told)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S + 60)
@pytest.mark.parametrize("tool", ["accelerate", "transformers", "lightning"])
def test_a_launched_example_trains_one_model(tool, tmp_path):
    """On processors accelerate stayed alone in each process: two models that never met, and exit code 0."""
    script = EXAMPLES / f"train_{tool}.py"
    done = launched(script, shared.shares_plan((6, 2), 24), tmp_path)
    assert done.returncode == 0, done.stdout
    shared.check_learns(done.stdout)
    weights = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert torch.equal(*weights)
    if tool == "transformers":  # its GPT-2 drops out, and draws in each process
        return
    done = launched(script, shared.shares_plan((8,), 24), tmp_path, alone=True)
    assert done.returncode == 0, done.stdout
    assert torch.allclose(weights[0], torch.load(tmp_path / "alone.pt"), atol=1e-3)
