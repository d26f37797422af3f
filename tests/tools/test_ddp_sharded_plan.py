"""Train a model that fits no device: tune_sharded simulates it, and the ranks stay within the predicted memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpus import COUNT, KIND

from autosplit import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT < 2 or KIND != "emu", reason="needs two emulated devices, whose memory can be chosen"),
]

MIB = 2**20
MEMORY_BYTES = 180 * MIB
"""Memory of a device. The context takes 32 MiB. A whole rank with AdamW needs 160 MiB for its state."""

WORKSPACES_BYTES = 16 * MIB
"""cuBLAS's workspaces on an A100, which the prediction includes. Emulated devices have none."""

MODEL = """
import json, os, sys
import torch
import autosplit
from torch import nn
from autosplit import Workload, ddp

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024, bias=False)
    def forward(self, x):
        return x + torch.relu(self.linear(x))

def make_workload():
    model = nn.Sequential(*(Layer() for _ in range(8)))
    batch = torch.randn(4, 1024), torch.randn(4, 1024)
    return Workload(model, batch, nn.functional.mse_loss, optimizer=torch.optim.AdamW)
"""

TUNE = """
from model import *
try:
    autosplit.tune(make_workload, strategy="ddp", devices="emu", effective_batch_size=600, profile="off")
except autosplit.AutosplitError as error:
    print(error.code)
plan = autosplit.tune_sharded(make_workload, layers=Layer, devices="emu", effective_batch_size=600)
plan.save(sys.argv[1])
"""

TRAIN = """
from model import *
with ddp.setup(sys.argv[1]) as ctx:
    model = ctx.shard(make_workload().model.to(ctx.device), layers=Layer)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(600, 1024), torch.randn(600, 1024))
    torch.accelerator.reset_peak_memory_stats(ctx.device)
    for step in ctx.steps(torch.utils.data.DataLoader(data, batch_sampler=ctx.batch_sampler(600))):
        for inputs, targets in step:
            outputs = model(inputs.to(ctx.device))
            step.backward(nn.functional.mse_loss(outputs, targets.to(ctx.device)))
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.accelerator.max_memory_allocated(ctx.device)
    with open(f"peak{ctx.rank}", "w") as file:
        json.dump(peak, file)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"model": MODEL, "tune": TUNE, "train": TRAIN}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(folder: Path, *command: str, memory_bytes: int = MEMORY_BYTES) -> str:
    environment = {
        **os.environ,
        "EMULATED_BYTES": str(memory_bytes),
        "EMULATED_NAMES": "NVIDIA A100-SXM4-40GB,NVIDIA A100-SXM4-40GB",
        "EMULATED_MEMORY": str(folder / "memory"),
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-1000:]
    return done.stdout


def test_a_model_that_fits_no_device_trains_within_the_predicted_memory(folder: Path) -> None:
    assert run(folder, "tune.py", "plan.json").split() == ["does-not-fit"]
    plan = Plan.load(folder / "plan.json")
    assert not plan.simulated
    assert [device.label for device in plan.devices] == ["emu:0", "emu:1"]
    assert "sharded-simulated" in [note.kind for note in plan.notes]
    assert all(seat.ceiling.limited_by == "memory" for seat in plan.ddp.seats)
    # The allocator's segments of 20 MiB waste a large part of these small devices, so train on larger ones.
    (folder / "memory").unlink()
    launch = ("-m", "autosplit", "launch", "--plan", "plan.json", "train.py", "plan.json")
    run(folder, *launch, memory_bytes=2 * MEMORY_BYTES)
    for rank, seat in enumerate(plan.ddp.seats):
        peak_bytes = json.loads((folder / f"peak{rank}").read_text())
        assert 0.75 < peak_bytes / (seat.peak_bytes - WORKSPACES_BYTES) < 1.02, (peak_bytes / MIB, seat)
