"""The stages of `gpu.py` that check single claims about CUDA: memory, contexts, errors, allocators, copies."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from gpu_findings import GIB, GPU, KIND, MIB, Skipped, checked
from gpu_models import gpt, mlp
from torch import nn

import autosplit
from autosplit import Workload
from autosplit.accelerators import backend
from autosplit.oom import OutOfMemoryError
from autosplit.runtime.accelerator import AcceleratorWorker
from autosplit.runtime.protocol import StepShape

ROOT = Path(__file__).parents[1]
DEVICE = torch.device(GPU)
CUDA: Any = backend(KIND)


def _shape(size: int, **options: Any) -> StepShape:
    return StepShape(((size,),), **options)


def _worker(workload: Workload, capacity_bytes: int | None = None) -> AcceleratorWorker:
    (device,) = autosplit.parse_devices(GPU)
    return AcceleratorWorker((device,), (capacity_bytes or device.capacity_bytes,), workload)


def _only_cuda() -> None:
    if KIND != "cuda":
        raise Skipped(f"it is about CUDA, and the device is {GPU}")


def _child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a separate process that imports this checkout."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# ------------------------------------------------------------------------------------------------------------- memory


def memory_stage(*, small: bool) -> None:  # noqa: ARG001 (every stage has the same arguments)
    """Check what contexts, workspaces and other processes take, and whether NVML and torch agree."""
    checked("parse_devices makes no context", _contexts)
    checked("NVML and torch report the same free memory", _nvml)
    checked("free memory of fresh processes differs by less than 1 MiB", _capacity_noise)
    checked("a child process can reserve the capacity that its parent reported", _room_in_child)
    checked("a tuning leaves no memory allocated", _nothing_left)
    checked("the allocator raises at the limit it was given", _limit)


def _used_mib() -> int:
    """Return the used memory of GPU 0 by NVML, which makes no context."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used) // MIB


def _contexts() -> tuple[bool, dict[str, Any]]:
    _only_cuda()
    code = """
    import pynvml, torch, autosplit
    def used():
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used >> 20
    pynvml.nvmlInit()
    seen = [used()]
    torch.cuda.get_device_properties(0); seen.append(used())
    autosplit.parse_devices("cuda:0"); seen.append(used())
    torch.cuda.mem_get_info(0); seen.append(used())
    print(*seen)
    """
    child = _child(code)
    if child.returncode:
        return False, {"stderr": child.stderr[-800:]}
    before, properties, parsed, context = map(int, child.stdout.split()[-4:])
    return parsed - before < 50, {
        "get_device_properties_mib": properties - before,
        "parse_devices_mib": parsed - before,
        "context_mib": context - before,
    }


def _nvml() -> tuple[bool, dict[str, Any]]:
    _only_cuda()
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    free, total = torch.cuda.mem_get_info(0)
    first, second = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    figures = {
        "torch_free_mib": free // MIB,
        "torch_total_mib": total // MIB,
        "properties_total_mib": torch.cuda.get_device_properties(0).total_memory // MIB,
        "nvml_free_mib": first.free // MIB,
        "nvml_total_mib": first.total // MIB,
        "nvml_v2_free_mib": second.free // MIB,
        "nvml_v2_reserved_mib": second.reserved // MIB,
        "uuid_matches": str(torch.cuda.get_device_properties(0).uuid) in str(pynvml.nvmlDeviceGetUUID(handle)),
    }
    return abs(free - second.free) < 64 * MIB, figures


def _capacity_noise() -> tuple[bool, dict[str, Any]]:
    code = f"import autosplit; print(autosplit.parse_devices('{GPU}')[0].capacity_bytes)"
    if KIND == "emu":
        raise Skipped("emulated devices have no driver whose reading could vary")
    values = [int(_child(code).stdout) for _ in range(2)]
    return max(values) - min(values) < MIB, {"values": values, "spread_bytes": max(values) - min(values)}


def _room_in_child() -> tuple[bool | None, dict[str, Any]]:
    _only_cuda()
    capacity = autosplit.parse_devices(GPU)[0].capacity_bytes
    code = """
    import torch
    x = torch.randn(64, 3, 64, 64, device="cuda"); c = torch.nn.Conv2d(3, 64, 3, device="cuda")
    c(x).sum().backward(); (torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")).sum().item()
    held, size = [], 2**30
    while size >= 2**21:
        try: held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError: size //= 2
    print(torch.cuda.memory_reserved())
    """
    reachable = int(_child(code).stdout.split()[-1])
    return 0.95 * capacity <= reachable, {
        "capacity_mib": capacity // MIB,
        "reachable_mib": reachable // MIB,
        "outside_allocator_mib": (capacity - reachable) // MIB,
        "share": round(reachable / capacity, 4),
    }


