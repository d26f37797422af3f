r"""Check autosplit on a real GPU within eight minutes: every claim about CUDA that a CPU cannot test.

    python benchmarks/gpu.py [--limit-s 480] [--only STAGE ...] [--output gpu.json]
    python benchmarks/gpu.py --predict [--output benchmarks/results/gpu/predictions.json]

Each stage runs in its own process with its own time budget. A crash or a timeout ends that stage only, and its earlier
findings are kept. The script prints one line per finding and writes all findings to one JSON file.

Predict first, on any machine: `--predict` writes what `sim:` predicts for the settings of the stage `steps`. The run on
the GPU compares its measurements with that file, so the predictions cannot be fitted to the measurements.

For a GPU machine that cannot download packages, collect the wheels on another machine. Name the Python version of the
GPU machine, whose own torch stays in use:

    pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels \
        alembic colorlog greenlet mako msgspec optuna platformdirs sqlalchemy
    pip wheel --no-deps -w wheels .

and install them there: `pip install --no-index --no-deps wheels/*.whl`.

If there is no GPU, the script plans for a simulated one, reports "no GPU" and exits with 3. Emulated devices
(``EMULATED_DEVICES=1``) count as GPUs. With `--small`, every model is small enough for a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PREDICTIONS = HERE / "results" / "gpu" / "predictions.json"
LIMIT_S = 480
LEAST_S = 10
"""A stage with less time than this is not started: importing torch takes half of it."""

NO_GPU = 3
"""The exit code of a run without a GPU."""


@dataclass(frozen=True)
class Stage:
    """One group of checks that shares a process.

    Attributes:
        name: The name for `--only`.
        module: The module of `benchmarks` that has the function `NAME_stage`.
        budget_s: The stage is killed after this many seconds.
    """

    name: str
    module: str
    budget_s: int


STAGES = (
    Stage("tests", "gpu_stages", 78),
    Stage("doctor", "gpu_stages", 30),
    Stage("ceilings", "gpu_stages", 80),
    Stage("steps", "gpu_stages", 125),
    Stage("tune", "gpu_stages", 45),
    Stage("ranks", "gpu_stages", 35),
    Stage("behaviour", "gpu_checks", 82),
    Stage("kernels", "gpu_kernels", 80),
    Stage("memory", "gpu_checks", 40),
)
"""The most valuable stages come first: the last ones are skipped if the time limit is reached."""


def main() -> int:
    """Run the script, and return its exit code."""
    arguments = _arguments()
    sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
    _switch_emulation_on()
    if arguments.stage:
        stage = next(stage for stage in STAGES if stage.name == arguments.stage)
        getattr(importlib.import_module(stage.module), f"{stage.name}_stage")(small=arguments.small)
        return 0
    if arguments.predict:
        return _write(arguments.output or PREDICTIONS, importlib.import_module("gpu_models").predictions())
    began_s = time.monotonic()
    answer = _described()
    if answer["gpu"] is None:
        answer["stages"] = [_planned_without_gpu()]
        answer["seconds"] = round(time.monotonic() - began_s, 1)
        _write(arguments.output, answer)
        print("no GPU: nothing was checked")
        return NO_GPU
    answer |= {"small": arguments.small, "limit_s": arguments.limit_s, "stages": []}
    answer["predictions"] = json.loads(PREDICTIONS.read_text(encoding="utf-8")) if PREDICTIONS.exists() else None
    for stage in STAGES:
        if arguments.only and stage.name not in arguments.only:
            continue
        left_s = arguments.limit_s - (time.monotonic() - began_s)
        answer["stages"].append(
            _run(stage, min(stage.budget_s * arguments.budget_factor, left_s), small=arguments.small)
        )
        answer["seconds"] = round(time.monotonic() - began_s, 1)
        _write(arguments.output, answer)
    return _summary(answer)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check autosplit on a real GPU.")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time for all stages, in seconds")
    parser.add_argument("--only", nargs="+", choices=[stage.name for stage in STAGES], help="run only these stages")
    parser.add_argument("--small", action="store_true", help="use models that a CPU can train")
    parser.add_argument("--budget-factor", type=float, default=1.0, help="multiply the time budget of every stage")
    parser.add_argument("--output", type=Path, help="write the JSON to this file (default: print no JSON)")
    parser.add_argument("--predict", action="store_true", help="write the predictions for the stage steps, and exit")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    return parser.parse_args()


def _switch_emulation_on() -> None:
    """Load the emulated devices if EMULATED_DEVICES asks for some; child processes inherit them."""
    if os.environ.get("EMULATED_DEVICES", "0") not in {"", "0"}:
        import emulated

        if "EMULATED_MEMORY" not in os.environ:
            emulated.switch_on()


def _described() -> dict[str, Any]:
    """Return the date, the machine, the versions and the GPU; the GPU is None if torch sees none."""
    from answer import of_this_run

    from autosplit.accelerators import accelerator_kind, backend

    found = of_this_run()
    kind = accelerator_kind()
    if kind is None:
        return {**found, "gpu": None}
    import torch

    name = str(backend(kind).get_device_properties(0).name)
    return {
        **found,
        "gpu": {"kind": kind, "name": name, "count": backend(kind).device_count(), "cuda": torch.version.cuda},
    }


def _planned_without_gpu() -> dict[str, Any]:
    """Plan for a simulated GPU, to show that the installation works as far as it can here."""
    import torch
    from torch import nn

    import autosplit

    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batch = torch.randn(8, 64), torch.randint(10, (8,))
    plan = autosplit.tune(
        net,
        batch,
        loss_fn=nn.functional.cross_entropy,
        devices="sim:2xH100-80GB",
        effective_batch_size=64,
        profile="off",
    )
    finding = {"name": "a plan for two simulated H100", "verdict": "number", "split": list(plan.split)}
    return {"name": "plan", "status": "done", "findings": [finding]}


def _run(stage: Stage, seconds: float, *, small: bool) -> dict[str, Any]:
    """Run a stage in its own process group, and return its findings and how it ended."""
    if seconds < LEAST_S:
        return {"name": stage.name, "status": "no time", "seconds": 0, "findings": []}
    print(f"== {stage.name} (at most {seconds:.0f} s)", flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "findings"), Path(folder, "log")
        command = [sys.executable, __file__, "--stage", stage.name, *(["--small"] if small else [])]
        environment = {
            **os.environ,
            "GPU_FINDINGS": str(path),
            "GPU_STAGE_S": str(int(seconds)),
            "PYTHONUNBUFFERED": "1",
        }
        environment.setdefault("AUTOSPLIT_CACHE_DIR", str(Path(folder, "cache")))
        with log.open("wb") as sink:
            child = subprocess.Popen(  # noqa: S603 (this very script)
                command, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
            )
            status = _status_of(child, began_s + seconds)
        findings = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found: dict[str, Any] = {"name": stage.name, "status": status, "seconds": round(time.monotonic() - began_s, 1)}
        if status == "crashed":
            found |= {"exit_code": child.returncode, "log": log.read_text(errors="replace")[-2000:]}
    for finding in findings:
        print(_line(finding))
    print(f"   {stage.name}: {status} after {found['seconds']} s, {len(findings)} findings", flush=True)
    return {**found, "findings": findings}


def _status_of(child: subprocess.Popen[bytes], end_s: float) -> str:
    """Wait for a stage until its time is over, then kill its process group."""
    try:
        code = child.wait(timeout=max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return "out of time"
    return "crashed" if code else "done"


def _line(finding: dict[str, Any]) -> str:
    figures = {key: value for key, value in finding.items() if key not in {"name", "verdict", "claim"}}
    return f"{finding['verdict']:7} {finding['name']}  {json.dumps(figures)[:400]}"


def _summary(answer: dict[str, Any]) -> int:
    """Print how many findings of each verdict there are; return 1 if a claim failed or a stage did not finish."""
    findings = [finding for stage in answer["stages"] for finding in stage["findings"]]
    counts = {
        verdict: sum(one["verdict"] == verdict for one in findings)
        for verdict in ("holds", "fails", "error", "number", "skipped")
    }
    unfinished = [f"{stage['name']} ({stage['status']})" for stage in answer["stages"] if stage["status"] != "done"]
    print(
        f"{answer['gpu']['name']}, {answer['seconds']} s: "
        + ", ".join(f"{count} {name}" for name, count in counts.items())
    )
    if unfinished:
        print("not finished: " + ", ".join(unfinished))
    return int(bool(counts["fails"] or counts["error"] or unfinished))


def _write(path: Path | None, answer: dict[str, Any]) -> int:
    if path is not None:
        path.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
