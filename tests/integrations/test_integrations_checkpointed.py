"""All training tools checkpoint a plan's layers, and the weights are the same as without checkpointing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
pytest.importorskip("accelerate", reason="needs accelerate (the extra `integrations`)")
pytest.importorskip("lightning", reason="needs lightning (the extra `integrations`)")

import shared_training as shared
import torch
from ranks import found_by, run_ranks
from tool_runs import Job, Module, by_accelerate, by_lightning, by_transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autosplit import ddp
from autosplit.integrations.lightning import workload
from autosplit.tuning.tune import tune
from autosplit.workload.checkpointing import Checkpointing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of torch 2.13 at Lightning's use of it
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]

NUM_SAMPLES, EFFECTIVE, LR = 64, 16, 0.1
INPUTS = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
SHARES = (5, 3)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": INPUTS[index]}


class Block(nn.Sequential):
    """Counts its forwards."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x + super().forward(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.Sequential(*(Block(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.blocks(inputs) - inputs.flip(1)).square().mean()}


JOB = Job(Net, Rows(), LR)


def plan_with(*names: str, sizes: tuple[int, ...] = SHARES) -> Any:
    return replace(shared.shares_plan(sizes, EFFECTIVE), checkpointed=names)


def found(net: Net) -> tuple[list[Tensor], list[int]]:
    whole = (getattr(one, "full_tensor", one.detach)() for one in net.parameters())
    return [one.detach().clone() for one in whole], [block.forwards for block in net.blocks]


def by_hand(*names: str, sharded: bool = False) -> Any:
    with ddp.setup(plan_with(*names)) as ctx:
        net = Net()
        model = ctx.shard(net, layers=Block) if sharded else ctx.wrap(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        sampler = ctx.batch_sampler(NUM_SAMPLES, shuffle=True, seed=shared.SEED)
        for step in ctx.steps(DataLoader(Rows(), batch_sampler=sampler)):
            for batch in step:
                step.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        return found(net)


def by_tool(tool: Any, *names: str) -> Any:
    return found(tool(JOB, plan_with(*names))[0])


RUNS = {
    "ctx.wrap": by_hand,
    "ctx.shard": partial(by_hand, sharded=True),
    "accelerate": partial(by_tool, by_accelerate),
    "transformers": partial(by_tool, by_transformers),
    "lightning": lambda *names: by_tool(by_lightning, *(f"net.{name}" for name in names)),
}
SCENARIOS = {
    f"{name}{', checkpointed' * bool(layers)}": partial(run, *layers)
    for name, run in RUNS.items()
    for layers in ((), ("blocks.1",))
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(__name__, "SCENARIOS", 2, tmp_path_factory.mktemp("checkpointed"), limit_s=200)


@pytest.mark.parametrize("name", RUNS)
def test_weights_are_those_without_and_the_layer_runs_twice(ranks, name):
    for plain, checkpointed in zip(found_by(ranks, name), found_by(ranks, f"{name}, checkpointed"), strict=True):
        (weights, forwards), (same_weights, forwards_now) = plain, checkpointed
        torch.testing.assert_close(same_weights, weights, rtol=1e-6, atol=1e-7)
        assert forwards_now == [forwards[0], forwards[1] + 8], "once more for each of 2 backwards of 4 steps"


def test_layers_are_named_as_the_module_that_is_trained_has_them():
    """The names came from autosplit's wrapper around the LightningModule, not from the trained module."""
    module = Module(JOB)
    own = replace(workload(module, DataLoader(Rows(), batch_size=4)), checkpointing=Checkpointing((Block,), 1))
    plan = tune(own, devices="sim:RTX3090", n_trials=2, max_batch_size=8, profile="off")
    assert plan.checkpointed == ("net.blocks.0", "net.blocks.1")
    assert module.net.blocks[0].forwards == 0
