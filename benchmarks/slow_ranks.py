"""Slow down one of two DDP ranks in training, and measure steps before and after `rebalance="auto"` changes the split.

    python benchmarks/slow_ranks.py [--window 200] [--output benchmarks/results/slow_ranks.json]

Two processes train over gloo with the plan's split (16, 16). A sample sleeps 4 ms, a third of it in the forward and the
rest in the backward, so that the ranks do not compete for a CPU. From step `SLOWS_AT` on, a sample of rank 1 sleeps
8 ms. The script then trains with every split near the best by other plans, without a change of split. It also compares
the float64 weights with those of one process on whole batches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from answer import of_this_run
from ddp import plan_of
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from autosplit import ddp
from autosplit.tools import slow_ranks

SAMPLE_S, SLOWER = 0.004, 2
SPLIT = (16, 16)
NEAR_BEST = ((19, 13), (20, 12), (21, 11), (22, 10), (23, 9))
SLOWS_AT = 200
STEPS = 650
MEASURED = 100
"""Steps with each other split."""


class Sleep(torch.autograd.Function):
    """Return the input, and sleep in the forward and for twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        """Sleep for a third of the time."""
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Sleep for the rest of the time."""
        time.sleep(ctx.seconds * 2 / 3)
        return gradient, None


def make_model() -> nn.Module:
    """Return the model, equal in all processes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def data_of(steps: int) -> TensorDataset:
    """Return random samples for this many optimizer steps."""
    generator = torch.Generator().manual_seed(0)
    number = steps * sum(SPLIT)
    made = (torch.randn(number, width, dtype=torch.float64, generator=generator) for width in (8, 1))
    return TensorDataset(*made)


def train(split: tuple[int, ...], steps: int, slows_at: int, rebalance: Any) -> tuple[dict[str, Any], Tensor]:
    """Train an epoch as one rank. Return the seconds and the split of each step, and the last weights."""
    found: dict[str, Any] = {"seconds": [], "splits": []}
    with ddp.setup(plan_of(("cpu:0", "cpu:1"), split, 1, sum(split))) as ctx:
        model = ctx.wrap(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = data_of(steps)
        loader = DataLoader(data, batch_sampler=ctx.batch_sampler(len(data), shuffle=True))
        begun_s = time.perf_counter()
        for step in ctx.steps(loader, rebalance=rebalance):
            is_slow = ctx.rank == 1 and step.index >= slows_at
            for inputs, targets in step:
                seconds = len(inputs) * SAMPLE_S * (SLOWER if is_slow else 1)
                step.backward(nn.functional.mse_loss(Sleep.apply(model(inputs), seconds), targets))  # type: ignore[no-untyped-call]
            found["splits"].append([rank.batch_size for rank in ctx.plan.ddp.ranks])
            optimizer.step()
            optimizer.zero_grad()
            found["seconds"].append(time.perf_counter() - begun_s)
            begun_s = time.perf_counter()
        weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    return found, weights


def in_one_process(steps: int) -> Tensor:
    """Train on whole batches. Return the last weights."""
    model, data = make_model(), data_of(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = plan_of(("cpu:0",), (sum(SPLIT),), 1, sum(SPLIT)).batch_sampler(len(data), shuffle=True)
    for inputs, targets in DataLoader(data, batch_sampler=sampler):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def run_rank(rank: int, port: int, output: str, window: int) -> None:
    """Run all trainings as one of two ranks. Rank 0 writes the results."""
    torch.set_num_threads(1)
    slow_ranks.WINDOW = window
    scale = window / 200
    steps, slows_at, measured = (round(number * scale) for number in (STEPS, SLOWS_AT, MEASURED))
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    found, weights = train(SPLIT, steps, slows_at, "auto")
    switched = found["splits"].index(found["splits"][-1])
    near = {split: train(split, measured, 0, "off")[0]["seconds"] for split in NEAR_BEST}
    if rank == 0:
        best = min(NEAR_BEST, key=lambda split: statistics.median(near[split]))
        seconds = found["seconds"]
        after_s, best_s = statistics.median(seconds[switched + 1 :]), statistics.median(near[best])
        answer = {
            **of_this_run(),
            "sample_s": SAMPLE_S,
            "slower": SLOWER,
            "slow_from_step": slows_at,
            "split_changed_after_step": switched,
            "splits": [list(one) for one in dict.fromkeys(map(tuple, found["splits"]))],
            "equal_ranks_s": round(statistics.median(seconds[measured // 2 : slows_at]), 5),
            "slow_rank_s": round(statistics.median(seconds[slows_at:switched]), 5),
            "after_s": round(after_s, 5),
            "best_split": best,
            "best_s": round(best_s, 5),
            "near_best_s": {str(split): round(statistics.median(near[split]), 5) for split in NEAR_BEST},
            "after_over_best": round(after_s / best_s, 4),
            "weights_apart": float((weights - in_one_process(steps)).abs().max()),
        }
        Path(output).write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Start both ranks, which write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--window", type=int, default=200, help="steps between two comparisons (default: 200)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "slow_ranks.json")
    arguments = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = store.port, str(arguments.output), arguments.window
    ranks = [context.Process(target=run_rank, args=(rank, *job)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
