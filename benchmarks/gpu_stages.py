"""The stages of `gpu.py` that compare what autosplit promises with what a GPU does."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_findings import GIB, GPU, KIND, MIB, Skipped, checked, record
from gpu_models import CEILINGS, SETTINGS, Setting, cnn, gpt

import autosplit
from autosplit import Workload
from autosplit.accelerators import backend, bounded
from autosplit.devices.catalog import find_card
from autosplit.oom import is_oom
from autosplit.runtime.accelerator import AcceleratorWorker
from autosplit.runtime.protocol import StepShape
from autosplit.workload.batch import resize
from autosplit.workload.tree import map_tensors, unmarked
from autosplit.workload.workload import PRECISIONS

ROOT = Path(__file__).parents[1]
DEVICE = torch.device(GPU)
CUDA: Any = backend(KIND)

NEAR = 0.03
"""A ceiling is right if it is within this share, or one sample, of the largest batch of a plain loop."""

PREDICTED_WITHIN = 0.1
"""`sim:` is right if its memory or time is within this share of the measured one."""

REACHED_WITHIN = 0.1
"""A plan is right if a plain loop reaches its samples/s within this share."""


# -------------------------------------------------------------------------------------------------------------- tests

_RESULT = re.compile(
    r"(?:\[gw\d+\] \[ *\d+%\] )?(?P<before>\S+::.*? )?(?P<result>PASSED|FAILED|ERROR|SKIPPED)(?: (?P<after>\S+::.*))?"
)
"""A line of ``pytest -v``. With several workers, the result is before the test's name."""


def tests_stage(*, small: bool) -> None:
    """Run the tests marked `gpu`; record each failure with its message, and each reason to skip.

    Eight processes share the GPU. A test that fails may need the memory of the others, so it runs again alone.
    """
    marked = re.compile(r"\bpytest\.mark\.gpu\b")
    files = sorted(
        str(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if marked.search(path.read_text(encoding="utf-8")) and not path.name.startswith("test_emulated")
    )
    if small:
        files = [path for path in files if path.endswith("test_peer_copy_check.py")]
    has_xdist = importlib.util.find_spec("xdist") is not None
    began_s = time.perf_counter()
    lines, counts, failed = _tested(files, ["-p", "xdist.plugin", "-n", "8"] if has_xdist and not small else [])
    if failed:
        record("these tests failed next to others, and ran again alone", "number", tests=failed)
        lines, alone, failed = _tested(failed, [])
        counts |= {"PASSED": counts["PASSED"] + alone["PASSED"], "FAILED": alone["FAILED"], "ERROR": alone["ERROR"]}
    for name in failed:
        record(f"test {name}", "fails")
    seconds = round(time.perf_counter() - began_s, 1)
    holds = bool(counts["PASSED"]) and not counts["FAILED"] + counts["ERROR"]
    record("the tests marked gpu pass", "holds" if holds else "fails", **counts, seconds=seconds)
    if not holds:
        causes = [line for line in lines if line.startswith("E  ") or re.match(r"tests/\S+:\d+: ", line)]
        record(
            "what pytest printed of failures",
            "number",
            lines=[line[:240] for line in (*causes[-120:], *lines[-8:])],
        )


def _tested(tests: list[str], options: list[str]) -> tuple[list[str], dict[str, int], list[str]]:
    """Run tests. Return pytest's lines, the number of tests by result, and the names of those that failed."""
    # Warnings and plugins of the packages on the GPU's machine must not stop pytest.
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-m", "gpu and not slow", "--tb=short", "--timeout=60"]
    command += ["-o", "addopts=", "-o", "filterwarnings=default", "--continue-on-collection-errors"]
    command += ["-p", "pytest_timeout", "-p", "no:cacheprovider", *options, *tests]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    counts: dict[str, int] = {"PASSED": 0, "FAILED": 0, "ERROR": 0, "SKIPPED": 0}
    lines: list[str] = []
    failed: list[str] = []
    with subprocess.Popen(  # noqa: S603
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip())
            if found := _RESULT.match(line):
                result, name = found["result"], found["before"] or found["after"]
                counts[result] += 1
                if result in {"FAILED", "ERROR"}:
                    failed.append(name.strip())
            elif line.startswith(("SKIPPED [", "FAILED ", "ERROR ")):
                record("a line of pytest's summary", "number", line=line.strip()[:400])
    return lines, counts, failed


# ------------------------------------------------------------------------------------------------------------- doctor


def doctor_stage(*, small: bool) -> None:  # noqa: ARG001 (every stage has the same arguments)
    """Run `autosplit doctor --json`: rates next to the catalogue's, problems, a small model tuned and trained."""

    def check() -> tuple[bool, dict[str, Any]]:
        command = [sys.executable, "-m", "autosplit", "doctor", "--devices", GPU, "--json"]
        child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)  # noqa: S603
        if child.returncode:
            return False, {"exit_code": child.returncode, "stderr": child.stderr[-1500:]}
        found = json.loads(child.stdout)
        return not found["problems"], {"examination": found}

    checked("doctor finds no problem", check)


