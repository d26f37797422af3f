"""Train the character-level GPT with DistributedDataParallel and a plan's batch size for each rank.

    python examples/train_ddp.py

This command tunes for two CPU devices and starts two jobs with one rank for each device. The second job resumes from
the first job's checkpoint. With your own plan: autosplit launch --plan plan.json examples/train_ddp.py last.pt 40
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from char_gpt import CharGPT, Snippets, next_character_loss, workload
from torch.utils.data import DataLoader

import autosplit
import autosplit.ddp


def train(checkpoint: str, num_steps: int) -> None:
    """Train as one rank of the job and save a checkpoint. Rank 0 prints the mean loss of its samples."""
    torch.manual_seed(0)
    with autosplit.ddp.setup() as ctx:
        model = ctx.wrap(CharGPT())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        snippets = Snippets()
        loader = DataLoader(snippets, batch_sampler=ctx.batch_sampler(len(snippets), shuffle=True, seed=0))
        parts = {"model": model, "optimizer": optimizer, "sampler": loader.batch_sampler}
        if Path(checkpoint).exists():
            ctx.load_checkpoint(checkpoint, **parts)
        for step in ctx.steps(loader):
            for inputs, targets in step:
                step.backward(next_character_loss(model(inputs.to(ctx.device)), targets.to(ctx.device)))
            optimizer.step()
            optimizer.zero_grad()
            if ctx.rank == 0 and step.index % 10 == 0:
                print(f"step {step.index:3}: loss {step.loss:.3f} on rank 0, {step.num_samples} samples on all ranks")
            if step.index + 1 == num_steps:
                break
        ctx.save_checkpoint(checkpoint, **parts)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1], int(sys.argv[2]))
        sys.exit()
    os.environ["OMP_NUM_THREADS"] = "1"  # the two ranks share the CPU
    devices, size = "cpu:512MiB,cpu:512MiB", 32
    plan = autosplit.tune(workload(), devices=devices, effective_batch_size=size, max_batch_size=size, n_trials=2)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.json")
        command = [sys.executable, "-m", "autosplit", "launch", "--plan", f"{folder}/plan.json", __file__]
        for last in ("20", "40"):
            subprocess.run([*command, f"{folder}/last.pt", last], check=True)  # noqa: S603 - a fixed command
