from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from types import ModuleType

import pytest
import torch
from raised import raises
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from autosplit.devices.spec import parse_devices
from autosplit.errors import WorkloadError
from autosplit.runtime.fake_copy import fake_like, fake_mode
from autosplit.runtime.memory_tracker import rounded
from autosplit.runtime.prepare import build, follow
from autosplit.runtime.protocol import StepShape
from autosplit.workload.workload import Workload


@pytest.fixture
def package(monkeypatch):
    """Define a class in a package that is not installed."""

    def define(base, name, module):
        monkeypatch.setitem(sys.modules, module.partition(".")[0], ModuleType(module.partition(".")[0]))
        return type(name, (base,), {"__module__": module})

    return define


def followed(workload, devices="sim:RTX3090"):
    found = parse_devices(devices)
    with ExitStack() as closing:
        return follow(build(workload, found), found, closing)


@pytest.mark.parametrize("devices", ["sim:RTX3090", "cpu:1GiB"])
@pytest.mark.parametrize(
    "wrapped",
    [lambda kind: kind, lambda kind: partial(kind, lr=0.1), lambda kind: lambda parameters: kind([*parameters])],
)
def test_an_optimizer_with_kernels_of_its_own_is_refused_by_name(package, devices, wrapped):
    kind = package(torch.optim.AdamW, "AdamW8bit", "bitsandbytes.optim.adamw")
    workload = Workload(nn.Linear(4, 2), torch.randn(4, 4), optimizer=wrapped(kind))
    with raises(WorkloadError):
        followed(workload, devices)


def test_a_live_one_is_refused_too(package):
    kind = package(torch.optim.SGD, "SGD8bit", "bitsandbytes.optim.sgd")
    model = nn.Linear(4, 2)
    with raises(WorkloadError):
        followed(Workload(model, torch.randn(4, 4), optimizer=kind(model.parameters(), lr=0.1)))


def test_a_quantised_layer_is_refused_by_name(package):
    kind = package(nn.Linear, "Linear4bit", "bitsandbytes.nn.modules")
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 2).requires_grad_(False))
    with raises(WorkloadError):
        followed(Workload(model, torch.randn(4, 4)))


def test_a_weight_around_other_tensors_is_refused_and_never_faked_at_its_outer_size():
    weight = TwoTensor(torch.randn(2, 4), torch.randn(2, 4))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = nn.Parameter(weight, requires_grad=False)
    with raises(WorkloadError):
        followed(Workload(model, torch.randn(4, 4)))
    with pytest.raises(NotImplementedError, match="TwoTensor"):
        fake_like(weight, fake_mode(), torch.device("cpu"))


class Momentum8bit(torch.optim.Optimizer):
    """A momentum with one byte per number and one scale per tensor, in plain torch ops."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, dtype=torch.int8)
                state["scale"] = torch.ones(1, device=parameter.device)
            moved = state["momentum"].float().mul_(state["scale"]).mul_(0.9).add_(parameter.grad)
            state["scale"].copy_(moved.abs().amax().div_(127))
            state["momentum"].copy_(moved.div(state["scale"] + 1e-12).round_())
            parameter.add_(moved, alpha=-0.1)


class Dequantised(nn.Module):
    """A frozen layer with quantised weights, which its forward dequantises."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("packed", torch.randint(-127, 128, (size, size), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(size, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.packed.float() * self.scale).T


def test_bytes_that_torchs_own_ops_update_count_as_bytes():
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), Dequantised(64), nn.Linear(64, 2))
        return Workload(model, torch.randn(4, 64), optimizer=Momentum8bit)

    shape = StepShape(((3,),))
    fake = followed(made).tracer
    assert fake.fake
    parts = fake.trace(shape).parts[0]
    parameters = list(fake.trainee.models.given.parameters())
    assert parts.optimizer_bytes == sum(rounded(p.numel()) + rounded(4) for p in parameters)
    assert parts.parameters_bytes == sum(rounded(p.nbytes) for p in (*parameters, *fake.trainee.models.given.buffers()))
