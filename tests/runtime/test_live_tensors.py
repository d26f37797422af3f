"""Tensors that a workload's code uses outside its model stay unchanged: a penalty, a teacher, weights of a loss."""

from __future__ import annotations

import functools

import pytest
import torch
from marks import for_release, whole
from raised import raises
from torch import nn
from torch.nn import functional as F

from autosplit.errors import WorkloadError
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.probe.gradient_check import check
from autosplit.tuning.measure import measure
from autosplit.tuning.tune import tune
from autosplit.workload.workload import Workload

DEVICES = ["cpu", "sim:2xRTX3090"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.randint(4, (8,))


def penalty(model: nn.Module, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())


def everything_of(module: nn.Module) -> dict[str, object]:
    held = {name: (id(p), p.grad, None if p.grad is None else p.grad.clone()) for name, p in module.named_parameters()}
    return {**held, **{name: (id(b), None, b.clone()) for name, b in module.named_buffers()}}


def assert_untouched(before: dict[str, object], module: nn.Module) -> None:
    after = everything_of(module)
    assert after.keys() == before.keys()
    for name, (identity, gradient, value) in after.items():
        assert (identity, gradient is before[name][1]) == (before[name][0], True), name
        assert value is None or torch.equal(value, before[name][2]), name


def run_all(devices: str, workload: Workload) -> None:
    options = {"max_batch_size": 16, "profile": "off"}
    tune(workload, devices=devices, **options)
    measure(workload, devices=devices, split=(4, 4) if "2x" in devices else 8)
    find_ceiling(workload, "cpu" if devices == "cpu" else "sim:RTX3090", max_batch_size=16)
    check(workload)


@pytest.mark.parametrize("devices", [DEVICES[0], for_release(DEVICES[1])])
@pytest.mark.parametrize("has_gradients", [for_release(False), True])
def test_a_penalty_on_the_live_parameters(devices, has_gradients):
    """Fake gradients stayed in the live parameters. In training, the clipped norm of the first step was NaN forever."""
    model = net()
    if has_gradients:
        model(batch()[0]).sum().backward()
    before = everything_of(model)
    run_all(devices, Workload(model, batch(), loss_fn=functools.partial(penalty, model)))
    assert_untouched(before, model)


class Distilling:
    """A user's trainer that refers to more objects than a full walk would visit."""

    def __init__(self) -> None:
        self.texts = [str(number) for number in range(20_000)]
        self.teacher = nn.Sequential(nn.Linear(16, 20), nn.BatchNorm1d(20), nn.Linear(20, 4))

    def loss(self, model, inputs):
        return F.mse_loss(model(inputs[0]), self.teacher(inputs[0]))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [for_release(DEVICES[0]), DEVICES[1]])
@pytest.mark.parametrize("is_bound", [for_release(False), True])
def test_a_teacher_in_training_mode(devices, is_bound):
    """The teacher's running statistics changed."""
    trainer = Distilling()
    teacher = trainer.teacher

    def distilled(model, inputs):
        return F.mse_loss(model(inputs[0]), teacher(inputs[0]))

    teacher.requires_grad_(False)  # parameters outside of the model must not train
    before = everything_of(teacher)
    run_all(devices, Workload(net(), batch(), compute_loss=trainer.loss if is_bound else distilled))
    assert_untouched(before, teacher)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_teacher_of_torchscript():
    """`measure` raised AttributeError, because TorchScript keeps buffers in an object without `clear`."""
    layers = nn.Sequential(nn.Linear(16, 20), nn.BatchNorm1d(20), nn.Linear(20, 4)).requires_grad_(False)
    teacher = torch.jit.script(layers)
    before = everything_of(teacher)

    def distilled(model, inputs):
        return F.mse_loss(model(inputs[0]), teacher(inputs[0]))

    measure(Workload(net(), batch(), compute_loss=distilled), devices="cpu:1GiB")
    after = everything_of(teacher)
    for name, (_, gradient, value) in after.items():
        assert gradient is None
        assert value is None or torch.equal(value, before[name][2]), name


@pytest.mark.parametrize("devices", [DEVICES[0], whole(DEVICES[1])])
def test_a_loss_of_another_model_than_the_one_it_is_given_is_refused(devices):
    """The plan was made without an error, but the copy was never trained."""
    model = net()
    before = everything_of(model)
    with raises(WorkloadError):
        tune(model, batch(), compute_loss=lambda _, one: F.cross_entropy(model(one[0]), one[1]), devices=devices)
    assert_untouched(before, model)
