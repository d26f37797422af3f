"""A recurrent layer counts as one cuDNN call, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from marks import for_release
from torch import nn

from autosplit.runtime.protocol import StepShape
from autosplit.sim.op_cost import Work
from autosplit.sim.recurrent_calls import RecurrentCalls
from autosplit.sim.tracer import make_tracer
from autosplit.workload.workload import Workload

PLACES = 12


class Reading(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(16, 32, num_layers=2, batch_first=True), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def works(kind, split):
    batch = torch.randn(4, PLACES, 16), torch.randint(4, (4,))
    tracer, _ = make_tracer(Workload(Reading(kind), batch, loss_fn=nn.CrossEntropyLoss()), like_gpu=True)
    trace = tracer.trace(StepShape((split,)))
    return trace, [event for event in trace.micro if isinstance(event, Work)]


def started(found):
    """Return how many kernels the host starts."""
    return sum(part != "none" for work in found for _, _, part in work.labels)


@pytest.mark.parametrize("kind", [nn.LSTM, for_release(nn.GRU), for_release(nn.RNN)])
@pytest.mark.parametrize("split", [(64,), for_release((48, 64))])
def test_the_host_starts_a_recurrent_layer_as_one_op(kind, split, monkeypatch):
    """Every op of every time step counted as a kernel launch. Launch-bound models were a hundred times too slow."""
    trace, found = works(kind, split)
    with monkeypatch.context() as patch:
        patch.setattr(RecurrentCalls, "watching", lambda *_: nullcontext())
        apart_trace, apart = works(kind, split)
    assert started(apart) > 4 * PLACES * len(split)
    assert started(found) < started(apart) / 4
    assert trace.peak_bytes == apart_trace.peak_bytes
    # The arithmetic is the same, with fewer bytes.
    assert sum(work.numbers[0].sum() for work in found) == sum(work.numbers[0].sum() for work in apart)
    assert sum(work.numbers[1].sum() for work in found) < sum(work.numbers[1].sum() for work in apart)
