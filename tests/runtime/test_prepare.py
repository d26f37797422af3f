"""Staging: turn the arguments of tune() into a workload to trace, and give the model back unchanged."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from contextlib import ExitStack

import pytest
import torch
from marks import for_release
from noted import kinds
from raised import raises
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from workloads import Uncopyable, net, small

from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.errors import UserCodeError, WorkloadError
from autosplit.profiles.key import workload_of
from autosplit.runtime import accelerator, prepare
from autosplit.runtime.prepare import Followed, build, follow
from autosplit.tuning.tune import tune
from autosplit.workload.workload import Workload


def staged(source, devices, closing) -> Followed:
    return follow(build(source, devices), devices, closing)


SIM, CPU = parse_devices("sim:RTX3090"), parse_devices("cpu:1MiB")


@pytest.fixture
def nothing_is_small(monkeypatch):
    """Treat every model as a large model."""
    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)


def test_what_is_small_is_built_once_and_for_real_for_cards_that_are_not_there():
    """A saved plan is then found without waiting for torch's compiler."""
    calls = []
    with ExitStack() as closing:
        followed = staged(lambda: calls.append(1) or small(), SIM, closing)
    assert len(calls) == 1
    assert not any(isinstance(parameter, FakeTensor) for parameter in followed.workload.model.parameters())
    assert followed.tracer.fake
    assert followed.rebuild is None


class Masked(nn.Module):
    """A model that keeps tensors and numbers outside of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))
        self.scale, self.positions = 0.5, torch.arange(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize(
    "made",
    [
        small,
        lambda: Workload(Masked(), torch.rand(4, 3, 8), optimizer=torch.optim.SGD),
        lambda: Workload(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.rand(2, 3, 8, 8)),
        lambda: Workload(model := nn.Linear(3, 3), torch.rand(2, 3), optimizer=torch.optim.AdamW(model.parameters())),
    ],
)
def test_it_is_the_same_workload_to_a_profile_however_it_is_built(made, monkeypatch):
    """Otherwise the profile is lost if the model counts as large in another torch version."""
    for_real = build(made, SIM)
    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
    without_memory = build(made, SIM)
    assert (for_real.fake, without_memory.fake) == (False, True)
    assert workload_of(for_real.workload) == workload_of(without_memory.workload)


@pytest.mark.slow
def test_it_is_the_same_plan_however_it_is_built(monkeypatch):
    plan = tune(small, devices="sim:2xRTX3090", n_trials=2, profile="off")
    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
    other = tune(small, devices="sim:2xRTX3090", n_trials=2, profile="off")
    assert (plan.split, plan.ceilings, plan.samples_per_s) == (other.split, other.ceilings, other.samples_per_s)


@pytest.mark.usefixtures("nothing_is_small")
def test_a_function_is_built_under_fake_tensors_for_cards_that_are_not_there():
    with ExitStack() as closing:
        followed = staged(small, SIM, closing)
    assert all(isinstance(parameter, FakeTensor) for parameter in followed.workload.model.parameters())
    assert followed.tracer.fake


@pytest.mark.usefixtures("nothing_is_small")
def test_a_function_that_reads_numbers_is_built_for_real_and_said_so():
    def reading() -> Workload:
        workload = small()
        assert workload.model[0].weight.abs().max().item() > 0
        return workload

    with ExitStack() as closing:
        followed = staged(reading, SIM, closing)
    assert followed.notes[0].kind == "real-tensors"


class Picky(nn.Module):
    """A model whose control flow depends on values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


@pytest.mark.usefixtures("nothing_is_small")
def test_what_can_not_be_followed_is_not_built_where_it_would_fill_this_machine(monkeypatch):
    def picky() -> Workload:
        return Workload(Picky(), torch.rand(4, 3))

    with ExitStack() as closing:
        followed = staged(picky, SIM, closing)
    assert "real-tensors" in kinds(followed.notes)
    assert "values-from-sample" in kinds(followed.notes)
    monkeypatch.setattr(prepare, "available_host_bytes", lambda: 95)
    said = r"\(DataDependentOutputException: .*needs 96 B, "
    with ExitStack() as closing, pytest.raises(WorkloadError, match=said):
        staged(picky, SIM, closing)


@pytest.mark.parametrize("devices", [SIM, CPU])
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
        staged(workload, CPU, closing)
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


@pytest.mark.parametrize("devices", ["sim:2xRTX3090", for_release("cpu:1MiB,cpu:1MiB")])
@pytest.mark.parametrize("kind", [kind if kind in QUICK_KINDS else for_release(kind) for kind in KINDS])
def test_batches_of_every_kind_are_tuned(kind, devices):
    plan = tune(KINDS[kind](), devices=devices, effective_batch_size=12, max_batch_size=8, n_trials=2, profile="off")
    assert plan.accumulation_steps >= 2
    assert plan.effective_batch_size == 12


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
    assert accelerator.twinned(devices, capacities) == planned