# ----------------------------------------------------------------------------------------------------------- ceilings


def ceilings_stage(*, small: bool) -> None:
    """Compare `find_ceiling` with a plain loop that tries the sizes around its answer."""
    cases = CEILINGS[:1] if small else CEILINGS
    for name, build in cases:
        checked(f"ceiling of {name}", lambda build=build: _ceiling(build, small, 32 * MIB if small else 8 * GIB))


def _ceiling(build: Callable[[bool], Workload], small: bool, room_bytes: int) -> tuple[bool | None, dict[str, Any]]:
    torch.manual_seed(0)
    workload = _built(build, small)
    capacity = autosplit.parse_devices(GPU)[0].capacity_bytes
    reserve = capacity - room_bytes if capacity > room_bytes else None
    began_s = time.perf_counter()
    found = autosplit.find_ceiling(workload, GPU, role="primary", reserve=reserve)
    seconds = time.perf_counter() - began_s
    figures: dict[str, Any] = {
        "batch_size": found.batch_size,
        "limited_by": found.limited_by,
        "confirmed": found.confirmed,
        "errors": found.ooms,
        "steps": found.steps,
        "search_s": round(seconds, 2),
        "peak_gib": round(found.peak_bytes / GIB, 3),
        "capacity_gib": round(found.capacity_bytes / GIB, 3),
        "points": found.points,
        "notes": [str(note) for note in found.notes],
    }
    if found.limited_by != "memory":
        return None, figures
    truth, tried = _largest_by_loop(workload, found.batch_size, found.capacity_bytes)
    figures |= {"plain_loop": truth, "ratio": round(found.batch_size / max(1, truth), 4), "tried": tried}
    near = max(1, round(NEAR * truth))
    return abs(truth - found.batch_size) <= near and not found.ooms, figures


