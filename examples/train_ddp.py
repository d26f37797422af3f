"""Trains the character-level GPT with DistributedDataParallel, by a plan's settings for each rank.

    python examples/train_ddp.py

tunes for two processor devices and starts itself again, once for each of them. With a plan of your own:

    python -m autosplit tune examples/char_gpt.py --effective-batch-size 32 --json > plan.json
    AUTOSPLIT_PROFILE=plan.json torchrun --nproc-per-node NUMBER_OF_DEVICES examples/train_ddp.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from char_gpt import CharGPT, Snippets, next_character_loss, workload
from torch import distributed as dist
from torch.utils.data import DataLoader

import autosplit
import autosplit.ddp

STEPS = 40


def tune_and_launch() -> None:
    """Make a plan for two devices, and start a process for each, as torchrun would."""
    plan = autosplit.tune(
        workload(), devices="cpu:512MiB,cpu:512MiB", effective_batch_size=32, max_batch_size=32, n_trials=2
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        # One thread each: the two share a processor.
        environment = {**os.environ, "AUTOSPLIT_PROFILE": str(path), "OMP_NUM_THREADS": "1"}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", str(len(plan.ddp.ranks)), __file__]
        done = subprocess.run(command, env=environment, check=False)  # noqa: S603 - the command is our own
    sys.exit(done.returncode)


def train() -> None:
    """Train as one rank of the job; rank 0 prints the mean loss over its own samples."""
    with autosplit.ddp.setup() as ctx:
        own = ctx.settings
        print(
            f"rank {ctx.rank} of {ctx.world_size}: {own.batch_size} samples x {own.accumulation_steps} on {own.device}"
        )
        torch.manual_seed(0)
        model = ctx.wrap(CharGPT())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        snippets = Snippets()
        loader = DataLoader(snippets, batch_sampler=ctx.batch_sampler(len(snippets), shuffle=True, seed=0))
        for number, step in enumerate(ctx.steps(loader)):
            for inputs, targets in step:
                logits = model(inputs.to(ctx.device))
                step.backward(next_character_loss(logits, targets.to(ctx.device)))
            optimizer.step()
            optimizer.zero_grad()
            if ctx.rank == 0 and number % 10 == 0:
                print(f"step {number:3}: loss {step.loss:.3f} on rank 0, of {step.num_samples} samples on all ranks")
            if number == STEPS:
                break
        dist.barrier()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        tune_and_launch()
