"""Hold the effective batch that `plan.goodput` recommends against the best of a grid, by training to a target loss.

    python benchmarks/noise_scale.py

A small regression model trains with SGD from the same weights on fresh samples at each effective batch, its learning
rate by `goodput`'s factor, until a held-out loss is at the target. The noise scale is the mean over a run at the plan's
own batch. Run it on a quiet machine: the times are the machine's own. Wanted: the recommended one is within 10 % of
the best. It is not there yet: on a busy machine of two processors the recommended 64 took 2.3 times as long as 256, the
best of the grid, and each run took less than a tenth of a second.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator

import torch
from torch import nn

import autosplit
from autosplit.parallel.optimizer_steps import steps
from autosplit.plan.goodput import Goodput
from autosplit.plan.plan import Plan

PLAN_BATCH, MICRO_BATCH = 64, 32
LEARNING_RATE = 0.05
TARGET = 0.27
"""Held-out loss; a label's own noise is 0.25 of it."""
REPEATS = 3
MOST_SAMPLES = 2_000_000
GRID = (32, 64, 128, 256, 512, 1024, 2048)


def network() -> nn.Module:
    """Make the model, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))


def batches(size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw fresh samples of a noisy linear truth."""
    chance = torch.Generator().manual_seed(seed)
    truth = torch.randn(64, 1, generator=torch.Generator().manual_seed(9)) / 8
    for _drawn in range(0, MOST_SAMPLES, size):
        inputs = torch.randn(size, 64, generator=chance)
        yield inputs, inputs @ truth + 0.5 * torch.randn(size, 1, generator=chance)


def seconds_to_target(effective: int, factor: float, seed: int) -> float | None:
    """Train at an effective batch; return the seconds of its steps, evaluation left out, or None without success."""
    net, loss_fn, spent_s = network(), nn.MSELoss(), 0.0
    held_inputs, held_targets = next(batches(4096, 10_000))
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE * factor)
    micro = min(effective, MICRO_BATCH)
    walk = steps(batches(micro, seed), batch_size=micro, effective_batch_size=effective)
    for index, step in enumerate(walk):
        for inputs, targets in step:
            begun_s = time.perf_counter()
            step.backward(loss_fn(net(inputs), targets))
            spent_s += time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        spent_s += time.perf_counter() - begun_s
        if index % max(1, 128 // effective) == 0:
            with torch.no_grad():
                if float(loss_fn(net(held_inputs), held_targets)) <= TARGET:
                    return spent_s
    return None


def recommended(plan: Plan) -> Goodput:
    """Estimate the noise scale by training to the target at the plan's own batch, and recommend a batch for it."""
    net, loss_fn = network(), nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    held_inputs, held_targets = next(batches(4096, 10_000))
    for step in plan.steps(batches(MICRO_BATCH, 1), noise_scale=True):
        for inputs, targets in step:
            step.backward(loss_fn(net(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if float(loss_fn(net(held_inputs), held_targets)) <= TARGET:
                break
    print(step.noise_scale)
    return plan.goodput(step.noise_scale)


def main() -> None:
    """Tune, recommend, and train at each batch of the grid."""
    torch.set_num_threads(1)
    plan = autosplit.tune(
        network(),
        next(batches(8, 0)),
        loss_fn=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        devices="cpu",
        effective_batch_size=PLAN_BATCH,
        max_batch_size=MICRO_BATCH,
        profile="refresh",
    )
    found = recommended(plan)
    print(found)
    times = {}
    for effective in sorted({*GRID, found.effective_batch_size}):
        noise = found.noise_scale
        factor = (1 + noise / PLAN_BATCH) / (1 + noise / effective)
        runs = [seconds_to_target(effective, factor, seed) for seed in range(2, 2 + REPEATS)]
        times[effective] = None if None in runs else statistics.median(run for run in runs if run is not None)
        print(effective, round(factor, 2), times[effective], flush=True)
    reached = {size: seconds for size, seconds in times.items() if seconds is not None}
    own = reached.get(found.effective_batch_size)
    slower = None if own is None else own / min(reached.values()) - 1
    print(json.dumps({"recommended": found.effective_batch_size, "seconds": times, "slower_than_best": slower}))


if __name__ == "__main__":
    main()
