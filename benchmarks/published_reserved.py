"""Compare predictions of reserved memory with published figures: `torch.cuda.max_memory_reserved`, or the driver's.

    python benchmarks/published_reserved.py [--half tuned|kept-apart|both] [--only TEXT] [--output FILE]

The table is `published_reserved.csv`. Each row names its source, and `reserved_models.py` builds its step. Figures are
in GB of 1e9 bytes. A figure in MiB is multiplied by 2**20 / 1e9, and one in GiB by 2**30 / 1e9. A ratio is predicted /
published. Rows of the kind "process" include the CUDA context, so the prediction adds `context_mib`. That is the
source's figure, or 512 MiB for torch 2 with CUDA 11.7 or later, which loads kernels when a program first calls them.

A rule of thumb is compared, too: allocated memory / 0.9. A seed draws half of the comparable rows. The model of the
allocator may be tuned on them. The other half is kept apart.

The tuned half showed two reasons for large errors. Some sources do not state the length of each sample. And Adam of
torch before 2.4 has larger temporary tensors than the one that is traced. So a summary of the other rows ("exact") is
added: samples of one length, and torch 2.4 or later.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import re
import statistics
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from reserved_models import Row, workload

from autosplit.devices.catalog import find_card
from autosplit.devices.spec import parse_devices
from autosplit.runtime.protocol import StepShape
from autosplit.sim.allocator_settings import AllocatorSettings
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.replay import source_of, tracers_of
from autosplit.sim.tracer import Tracer

TABLE = Path(__file__).with_name("published_reserved.csv")
RESULTS = Path(__file__).parent / "results" / "published_reserved.json"
SEED = 0
SHARE = 0.9
"""The part of reserved memory that tensors fill, by the rule of thumb."""

NUMBERS = {
    **dict.fromkeys(("batch", "size", "lora", "accumulation", "context_mib"), int),
    **dict.fromkeys(("reserved_gb", "allocated_gb"), float),
}


def rows() -> list[Row]:
    """Read the table.

    Raises:
        ValueError: The column `half` is not what the seed draws.
    """
    with TABLE.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    found = [Row(**{**line, **{name: kind(line[name] or 0) for name, kind in NUMBERS.items()}}) for line in lines]
    if [row.half for row in found] != drawn_halves([row.needs for row in found]):
        raise ValueError(f"The column `half` of {TABLE.name} is not what seed {SEED} draws.")
    return found


def drawn_halves(needs: list[str]) -> list[str]:
    """Return the half of each row, given why rows are not compared. Those have none."""
    comparable = [index for index, reason in enumerate(needs) if not reason]
    tuned = set(random.Random(SEED).sample(comparable, len(comparable) // 2))  # noqa: S311
    return ["" if reason else "tuned" if index in tuned else "kept apart" for index, reason in enumerate(needs)]


def memory(row: Row) -> tuple[int, int]:
    """Predict a row's peak of allocated and of reserved memory, in bytes."""
    kernels = GpuKernels.of(find_card(row.simulated).compute_capability)
    tracer = Tracer(workload(row), fake=True, like_gpu=True, kernels=kernels)
    devices, shape = parse_devices(f"sim:{row.simulated}"), StepShape(((row.batch,),) * row.accumulation)
    (traced,) = source_of(tracers_of(tracer, shape, devices), shape).devices()
    assert traced is not None, "the batch has samples"
    parts = traced.parts(AllocatorSettings.parsed(row.allocator), devices[0].capacity_bytes)
    return traced.peak_bytes, parts.total_bytes


def compare(row: Row) -> dict[str, Any]:
    """Predict a row's memory, and return it next to the published figures."""
    allocated_bytes, reserved_bytes = memory(row)
    context_gb = row.context_mib * 2**20 / 1e9
    predicted_gb, allocated_gb = reserved_bytes / 1e9 + context_gb, allocated_bytes / 1e9
    ruled_gb = allocated_gb / SHARE + context_gb
    report: dict[str, Any] = {
        "row": f"{row.model}, {row.recipe}, {row.precision}, {row.optimizer}, {row.batch} x {row.size}",
        "half": row.half,
        "exact": is_exact(row),
        "kind": row.kind,
        "published GB": row.reserved_gb,
        "predicted GB": round(predicted_gb, 3),
        "ratio": round(predicted_gb / row.reserved_gb, 4),
        "rule's ratio": round(ruled_gb / row.reserved_gb, 4),
    }
    if row.allocated_gb:
        report |= {"published allocated GB": row.allocated_gb, "predicted allocated GB": round(allocated_gb, 3)}
        report["allocated ratio"] = round(allocated_gb / row.allocated_gb, 4)
    return {**report, "source": row.source}


def is_exact(row: Row) -> bool:
    """Return whether a source has samples of one length, and torch 2.4 or later."""
    version = re.search(r"torch 2\.(\d+)", row.source)
    return version is not None and int(version[1]) >= 4 and "batches padded" not in row.source


def summary(ratios: list[float]) -> dict[str, float]:
    """Return how many ratios are within 5% and 10% of 1, the median error, and the lowest ratio minus 1."""
    errors = [abs(ratio - 1) for ratio in ratios]
    return {
        "rows": len(ratios),
        "within 5%": sum(error <= 0.05 for error in errors),
        "within 10%": sum(error <= 0.1 for error in errors),
        "median error": round(statistics.median(errors), 4),
        "most too low": round(min(0.0, min(ratios) - 1), 4),
    }


def summaries(compared: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summaries of each half, for the predictions and for the rule of thumb."""
    found: dict[str, Any] = {}
    for half, exact in itertools.product(("tuned", "kept apart"), (False, True)):
        chosen = [report for report in compared if report["half"] == half and (report["exact"] or not exact)]
        if chosen:
            found[f"{half}, exact" if exact else half] = {
                "predicted": summary([report["ratio"] for report in chosen]),
                "rule": summary([report["rule's ratio"] for report in chosen]),
            }
    return found


def main() -> None:
    """Compare the rows of the chosen halves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--half", choices=("tuned", "kept-apart", "both"), default="both")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only rows whose source, model or recipe contains it"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    half = options.half.replace("-", " ")
    compared = []
    for row in rows():
        is_chosen = options.only in f"{row.source} {row.model} {row.recipe}" and half in ("both", row.half)
        if is_chosen and not row.needs:
            compared.append(compare(row))
            print(json.dumps(compared[-1]), flush=True)
    report = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": str(torch.__version__),
        "seed": SEED,
        "summary": summaries(compared),
        "compared": compared,
        "not compared": [f"{row.model}, {row.source}: needs {row.needs}" for row in rows() if row.needs],
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["summary"], indent=1))


if __name__ == "__main__":
    main()
