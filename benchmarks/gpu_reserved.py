"""Predict the reserved memory of the steps that `gpu.py` measured on an H100 and an H200.

    python benchmarks/gpu_reserved.py [--output FILE]

The measured figures are in results/gpu. `AcceleratorWorker` emptied the allocator's cache after the first step, so the
prediction does so, too. The fixed rule that it replaces is allocated memory / 0.9. transformers and peft must be
installed. Nothing was fitted to reserved memory.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from answer import of_this_run
from gpu_models import SETTINGS, Setting
from published_reserved import SHARE, summary

from autosplit.devices.catalog import find_card
from autosplit.runtime.protocol import StepShape
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.allocator_settings import MIB, AllocatorSettings
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.reserved_memory import reserved_bytes
from autosplit.sim.tracer import Tracer

FOLDER = Path(__file__).parent / "results"
RUNS = {"H200": "h200_before", "H100-80GB": "h100"}
"""The run of each GPU that has the most steps."""

NOT_PREDICTED = {
    "cnn fp32, SGD": "cuDNN's workspaces",
    "cnn bf16, momentum": "cuDNN's workspaces",
    "lstm fp32": "cuDNN's workspaces",
}
"""Steps with memory that no public source describes."""


def measured(name: str) -> dict[str, dict[str, Any]]:
    """Return the measured steps of a run, by setting."""
    stages = json.loads((FOLDER / "gpu" / f"{name}.json").read_text(encoding="utf-8"))["stages"]
    steps = next(stage["findings"] for stage in stages if stage["name"] == "steps")
    return {one["name"].removeprefix("step of "): one for one in steps if "reserved_mib" in one}


def compare(setting: Setting, gpu: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Predict both sizes of a step, next to the measured figures."""
    torch.manual_seed(0)
    kernels = GpuKernels.of(find_card(gpu).compute_capability)
    traces = AffineTraces(Tracer(setting.build(False), fake=True, like_gpu=True, kernels=kernels))
    rows = []
    for samples, own_mib, reserved_mib in zip(
        found["samples"], found["allocated_mib"], found["reserved_mib"], strict=True
    ):
        trace = traces.trace(StepShape(((samples,),)))
        replayed = partial(reserved_bytes, trace.entries, trace.entry_bytes, 0, AllocatorSettings())
        allocated_mib, predicted_mib = trace.peak_bytes[0] / MIB, replayed(empties_cache=True) / MIB
        rows.append(
            {
                "step": setting.name,
                "GPU": gpu,
                "samples": samples,
                "reserved MiB": reserved_mib,
                "predicted MiB": round(predicted_mib),
                "without an empty cache MiB": round(replayed() / MIB),
                "ratio": round(predicted_mib / reserved_mib, 4),
                "rule's ratio": round(allocated_mib / SHARE / reserved_mib, 4),
                "allocated ratio": round(allocated_mib / own_mib, 4),
                "reason": NOT_PREDICTED.get(setting.name, ""),
            }
        )
    return rows


def main() -> None:
    """Compare all steps of both GPUs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=FOLDER / "gpu_reserved.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for gpu, name in RUNS.items():
        found = measured(name)
        for setting in SETTINGS:
            if setting.name in found and "compiled" not in setting.name:
                rows += compare(setting, gpu, found[setting.name])
                print(json.dumps(rows[-1]), flush=True)
    chosen = {"all": rows, "without cuDNN's workspaces": [row for row in rows if not row["reason"]]}
    summaries = {
        name: {
            "predicted": summary([row["ratio"] for row in some]),
            "rule": summary([row["rule's ratio"] for row in some]),
        }
        for name, some in chosen.items()
    }
    report = {**of_this_run(), "summary": summaries, "compared": rows}
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summaries, indent=1))


if __name__ == "__main__":
    main()
