"""Measure how soon a job under torchrun ends after one of its ranks fails.

    python benchmarks/failing_ranks.py [--repetitions 5] [--ways raises ...] [--output FILE]

Three processes train over gloo. Rank 1 fails in the middle of an optimizer step: it raises an exception, the system
kills it (SIGKILL), or it exits without an error (``sys.exit(0)``). The time runs from the failure until torchrun has
ended all ranks and printed its report. The report must name the failed rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from answer import of_this_run
from ddp import plan_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autosplit import ddp

WORLD_SIZE, VICTIM = 3, 1
WAYS = ("raises", "is killed", "exits early")
PROMISED_S = 30
"""Limit in docs/ddp.md for the end of all ranks, in seconds."""

LONGEST_S = 250
"""Seconds after which a measurement is given up."""


def fail(way: str, folder: Path) -> None:
    """Record the time, and fail in this way."""
    (folder / "failed").write_text(str(time.time()), encoding="utf-8")
    if way == "raises":
        raise ValueError("on purpose")
    if way == "exits early":
        sys.exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(way: str, folder: Path) -> None:
    """Train as one rank."""
    torch.set_num_threads(1)
    labels = tuple(f"cpu:{index}" for index in range(WORLD_SIZE))
    with ddp.setup(plan_of(labels, (4, 2, 2), 2, 16)) as ctx:
        model = ctx.wrap(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
        loader = DataLoader(data, batch_sampler=ctx.batch_sampler(len(data)))
        for step in ctx.steps(loader):
            for number, (inputs, targets) in enumerate(step):
                if (ctx.rank, step.index, number) == (VICTIM, 3, 1):
                    fail(way, folder)
                step.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def measured_s(way: str) -> float:
    """Run a job. Return the seconds from the failure to torchrun's end."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun, __file__, "--rank", way, folder]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LONGEST_S, check=False)  # noqa: S603  # this script
        over_s = time.time()
        assert done.returncode != 0, done.stderr
        root = done.stderr.split("Root Cause")[-1]
        assert f"rank {VICTIM} left" in root if way == "exits early" else f"rank      : {VICTIM}" in root, done.stderr
        return over_s - float((Path(folder) / "failed").read_text(encoding="utf-8"))


def main() -> None:
    """Measure each way several times, and write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5, help="measurements of each failure (default: 5)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="how the rank fails (default: all ways)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "failing_ranks.json")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(arguments.rank[0], Path(arguments.rank[1]))
        return
    seconds = {way: sorted(round(measured_s(way), 2) for _ in range(arguments.repetitions)) for way in arguments.ways}
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
