"""Layers that a tool's callback unfreezes after DDP has wrapped the model, and losses that are not prepared.

Each process trained another model, without a message, as with the tools alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs lightning (the extra `integrations`)")
pytest.importorskip("transformers", reason="needs transformers (the extra `integrations`)")

import lightning.pytorch as pl
import shared_training as shared
import torch
import transformers
from ddp_jobs import make_plan
from lightning.pytorch.callbacks import BaseFinetuning
from ranks import found_by, job_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autosplit.errors import InputError
from autosplit.integrations.accelerate import Accelerator
from autosplit.integrations.lightning import Shares
from autosplit.integrations.transformers import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
PLAN = make_plan((5, 3), 8)
INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(16, 2, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """A body that is trained after the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.head(self.body(inputs).tanh())
        return outputs if labels is None else {"loss": F.mse_loss(outputs, labels), "logits": outputs}


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


class Finetuning(BaseFinetuning):
    """Freeze the body before the training, and unfreeze it in epoch 1, as BackboneFinetuning does."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.body, optimizer)


def with_lightning() -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # as torchrun sets it, because Lightning would start processes otherwise
    shares = Shares(PLAN)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options: Any = {"devices": 2, "strategy": "ddp", "accelerator": "cpu", "max_epochs": 2, "logger": False, **quiet}
    trainer = pl.Trainer(callbacks=[shares, Finetuning()], **options)
    trainer.fit(Module(), shares.loader(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4)))


class Unfreezing(transformers.TrainerCallback):
    def on_epoch_begin(self, args, state, control, model=None, **kwargs):
        model.body.requires_grad_(state.epoch >= 1)


def with_trainer() -> None:
    net = Net()
    net.body.requires_grad_(False)
    folder = str(shared.folder_of_job("unfreezing"))
    options: Any = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = transformers.TrainingArguments(folder, num_train_epochs=2, **options)
    data = [{"inputs": one, "labels": other} for one, other in zip(INPUTS, TARGETS, strict=True)]
    optimizers: Any = torch.optim.SGD(net.parameters(), lr=0.1), None  # the Trainer's own would leave the body out
    Trainer(net, args, train_dataset=data, plan=PLAN, callbacks=[Unfreezing()], optimizers=optimizers).train()


def with_accelerate() -> None:
    scale = nn.Parameter(torch.ones(()))
    accelerator = Accelerator(plan=PLAN, cpu=True)
    net = Net()
    optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(inputs) * scale, targets))
            optimizer.step()
            optimizer.zero_grad()


def refused_by(train: Callable[[], None]) -> str:
    shared.clean_workers()
    try:
        train()
    except InputError as error:
        return str(error)
    return "no error"


EXPECTED = {
    with_lightning: ("body.weight", "on_train_start"),
    with_trainer: ("body.weight", "before trainer.train()"),
    with_accelerate: ("shape ()", "part of the model"),
}
SCENARIOS = {train.__name__: lambda train=train: refused_by(train) for train in EXPECTED}

ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.parametrize("train", EXPECTED, ids=lambda train: train.__name__)
def test_parameters_that_ddp_does_not_synchronise_are_an_error(ranks, train):
    for text in found_by(ranks, train.__name__):
        for part in (*EXPECTED[train], "differs between the ranks"):
            assert part in text
