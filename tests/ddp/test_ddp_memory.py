"""Loading a checkpoint needs one copy of the model in each rank's memory, and not a byte on the first GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from gpus import KIND
from handmade import on_devices
from ranks import found_by, run_ranks
from torch import distributed as dist
from torch import nn

from autosplit import ddp
from autosplit.accelerators import backend
from autosplit.devices.accelerator import visible_devices

MIB = 2**20
SPARE_BYTES = 24 * MIB
"""Extra memory that a rank may take: Python objects, gloo, and inaccuracy of the kernel's counters."""
STATUS = Path("/proc/self/status")


def large_model() -> nn.Module:
    """A model of 208 MiB whose tensors are all too large for the heap."""
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(13)))


def status_bytes() -> dict[str, int]:
    """Return the kernel's counters of this process: VmHWM is the peak, RssAnon and RssFile are its current parts."""
    lines = (line.split() for line in STATUS.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def put(ctx: ddp.Context, path: Path, **parts: Any) -> None:
    ctx.save_checkpoint(path, **parts)
    dist.barrier()


def on_processor(load: Callable[[ddp.Context, Path, nn.Module], None]) -> dict[str, int]:
    """Return how much this rank's peak and pages grew while it loaded a model."""
    path = Path(os.environ["SCENARIO_FOLDER"]) / "large.pt"
    with ddp.setup(make_plan((2, 6))) as ctx:
        model = ctx.wrap(large_model())
        put(ctx, path, model=model)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = status_bytes()
        during: dict[str, int] = {}

        def seen(module: nn.Module, _: Any) -> None:
            during.update(status_bytes())  # while the loaded tensors still exist

        model.module.register_load_state_dict_post_hook(seen)
        load(ctx, path, model)
        after = status_bytes()
        assert torch.isfinite(next(model.parameters())).all()
    return {
        "model": sum(p.nbytes for p in model.parameters()),
        "file": path.stat().st_size,
        "peak": max(during["VmHWM"], after["VmHWM"]) - before["VmRSS"],
        "anonymous": during["RssAnon"] - before["RssAnon"],
        "left": after["VmRSS"] - before["VmRSS"],
    }


def by_checkpoint(ctx: ddp.Context, path: Path, model: nn.Module) -> None:
    ctx.load_checkpoint(path, model=model)


def by_hand(ctx: ddp.Context, path: Path, model: nn.Module) -> None:
    """The usual way to write it."""
    model.module.load_state_dict(torch.load(path, weights_only=True)["model"])


def on_gpu() -> dict[str, int]:
    """Return each rank's used and free GPU memory before and after all ranks loaded a model."""
    path = Path(os.environ["SCENARIO_FOLDER"]) / "large.pt"
    gpu, cards = backend(KIND), visible_devices(KIND)
    devices = [f"{KIND}:{rank if len(cards) > 1 else 0}" for rank in range(2)]
    plan = make_plan((2, 6), device=f"{KIND}:{{}}")
    names = [cards[int(device[-1])].name for device in devices]
    facts = zip(plan.devices, devices, names, strict=True)
    plan = on_devices(plan, *(replace(device, label=label, name=name) for device, label, name in facts))
    with ddp.setup(plan) as ctx:
        model = ctx.wrap(large_model())
        put(ctx, path, model=model)
        gpu.synchronize()
        dist.barrier()
        gpu.reset_peak_memory_stats()
        # Ask only about this rank's GPU. Asking about another GPU creates a context there, which this test looks for.
        before, free_before = gpu.memory_allocated(), gpu.mem_get_info(ctx.device)[0]
        dist.barrier()
        ctx.load_checkpoint(path, model=model)
        gpu.synchronize()
        dist.barrier()
        after, free_after = gpu.memory_allocated(), gpu.mem_get_info(ctx.device)[0]
        dist.barrier()
        return {
            "left": after - before,
            "peak": gpu.max_memory_allocated() - before,
            "lost": free_before - free_after,
            "elsewhere": sum(gpu.memory_allocated(index) for index in range(len(cards)) if index != ctx.device.index),
        }


ON_PROCESSOR = {"ours": lambda: on_processor(by_checkpoint), "by hand": lambda: on_processor(by_hand)}
ON_GPU = {"ours": on_gpu}


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="the kernel's own figures of a process are Linux's")
def test_a_rank_peaks_at_its_model_and_one_copy(tmp_path, monkeypatch):
    """Mapped tensors changed when the file was replaced, so each rank copies them once. A second copy is too much."""
    monkeypatch.setenv("SCENARIO_FOLDER", str(tmp_path))
    ranks = run_ranks(__name__, "ON_PROCESSOR", 2, tmp_path, limit_s=250, spawned=True)
    for found in found_by(ranks, "ours"):
        assert found["model"] == 208 * MIB
        assert found["anonymous"] < found["model"] + SPARE_BYTES
        assert found["peak"] < found["model"] + found["file"] + SPARE_BYTES
        assert found["left"] < SPARE_BYTES
    for found in found_by(ranks, "by hand"):
        assert found["anonymous"] > found["model"] - SPARE_BYTES, "the counter shows a copy"


@pytest.mark.gpu
def test_ranks_leave_nothing_on_the_first_gpu(tmp_path, monkeypatch):
    """torch.load without map_location puts every rank's copy on the GPU that wrote the file."""
    monkeypatch.setenv("SCENARIO_FOLDER", str(tmp_path))
    ranks = run_ranks(__name__, "ON_GPU", 2, tmp_path, limit_s=200, spawned=True)
    for found in found_by(ranks, "ours"):
        assert found["left"] == 0
        assert found["elsewhere"] == 0
        assert found["peak"] <= 16 * MIB, "at most one parameter"
        assert found["lost"] <= SPARE_BYTES, "what any rank took on this card beyond its model"
