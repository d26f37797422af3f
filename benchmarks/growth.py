"""Time `tune` with many parameter tensors, and commands with many saved profiles, before and after a change.

    git worktree add --detach BEFORE COMMIT
    python benchmarks/growth.py BEFORE [--rounds 3] [--output benchmarks/results/growth.json]

The two trees take turns, and each run is a new process. So other load on the machine affects both. Each case has its
wall time and its CPU time, which depends less on other load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from startup import processor

HERE = Path(__file__).parents[1]
SIMULATED, BUDGETS = "sim:RTX4090+RTX3060", "cpu:64MiB,cpu:32MiB"
TENSORS = [(500, SIMULATED), (2000, SIMULATED)]
PROFILES = 1000

AUTOSPLIT = [sys.executable, "-m", "autosplit"]
CHAR_GPT = [*AUTOSPLIT, "tune", str(HERE / "examples/char_gpt.py"), "--devices", "sim:2xRTX4090", "--profile", "off"]
SMALL = """
import torch
from torch import nn
import autosplit
def workload():
    net, sample = nn.Linear(8, 2), (torch.randn(8, 8), torch.randint(2, (8,)))
    return autosplit.Workload(net, sample, loss_fn=nn.CrossEntropyLoss())
"""
TUNE_SMALL = [*AUTOSPLIT, "tune", "net.py", "--devices", BUDGETS, "--n-trials", "1", "--effective-batch-size"]
COMMANDS = {
    "profiles": [*AUTOSPLIT, "profiles"],
    "launch --print": [*AUTOSPLIT, "launch", "--print", "net.py"],
    "tune, with a profile": [*TUNE_SMALL, "64"],
    "tune, without a profile": [*TUNE_SMALL, "32"],
}


def tune_tensors(count: int, devices: str) -> None:
    """Tune a model with `count` parameter tensors, each with its own operator. Print the wall time and the CPU time."""
    import torch
    from torch import nn

    import autosplit

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(count)])
            self.last = nn.Linear(8, 2)

        def forward(self, values: torch.Tensor) -> Any:
            for factor in self.factors:
                values = values * factor
            return self.last(values)

    sample = torch.randn(8, 8), torch.randint(2, (8,))
    workload = autosplit.Workload(Chain(), sample, nn.CrossEntropyLoss(), optimizer=torch.optim.SGD)
    options: dict[str, Any] = {"effective_batch_size": 64, "max_batch_size": 32, "n_trials": 2, "profile": "off"}
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    autosplit.tune(workload, devices=devices, **options)
    print(json.dumps([time.perf_counter() - wall_s, time.process_time() - cpu_s]))


def seconds_of(command: Sequence[str], tree: Path, folder: Path, cache: str) -> tuple[float, float]:
    """Run a command with the autosplit of a tree. Return its wall time and its CPU time, in seconds.

    The process of `tune_tensors` measures itself, without the import of torch.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "AUTOSPLIT_CACHE_DIR": str(folder / cache)}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, check=True, cwd=folder, env=environment, capture_output=True)  # noqa: S603 (commands of this script)
    if "--tensors" in command:
        wall_s, cpu_s = json.loads(done.stdout)
        return wall_s, cpu_s
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def side_by_side(command: Sequence[str], trees: dict[str, Path], folder: Path, rounds: int) -> dict[str, Any]:
    """Time a command with each tree, in turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            times[name].append(seconds_of(command, tree, folder, "unused"))
    return _compared(times)


def _compared(times: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, kind in enumerate(("wall_s", "cpu_s")):
        medians = {name: statistics.median(run[place] for run in runs) for name, runs in times.items()}
        found |= {f"{name}_{kind}": round(median, 3) for name, median in medians.items()}
        first, second = medians.values()
        found[f"{kind[:-2]}_ratio"] = round(second / first, 3)
    return found


def with_profiles(trees: dict[str, Path], folder: Path, rounds: int) -> dict[str, Any]:
    """Time each command of each tree with one profile and with `PROFILES`, in turns."""
    (folder / "net.py").write_text(SMALL, encoding="utf-8")
    saved: dict[str, set[Path]] = {}
    for name, tree in trees.items():
        for cache in (f"{name}-few", f"{name}-many"):
            seconds_of([*TUNE_SMALL, "64"], tree, folder, cache)
        (first,) = (folder / f"{name}-many").rglob("*.json")
        for _ in range(PROFILES - 1):
            first.with_name(f"{secrets.token_hex(16)}.json").write_bytes(first.read_bytes())
    for cache in (f"{name}-{size}" for name in trees for size in ("few", "many")):
        saved[cache] = set((folder / cache).rglob("*.json"))
    found: dict[str, Any] = {}
    for title, command in COMMANDS.items():
        runs: dict[str, list[tuple[float, float]]] = {cache: [] for cache in saved}
        for _ in range(rounds):
            for cache, times in runs.items():
                times.append(seconds_of(command, trees[cache.partition("-")[0]], folder, cache))
                for path in set((folder / cache).rglob("*.json")) - saved[cache]:  # the next run must tune again
                    path.unlink()
        found[title] = {name: _compared({"few": runs[f"{name}-few"], "many": runs[f"{name}-many"]}) for name in trees}
    return found


def measured(before: Path, rounds: int) -> dict[str, Any]:
    """Run all cases, and return the results with the machine, its load, the versions and the date."""
    trees = {"before": before.resolve(), "now": HERE}
    commits = {
        name: subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=tree, text=True).strip()  # noqa: S607
        for name, tree in trees.items()
    }
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        profiles = with_profiles(trees, folder, rounds)
        tensors = {}
        for count, devices in TENSORS:
            child = [sys.executable, __file__, "--tensors", str(count), devices]
            tensors[f"{count} on {devices}"] = side_by_side(child, trees, folder, 1 if count > 1000 else rounds)
        plain = side_by_side(CHAR_GPT, trees, folder, rounds)
    return {
        "claim": "tune takes at most half of its time before with 500 and 2,000 parameter tensors; "
        f"with {PROFILES} profiles, each command takes at most twice its time with one",
        "commits": commits,
        "rounds": rounds,
        "tensors": tensors,
        "char_gpt on sim:2xRTX4090": plain,
        f"{PROFILES} profiles": profiles,
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.system()},
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def main() -> None:
    """Run the benchmark, or one of its tunings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="a git worktree of the commit before")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "growth.json")
    parser.add_argument("--tensors", nargs=2, metavar=("COUNT", "DEVICES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tensors:
        tune_tensors(int(options.tensors[0]), options.tensors[1])
        return
    if options.before is None:
        parser.error("name a git worktree of the commit before")
    found = measured(options.before, options.rounds)
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
