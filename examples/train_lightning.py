"""Train a small network on synthetic points with Lightning. With a plan, each process uses its own batch size.

    python examples/train_lightning.py
    python -m autosplit tune examples/train_lightning.py --strategy ddp --output plan.json
    python -m autosplit launch --plan plan.json examples/train_lightning.py

The training differs in two places from a script without autosplit: the callback and the loader.
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
    """Classifies points as inside or outside a circle."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        del batch_idx  # all batches are treated the same
        return F.cross_entropy(self.network(batch["point"]), batch["label"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print the loss now and then. If `training_step` uses `self.trainer`, pass `trainer=` to `workload`."""
        if self.trainer.is_global_zero and self.global_step % 10 == 0:
            text = f"loss {outputs['loss']:.3f} over {len(batch['label'])} samples"
            print(f"step {self.global_step:3}, batch {batch_idx + 1}: {text}")

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def made_loader() -> DataLoader[Any]:
    """Return a DataLoader of points labelled by whether they are inside the circle."""
    torch.manual_seed(0)
    data: Any = [{"point": point, "label": (point.norm() < 0.8).long()} for point in torch.rand(1000, 2) * 2 - 1]
    return DataLoader(data, batch_size=32, shuffle=True)  # a plan replaces this batch size


def workload() -> autosplit.Workload:
    """Return the workload to tune: the module's training step and optimizer on a batch of the loader."""
    return autosplit.integrations.lightning.workload(Circle(), made_loader())


if __name__ == "__main__":
    loader = made_loader()
    shares = Shares()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(max_steps=40, devices=processes, callbacks=[shares], **quiet)
    trainer.fit(Circle(), shares.loader(loader))
