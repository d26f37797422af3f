"""The loops of README and docstrings run unchanged on accelerators. The gradient is the whole step's."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from folders import PAGES
from gpus import CARDS, KIND
from torch import nn
from torch.utils.data import DataLoader

import autosplit
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.plan.plan import Plan

pytestmark = pytest.mark.gpu

NUM_SAMPLES = 20


def readme_block(containing: str) -> str:
    """Return the README's first block of Python with some text in it."""
    return next(block for block in PAGES.split("```python\n")[1:] if containing in block.split("```")[0]).split("```")[
        0
    ]


def docstring_block(function: Any, containing: str) -> str:
    """Return a docstring's indented lines around some text."""
    paragraphs = inspect.cleandoc(function.__doc__).split("\n\n")
    return textwrap.dedent(next(paragraph for paragraph in paragraphs if containing in paragraph))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(NUM_SAMPLES, size, dtype=torch.float64, generator=generator) for size in (6, 1))


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


class Watched(torch.optim.SGD):
    """Keeps the gradient of each step."""

    seen: list[torch.Tensor]

    def step(self, closure: Any = None) -> None:
        gradients = [parameter.grad.cpu() for group in self.param_groups for parameter in group["params"]]
        self.seen = [*getattr(self, "seen", []), torch.cat([one.flatten() for one in gradients])]


def expected() -> torch.Tensor:
    model = make_model()
    inputs, targets = samples()
    squares(model(inputs), targets).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def run(block: str, model: nn.Module, **names: Any) -> torch.Tensor:
    """Run a block, and return the gradient of its one optimizer step."""
    optimizer = names.setdefault("optimizer", Watched(model.parameters(), lr=0.1))
    known = {"contextlib": contextlib, "torch": torch, "autosplit": autosplit, "DataLoader": DataLoader}
    exec(block, {**known, "model": model, "loss_fn": squares, **names})  # it is ours
    (gradient,) = optimizer.seen
    return gradient


def assert_exact(gradient: torch.Tensor) -> None:
    torch.testing.assert_close(gradient, expected(), rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Return a plan of 20 samples in steps of several forwards on the available GPUs."""
    inputs, targets = samples()
    workload = autosplit.Workload(make_model(), (inputs[:8], targets[:8]), loss_fn=squares)
    return autosplit.tune(
        workload,
        devices=[f"{KIND}:{index}" for index in dict.fromkeys(CARDS)],
        effective_batch_size=NUM_SAMPLES,
        max_batch_size=8,
        strategy="balanced",
        n_trials=3,
        profile="off",
        isolate=False,
    )


@pytest.fixture
def exactly() -> Iterator[None]:
    """Make all new tensors of a block float64 and reproducible."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def assert_trained_as(model: nn.Module, alone: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.device.type == KIND
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("exactly")
class TestPages:
    """Blocks that run unchanged: each makes its model, data and optimizer. One process trains the same."""

    @pytest.mark.usefixtures("cache_dir")
    def test_the_first_loop(self):
        """It failed on every GPU, because the outputs were on the GPU and the targets on the host."""
        block = readme_block("plan = autosplit.tune(net, data[:8]")
        names: dict[str, Any] = {}
        exec(block, names)  # it is ours
        plan = names["plan"]
        assert {device.kind for device in plan.devices} == {KIND}
        torch.manual_seed(0)
        made: dict[str, Any] = {}
        exec(block.split("plan = ")[0], made)
        net, data = made["net"], made["data"]
        optimizer = torch.optim.AdamW(net.parameters())
        places = [*itertools.chain(*plan.batch_sampler(len(data), shuffle=True))]
        for begin in range(0, len(places), plan.effective_batch_size):
            inputs, targets = data[places[begin : begin + plan.effective_batch_size]]
            optimizer.zero_grad()
            made["loss_fn"](net(inputs), targets).backward()
            optimizer.step()
        assert_trained_as(names["model"], net)

    def test_the_loop_by_hand(self):
        block = readme_block("model.no_sync()")
        assert block.count('nn.Linear(64, 10), ["cpu", "cpu"]') == 1
        here = f'nn.Linear(64, 10).to("{KIND}:{CARDS[0]}"), {list(CARDS)}'
        names: dict[str, Any] = {}
        exec(block.replace('nn.Linear(64, 10), ["cpu", "cpu"]', here), names)
        torch.manual_seed(0)
        alone = nn.Linear(64, 10)
        inputs, targets = (torch.cat(parts) for parts in zip(*names["micro_batches"], strict=True))
        nn.functional.cross_entropy(alone(inputs), targets).backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        assert_trained_as(names["model"], alone)


class TestDocstrings:
    def test_plan_steps(self, plan):
        inputs, targets = samples()
        loader = list(zip(inputs.split(plan.batch_size), targets.split(plan.batch_size), strict=True))
        block = docstring_block(Plan.steps, "for step in plan.steps(loader)")
        assert_exact(run(block, plan.wrap(make_model()), plan=plan, loader=loader))

    def test_no_sync(self):
        inputs, targets = samples()
        model = make_model().to(torch.device(KIND, CARDS[0]))
        wrapped = BalancedDataParallel(None, copy.deepcopy(model), list(CARDS), split=(5, 3))
        micro_batches = list(zip(inputs.split(8), targets.split(8), strict=True))
        block = docstring_block(BalancedDataParallel.no_sync, "*others, ")
        assert_exact(run(block, wrapped, micro_batches=micro_batches, total=NUM_SAMPLES))