def _largest_by_loop(workload: Workload, guess: int, capacity_bytes: int) -> tuple[int, list[tuple[int, bool]]]:
    """Return the largest batch that a plain loop trains, to 1%, and what was tried."""
    tried: list[tuple[int, bool]] = []

    def runs(size: int) -> bool:
        tried.append((size, _loop_fits(workload, size, capacity_bytes)))
        return tried[-1][1]

    step = max(1, guess // 50)
    low, high = guess, guess + step
    if runs(guess):
        while runs(high):
            step *= 2
            low, high = high, high + step
    else:
        low, high = guess - step, guess
        while low > 0 and not runs(low):
            step *= 2
            low, high = max(0, low - step), low
    while high - low > max(1, guess // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low, tried


def _loop_fits(workload: Workload, size: int, capacity_bytes: int) -> bool:
    """Return whether a plain loop runs in this much memory; its allocator may not release cached memory each step."""
    gc.collect()
    CUDA.empty_cache()
    with bounded(CUDA, DEVICE, capacity_bytes):
        step = _training_step(workload)
        batch = map_tensors(lambda tensor: tensor.to(DEVICE), unmarked(resize(workload.sample_batch, size, 0)))
        try:
            for _ in range(3):
                released = _retries()
                step(batch)
            CUDA.synchronize(DEVICE)
        except RuntimeError as error:
            if not is_oom(error, smaller_ran=True):
                raise
            return False
        return _retries() == released


def _retries() -> int:
    """Return how often the allocator released cached memory to find room."""
    return int(CUDA.memory_stats(DEVICE).get("num_alloc_retries", 0))


def _training_step(workload: Workload) -> Callable[[Any], None]:
    """Return a plain training step of a copy of a workload's model. It uses no part of autosplit's worker."""
    model = copy.deepcopy(workload.model).to(DEVICE)
    optimizer = workload.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(KIND, enabled=workload.precision == "fp16")

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        with _autocast(workload):
            loss = model(**batch).loss if workload.loss_fn is None else workload.loss_fn(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _autocast(workload: Workload) -> Any:
    """Return the autocast of a workload's precision."""
    dtype = PRECISIONS[workload.precision or "none"]
    return torch.autocast(KIND, dtype=dtype, enabled=dtype is not None)


def _built(build: Callable[[bool], Workload], small: bool) -> Workload:
    try:
        return build(small)
    except ImportError as error:
        raise Skipped(str(error)) from None


# -------------------------------------------------------------------------------------------------------------- steps


def steps_stage(*, small: bool) -> None:
    """Compare the predicted memory and time of steps with measured ones and with a plain loop."""
    known = _predictions()
    for setting in SETTINGS[3:6] if small else SETTINGS:
        predicted = None if small else known.get(setting.name)
        checked(f"step of {setting.name}", lambda one=setting, told=predicted: _step(one, told, small))


def _predictions() -> dict[str, Any]:
    """Return the predictions for this kind of GPU, by setting. They are empty if there are none."""
    from gpu import PREDICTIONS

    gpus = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["gpus"] if PREDICTIONS.exists() else {}
    try:
        return gpus.get(find_card(CUDA.get_device_properties(DEVICE).name).name, {})
    except autosplit.AutosplitError:
        return {}


def _step(setting: Setting, predicted: dict[str, Any] | None, small: bool) -> tuple[bool | None, dict[str, Any]]:
    torch.manual_seed(0)
    workload, sizes = _built(setting.build, small), setting.sizes(small)
    devices = autosplit.parse_devices(GPU)
    worker = AcceleratorWorker(devices, (devices[0].capacity_bytes,), workload)
    held = [worker.memory(StepShape(((size,),))) for size in sizes]
    step = worker.measure(StepShape(((sizes[1],),)), budget_s=0.5)
    worker.close()
    allocated, reserved = ([getattr(one, name)[0] for one in held] for name in ("allocated_bytes", "reserved_bytes"))
    loop_s, loop_bytes, loop_reserved_bytes = _plain_loop(workload, sizes[1])
    figures: dict[str, Any] = {
        "samples": sizes,
        "measured_s": step.seconds,
        "error_s": step.error_s,
        "loop_s": loop_s,
        "measured/loop": round(step.seconds / loop_s, 3),
        "allocated_mib": [round(size / MIB, 1) for size in allocated],
        "reserved_mib": [round(size / MIB, 1) for size in reserved],
        "loop_mib": round(loop_bytes / MIB, 1),
        "loop_reserved_mib": round(loop_reserved_bytes / MIB, 1),
    }
    if predicted is None or "error" in predicted:
        return (None if predicted is None else False), {**figures, **(predicted or {})}
    peaks = predicted["peak_bytes"]
    slope = (peaks[1] - peaks[0]) / (allocated[1] - allocated[0])
    memory = [one / other for one, other in zip(peaks, allocated, strict=True)]
    figures |= {
        "predicted_mib": [round(size / MIB, 1) for size in peaks],
        "predicted_s": predicted["step_s"],
        "memory predicted/measured": [round(ratio, 3) for ratio in memory],
        "reserved predicted/loop": round(predicted["reserved_bytes"][1] / loop_reserved_bytes, 3),
        "bytes per sample predicted/measured": round(slope, 3),
        "time predicted/measured": round(predicted["step_s"] / step.seconds, 3),
        "time predicted/loop": round(predicted["step_s"] / loop_s, 3),
    }
    return all(
        abs(ratio - 1) <= PREDICTED_WITHIN for ratio in (*memory, slope, predicted["step_s"] / step.seconds)
    ), figures


def _plain_loop(workload: Workload, size: int) -> tuple[float, int, int]:
    """Return the seconds of a step of a plain loop with pinned memory, and the most that it allocates and reserves."""
    pins = (lambda tensor: tensor.pin_memory()) if KIND == "cuda" else (lambda tensor: tensor)
    host = map_tensors(pins, unmarked(resize(workload.sample_batch, size, 0)))
    step = _training_step(workload)

    def once() -> None:
        step(map_tensors(lambda tensor: tensor.to(DEVICE, non_blocking=True), host))

    CUDA.empty_cache()
    for _ in range(3):
        once()
    CUDA.synchronize(DEVICE)
    CUDA.reset_peak_memory_stats(DEVICE)
    seconds = _seconds_of(once)
    return seconds, int(CUDA.max_memory_allocated(DEVICE)), int(CUDA.max_memory_reserved(DEVICE))


def _seconds_of(once: Callable[[], None]) -> float:
    """Return the time of a call in a free-running loop: the best of three runs of about 0.3 s."""
    began_s = time.perf_counter()
    once()
    CUDA.synchronize(DEVICE)
    repeats = max(2, min(50, int(0.3 / max(1e-4, time.perf_counter() - began_s))))
    found = []
    for _ in range(3):
        began_s = time.perf_counter()
        for _ in range(repeats):
            once()
        CUDA.synchronize(DEVICE)
        found.append((time.perf_counter() - began_s) / repeats)
    return min(found)


# --------------------------------------------------------------------------------------------------------------- tune


def tune_stage(*, small: bool) -> None:
    """Tune whole models, then train by the plan as a user does: the loop should reach the plan's samples/s."""
    cases: tuple[tuple[str, Callable[[bool], Workload], str], ...] = (
        ("gpt bf16", lambda s: gpt(s, precision="bf16", dropout=0.1), "balanced"),
        ("cnn fp32", cnn, "ddp"),
    )
    for name, build, strategy in cases[: 1 if small else 2]:
        checked(f"tune {name}, {strategy}", lambda b=build, s=strategy: _tuned(_built(b, small), s, small))


def _tuned(workload: Workload, strategy: str, small: bool) -> tuple[bool, dict[str, Any]]:
    torch.manual_seed(0)
    held = int(CUDA.memory_allocated(DEVICE))
    began_s = time.perf_counter()
    reached_s: dict[str, float] = {}
    plan = autosplit.tune(
        workload,
        devices=GPU,
        strategy=strategy,
        effective_batch_size=16 if small else 512,
        n_trials=4,
        profile="off",
        progress=lambda progress: reached_s.setdefault(progress.stage, round(time.perf_counter() - began_s, 1)),
    )
    seconds = time.perf_counter() - began_s
    left = int(CUDA.memory_allocated(DEVICE)) - held
    model = plan.wrap(workload.model)
    optimizer = workload.optimizer(model.parameters())
    batch = unmarked(resize(workload.sample_batch, plan.effective_batch_size, 0))
    parts = _cut(batch, [len(indices) for indices in plan.batch_sampler(plan.effective_batch_size)])

    def once() -> None:
        for step in plan.steps(parts):
            for part in step:
                with _autocast(workload):
                    if workload.loss_fn is None:
                        loss = model(**part).loss
                    else:
                        loss = workload.loss_fn(model(part[0]), part[1].to(model.output_device))
                step.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    once()
    CUDA.empty_cache()
    CUDA.reset_peak_memory_stats(DEVICE)
    once()
    peak = int(CUDA.max_memory_reserved(DEVICE))
    rate = plan.effective_batch_size / _seconds_of(once)
    return abs(rate / plan.samples_per_s - 1) <= REACHED_WITHIN, {
        "batch_size": plan.batch_size,
        "accumulation_steps": plan.accumulation_steps,
        "ceiling": plan.ceilings[0],
        "tuning_s": round(seconds, 1),
        "stages_reached_s": reached_s,
        "plan_samples_per_s": round(plan.samples_per_s, 1),
        "loop_samples_per_s": round(rate, 1),
        "ratio": round(rate / plan.samples_per_s, 3),
        "plan_peak_mib": round(plan.main.seats[0].peak_bytes / MIB),
        "loop_peak_mib": round(peak / MIB),
        "left_allocated_mib": round(left / MIB, 2),
        "notes": [str(note) for note in plan.notes],
    }


def _cut(batch: Any, sizes: list[int]) -> list[Any]:
    """Cut a batch into pinned micro-batches of these sizes."""
    pins = (lambda tensor: tensor.pin_memory()) if KIND == "cuda" else (lambda tensor: tensor)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        map_tensors(lambda tensor, start=start, size=size: pins(tensor[start : start + size].clone()), batch)
        for start, size in zip(starts, sizes, strict=True)
    ]


# -------------------------------------------------------------------------------------------------------------- ranks

_RANKS = """
import json, os, sys, torch, autosplit
from torch import nn, distributed as dist
from torch.utils.data import DataLoader, TensorDataset

def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).double()

generator = torch.Generator().manual_seed(5)
x, y = (torch.randn(40, size, dtype=torch.float64, generator=generator) for size in (16, 1))
batch = x[:4], y[:4]
plan = autosplit.tune(net(), batch, loss_fn=nn.functional.mse_loss, optimizer=torch.optim.SGD, devices=sys.argv[1],
                      strategy="ddp", effective_batch_size=20, n_trials=2, profile="off")
with autosplit.ddp.setup(plan) as ctx:
    model = ctx.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=ctx.batch_sampler(40))
    for step in ctx.steps(loader):
        for some, wanted in step:
            step.backward(nn.functional.mse_loss(model(some.to(ctx.device)), wanted.to(ctx.device)))
        optimizer.step()
        optimizer.zero_grad()
    ours = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    back_end, rank = dist.get_backend(), dist.get_rank()
reference = net()
optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
for part in range(2):
    part = slice(20 * part, 20 * part + 20)
    nn.functional.mse_loss(reference(x[part]), y[part]).backward()
    optimizer.step()
    optimizer.zero_grad()
theirs = torch.cat([p.detach().flatten() for p in reference.parameters()])
answer = {"rank": rank, "difference": float((ours - theirs).abs().max()), "backend": back_end,
          "split": list(plan.split), "device": str(ctx.device)}
open(f"{sys.argv[2]}/{rank}", "w").write(json.dumps(answer))
"""


def ranks_stage(*, small: bool) -> None:  # noqa: ARG001 (every stage has the same arguments)
    """Tune and train with two DDP ranks on one GPU, over gloo; compare the weights with one process in float64."""

    def check() -> tuple[bool, dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(_RANKS, encoding="utf-8")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            child = subprocess.run(  # noqa: S603
                [*command, str(script), GPU, folder], capture_output=True, text=True, check=False, env=environment
            )
            ranks = [
                json.loads(path.read_text()) for path in (Path(folder, str(rank)) for rank in range(2)) if path.exists()
            ]
        if child.returncode or len(ranks) < 2:
            return False, {"exit_code": child.returncode, "stderr": child.stderr[-2500:], "ranks": ranks}
        gloo = KIND == "emu" or {one["backend"] for one in ranks} == {"gloo"}
        return gloo and all(one["difference"] < 1e-12 for one in ranks), {"ranks": ranks}

    checked("two ranks on one GPU train as one process does", check)
