"""A loss with trained parameters (ArcFace, proxies) is part of the model, or refused with the lines to write."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_types import WorkloadError
from raised import raises
from torch import Tensor, nn
from torch.nn import functional as F

import autosplit

CLASSES = 100


class Proxies(nn.Module):
    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 16), requires_grad=trained)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ self.weight.T, targets)


class Detached(Proxies):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ self.weight.detach().T, targets)


class Criterion:
    """An object with a module, as metric-learning packages have it."""

    def __init__(self) -> None:
        self.proxies = Proxies()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.proxies(outputs, targets)


class WithLoss(nn.Module):
    """The lines that the error shows."""

    def __init__(self, net: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.net(inputs), targets)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.pad(outputs, (0, CLASSES - 16)), targets)


def scaled(temperature: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: cross_entropy(outputs, targets) * temperature


def by_a_second_model(model: nn.Module, batch: Any, *, second: nn.Module) -> Tensor:
    return (model(batch[0]) - second(batch[0])).square().mean()


def gradient_penalty(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def of_its_inputs(model: nn.Module, batch: Any) -> Tensor:
    inputs = batch[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return gradient.square().mean() + model(inputs).square().mean()


OUTSIDE: dict[str, Callable[[], dict[str, Any]]] = {
    "module": lambda: {"loss_fn": Proxies()},
    "bound method": lambda: {"loss_fn": Proxies().forward},
    "object": lambda: {"loss_fn": Criterion()},
    "partial": lambda: {"loss_fn": functools.partial(Proxies.forward, Proxies())},
    "temperature": lambda: {"loss_fn": scaled(nn.Parameter(torch.ones(())))},
    "tensor": lambda: {"loss_fn": scaled(torch.ones((), requires_grad=True))},
    "second model": lambda: {"compute_loss": functools.partial(by_a_second_model, second=nn.Linear(32, 16))},
}
INSIDE: dict[str, Callable[[], dict[str, Any]]] = {
    "frozen": lambda: {"loss_fn": Proxies(trained=False)},
    "detached": lambda: {"loss_fn": Detached()},
    "no_grad": lambda: {
        "compute_loss": functools.partial(by_a_second_model, second=torch.no_grad()(nn.Linear(32, 16)))
    },
    "weights": lambda: {"loss_fn": nn.CrossEntropyLoss(weight=torch.ones(16))},
    "gradient penalty": lambda: {"compute_loss": gradient_penalty},
    "gradient of inputs": lambda: {"compute_loss": of_its_inputs},
}


def workload_of(**options: Any) -> autosplit.Workload:
    batch = torch.randn(8, 32), torch.randint(16, (8,))
    return autosplit.Workload(nn.Linear(32, 16), batch, optimizer=torch.optim.AdamW, **options)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_loss_that_trains_parameters_is_refused(name):
    """Its gradients and its optimizer state were not counted: the second step of a ceiling ran out of memory."""
    workload = workload_of(**OUTSIDE[name]())
    with raises(WorkloadError, "outside of the model", "compute_loss=lambda model, batch: model(*batch)"):
        autosplit.find_ceiling(workload, "cpu:1MiB")
    if name != "tensor":  # one step can't show whether the loss makes the tensor anew
        with raises(WorkloadError):
            autosplit.check(workload)


@pytest.mark.whole
def test_it_is_refused_for_simulated_gpus_too():
    loss = Proxies()
    with raises(WorkloadError, "(100, 16)"):
        autosplit.tune(workload_of(loss_fn=loss), devices="sim:A100-40GB", profile="off", n_trials=1)
    assert loss.weight.grad is None


@pytest.mark.parametrize("name", INSIDE)
def test_a_loss_that_trains_none_is_measured(name):
    workload = workload_of(**INSIDE[name]())
    assert autosplit.find_ceiling(workload, "cpu:1MiB").batch_size > 8


def test_the_model_must_be_the_argument():
    """A loss that uses the script's model instead of its argument gives its gradient to a model that is not trained."""
    model = nn.Linear(32, 16)
    workload = autosplit.Workload(model, torch.randn(8, 32), compute_loss=lambda _, batch: model(batch).square().mean())
    with raises(WorkloadError, "call the model that is passed"):
        autosplit.find_ceiling(workload, "cpu:1MiB")
    assert model.weight.grad is None


def test_a_loss_may_add_a_penalty_on_the_scripts_own_model():
    """autosplit trains a copy, so the script's model is not the one that the step trains."""
    model = nn.Linear(32, 16)

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets) + 1e-3 * sum(p.norm() for p in model.parameters())

    workload = autosplit.Workload(model, (torch.randn(8, 32), torch.randint(16, (8,))), loss)
    assert autosplit.find_ceiling(workload, "cpu:1MiB").batch_size > 8
    assert model.weight.grad is None


def test_the_advised_model_counts_the_loss():
    """Proxies of 6.4 kB have a gradient and two states, so fewer samples fit than without them."""
    batch, loss = (torch.randn(8, 32), torch.randint(16, (8,))), lambda model, batch: model(*batch)
    inside = autosplit.Workload(WithLoss(nn.Linear(32, 16), Proxies()), batch, compute_loss=loss)
    frozen = autosplit.Workload(WithLoss(nn.Linear(32, 16), Proxies(trained=False)), batch, compute_loss=loss)
    found = [autosplit.find_ceiling(one, "cpu:128KiB").batch_size for one in (inside, frozen)]
    assert found[0] < found[1]


def test_an_optimizer_function_may_not_add_parameters_of_the_loss():
    """It was told that it did not use the parameters in its argument. It did."""
    loss = Proxies()
    batch = torch.randn(8, 32), torch.randint(16, (8,))
    workload = autosplit.Workload(
        nn.Linear(32, 16), batch, loss, optimizer=lambda parameters: torch.optim.SGD([*parameters, *loss.parameters()])
    )
    with raises(WorkloadError, "added 1 parameter", "Make the loss a part"):
        autosplit.find_ceiling(workload, "cpu:1MiB")
