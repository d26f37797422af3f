"""Measure how soon the other ranks of a job end after one rank fails, or name a rank that is suspended.

    python benchmarks/failing_ranks.py [--repetitions 5] [--output benchmarks/results/failing_ranks.json]

Three processes train over gloo. Rank 1 fails in the middle of an optimizer step: it raises an exception, the system
kills it (SIGKILL), or it is suspended (SIGSTOP). The time runs from the failure until both other ranks have ended, or
until a rank has named the suspended rank on stderr. Without autosplit, ranks wait for the timeout of the process group,
which is half an hour by default.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from answer import of_this_run
from ddp import plan_of
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from autosplit import ddp

WORLD_SIZE, VICTIM = 3, 1
WAYS = ("raises", "is killed", "is suspended")
PROMISED_S = 20
"""Limit in docs/ddp.md for naming a suspended rank, in seconds."""

LONGEST_S = 250
"""Seconds after which a measurement is given up."""


def fail(way: str, folder: Path) -> None:
    """Record the time, and fail in this way."""
    (folder / "failed").write_text(str(time.time()), encoding="utf-8")
    if way == "raises":
        raise ValueError("on purpose")
    os.kill(os.getpid(), signal.SIGKILL if way == "is killed" else signal.SIGSTOP)


def run_rank(rank: int, port: int, way: str, folder: Path) -> None:
    """Train as one rank, with stderr in a file."""
    os.dup2(os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    labels = tuple(f"cpu:{index}" for index in range(WORLD_SIZE))
    with ddp.setup(plan_of(labels, (4, 2, 2), 2, 16)) as ctx:
        model = ctx.wrap(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
        loader = DataLoader(data, batch_sampler=ctx.batch_sampler(len(data)))
        for step in ctx.steps(loader):
            for number, (inputs, targets) in enumerate(step):
                if (rank, step.index, number) == (VICTIM, 3, 1):
                    fail(way, folder)
                step.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def measured_s(way: str) -> float:
    """Run a job. Return the seconds from the failure to the end of the other ranks, or to the message."""
    context = torch.multiprocessing.get_context("spawn")
    port = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        ranks = [context.Process(target=run_rank, args=(rank, port, way, folder)) for rank in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        others = [process for rank, process in enumerate(ranks) if rank != VICTIM]

        def is_over() -> bool:
            if way != "is suspended":
                return not any(process.is_alive() for process in others)
            return any(f"rank {VICTIM}" in path.read_text(encoding="utf-8") for path in folder.glob("[02].txt"))

        given_up_s = time.time() + LONGEST_S
        while not is_over() and time.time() < given_up_s:
            time.sleep(0.01)
        over_s = time.time()
        for process in ranks:
            process.kill()
            process.join()
        said = [(folder / f"{rank}.txt").read_text(encoding="utf-8") for rank in range(WORLD_SIZE) if rank != VICTIM]
        assert over_s < given_up_s, said
        assert any(f"rank {VICTIM}" in one for one in said), said
        return over_s - float((folder / "failed").read_text(encoding="utf-8"))


def main() -> None:
    """Measure each way several times, and write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each failure (default: 5)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "failing_ranks.json")
    arguments = parser.parse_args()
    seconds = {way: sorted(round(measured_s(way), 2) for _ in range(arguments.repetitions)) for way in WAYS}
    answer: dict[str, Any] = {
        **of_this_run(),
        "ranks": WORLD_SIZE,
        "promised_s": PROMISED_S,
        "seconds": seconds,
        "longest_over_promised": round(max(map(max, seconds.values())) / PROMISED_S, 3),
    }
    arguments.output.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(answer["seconds"]))


if __name__ == "__main__":
    main()
