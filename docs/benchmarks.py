"""Writes docs/benchmarks.md from the committed results: python docs/benchmarks.py. A test compares the page.

The page has one chart (docs/pictures.py draws it) and seven figures. docs/measurements.py writes all other tables.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


class Figure(NamedTuple):
    """One row of the page: what was compared, both results, and the section of docs/measurements.md."""

    compared: str
    ours: str
    rival: str
    command: str
    section: str


def read(name: str) -> dict[str, Any]:
    """Return a committed result."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def findings(name: str, stage: str) -> list[dict[str, Any]]:
    """Return the findings of one stage of a run on a GPU."""
    stages = {one["name"]: one["findings"] for one in read(name)["stages"]}
    found: list[dict[str, Any]] = stages[stage]
    return found


def estimators() -> dict[str, float]:
    """Return the share of published largest batches that each estimator predicts, the best first."""
    errors = read("rivals")["errors"]
    most = max(one["brackets"] for one in errors.values())
    shares = {name: one["inside"] for name, one in errors.items() if one["brackets"] == most}
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))


def brackets() -> Figure:
    """Compare predicted largest batches with published ones."""
    (ours, share), (rival, other), *_ = estimators().items()
    number = read("rivals")["errors"][ours]["brackets"]
    return Figure(
        f"largest batch on an RTX 3090, predicted without the GPU, for {number} published models",
        f"{share:.0%} correct",
        f"{other:.0%} ({rival}, the next best of {len(estimators()) - 1} tools)",
        "rivals",
        "other-estimators",
    )


def memory() -> Figure:
    """Compare the memory predicted for a GPU with the memory that its steps then used."""
    ratios = [one["memory predicted/measured"][1] for one in findings("gpu/h200_before", "steps")]
    close = sum(abs(ratio - 1) <= 0.01 for ratio in ratios)
    return Figure(
        "memory of a training step on an H200, predicted before the first run there",
        f"{close} of {len(ratios)} steps within 1%",
        "no other tool was run there",
        "gpu",
        "on-a-gpu-that-was-never-fitted",
    )


def reserved() -> Figure:
    """Compare the predicted reserved memory with a fixed share for gaps."""
    found = read("gpu_reserved")["summary"]["without cuDNN's workspaces"]
    ours, rule = found["predicted"], found["rule"]
    return Figure(
        f"memory that the allocator reserves in {ours['rows']} steps on an H200 and an H100, without the GPU",
        f"{ours['within 5%']} within 5%, median error {ours['median error']:.1%}",
        f"{rule['within 5%']} within 5%, median error {rule['median error']:.1%} (allocated memory / 0.9)",
        "gpu_reserved",
        "reserved-memory",
    )


def budgets() -> Figure:
    """Compare searches for the largest batch on enforced memory budgets."""
    medians = read("ceilings")["cpu"]["medians"]
    ours, rival = medians["ours"], medians["accelerate"]
    return Figure(
        f"search for the largest batch on {len(read('ceilings')['cpu']['cases'])} enforced memory budgets (median)",
        f"{ours['seconds']:.1f} s, {ours['ooms']} out-of-memory errors",
        f"{rival['seconds']:.1f} s, {rival['ooms']} errors (accelerate's `find_executable_batch_size`)",
        "ceilings",
        "the-largest-batch-that-fits",
    )


def gpus() -> Figure:
    """Compare searches for the largest batch on GPUs with a plain loop."""
    found = [one for name in ("gpu/h100", "gpu/h200") for one in findings(name, "ceilings")]
    shares = [one["batch_size"] / one["plain_loop"] for one in found]
    return Figure(
        f"search for the largest batch, {len(found)} models on an H100 and an H200",
        f"{min(shares):.0%} to {max(shares):.0%} of the rival's batch, at most "
        f"{max(one['errors'] for one in found)} out-of-memory errors, all caught",
        "a plain training loop that tries the sizes around it",
        "gpu",
        "on-a-gpu",
    )


def splits() -> Figure:
    """Compare the speed of splits on simulated machines."""
    machines = read("search")["search"]["machines"].values()
    ours, ranks = (
        statistics.median(one[name] for one in machines)
        for name in ("over_data_parallel", "over_equal_ranks_in_ddp_predicted")
    )
    return Figure(
        f"samples/s of a split, {len(machines)} simulated machines, most with different GPUs (median)",
        f"{ours:.2f} and {ranks:.2f} times the rivals'",
        "nn.DataParallel, and DDP with equal ranks (both simulated)",
        "search",
        "the-search",
    )


def lengths() -> Figure:
    """Compare batches of similar length with batches of one size."""
    found = read("lengths")
    return Figure(
        f"samples/s with samples of different length, on {found['devices']}",
        f"{found['like_samples_per_s']:.0f}",
        f"{found['fixed_samples_per_s']:.0f} (batches of one size, padded)",
        "lengths",
        "batches-of-like-length",
    )


FIGURES = (brackets, memory, reserved, budgets, gpus, splits, lengths)


def page() -> str:
    """Return docs/benchmarks.md."""
    rows = []
    for made in FIGURES:
        one = made()
        rows.append(
            f"| [{one.compared}](measurements.md#{one.section}) | {one.ours} | {one.rival} | "
            f"`python benchmarks/{one.command}.py` |"
        )
    table = "\n".join(["| compared | autosplit | rival | command |", "| --- | --- | --- | --- |", *rows])
    number = read("rivals")["errors"]["autosplit"]["brackets"]
    return f"""# Benchmarks

![Share of {number} published largest batches that each tool predicts without a GPU](pictures/estimators.svg)

The chart shows how many of {number} published largest batches each tool predicts without a GPU. A prediction is correct
if it lies between the largest batch that fits and the next larger one, which failed.

{table}

`python docs/benchmarks.py` makes this page from `benchmarks/results/*.json`. [Measurements](measurements.md) has all
tables, each with its date, machine and versions.

No machine with two real GPUs has been measured yet, so the speed of a split is simulated. Those results do not contain
the speed of the fastest GPU alone.
"""


if __name__ == "__main__":
    (Path(__file__).parent / "benchmarks.md").write_text(page(), encoding="utf-8")
