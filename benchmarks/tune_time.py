"""Compare the time of `tune` with that of another version of autosplit, on CPU budgets, on two ranks and on `sim:`.

    python benchmarks/tune_time.py --before FOLDER [--rounds 5] [--output benchmarks/results/tune_time.json]

FOLDER is a checkout of the other version. Each tuning is a new process, which reports the time of the call of `tune`.
The versions take turns, so other load on the machine affects both equally.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from answer import of_this_run

ROOT = Path(__file__).parents[1]

CASES = {
    "perceptron, two CPU budgets": ("perceptron", "cpu:8MiB,cpu:4MiB", "auto", 1),
    "CNN, two CPU budgets": ("cnn", "cpu:24MiB,cpu:16MiB", "auto", 1),
    "transformer, one CPU budget": ("transformer", "cpu:64MiB", "auto", 1),
    "perceptron, two ranks": ("perceptron", "cpu:8MiB,cpu:4MiB", "ddp", 2),
    "CNN, two ranks": ("cnn", "cpu:24MiB,cpu:16MiB", "ddp", 2),
    "transformer, two simulated GPUs": ("transformer", "sim:2xRTX3090", "auto", 1),
}
"""Model, devices, strategy and number of processes of each case."""

SCRIPT = """
import sys, time
import torch
from torch import nn
import autosplit

def perceptron():
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)), torch.randn(8, 64)

def cnn():
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.randn(8, 3, 24, 24)

def transformer():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    stack = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(stack, nn.Flatten(), nn.Linear(16 * 64, 10)), torch.randn(8, 16, 64)

if __name__ == "__main__":
    name, devices, strategy = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = globals()[name]()
    batch = inputs, torch.randint(0, 10, (len(inputs),))
    begun_s = time.perf_counter()
    autosplit.tune(
        model, batch, nn.functional.cross_entropy, devices=devices, strategy=strategy, profile="off",
        optimizer=torch.optim.AdamW, effective_batch_size=256,
    )
    sys.stdout.write(f"took {time.perf_counter() - begun_s}\\n")  # in one piece, because ranks share the output
"""


def seconds_of(tree: Path, script: Path, case: tuple[str, str, str, int]) -> float:
    """Tune once with the autosplit of a folder, and return the time of the slowest process in seconds."""
    name, devices, strategy, processes = case
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    done = subprocess.run(  # noqa: S603 (the commands are those above)
        [sys.executable, *(launcher if processes > 1 else []), str(script), name, devices, strategy],
        check=True,
        capture_output=True,
        text=True,
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
    )
    return max(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("took"))


def measured(before: Path, rounds: int) -> dict[str, Any]:
    """Tune each case with both versions in turn. Return the times and two ratios."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "tuning_job.py")
        script.write_text(SCRIPT, encoding="utf-8")
        for name, case in CASES.items():
            pairs = [(seconds_of(before, script, case), seconds_of(ROOT, script, case)) for _ in range(rounds)]
            old, new = zip(*pairs, strict=True)
            found[name] = {
                "ratio": round(statistics.median(now / then for then, now in pairs), 3),
                "ratio_of_least": round(min(new) / min(old), 3),
                "before_s": [round(one, 2) for one in old],
                "now_s": [round(one, 2) for one in new],
            }
            print(f"{found[name]['ratio']:.2f} {found[name]['ratio_of_least']:.2f}  {name}", flush=True)
    return found


def main() -> None:
    """Measure, print the ratios, and write the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout of the other version")
    parser.add_argument("--rounds", type=int, default=5, help="tunings of each version and case (default: 5)")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    commit = subprocess.run(  # noqa: S603 (the folder is an argument)
        ["git", "-C", str(args.before), "rev-parse", "--short=8", "HEAD"],  # noqa: S607 (git is on the path)
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    found = {"before": commit, "cases": measured(args.before.resolve(), args.rounds), **of_this_run()}
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
