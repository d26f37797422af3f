"""Train a small network on synthetic points with accelerate. With a plan, each process uses its own batch size.

    python examples/train_accelerate.py
    python -m autosplit tune examples/train_accelerate.py --strategy ddp --output plan.json
    python -m autosplit launch --plan plan.json examples/train_accelerate.py

Only one line of the training differs from a script without autosplit: the import of Accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

import autosplit
from autosplit.integrations.accelerate import Accelerator

COUNT, STEPS = 1000, 40


def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a network, its optimizer, and points labelled by whether they are inside a circle."""
    torch.manual_seed(0)
    points = torch.rand(COUNT, 2) * 2 - 1
    data = [{"point": point, "label": (point.norm() < 0.8).long()} for point in points]
    network = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    return network, torch.optim.AdamW(network.parameters(), lr=1e-2), data


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    return F.cross_entropy(model(batch["point"]), batch["label"])


def workload() -> autosplit.Workload:
    """Return the workload to tune: the network, a batch of its data, its loss and its optimizer."""
    network, adam, data = made()
    return autosplit.Workload(network, default_collate(data[:8]), compute_loss=loss_of, optimizer=adam)


if __name__ == "__main__":
    network, adam, data = made()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS)
    shuffled = DataLoader(data, batch_size=32, shuffle=True)  # a plan replaces this batch size

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(network, adam, shuffled, cosine)
    step = 0
    while step < STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if accelerator.sync_gradients and step % 10 == 0:
                accelerator.print(f"step {step:3}: loss {loss.detach():.3f} in the last forward of the first process")
            if step == STEPS:
                break
    accelerator.end_training()
