from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from types import ModuleType

import pytest
import torch
from raised import raises
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from autosplit.devices.spec import parse_devices
from autosplit.errors import WorkloadError
from autosplit.runtime.prepare import build, prepare
from autosplit.sim.fake_copy import fake_like, fake_mode
from autosplit.workload.workload import Workload


@pytest.fixture
def package(monkeypatch):
    """Define a class in a package that is not installed."""

    def define(base, name, module):
        monkeypatch.setitem(sys.modules, module.partition(".")[0], ModuleType(module.partition(".")[0]))
        return type(name, (base,), {"__module__": module})

    return define


def followed(workload):
    found = parse_devices("sim:RTX3090")
    with ExitStack() as closing:
        return prepare(build(workload, found), found, (2**30,) * len(found), closing, largest_batch=64)


@pytest.mark.parametrize(
    "wrapped",
    [lambda kind: kind, lambda kind: partial(kind, lr=0.1), lambda kind: lambda parameters: kind([*parameters])],
)
def test_an_optimizer_with_kernels_of_its_own_is_refused_by_name(package, wrapped):
    kind = package(torch.optim.AdamW, "AdamW8bit", "bitsandbytes.optim.adamw")
    workload = Workload(nn.Linear(4, 2), torch.randn(4, 4), optimizer=wrapped(kind))
    with raises(WorkloadError):
        followed(workload)


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
