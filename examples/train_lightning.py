"""Trains a small network on made-up points with Lightning; where there is a plan, by its shares.

    python examples/train_lightning.py
    python -m autosplit tune examples/train_lightning.py --strategy ddp --output plan.json
    python -m autosplit launch --plan plan.json examples/train_lightning.py

Two things of training differ from a script without autosplit: the callback, and the loader that comes through it.
"""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import autosplit
import autosplit.integrations.lightning
from autosplit.integrations.lightning import Shares


class Circle(pl.LightningModule):
    """Tells the points within a circle from those outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        del batch_idx  # every batch is alike
        return F.cross_entropy(self.network(batch["point"]), batch["label"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print the loss now and then; where `training_step` asks for the trainer, tuning has to be given one."""
        if self.trainer.is_global_zero and self.global_step % 10 == 0:
            said = f"loss {outputs['loss']:.3f} over {len(batch['label'])} samples"
            print(f"step {self.global_step:3}, batch {batch_idx + 1}: {said}")

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def made_loader() -> DataLoader[Any]:
    """Return a loader of points and of whether they lie within the circle."""
    torch.manual_seed(0)
    data: Any = [{"point": point, "label": (point.norm() < 0.8).long()} for point in torch.rand(1000, 2) * 2 - 1]
    return DataLoader(data, batch_size=32, shuffle=True)  # with a plan, its batch size instead


def workload() -> autosplit.Workload:
    """Return what is tuned: the module's own training step and optimizer, on a batch of the loader."""
    return autosplit.integrations.lightning.workload(Circle(), made_loader())


if __name__ == "__main__":
    loader = made_loader()
    shares = Shares()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(max_steps=40, devices=processes, callbacks=[shares], **quiet)
    trainer.fit(Circle(), shares.loader(loader))
