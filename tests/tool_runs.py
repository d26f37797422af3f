"""An epoch of SGD with each tool: accelerate, the Trainer of transformers, and Lightning.

Each function returns the trained model, and the object that got the plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import shared_training as shared
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from autosplit.integrations.accelerate import Accelerator
from autosplit.integrations.lightning import Shares
from autosplit.integrations.transformers import Trainer
from autosplit.plan.plan import Plan


def own_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch)["loss"]


@dataclass(frozen=True)
class Job:
    """What to train.

    Attributes:
        loss: The loss outside the Trainer, which calls the model itself.
    """

    model: Callable[[], nn.Module]
    samples: Any
    lr: float
    clip: float = 0.0
    collate: Callable[[Any], Any] | None = None
    shuffle: bool = True
    loss: Callable[[nn.Module, Any], torch.Tensor] = own_loss

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, shuffle=self.shuffle, collate_fn=self.collate)


def by_accelerate(job: Job, plan: Plan, **options: Any) -> tuple[nn.Module, Any]:
    shared.forget_accelerate()
    accelerator, net = Accelerator(plan=plan, cpu=True, **options), job.model()
    loader = accelerator.shares_of(job.loader(), seed=shared.SEED)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=job.lr), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(job.loss(model, batch))
            if job.clip:
                accelerator.clip_grad_norm_(model.parameters(), job.clip)
            optimizer.step()
            optimizer.zero_grad()
    return net, accelerator


def by_transformers(job: Job, plan: Plan, **options: Any) -> tuple[nn.Module, Any]:
    shared.forget_accelerate()
    args = TrainingArguments(
        str(shared.folder_of_job("epoch")),
        num_train_epochs=1,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=job.clip,
        seed=shared.SEED,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
        train_sampling_strategy="random" if job.shuffle else "sequential",
    )
    net = job.model()
    trainer = Trainer(net, args, train_dataset=job.samples, data_collator=job.collate, plan=plan, **options)
    trainer.train()
    return net, trainer


class Module(pl.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.net = job, job.model()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.job.loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.job.lr)


def by_lightning(job: Job, plan: Plan, **options: Any) -> tuple[nn.Module, Any]:
    os.environ["TORCHELASTIC_RUN_ID"] = "none"  # as torchrun sets it, because Lightning would start processes otherwise
    shares, module = Shares(plan, **options), Module(job)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    places = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    trainer = pl.Trainer(max_epochs=1, callbacks=[shares], gradient_clip_val=job.clip or None, **places, **quiet)
    trainer.fit(module, shares.loader(job.loader(), seed=shared.SEED))
    return module.net, shares