def _nothing_left() -> tuple[bool, dict[str, Any]]:
    before = int(CUDA.memory_allocated(DEVICE))
    worker = _worker(mlp(small=True))
    worker.peaks(_shape(64))
    worker.close()
    left = int(CUDA.memory_allocated(DEVICE)) - before
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 (no public name)
    if KIND == "cuda" and clear is not None:
        clear()
    after = int(CUDA.memory_allocated(DEVICE)) - before
    return after == 0, {"left_mib": round(left / MIB, 2), "left_without_workspaces_mib": round(after / MIB, 2)}


def _limit() -> tuple[bool, dict[str, Any]]:
    worker = _worker(mlp(small=True), 64 * MIB)
    try:
        worker.peaks(_shape(1_000_000))
    except OutOfMemoryError as error:
        return error.device == GPU, {"device": error.device, "message": str(error)[:200]}
    finally:
        worker.close()
    return False, {"message": "a step of 1,000,000 samples ran within 64 MiB"}


# ---------------------------------------------------------------------------------------------------------- behaviour


def behaviour_stage(*, small: bool) -> None:
    """Check how steps recover from errors, and what unusual settings do."""
    checked("a compiled step runs", lambda: _compiled(small))
    checked("fp16 steps that GradScaler skips still count the optimizer's state", lambda: _skipped_steps(small))
    checked("a smaller step runs after the optimizer ran out of memory", _oom_in_optimizer)
    checked("nothing stays allocated after an out-of-memory error", lambda: _oom_recovery(small))
    checked("a model on the GPU has the ceiling of the same model on the host", lambda: _live_model(small))
    checked("kept replicas are as fast as nn.DataParallel", lambda: _kept_copies(small))
    checked("expandable segments keep the limit", lambda: _allocator("expandable_segments:True"))
    checked("cudaMallocAsync keeps the limit", lambda: _allocator("backend:cudaMallocAsync"))
    checked("a device-side assertion ends one step of an isolated process", _sticky_error)
    checked("tune plans for a model compiled with torch.compile", _torch_compile)


