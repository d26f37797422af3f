"""What traces at any batch would say: against the very traces."""

from __future__ import annotations

import pytest
import torch
from marks import slow
from torch import nn
from torch.nn import functional as F
from workloads import ALL

from autosplit.runtime.affine_traces import AffineTraces
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.simulated import traced_parts, traced_peaks
from autosplit.runtime.tracer import make_tracer
from autosplit.workload.workload import Workload

SHAPES = {
    "alone": lambda n: StepShape(((n,),)),
    "alone, accumulating": lambda n: StepShape(((n,),) * 2),
    "a replica": lambda n: StepShape(((0, n),)),
    "device 0 beside one": lambda n: StepShape(((n, 5),)),
    "device 0 beside one, accumulating": lambda n: StepShape(((7, n),) * 2),
    "device 0 beside two": lambda n: StepShape(((n, 6, 3),)),
    "a rank": lambda n: StepShape(((n,),), "rank", num_ranks=2),
    "evaluation": lambda n: StepShape(((n,),), "eval"),
}


@pytest.mark.parametrize("name", ["cnn", slow("gru"), slow("char_gpt")])
def test_equal_to_the_byte(name):
    """Up to 24 traces were made for each size that was run, of seconds each where a step takes a third of one."""
    workload = ALL[name]()
    tracer, _ = make_tracer(workload, like_gpu=True)
    full, _ = make_tracer(workload, like_gpu=True)
    traces = AffineTraces(tracer, workload.sample_batch_size, 4096)
    for shape_of in SHAPES.values():
        for n in (4, 61):
            shape = shape_of(n)
            assert traced_peaks(traces, shape) == traced_peaks(full, shape)
            assert traced_parts(traces, shape) == traced_parts(full, shape)
    for n in range(100, 1000, 10):
        traced_peaks(traces, StepShape(((n,),)))
    assert tracer.runs <= 20


class Contrasting(nn.Module):
    """Each sample beside every other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x):
        return F.normalize(self.layer(x))


def contrast(outputs, _targets):
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs), device=outputs.device))


def test_a_loss_over_the_whole_batch_takes_one_more_trace():
    batch = torch.randn(64, 16), torch.zeros(64)
    workload = Workload(Contrasting(), batch, loss_fn=contrast, loss_scope="batch")
    tracer, _ = make_tracer(workload, like_gpu=True)
    full, _ = make_tracer(workload, like_gpu=True)
    traces = AffineTraces(tracer, 64, 2**20)
    shape = StepShape(((4096,),))
    assert traced_peaks(traces, shape) == traced_peaks(full, shape)
    assert tracer.runs <= 5


class Switching(nn.Module):
    """Takes another way from so many samples on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(self.layer(x)) if len(x) > 10 else self.layer(x)


def test_steps_that_are_not_alike_are_told_by_a_line():
    workload = Workload(Switching(), torch.randn(4, 16))
    tracer, _ = make_tracer(workload, like_gpu=True)
    full, _ = make_tracer(workload, like_gpu=True)
    traces = AffineTraces(tracer, 4, 1000)  # of 8 and of 12 samples
    ends = [traced_peaks(full, StepShape(((n,),)))[0] for n in (8, 12)]
    assert traced_peaks(traces, StepShape(((16,),)))[0] == 2 * ends[1] - ends[0]
