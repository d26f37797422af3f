"""Tools with unequal splits estimate the same gradient noise scale as `ctx.steps` for the same batches."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")
pytest.importorskip("accelerate", reason="needs accelerate (the extra `integrations`)")
pytest.importorskip("lightning", reason="needs lightning (the extra `integrations`)")

import lightning.pytorch as pl
import shared_training as shared
import torch
import transformers
from ranks import found_by, run_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autosplit import ddp
from autosplit.errors import InputError
from autosplit.extras.noise_scale import NoiseScale
from autosplit.integrations.accelerate import Accelerator
from autosplit.integrations.lightning import Shares
from autosplit.integrations.transformers import Trainer

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


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Regression()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


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


def by_accelerate(plan: Any, **options: Any) -> tuple[float, int]:
    shared.forget_accelerate()
    accelerator = Accelerator(plan=plan, cpu=True, noise_scale=NoiseScale(), **options)
    net = Regression()
    loader = accelerator.shares_of(DataLoader(Rows(), shuffle=True), seed=shared.SEED)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return found(accelerator.noise_scale)


def make_trainer(plan: Any, **options: Any) -> Trainer:
    shared.forget_accelerate()
    args = transformers.TrainingArguments(
        str(shared.folder_of_job("noise")),
        num_train_epochs=1,
        learning_rate=0.0,
        optim="sgd",
        max_grad_norm=CLIP,
        seed=shared.SEED,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    return Trainer(
        **{"model": Regression(), "train_dataset": Rows(), **options}, args=args, plan=plan, noise_scale=NoiseScale()
    )


def by_transformers(plan: Any, **options: Any) -> tuple[float, int]:
    trainer = make_trainer(plan, **options)
    trainer.train()
    return found(trainer.noise_scale)


def by_lightning(plan: Any) -> tuple[float, int]:
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # as torchrun sets it, because Lightning would start processes otherwise
    shares = Shares(plan, noise_scale=NoiseScale())
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        callbacks=[shares],
        devices=2,
        strategy="ddp",
        gradient_clip_val=CLIP,
        **quiet,
    )
    trainer.fit(Module(), shares.loader(DataLoader(Rows(), shuffle=True), seed=shared.SEED))
    return found(shares.noise_scale)


WAYS = {"ctx.steps": by_hand, "accelerate": by_accelerate, "transformers": by_transformers, "lightning": by_lightning}
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


@pytest.mark.parametrize("way", [by_accelerate, by_transformers])
def test_a_sum_is_refused(way):
    plan = shared.shares_plan((16,), 32)
    with pytest.raises(InputError, match=r"noise_scale is given, but the loss is a sum. .* leave noise_scale out"):
        way(type(plan).from_json(plan.to_json().replace('"loss_reduction": "mean"', '"loss_reduction": "sum"')))


@pytest.mark.parametrize("in_one", [False, True])
def test_one_process_without_a_group(in_one):
    plan = shared.shares_plan((11, 5), 32, in_one=True) if in_one else shared.shares_plan((16,), 32)
    value, number = by_accelerate(plan)
    assert by_transformers(plan) == (pytest.approx(value, rel=1e-4), number)
    assert number == STEPS // 2


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
    trainer = make_trainer(
        plan, model=shared.make_model("gpt"), train_dataset=shared.TEXTS, data_collator=shared.COLLATE["gpt"]
    )
    trainer.train()
    assert found(trainer.noise_scale) == (pytest.approx(step.noise_scale.value, rel=1e-4), len(step.noise_scale))
