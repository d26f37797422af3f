"""Time commands that need no tuning, as shares of `python -c "import torch"`.

    python benchmarks/startup.py [--runs 21] [--output benchmarks/results/startup.json]

`--help`, `show`, `profiles list` and `export` never import torch. `tune` of a workload with a profile loads the model
and returns the saved plan. Each run is a new process, timed from outside. The commands take turns, and each run is
divided by the import of the same round, so other load on the machine affects all equally. The first round is not
counted, because it fills the page cache and writes bytecode.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

LIMITS = {
    "help": 0.2,
    "show": 0.25,
    "profiles_list": 0.25,
    "export": 0.25,
    "tune_again": 1.5,
    "tune_again_simulated": 1.5,
}
"""Largest time of each command, as a share of importing torch."""

AUTOSPLIT = [sys.executable, "-m", "autosplit"]
TUNE = [*AUTOSPLIT, "tune", "examples/char_gpt.py", "--n-trials", "1"]
TUNE_REAL = [*TUNE, "--devices", "cpu:256MiB", "--effective-batch-size", "8"]
TUNE_SIMULATED = [*TUNE, "--devices", "sim:2xRTX3090"]
COMMANDS = {
    "import_torch": [sys.executable, "-c", "import torch"],
    "help": [*AUTOSPLIT, "--help"],
    "show": [*AUTOSPLIT, "show"],
    "profiles_list": [*AUTOSPLIT, "profiles", "list"],
    "export": [*AUTOSPLIT, "export", "--to", "transformers"],
    "tune_again": TUNE_REAL,
    "tune_again_simulated": TUNE_SIMULATED,
    "bare_python": [sys.executable, "-c", "pass"],
}


def seconds_of(command: list[str], environment: Mapping[str, str]) -> float:
    """Run a command once, and return its time in seconds."""
    start = time.perf_counter()
    subprocess.run(  # noqa: S603 (the commands are those above)
        command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1], env=environment
    )
    return time.perf_counter() - start


def summary(seconds: list[float]) -> dict[str, Any]:
    """Return the median and the spread of the runs, in seconds."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return {
        "median_s": round(statistics.median(seconds), 5),
        "quartiles_s": [round(low, 5), round(high, 5)],
        "least_s": round(min(seconds), 5),
        "most_s": round(max(seconds), 5),
        "runs": len(seconds),
    }


def shares(seconds: list[float], imports: list[float]) -> dict[str, float]:
    """Return the ratio of a command's runs to the imports of the same rounds."""
    ratios = [one / other for one, other in zip(seconds, imports, strict=True)]
    return {
        "ratio_of_medians": round(statistics.median(seconds) / statistics.median(imports), 4),
        "median_ratio_of_a_round": round(statistics.median(ratios), 4),
        "largest_ratio_of_a_round": round(max(ratios), 4),
    }


def processor() -> str:
    """Return the CPU's name if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measured(runs: int) -> dict[str, Any]:
    """Time the commands in turn, with a new cache that holds one plan.

    Args:
        runs: Measured runs of each command.

    Returns:
        The results with the machine, its load, the versions and the date.
    """
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "AUTOSPLIT_CACHE_DIR": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for command in (TUNE_REAL, TUNE_SIMULATED):  # last, because `show` prints the newest plan
            seconds_of(command, environment)
        for run in range(runs + 1):
            loads.append(os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0)
            for name, command in COMMANDS.items():
                seconds = seconds_of(command, environment)
                if run:
                    times[name].append(seconds)
    return {
        "claim": "at most these multiples of the time of python -c 'import torch': "
        + ", ".join(f"{name} {limit}" for name, limit in LIMITS.items()),
        "commands": {name: " ".join(["python", *command[1:]]) for name, command in COMMANDS.items()},
        "shares": {name: shares(times[name], times["import_torch"]) for name in times},
        **{name: summary(seconds) for name, seconds in times.items()},
        "machine": {
            "processor": processor(),
            "cpus": os.cpu_count(),
            "system": platform.system(),
            "load": [round(min(loads), 1), round(max(loads), 1)],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "rich")},
        },
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Measure, write the results, and print the shares. Return 1 if a share is over its limit."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=int, default=21, help="runs of each command (default: 21)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "startup.json")
    arguments = parser.parse_args()
    figures = measured(max(2, arguments.runs))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"import torch {figures['import_torch']['median_s'] * 1000:.0f} ms")
    for name, limit in LIMITS.items():
        share = figures["shares"][name]["ratio_of_medians"]
        print(f"{name} {figures[name]['median_s'] * 1000:.0f} ms: {share:.3f}, at most {limit}")
    return int(any(figures["shares"][name]["ratio_of_medians"] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
