"""Trains a small network on made-up points with Lightning; where there is a plan, by its shares.

    python examples/train_lightning.py
    autosplit launch --plan plan.json examples/train_lightning.py

Two things differ from a script without autosplit: the callback, and the loader that comes through it.
"""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autosplit.integrations.lightning import Shares


class Circle(pl.LightningModule):
    """Tells the points within a circle from those outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        loss = F.cross_entropy(self.network(batch["point"]), batch["label"])
        if self.trainer.is_global_zero and self.global_step % 10 == 0:
            print(f"step {self.global_step:3}, batch {batch_idx}: loss {loss.detach():.3f}")
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    data: Any = [{"point": point, "label": (point.norm() < 0.8).long()} for point in torch.rand(1000, 2) * 2 - 1]
    shares = Shares()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(max_steps=40, devices=processes, callbacks=[shares], **quiet)
    trainer.fit(Circle(), shares.loader(DataLoader(data, batch_size=32, shuffle=True)))
