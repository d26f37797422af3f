"""Training script of test_ddp_machines.py. torchrun starts it on each machine. The same training on one device is
below.

Each machine's folder gets `steps.jsonl`, with one line per optimizer step and this rank's samples, and `weights.pt`
at the end. A step can kill a process only once: the next process in that folder continues.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from autosplit import Workload, ddp
from autosplit.parallel.batch_sampler import ScheduledBatchSampler

BATCH_SIZES, EFFECTIVE_BATCH_SIZE = (2, 6), 16
NUM_SAMPLES, EPOCHS = 88, 3  # six steps an epoch, the last one of 8 samples
SAVED_EVERY = 4
INPUTS = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(NUM_SAMPLES, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def mean_loss(model: torch.nn.Module, indices: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(INPUTS[indices]), TARGETS[indices])


def workload() -> Workload:
    """Return the workload for `autosplit tune`, with the same model."""
    return Workload(make_model(), (INPUTS[:8], TARGETS[:8]), loss_fn=torch.nn.functional.mse_loss)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def trained_on_one_device() -> torch.Tensor:
    """Return the weights after all epochs, each step being one batch."""
    model = make_model()
    optimizer = make_optimizer(model)
    sampler = ScheduledBatchSampler(NUM_SAMPLES, EFFECTIVE_BATCH_SIZE, EFFECTIVE_BATCH_SIZE, shuffle=True, seed=7)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for indices in sampler:
            mean_loss(model, indices).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def tell(**what: Any) -> None:
    with Path("steps.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def die(what: str) -> None:
    """Kill this process, and also torchrun if the whole machine is to fail."""
    died = Path("died")
    if died.exists():
        return
    died.touch()
    if what == "machine":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def train(checkpoint: str, *, dies: str | None, at: int) -> None:
    with ddp.setup() as ctx:
        model = ctx.wrap(make_model())
        optimizer = make_optimizer(model)
        loader = DataLoader(range(NUM_SAMPLES), batch_sampler=ctx.batch_sampler(NUM_SAMPLES, shuffle=True, seed=7))
        sampler = loader.batch_sampler
        parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
        done = 0
        if Path(checkpoint).exists():
            done = ctx.load_checkpoint(checkpoint, **parts)["done"]
        for epoch in range(sampler.epoch, EPOCHS):
            sampler.set_epoch(epoch)
            for step in ctx.steps(loader):
                samples = []
                for number, indices in enumerate(step):
                    if dies and done == at and number == len(step) // 2:
                        die(dies)
                    step.backward(mean_loss(model, indices))
                    samples += (
                        indices.tolist() if step.micro_batch_sizes[number] else []
                    )  # the rank may also run an extra sample that does not count
                optimizer.step()
                optimizer.zero_grad()
                tell(rank=ctx.rank, pid=os.getpid(), epoch=epoch, done=done, samples=samples)
                done += 1
                if done % SAVED_EVERY == 0:
                    ctx.save_checkpoint(checkpoint, **parts, done=done)
        torch.save(weights(model), "weights.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--dies", choices=("worker", "machine"))
    parser.add_argument("--at", type=int, default=-1)
    arguments = parser.parse_args()
    train(arguments.checkpoint, dies=arguments.dies, at=arguments.at)
