"""Turn the arguments of tune() into a workload and its worker, and give the model back unchanged."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from contextlib import ExitStack

import pytest
import torch
from marks import for_release, whole
from raised import raises
from torch import nn
from torch.nn import functional as F
from workloads import Uncopyable, net, small

from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.errors import UserCodeError, WorkloadError
from autosplit.runtime import accelerator
from autosplit.runtime.prepare import Prepared, build, prepare
from autosplit.tuning.tune import tune
from autosplit.workload.workload import Workload


def staged(source, devices, closing) -> Prepared:
    capacities = tuple(device.capacity_bytes for device in devices)
    return prepare(build(source, devices), devices, capacities, closing, largest_batch=64)


SIM, CPU = parse_devices("sim:RTX3090"), parse_devices("cpu:1MiB")


@pytest.mark.parametrize("devices", [whole(SIM), CPU])
def test_a_borrowed_model_is_given_back_when_all_is_closed(devices):
    model = Uncopyable()
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with ExitStack() as closing:
        staged(small(model), devices, closing)
        assert any(tensor.data_ptr() != pointer for tensor, pointer in before.values())
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor and tensor.data_ptr() == pointer for name, (tensor, pointer) in before.items())


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_borrowed_model_is_given_back_where_it_can_not_be_followed(error):
    """After a failing first step, the borrowed model kept the numbers of its copies."""
    model = Uncopyable()
    pointers = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]

    def fail(model, batch):
        model(batch[0])
        raise error

    workload = small(model, loss_fn=None, compute_loss=fail)
    with ExitStack() as closing, pytest.raises((UserCodeError, KeyboardInterrupt)):
        staged(workload, CPU, closing).worker.facts()
    assert [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())] == pointers


# --------------------------------------------------------------------------------------- batches of all kinds


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x, y):
        return F.cross_entropy(self.body(x), y)


class OfColumns(nn.Module):
    """A batch with its samples in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


def batch_loss(model, batch):
    return model(batch.x, batch.y)


X, Y = torch.randn(4, 4), torch.randint(0, 3, (4,))
KINDS = {
    "UserDict": lambda: Workload(ByName(), UserDict({"x": X, "y": Y})),
    "dataclass": lambda: Workload(ByName(), Batch(X, Y), compute_loss=batch_loss),
    "make_batch": lambda: small(make_batch=lambda n: (torch.randn(n, 4), torch.zeros(n, dtype=torch.long))),
    "batch_dim 1": lambda: Workload(OfColumns(), torch.randn(4, 6), batch_dim=1),
    "bf16": lambda: small(precision="bf16"),
    "sum": lambda: small(loss_fn=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum"),
    "frozen": lambda: small(nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 3))),
}
QUICK_KINDS = ("UserDict", "make_batch", "batch_dim 1", "bf16")


@pytest.mark.whole
@pytest.mark.parametrize("devices", ["sim:2xRTX3090", for_release("cpu:1MiB,cpu:1MiB")])
@pytest.mark.parametrize("kind", [kind if kind in QUICK_KINDS else for_release(kind) for kind in KINDS])
def test_batches_of_every_kind_are_tuned(kind, devices):
    plan = tune(KINDS[kind](), devices=devices, effective_batch_size=12, max_batch_size=8, n_trials=2, profile="off")
    assert plan.accumulation_steps >= 2
    assert plan.effective_batch_size == 12


@pytest.mark.whole
def test_a_model_without_memory_is_planned_for_cards_and_refused_here():
    with torch.device("meta"):
        model = net()
    assert tune(small(model), devices="sim:RTX3090", max_batch_size=8, n_trials=2, profile="off").batch_size == 8
    with raises(WorkloadError):
        tune(small(model), devices="cpu:1MiB", max_batch_size=8, profile="off")


@pytest.mark.parametrize(
    ("capacities", "planned"),
    [((1000, 995), (995, 995)), ((1000, 980), (1000, 980)), ((995, 1000, 400), (995, 995, 400))],
)
def test_twins_have_as_much_as_the_one_with_the_least(capacities, planned):
    """A display on one of two equal GPUs made autosplit probe both: 24 confirmations instead of 10."""
    devices = tuple(Device("cuda", index, "NVIDIA RTX 3090", nbytes) for index, nbytes in enumerate(capacities))
    assert accelerator.equalize_capacities(devices, capacities) == planned
