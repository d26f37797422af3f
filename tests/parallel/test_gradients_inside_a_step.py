"""Losses that take gradients inside the step: kept replicas give the gradients of the whole batch.

In VQGAN's training (CompVis/latent-diffusion issue 176) the weight of the adversarial loss is a ratio of two gradients
of the last layer. With kept replicas these were the gradients of the first device alone, and no error was raised.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from gpus import CARDS, card
from raised import raises
from torch import Tensor, nn

from autosplit.errors import InputError
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.parallel.epoch_steps import steps
from autosplit.runtime.memory_tracker import Tracker

BATCHES = (8, 8, 8, 8, 3)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def losses_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return (outputs - targets).abs().mean(), -outputs.tanh().mean()


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    return list(getattr(model, "module", model).parameters())


def adaptive_weight(model: nn.Module, inputs: Tensor) -> Tensor:
    """VQGAN."""
    last = parameters_of(model)[2]
    first, second = losses_of(model(inputs), inputs)
    norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (first, second)]
    return first + (norms[0] / (norms[1] + 1e-4)).detach() * second


def projected(model: nn.Module, inputs: Tensor) -> Tensor:
    """PCGrad and MGDA: the losses are weighted by products of their gradients over all parameters."""
    losses = losses_of(model(inputs), inputs)
    grads = [torch.autograd.grad(loss, parameters_of(model), retain_graph=True) for loss in losses]
    first, second = (torch.cat([grad.flatten() for grad in one]) for one in grads)
    conflict = (first @ second / (second @ second)).clamp(max=0.5)
    return losses[0] - conflict * losses[1]


def gradient_penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    """WGAN-GP, with another forward after the gradient was taken."""
    between = (inputs * 0.3).requires_grad_()
    (grad,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return losses_of(model(inputs), inputs)[0] + 10 * ((grad.norm(dim=1) - 1) ** 2).mean()


def curvature(model: nn.Module, inputs: Tensor) -> Tensor:
    """AdaHessian and Hutchinson's trace: gradients of gradients."""
    loss = losses_of(model(inputs), inputs)[0]
    parameters = parameters_of(model)
    grads = torch.autograd.grad(loss, parameters, create_graph=True)
    products = torch.autograd.grad(grads, parameters, [torch.ones_like(grad) for grad in grads], retain_graph=True)
    return loss * (1 + sum((product.abs().mean() for product in products), torch.zeros(())).detach())


KINDS = [curvature, adaptive_weight, projected, gradient_penalty]


def train(model: nn.Module, batches: list[Tensor], loss_of, budgets=nullcontext) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps(batches, batch_size=8, effective_batch_size=24):
        with budgets():
            for inputs in step:
                step.backward(loss_of(model, inputs))
        optimizer.step()
        optimizer.zero_grad()


def pair() -> tuple[nn.Module, nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    reference = network()
    return reference, copy.deepcopy(reference), [torch.randn(size, 4, dtype=torch.float64) for size in BATCHES]


def assert_same(module: nn.Module, reference: nn.Module) -> None:
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", [(5, 3), (0, 8), (8, 0), (1, 3, 4)], ids=str)
@pytest.mark.parametrize("loss_of", KINDS)
def test_training_is_that_of_one_device(loss_of, split):
    reference, module, batches = pair()
    wrapped = BalancedDataParallel(None, module, ["cpu"] * len(split), split=split)
    train(wrapped, batches, loss_of, lambda: Tracker([f"device {i}" for i in range(len(split))], [None] * len(split)))
    train(reference, batches, loss_of)
    assert_same(module, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("loss_of", KINDS)
def test_training_is_that_of_one_gpu(loss_of):
    reference, module, batches = pair()
    home = card(CARDS[0])
    reference, module, batches = reference.to(home), module.to(home), [batch.to(home) for batch in batches]
    train(BalancedDataParallel(None, module, list(CARDS), split=(5, 3)), batches, loss_of)
    train(reference, batches, loss_of)
    assert_same(module, reference)


def test_gradients_that_wait_are_not_part_of_a_gradient_inside_the_step():
    """`torch.autograd.grad` returns only the gradient of its loss, and does not touch waiting gradients."""
    reference, module, batches = pair()
    with Tracker(["device 0", "device 1"], [None, None]):
        wrapped = BalancedDataParallel(None, module, ["cpu", "cpu"], split=(5, 3))
        with wrapped.no_sync():
            losses_of(wrapped(batches[0]), batches[0])[0].backward()
            taken = torch.autograd.grad(losses_of(wrapped(batches[1]), batches[1])[0], parameters_of(module))
        wrapped.synchronize()
    expected = torch.autograd.grad(losses_of(reference(batches[1]), batches[1])[0], parameters_of(reference))
    torch.testing.assert_close(taken, expected, rtol=1e-12, atol=1e-12)
    losses_of(reference(batches[0]), batches[0])[0].backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_an_optimizer_that_steps_inside_the_backward_is_refused():
    """Each micro-batch was a separate update: 3e-4 off, without an error."""
    _, module, batches = pair()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in module.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    step = next(steps(batches, batch_size=8, effective_batch_size=24))
    inputs = next(iter(step))
    with raises(InputError):
        step.backward(losses_of(module(inputs), inputs)[0])


def test_an_optimizer_that_steps_inside_the_only_backward_is_not_refused():
    _, module, batches = pair()
    before = copy.deepcopy(module.state_dict())
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.1).step())
    for step in steps(batches[:2], batch_size=8, effective_batch_size=8):
        for inputs in step:
            step.backward(losses_of(module(inputs), inputs)[0])
        module.zero_grad()
    assert not torch.equal(module[0].weight, before["0.weight"])
