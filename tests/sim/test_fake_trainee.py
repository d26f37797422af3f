"""A copy with fake tensors takes no memory. The live model and optimizer stay real."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from training_copies import CopyTests, live, workload

from autosplit.runtime.protocol import StepShape
from autosplit.runtime.trainee import Trainee
from autosplit.sim.fake_copy import fake_mode
from autosplit.sim.fake_trainee import FakeTrainee, fake_training_copy, traced_copy
from autosplit.sim.trace_tracker import TraceTracker
from autosplit.sim.tracer import make_tracer
from autosplit.workload.workload import Workload


class TestFakeCopies(CopyTests):
    def copied(self, given):
        return fake_training_copy(given, fake_mode())

    def tracker(self, num_devices):
        return TraceTracker(num_devices)

    def test_nested_state_is_fake(self):
        """Only tensors at the top level of a parameter's state became fake."""
        model, optimizer = live("custom")
        trainee = self.copied(workload(model, optimizer=optimizer))
        (copied,) = trainee.optimizers.given.state[trainee.models.given[0].weight]["nested"]["slots"]
        (slot,) = optimizer.state[model[0].weight]["nested"]["slots"]
        assert isinstance(copied, FakeTensor)
        assert not isinstance(slot, FakeTensor)

    def test_a_very_large_factory_takes_no_memory(self):
        given = Workload(lambda: nn.Linear(200_000, 200_000), torch.zeros(2, 1).expand(2, 200_000))
        peaks = self.run(self.copied(given), (1, 1))
        assert peaks[0] > 4 * 200_000**2


class Graph(nn.Module):
    """A layer over a graph in a sparse matrix."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 3)
        self.register_buffer("edges", torch.ones(256, 256).to_sparse(layout=layout))

    def forward(self, x):
        return self.layer(torch.sparse.mm(self.edges, x.t()).t())


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize(("layout", "is_faked"), [(torch.sparse_coo, True), (torch.sparse_csr, False)])
def test_a_sparse_tensors_values_take_memory_also_where_they_are_fake(layout, is_faked):
    """Plans for simulated GPUs counted no values, because torch fakes a sparse tensor as an empty tensor."""
    made = Workload(Graph(layout), (torch.randn(4, 256), torch.zeros(4, dtype=torch.long)), loss_fn=F.cross_entropy)
    tracer, note = make_tracer(made, like_gpu=True)
    assert tracer.fake == is_faked
    assert (note is None) == is_faked
    (peak,) = tracer.trace(StepShape(((4,),))).peak_bytes
    assert peak > 256 * 256 * (8 + 4)  # a place and a number each, at least


@pytest.mark.parametrize("is_fake", [True, False])
@pytest.mark.parametrize("gpu_variants", [True, False])
def test_a_traced_copy_has_the_optimizer_variant_of_its_device(is_fake, gpu_variants):
    """On CUDA, torch runs the multi-tensor variant by default. It needs more memory than the variant of the CPU."""
    given = workload(optimizer=torch.optim.AdamW)
    trainee = traced_copy(given, fake_mode() if is_fake else None, gpu_variants=gpu_variants)
    assert type(trainee) is (FakeTrainee if is_fake else Trainee)
    assert [group["foreach"] for group in trainee.optimizers.given.param_groups] == [True if gpu_variants else None]
