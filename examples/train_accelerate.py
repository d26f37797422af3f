"""Trains a small network on made-up points with accelerate; where there is a plan, by its shares.

    python examples/train_accelerate.py
    autosplit launch --plan plan.json examples/train_accelerate.py

One line differs from a script without autosplit: where Accelerator is imported from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from autosplit.integrations.accelerate import Accelerator

COUNT, STEPS = 1000, 40

if __name__ == "__main__":
    torch.manual_seed(0)
    points = torch.rand(COUNT, 2) * 2 - 1
    data: Any = [{"point": point, "label": (point.norm() < 0.8).long()} for point in points]
    network = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    adam = torch.optim.AdamW(network.parameters(), lr=1e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS)
    shuffled = DataLoader(data, batch_size=32, shuffle=True)  # with a plan, its batch size instead

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(network, adam, shuffled, cosine)
    step = 0
    while step < STEPS:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch["point"]), batch["label"])
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
