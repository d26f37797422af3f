"""A training script of an elastic job, for tests/ddp/test_ddp_elastic.py: torchrun ... elastic_training.py FOLDER.

Rank 0 appends lines to FOLDER/events: ``started WORLD STEP``, ``sizes SIZE ...`` and ``done WORLD STEP``. Before each
step, every rank waits until FOLDER/limit is higher than the number of finished steps.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from handmade import changed_plan, changed_seats, made_ceiling
from plans import MIB
from shared_training import shares_plan
from torch import nn
from torch.nn import functional as F

import autosplit
from autosplit.plan.plan import Plan
from autosplit.solve.step_time import Cost, StepTime, TimeCurve

NUM_SAMPLES, EFFECTIVE, SIZES, EPOCHS = 200, 48, (9, 3), 2
"""Samples of an epoch (four steps of 48 and one of 8), of an optimizer step, and of a forward on each device."""


def make_plan(**changes: Any) -> Plan:
    """Return a plan for a device and another that takes three times as long. Each holds 12 samples."""
    plan = shares_plan(SIZES, EFFECTIVE)
    curves = tuple(TimeCurve(((1, each), (64, 64 * each))) for each in (0.001, 0.003))
    held = made_ceiling("cpu:0", 12, 20 * MIB, fixed_bytes=MIB, bytes_per_sample=MIB, peak_bytes=13 * MIB)
    cost = Cost(StepTime.bare(curves, 0.001, adds_up=False), all_reduce_s=0.001)
    return changed_plan(changed_seats(plan, lambda _, seat: replace(seat, ceiling=held)), cost=cost, **changes)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).double()


def made_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(NUM_SAMPLES, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [(row, row.sum().gt(0).long()) for row in inputs]


def in_one_process() -> dict[str, torch.Tensor]:
    """Return the weights of a single process from whole optimizer steps in the same order."""
    model, data = make_model(), made_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = shares_plan((EFFECTIVE,), EFFECTIVE).batch_sampler(NUM_SAMPLES, shuffle=True, seed=3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in sampler:
            inputs, targets = zip(*(data[number] for number in batch), strict=True)
            F.cross_entropy(model(torch.stack(inputs)), torch.stack(targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def tuned(folder: Path) -> Plan:
    """Tune for the machines that are there, or take their saved plan. Append the number of ranks to FOLDER/tuned."""
    inputs, targets = zip(*made_data()[:8], strict=True)
    workload = autosplit.Workload(make_model(), (torch.stack(inputs), torch.stack(targets)), F.cross_entropy)
    plan = autosplit.tune(
        workload, devices="cpu:8MiB", strategy="ddp", effective_batch_size=EFFECTIVE, max_batch_size=12, n_trials=1
    )
    if os.environ["RANK"] == "0":
        with (folder / "tuned").open("a") as file:
            file.write(f"{len(plan.devices)}\n")
    return plan


def main(folder: Path) -> None:
    def tell(*words: object) -> None:
        if ctx.rank == 0:
            with (folder / "events").open("a") as file:
                file.write(" ".join(map(str, words)) + "\n")

    with (folder / "pids").open("a") as file:
        file.write(f"{os.getppid()} {os.getpid()}\n")
    path = folder / "plan.json"
    with autosplit.ddp.setup(path, elastic=True) if path.exists() else autosplit.ddp.setup(tuned(folder)) as ctx:
        model = ctx.wrap(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = ctx.loader(made_data(), shuffle=True, seed=3)
        parts = {"model": model, "optimizer": optimizer, "sampler": loader.batch_sampler}
        done = 0
        if (folder / "checkpoint.pt").exists():
            done = ctx.load_checkpoint(folder / "checkpoint.pt", **parts)["done"]
        tell("sizes", *ctx.layout.split)
        tell("started", ctx.world_size, done)
        for epoch in range(loader.batch_sampler.epoch, EPOCHS):
            loader.batch_sampler.set_epoch(epoch)
            for step in ctx.steps(loader):
                while int((folder / "limit").read_text()) <= done:
                    time.sleep(0.02)
                for inputs, targets in step:
                    step.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                ctx.save_checkpoint(folder / "checkpoint.pt", done=done, **parts)
                tell("done", ctx.world_size, done)
        if ctx.rank == 0:
            torch.save(model.module.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