def _compiled(small: bool) -> tuple[bool, dict[str, Any]]:
    worker = _worker(mlp(small))
    peak = worker.peaks(_shape(64, compiled=True))[0]
    worker.close()
    return peak > 0, {"peak_mib": peak // MIB}


def _skipped_steps(small: bool) -> tuple[bool, dict[str, Any]]:
    rows = {}
    given = mlp(small, precision="fp16")
    for name, loss_fn in (
        ("cross entropy", given.loss_fn),
        ("overflowing loss", lambda o, _t: (o.float() ** 2).mean() * 1e9),
    ):
        workload = Workload(
            given.model, given.sample_batch, loss_fn=loss_fn, optimizer=given.optimizer, precision="fp16"
        )
        worker = _worker(workload)
        rows[name] = worker.peaks(_shape(64))[0]
        worker.close()
    least, most = sorted(rows.values())
    return least >= 0.98 * most, {name: round(peak / MIB, 1) for name, peak in rows.items()}


def _oom_in_optimizer() -> tuple[bool, dict[str, Any]]:
    width = 512 if KIND == "emu" else 4096
    parameter_bytes = 4 * 4 * width**2
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    workload = Workload(model, torch.randn(2, width), optimizer=torch.optim.AdamW)
    rows = {}
    for factor in (2.6, 3.0, 3.4):  # parameters 1, gradients 1, optimizer state 2
        worker = _worker(workload, int(factor * parameter_bytes) + 24 * MIB)
        seen = []
        for size in (64, 2):
            try:
                worker.peaks(_shape(size))
                seen.append("ran")
            except OutOfMemoryError:
                seen.append("out of memory")
            except Exception as error:  # noqa: BLE001 (it is the finding)
                seen.append(f"{type(error).__name__}: {error}"[:80])
        rows[str(factor)] = seen
        worker.close()
    return all(one in {"ran", "out of memory"} for seen in rows.values() for one in seen), rows


def _oom_recovery(small: bool) -> tuple[bool, dict[str, Any]]:
    worker = _worker(gpt(small), (32 * MIB) if small else 4 * GIB)
    least, large = (2, (1024, 4096)) if small else (2, (128, 512))
    worker.peaks(_shape(least))
    before, seen = int(CUDA.memory_allocated(DEVICE)), []
    for size in (*large, least):
        try:
            worker.peaks(_shape(size))
            seen.append("ran")
        except OutOfMemoryError as error:
            seen.append(f"out of memory on {error.device}")
    left = (int(CUDA.memory_allocated(DEVICE)) - before) // MIB
    worker.close()
    return seen[-1] == "ran" and seen[0].endswith(GPU) and abs(left) <= 80, {"seen": seen, "left_mib": left}


def _live_model(small: bool) -> tuple[bool, dict[str, Any]]:
    rows = {}
    width, room = (256, 64 * MIB) if small else (4096, 4 * GIB)
    for place in ("cpu", GPU):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8))).to(place)
        workload = Workload(model, torch.randn(8, width), optimizer=torch.optim.AdamW)
        reserve = int(autosplit.parse_devices(GPU)[0].capacity_bytes - room)
        found = autosplit.find_ceiling(workload, GPU, role="primary", reserve=reserve)
        rows[place] = {"ceiling": found.batch_size, "errors": found.ooms, "fixed_mib": found.fixed_bytes // MIB}
        del model, workload
        CUDA.empty_cache()
    return rows[GPU]["ceiling"] >= 0.97 * rows["cpu"]["ceiling"], rows


def _kept_copies(small: bool) -> tuple[bool, dict[str, Any]]:
    """Compare two replicas on one GPU, which times the copies and the launches, with nn.DataParallel."""
    _only_cuda()
    rows = {}
    for layers, width in ((20, 32),) if small else ((400, 32), (12, 2048)):
        times = {}
        for name in ("autosplit", "nn.DataParallel"):
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(DEVICE)
            ours = name == "autosplit"
            wrapped: Any = (
                autosplit.BalancedDataParallel(None, model, [0, 0], split=(8, 8))
                if ours
                else nn.DataParallel(model, [0, 0])
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, foreach=True)
            x = torch.randn(16, width, device=DEVICE)

            def step(wrapped: Any = wrapped, optimizer: Any = optimizer, x: Any = x, ours: bool = ours) -> None:
                with wrapped.no_sync() if ours else nullcontext():
                    wrapped(x).sum().backward()
                wrapped(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

            for _ in range(3):
                step()
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            times[name] = round(1e3 * (time.perf_counter() - began_s) / 5, 1)
        rows[f"{2 * layers} tensors of width {width}, ms"] = times
    return all(row["autosplit"] <= 1.05 * row["nn.DataParallel"] for row in rows.values()), rows


def _allocator(setting: str) -> tuple[bool, dict[str, Any]]:
    _only_cuda()
    code = """
    import os
    os.environ.setdefault("GPU_FINDINGS", os.devnull)
    import gpu_checks as checks
    from autosplit.oom import OutOfMemoryError
    worker = checks._worker(checks.mlp(small=True), 2**31)  # the context takes 0.5 GiB of this
    print("peak_mib", worker.peaks(checks._shape(64))[0] // 2**20)
    try:
        worker.peaks(checks._shape(4_000_000))
        print("no limit")
    except OutOfMemoryError:
        print("raised")
    """
    child = _child(code, PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting)
    return child.stdout.strip().endswith("raised"), {"stdout": child.stdout.strip(), "stderr": child.stderr[-600:]}


_BREAKS = """
import torch
from torch import nn
import autosplit

class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 64), nn.Linear(64, 3)

    def forward(self, x):
        if len(x) > 16:
            x = x + 100  # out of range: an assertion in the kernel
        return self.head(self.table(x))

def workload():
    batch = torch.randint(0, 8, (8,)), torch.randint(0, 3, (8,))
    return autosplit.Workload(Breaks(), batch, loss_fn=nn.functional.cross_entropy)
"""


def _sticky_error() -> tuple[bool, dict[str, Any]]:
    import tempfile

    from autosplit.runtime.prepare import build, prepare

    _only_cuda()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        Path(folder, "gpu_breaks.py").write_text(_BREAKS, encoding="utf-8")
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        import gpu_breaks  # type: ignore[import-not-found]

        devices = autosplit.parse_devices(GPU)
        built = build(gpu_breaks.workload, devices)
        worker = prepare(built, devices, (2 * GIB,), closing, largest_batch=64, isolate=True).worker
        seen = []
        for size in (8, 32, 8):
            began_s = time.perf_counter()
            try:
                worker.peaks(_shape(size))
                said = "ran"
            except Exception as error:  # noqa: BLE001 (it is the finding)
                said = f"{type(error).__name__}: {error}"[:160]
            seen.append((size, said, round(time.perf_counter() - began_s, 1)))
    return seen[0][1] == seen[2][1] == "ran" and seen[1][1].startswith("StepLost"), {"seen": seen}


def _torch_compile() -> tuple[bool, dict[str, Any]]:
    _only_cuda()
    given = mlp(small=True)
    workload = Workload(
        torch.compile(given.model), given.sample_batch, loss_fn=given.loss_fn, optimizer=given.optimizer
    )
    began_s = time.perf_counter()
    plan = autosplit.tune(workload, devices=GPU, effective_batch_size=256, n_trials=2, profile="off")
    return plan.samples_per_s > 0, {
        "tuning_s": round(time.perf_counter() - began_s, 1),
        "batch_size": plan.batch_size,
        "samples_per_s": round(plan.samples_per_s),
        "notes": "; ".join(map(str, plan.notes))[:800],
    }
