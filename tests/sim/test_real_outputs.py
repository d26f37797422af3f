"""A traced step counts the memory that oneDNN's fused LSTM saves, at any length and batch."""

from __future__ import annotations

import pytest
import torch
from marks import for_release
from torch import nn
from torch.nn import functional as F

from autosplit import find_ceiling
from autosplit.devices.spec import parse_devices
from autosplit.oom import OutOfMemoryError
from autosplit.runtime.cpu import CpuWorker
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.sim.simulated import traced_peaks
from autosplit.sim.tracer import make_tracer
from autosplit.workload.workload import Workload

ROOM = 2**40


class Reader(nn.Module):
    def __init__(self, *, bidirectional):
        super().__init__()
        self.rnn = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(32 if bidirectional else 16, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def reader(length: int, *, bidirectional: bool = False) -> Workload:
    batch = (torch.randn(4, length, 8), torch.randint(0, 5, (4,)))
    return Workload(Reader(bidirectional=bidirectional), batch, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW)


def cpu_worker(workload: Workload, capacity_bytes: int = ROOM) -> CpuWorker:
    trainee = training_copy(workload, device=torch.device("cpu"))
    return CpuWorker(parse_devices(f"cpu:{capacity_bytes}B"), (capacity_bytes,), trainee, largest_batch=256)


@pytest.mark.parametrize("length", [for_release(6), 12, for_release(40)])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_traced_peaks_are_real_ones(length, bidirectional):
    """A fake op returned an empty workspace, so a sample was traced at a seventh of its memory."""
    workload = reader(length, bidirectional=bidirectional)
    tracer, reason = make_tracer(workload, like_gpu=False)
    assert reason is None
    worker = cpu_worker(workload)
    for n in (1, 2, 5, 16, 17, 33, 64):
        shape = StepShape(((n,),))
        assert traced_peaks(tracer, shape) == worker.peaks(shape)


@pytest.mark.parametrize("length", [for_release(6), 12])
@pytest.mark.parametrize("samples", [for_release(5), 37, for_release(96)])
def test_a_ceiling_is_exact_although_memory_grows_unevenly(length, samples):
    """oneDNN rounds the blocks of an LSTM, so a line through small steps is some percent off. Real steps correct it."""
    workload = reader(length)
    capacity = cpu_worker(workload).peaks(StepShape(((samples,),)))[0]
    found = find_ceiling(workload, f"cpu:{capacity}B", role="primary", max_batch_size=256)
    assert found.ooms <= 2
    cpu_worker(workload, capacity).peaks(StepShape(((found.batch_size,),)))
    with pytest.raises(OutOfMemoryError):
        cpu_worker(workload, capacity).peaks(StepShape(((found.batch_size + 1,),)))
