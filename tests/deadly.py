"""Workloads whose steps kill another process than the test's, from a number of samples on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from autosplit.workload.workload import Workload


class Deadly(nn.Module):
    """A small network that checks its number of samples."""

    def __init__(self, end: str, at: int) -> None:
        super().__init__()
        self.end, self.at = end, at
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        if multiprocessing.parent_process() is not None and len(x) >= self.at:
            _meet(self.end)
        y: Tensor = self.head(self.hidden(x).relu())
        return y


def _meet(end: str) -> None:
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "exit":
        os._exit(3)
    elif end == "sys.exit":
        sys.exit(3)
    elif end == "hang":
        folder = os.environ.get("HANGING_FOLDER")
        if folder is not None:
            Path(folder, str(os.getpid())).touch()
        time.sleep(1000)
    elif end == "raise":
        raise ZeroDivisionError("boom")
    elif end == "host memory":
        raise MemoryError("no room on the host")
    elif end == "kernel assertion":
        there = torch.accelerator.current_accelerator()
        torch.zeros(4, device=there)[torch.tensor([9], device=there)].sum().item()
    else:
        assert end == "nothing", end


def deadly(end: str, at: int = 1) -> Workload:
    return Workload(Deadly(end, at), torch.randn(4, 64), optimizer=torch.optim.SGD)


def dead_on_arrival() -> Workload:
    """Kill the process if it is not the test's own."""
    if multiprocessing.parent_process() is not None:
        _meet("exit")
    return deadly("nothing")
