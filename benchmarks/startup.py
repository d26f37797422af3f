"""How long `python -m autosplit --help` takes, as a share of `python -c "import torch"`.

    python benchmarks/startup.py [--runs 21] [--output benchmarks/results/startup.json]

The two are run in turn, so that what else the machine does meets both alike; each run is a fresh process, timed from
outside. The first of each is not counted: it fills the page cache and writes the bytecode.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

LIMIT = 0.2
"""The most that `--help` may take, as a share of importing torch."""

COMMANDS = {
    "help": [sys.executable, "-m", "autosplit", "--help"],
    "import_torch": [sys.executable, "-c", "import torch"],
    "bare_python": [sys.executable, "-c", "pass"],
}


def seconds_of(command: list[str]) -> float:
    """Run a command once, and return how long it took, in seconds."""
    start = time.perf_counter()
    subprocess.run(  # noqa: S603 (the commands are those above)
        command, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1]
    )
    return time.perf_counter() - start


def summary(seconds: list[float]) -> dict[str, Any]:
    """Return the median and the spread of some runs, in seconds."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return {
        "median_s": round(statistics.median(seconds), 5),
        "quartiles_s": [round(low, 5), round(high, 5)],
        "least_s": round(min(seconds), 5),
        "most_s": round(max(seconds), 5),
        "runs": len(seconds),
    }


def processor() -> str:
    """Name the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measured(runs: int) -> dict[str, Any]:
    """Time the commands in turn.

    Args:
        runs: Runs of each that count.

    Returns:
        The figures with the machine, the versions and the date.
    """
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(runs + 1):
        for name, command in COMMANDS.items():
            seconds = seconds_of(command)
            if run:
                times[name].append(seconds)
    figures = {name: summary(seconds) for name, seconds in times.items()}
    ratios = [one / other for one, other in zip(times["help"], times["import_torch"], strict=True)]
    return {
        "claim": f"python -m autosplit --help takes at most {LIMIT} of the time of python -c 'import torch'",
        "ratio_of_medians": round(figures["help"]["median_s"] / figures["import_torch"]["median_s"], 4),
        "largest_ratio_of_neighbours": round(max(ratios), 4),
        **figures,
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "system": platform.system()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "typer", "rich")},
        },
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def main() -> int:
    """Measure, write the figures, print the ratio; 1 where it is over the limit."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=int, default=21, help="runs of each command (default: 21)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "startup.json")
    arguments = parser.parse_args()
    figures = measured(max(2, arguments.runs))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    ratio = figures["ratio_of_medians"]
    print(
        f"--help {figures['help']['median_s'] * 1000:.0f} ms, import torch "
        f"{figures['import_torch']['median_s'] * 1000:.0f} ms: {ratio:.3f}, at most {LIMIT}"
    )
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
