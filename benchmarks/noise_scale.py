"""Compare the effective batch size that `plan.goodput` recommends with the best of a grid.

    python benchmarks/noise_scale.py

A classifier learns a random network's noisy labels with SGD until a held-out loss reaches the target. At each effective
batch size it starts from the same weights, sees fresh samples, and uses `goodput`'s factor for the learning rate. Run
the script on a quiet machine, because it measures time. Expected: the recommended batch takes at most 10% longer than
the best.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator

import torch
from answer import of_this_run, put
from torch import nn

import autosplit
from autosplit.parallel.epoch_steps import steps
from autosplit.plan.plan import Plan
from autosplit.tools.goodput import Goodput

PLAN_BATCH, MICRO_BATCH = 512, 256
LEARNING_RATE = 3.2
"""The best rate at the plan's batch size among powers of two. The theory of the noise scale assumes the best rate."""
TARGET = 1.1
"""Target of the held-out loss. The noise of the labels alone gives 0.78."""
REPEATS = 3
MOST_SAMPLES = 400_000
GRID = (32, 64, 128, 256, 512, 1024, 2048)


def network(seed: int = 0, width: int = 256) -> nn.Module:
    """Return the model, always with the same weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))


def teacher() -> nn.Module:
    """Return the network that gives the labels' probabilities."""
    made = network(9, 32)
    with torch.no_grad():
        made[0].weight *= 3
        made[2].weight *= 8
    return made


def batches(size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Draw fresh samples with labels from the teacher's probabilities."""
    chance, knows = torch.Generator().manual_seed(seed), teacher()
    for _drawn in range(0, MOST_SAMPLES, size):
        inputs = torch.randn(size, 64, generator=chance)
        with torch.no_grad():
            labels = torch.multinomial(knows(inputs).softmax(1), 1, generator=chance)[:, 0]
        yield inputs, labels


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the held-out samples."""
    return next(batches(8192, 10_000))


def to_target(effective: int, factor: float, seed: int) -> tuple[int, float] | None:
    """Train at an effective batch size. Return the steps and their seconds without evaluation, or None on failure."""
    net, loss_fn, spent_s = network(), nn.CrossEntropyLoss(), 0.0
    held_inputs, held_labels = held_out()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE * factor)
    micro = min(effective, MICRO_BATCH)
    walk = steps(batches(micro, seed), batch_size=micro, effective_batch_size=effective)
    for index, step in enumerate(walk):
        for inputs, labels in step:
            begun_s = time.perf_counter()
            step.backward(loss_fn(net(inputs), labels))
            spent_s += time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        spent_s += time.perf_counter() - begun_s
        if index % max(1, 512 // effective) == 0:
            with torch.no_grad():
                if float(loss_fn(net(held_inputs), held_labels)) <= TARGET:
                    return index + 1, spent_s
    return None


def recommended(plan: Plan) -> Goodput:
    """Estimate the noise scale at the plan's batch size, and recommend a batch size."""
    net, loss_fn = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    noise_scale = autosplit.NoiseScale()
    for step in plan.steps(itertools.islice(batches(MICRO_BATCH, 1), 1000), noise_scale=noise_scale):
        for inputs, labels in step:
            step.backward(loss_fn(net(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    print(noise_scale)
    return plan.goodput(noise_scale)


def measured(found: Goodput, factors: dict[int, float]) -> dict[int, dict[str, float] | None]:
    """Train at each batch size in turn, several times. Return the medians."""
    runs: dict[int, list[tuple[int, float] | None]] = {size: [] for size in factors}
    for seed in range(2, 2 + REPEATS):
        for size, factor in factors.items():
            runs[size].append(to_target(size, factor, seed))
    rates = {point.effective_batch_size: point.samples_per_s for point in found.curve}
    rows: dict[int, dict[str, float] | None] = {}
    for size, got in runs.items():
        reached = [run for run in got if run is not None]
        if len(reached) < len(got):
            rows[size] = None
            continue
        number, seconds = (statistics.median(column) for column in zip(*reached, strict=True))
        rows[size] = {
            "learning_rate": round(LEARNING_RATE * factors[size], 4),
            "steps": number,
            "seconds": round(seconds, 4),
            "samples_per_s": round(number * size / seconds),
            "predicted_samples_per_s": round(rates[size]),
        }
        print(size, rows[size], flush=True)
    return rows


def main() -> None:
    """Tune, recommend, and train at each batch size of the grid."""
    torch.set_num_threads(1)
    plan = autosplit.tune(
        network(),
        next(batches(8, 0)),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        devices="cpu",
        effective_batch_size=PLAN_BATCH,
        max_batch_size=MICRO_BATCH,
        profile="refresh",
    )
    found = recommended(plan)
    print(found)
    noise = found.noise_scale
    factors = {size: (1 + noise / PLAN_BATCH) / (1 + noise / size) for size in {*GRID, found.effective_batch_size}}
    rows = measured(found, dict(sorted(factors.items())))
    reached = {size: row["seconds"] for size, row in rows.items() if row is not None}
    answer = {
        **of_this_run(),
        "noise_scale": round(noise, 1),
        "recommended": found.effective_batch_size,
        "best": min(reached, key=reached.__getitem__),
        "ratio_to_best": round(reached[found.effective_batch_size] / min(reached.values()), 4),
        "ratio_to_plan": round(reached[found.effective_batch_size] / reached[PLAN_BATCH], 4),
        "plan_effective_batch_size": PLAN_BATCH,
        "predicted_gain": round(found.gain, 4),
        "batches": rows,
    }
    put(answer)


if __name__ == "__main__":
    main()
