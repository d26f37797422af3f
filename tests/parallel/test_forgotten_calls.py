"""`plan.steps` warns once, at the second step, if `optimizer.step()` or `zero_grad()` is missing. Both were silent."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_jobs import INPUTS, TARGETS, make_model, make_plan
from raised import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autosplit.errors import InputError
from autosplit.parallel.awaited_update import StepsWarning

Update = Callable[[nn.Module, torch.optim.Optimizer], None]


def warned_of(
    update: Update, begin: Update = lambda *_: None, *, scaled: bool = False, effective: int = 4, wrap: bool = False
) -> list[str]:
    """Train four steps, and return the warnings. `begin` runs before the micro-batches of a step, `update` after."""
    torch.manual_seed(0)
    model, plan = make_model(), make_plan((2, 1), effective)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16) if scaled else None
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=2)
    used: Any = plan.wrap(model) if wrap else model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in plan.steps(loader):
            begin(model, optimizer)
            for inputs, targets in step:
                step.backward(nn.functional.mse_loss(used(inputs), targets), scaler)
            if scaler is None:
                update(model, optimizer)
            else:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught if warning.category is StepsWarning]


def clears(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def updates(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def updates_and_clears(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def updates_and_sets_zeros(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def clears_the_model(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.zero_grad()


def updates_by_hand(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    model.zero_grad()


def does_nothing(_: nn.Module, __: torch.optim.Optimizer) -> None:
    pass


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("effective", [2, 4])
@pytest.mark.parametrize("update", [clears, clears_the_model, does_nothing])
def test_a_missing_step_is_one_warning(update: Update, effective: int, wrap: bool) -> None:
    (text,) = warned_of(update, effective=effective, wrap=wrap)
    assert text.startswith("No optimizer has stepped since optimizer step 0, so the parameters did not change.")


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("effective", [2, 4])
def test_a_missing_zero_grad_is_one_warning(effective: int, wrap: bool) -> None:
    (text,) = warned_of(updates, effective=effective, wrap=wrap)
    assert text.startswith("Optimizer step 1 adds its gradient to the gradient of step 0, which was not cleared.")


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("effective", [2, 4])
@pytest.mark.parametrize(
    ("update", "begin"),
    [
        (updates_and_clears, does_nothing),
        (updates_and_sets_zeros, does_nothing),
        (updates, clears),
        (updates, clears_the_model),
        (updates_by_hand, does_nothing),
    ],
)
def test_usual_loops_are_silent(update: Update, begin: Update, effective: int, wrap: bool) -> None:
    assert warned_of(update, begin, effective=effective, wrap=wrap) == []


@pytest.mark.parametrize("effective", [2, 4])
def test_a_scaler_may_skip_a_step(effective: int) -> None:
    assert warned_of(does_nothing, scaled=True, effective=effective) == []


def test_gradients_that_are_cleared_before_the_only_micro_batch_are_silent() -> None:
    """Some loops clear the gradients inside of the inner loop. With one micro-batch per step, they are right."""
    model, plan = make_model(), make_plan((2, 1), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in plan.steps(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=3)):
        for inputs, targets in step:
            optimizer.zero_grad()
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()


def test_two_optimizers_that_alternate_are_silent() -> None:
    """In a GAN's loop, each optimizer clears its gradients when its turn comes."""
    first, second = make_model(), make_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (first, second)]
    for step in make_plan((2, 1), 3).steps(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=3)):
        optimizer, model = optimizers[step.index % 2], (first, second)[step.index % 2]
        optimizer.zero_grad()
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()


def divides(loss: torch.Tensor, step: Any) -> torch.Tensor:
    return loss / len(step)


def multiplies(loss: torch.Tensor, _: Any) -> torch.Tensor:
    return loss * (1 / 3)


def weights(loss: torch.Tensor, step: Any) -> torch.Tensor:
    return loss * step.weight


@pytest.mark.parametrize("scale", [divides, multiplies, weights])
def test_a_loss_that_is_divided_by_hand_is_one_warning(scale: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    """In a loop without `plan.steps`, dividing is right. Here the gradient was a third of the right one."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in make_plan((2, 1), 9).steps(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=3)):
            for inputs, targets in step:
                step.backward(scale(nn.functional.mse_loss(model(inputs), targets), step))
            optimizer.step()
            optimizer.zero_grad()
    (text,) = [str(warning.message) for warning in caught]
    assert text.startswith(
        "The loss is multiplied by 0.333, but step.backward(loss) weights each of the 3 micro-batches"
    )


def test_steps_of_an_ended_epoch_are_an_error() -> None:
    """`made = plan.steps(loader)` before the loop over epochs trained only the first epoch, without a message."""
    made = make_plan((2, 1), 3).steps(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=3))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in made:
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    with raises(InputError):
        iter(made)


def test_a_finished_step_is_not_kept():
    """The first step's loss stayed in memory during the second step. A plan that filled its budget ran out by 512 B."""
    model, kept = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in make_plan((2, 1), 4).steps(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=2)):
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
            assert [one() for one in kept] == [None] * len(kept)
        updates_and_clears(model, optimizer)
        kept.append(weakref.ref(step))
    assert len(kept) > 2
