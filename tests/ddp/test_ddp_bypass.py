"""Training that bypasses the wrapper, and loaders of another size: reported in the first step, on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ddp_jobs import INPUTS, loader_of, make_plan
from ranks import found_by, job_of
from torch import Tensor, nn

from autosplit import ddp
from autosplit.ddp.bypassed_wrappers import UnwrappedWarning
from autosplit.ddp.group_end import let_go_of_group_last
from autosplit.errors import InputError


class Net(nn.Module):
    """A model whose loss is a method, as in some robot policies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1).double()

    def forward(self, inputs: Tensor, loss: bool = False) -> Tensor:
        return self.loss(inputs) if loss else self.layer(inputs)

    def loss(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs).square().mean()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "module.method()": lambda model, inputs: model.module.loss(inputs),
    "module()": lambda model, inputs: model.module(inputs, loss=True),
    "the wrapper, then module.method()": lambda model, inputs: (model(inputs).detach(), model.module.loss(inputs))[1],
    "the wrapper": lambda model, inputs: model(inputs, loss=True),
    "the wrapper and a penalty": lambda model, inputs: model(inputs, loss=True) + model.module.layer.weight.norm(),
    "the wrapper, then an evaluation": lambda model, inputs: (model(inputs, loss=True), evaluate(model, inputs))[0],
}


def evaluate(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(inputs)


def trained(name: str, effective: int, sizes: tuple[int, int] = (2, 6), **options: Any) -> str:
    """Run two steps. Return the error or an empty string. Fail if gradients differ between ranks without an error."""
    with ddp.setup(make_plan(sizes, effective)) as ctx:
        torch.manual_seed(1)
        model, unused = ctx.wrap(Net()), ctx.wrap(Net())
        try:
            for number, step in enumerate(ctx.steps(loader_of(ctx), **options)):
                for indices in step:
                    with step.attempt():
                        step.backward(LOSSES[name](model, INPUTS[indices]))
                grad = model.module.layer.weight.grad
                everyones = [torch.empty_like(grad) for _ in range(2)]
                torch.distributed.all_gather(everyones, grad)
                if name != "the wrapper, then module.method()":
                    assert torch.equal(*everyones)
                if number == 1:
                    break
        except InputError as error:
            return str(error)
        assert unused.module.layer.weight.grad is None or not unused.module.layer.weight.grad.any()
        return ""


def of_loader(sizes: list[int]) -> list[str]:
    """Use a loader with this batch size on each rank, and return the warnings."""

    def made() -> Iterator[Tensor]:
        yield from (INPUTS[:size] for size in sizes)

    with warnings.catch_warnings(record=True) as caught, ddp.setup(make_plan((2, 6), 8)) as ctx:
        warnings.simplefilter("always")
        model = ctx.wrap(Net())
        for step in ctx.steps(made()):
            for inputs in step:
                step.backward(model(inputs, loss=True))
    return [str(warning.message) for warning in caught if warning.category is ddp.EffectiveBatchWarning]


def unwrapped(how: str) -> list[str]:
    """Train a model that ctx did not wrap, and return the warnings."""
    with warnings.catch_warnings(record=True) as caught, ddp.setup(make_plan((2, 6), 8)) as ctx:
        warnings.simplefilter("always")
        model: Any = Net()
        if how == "the user's DDP":
            model = nn.parallel.DistributedDataParallel(model)
            let_go_of_group_last(model)  # otherwise torch's reducer ends the group with the GIL held: a rare deadlock
        for step in ctx.steps(loader_of(ctx)):
            for indices in step:
                step.backward(model(INPUTS[indices], loss=True))
    return [str(warning.message) for warning in caught if warning.category is UnwrappedWarning]


def wrapped_by_plan() -> str:
    try:
        make_plan((2, 6), 8).wrap(Net())
    except InputError as error:
        return error.code or ""
    return "nothing"


BYPASSES = ("module.method()", "module()")
LOADERS = {"too large": [10, 10, 10], "too small": [3, 3, 3], "fits": [4, 4, 4], "a smaller last one": [4, 4, 1]}

SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"{name}, {steps}": lambda n=name, s=steps: trained(n, s) for name in LOSSES for steps in (8, 16)},
    "cut": lambda: trained("module.method()", 8, on_oom="cut"),
    **{how: lambda how=how: unwrapped(how) for how in ("nothing", "the user's DDP")},
    "plan.wrap": wrapped_by_plan,
    **{name: lambda sizes=sizes: of_loader(sizes) for name, sizes in LOADERS.items()},
}


ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.parametrize("effective", [8, 16])
@pytest.mark.parametrize("name", BYPASSES)
def test_a_bypassed_wrapper_is_an_error_at_the_end_of_the_first_step(ranks, name, effective):
    """The ranks' weights were 0.32 apart after three steps, as in plain DDP, without a message."""
    for text in found_by(ranks, f"{name}, {effective}"):
        assert "The ranks did not synchronise the gradients of Net" in text
        assert "Call the wrapper that ctx.wrap returned" in text


@pytest.mark.parametrize("effective", [8, 16])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in BYPASSES])
def test_a_forward_of_the_wrapper_is_no_error(ranks, name, effective):
    assert found_by(ranks, f"{name}, {effective}") == ["", ""]


def test_with_cuts_autosplit_averages_the_gradients_itself(ranks):
    assert found_by(ranks, "cut") == ["", ""]


def test_a_model_that_nothing_wraps_is_warned_of(ranks):
    """Each rank trained its own model, without a warning."""
    for found in found_by(ranks, "nothing"):
        (text,) = found
        assert "ctx.wrap(model) before the loop" in text
    assert found_by(ranks, "the user's DDP") == [[], []]


def test_plan_wrap_in_a_rank_is_an_error(ranks):
    """Code for one process, started by launch, trained two models on all samples, silently."""
    assert found_by(ranks, "plan.wrap") == ["wrap-in-several-processes"] * 2


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_of_another_batch_size_are_reported(ranks, name):
    samples = 2 * LOADERS[name][0]
    for found in found_by(ranks, name):
        assert len(found) == (samples != 8)
        assert all(f"have {samples} samples, but the plan's have 8" in text for text in found)
