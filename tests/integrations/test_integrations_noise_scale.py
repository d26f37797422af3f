"""Tools with unequal splits estimate the same gradient noise scale as `ctx.steps` for the same batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
pytest.importorskip("accelerate", reason="needs accelerate (the extra `integrations`)")
pytest.importorskip("lightning", reason="needs lightning (the extra `integrations`)")

import shared_training as shared
import torch
from ranks import found_by, run_ranks
from tool_runs import Job, by_accelerate, by_lightning, by_transformers
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autosplit import ddp
from autosplit.errors import InputError
from autosplit.plan.plan import Plan
from autosplit.tools.noise_scale import NoiseScale

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of torch 2.13 at Lightning's use of it
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
]

NUM_SAMPLES, STEPS, CLIP = 640, 20, 0.01
INPUTS = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(NUM_SAMPLES, generator=torch.Generator().manual_seed(2))
SHARES = {"two forwards": (11, 5), "no share": (16, 0)}


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": INPUTS[index], "targets": INPUTS[index].sum() + 2 * NOISE[index]}


class Regression(nn.Module):
    """The model keeps its first weights, because the learning rate is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.linear(inputs)[:, 0], targets)}


JOB = Job(Regression, Rows(), lr=0.0, clip=CLIP)


def found(noise_scale: Any) -> tuple[float, int]:
    return noise_scale.value, len(noise_scale)


def by_hand(plan: Any) -> tuple[float, int]:
    with ddp.setup(plan) as ctx:
        model = ctx.wrap(Regression())
        sampler = ctx.batch_sampler(NUM_SAMPLES, shuffle=True, seed=shared.SEED)
        for step in ctx.steps(DataLoader(Rows(), batch_sampler=sampler), noise_scale=NoiseScale()):
            for batch in step:
                step.backward(model(**batch)["loss"])
            model.zero_grad()
        return found(step.noise_scale)


def estimated(tool: Any, plan: Any, job: Job = JOB, **options: Any) -> tuple[float, int]:
    return found(tool(job, plan, noise_scale=NoiseScale(), **options)[1].noise_scale)


TOOLS = {"accelerate": by_accelerate, "transformers": by_transformers, "lightning": by_lightning}
WAYS = {"ctx.steps": by_hand, **{name: partial(estimated, tool) for name, tool in TOOLS.items()}}
SCENARIOS = {
    f"{way}, {name}": partial(run, shared.shares_plan(sizes, 32))
    for name, sizes in SHARES.items()
    for way, run in WAYS.items()
}
SCENARIOS |= {
    f"{way}, cut": partial(WAYS[way], shared.shares_plan((11, 5), 32), on_oom="cut")
    for way in ("accelerate", "transformers")
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(__name__, "SCENARIOS", 2, tmp_path_factory.mktemp("noise"), limit_s=200)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "ctx.steps" not in name])
def test_it_is_what_a_loop_of_ones_own_finds(ranks, name):
    """The estimate comes before clipping, because clipped gradients hide the noise."""
    kind = name.split(", ")[1].replace("cut", "two forwards")
    (value, number), other = found_by(ranks, f"ctx.steps, {kind}")
    assert other == (value, number)
    assert number == STEPS // 2
    assert 5 < value < 40, "13 over all samples there are"
    for one in found_by(ranks, name):
        assert one == (pytest.approx(value, rel=1e-4), number)


@pytest.mark.parametrize("tool", [by_accelerate, by_transformers])
def test_a_sum_is_refused(tool):
    written = shared.shares_plan((16,), 32).to_json()
    plan = Plan.from_json(written.replace('"loss_reduction": "mean"', '"loss_reduction": "sum"'))
    with pytest.raises(InputError, match=r"noise_scale is given, but the loss is a sum. .* leave noise_scale out"):
        estimated(tool, plan)


def test_a_model_that_divides_by_the_steps_tokens_itself():
    """GPT-2 in the Trainer: its loss already includes the weight of the micro-batch."""
    plan = shared.shares_plan((8,), 40)
    model = shared.make_model("gpt")
    loader = DataLoader(
        shared.TEXTS,
        collate_fn=shared.COLLATE["gpt"],
        batch_sampler=plan.batch_sampler(len(shared.TEXTS), shuffle=True, seed=shared.SEED),
    )
    for step in plan.steps(loader, count=shared.count_tokens, noise_scale=NoiseScale()):
        for batch in step:
            step.backward(shared.loss_on(model, batch))
        model.zero_grad()
    job = Job(partial(shared.make_model, "gpt"), shared.TEXTS, lr=0.0, clip=CLIP, collate=shared.COLLATE["gpt"])
    expected = (pytest.approx(step.noise_scale.value, rel=1e-4), len(step.noise_scale))
    assert estimated(by_transformers, plan, job) == expected
