"""Check that the ranks of a job can communicate, with one process per device and torch's back end for the devices."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed as dist

from autosplit.accelerators import backend, is_accelerator
from autosplit.errors import first_line
from autosplit.tools.examination import Meeting

LIMIT_S = 40.0
"""Time limit in seconds for processes to start, connect and all-reduce.

On a busy machine, importing torch takes 10 s.
"""

_BYTES = 64 * 2**20
_TIMES = 5


def met(devices: Sequence[torch.device]) -> Meeting:
    """Start one process per device, all devices of one kind, and all-reduce gradients between the processes."""
    name, count = dist.get_default_backend_for_device(devices[0].type), len(devices)
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(count) as ranks:
        store = Path(folder) / "store"
        asked = [ranks.apply_async(_seconds, (rank, count, name, place, store)) for rank, place in enumerate(devices)]
        ends_s = time.monotonic() + LIMIT_S
        while time.monotonic() < ends_s and not all(one.ready() for one in asked):
            if any(one.ready() and not one.successful() for one in asked):
                break
            time.sleep(0.02)
        answered = [one for one in asked if one.ready()]  # The pool terminates the other processes.
        try:
            seconds = [one.get() for one in answered]
            failure = None if len(seconds) == count else f"{count - len(seconds)} of {count} processes did not answer"
        except Exception as error:  # any failure is a result of this check # noqa: BLE001
            failure = first_line(error)
    if failure is None:
        return Meeting(name, count, gb_per_s=_BYTES / max(seconds) / 1e9)
    cure = (
        "set NCCL_DEBUG=INFO and run it again. If NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 helps, that transport is "
        "broken"
    )
    return Meeting(name, count, failure=failure, cure=cure if name == "nccl" else "see the message")


def _seconds(rank: int, size: int, name: str, device: torch.device, store: Path) -> float:
    if is_accelerator(device.type):
        backend(device.type).set_device(device)
    dist.init_process_group(name, init_method=store.as_uri(), rank=rank, world_size=size)
    gradients = torch.ones(_BYTES // 4, device=device)
    best_s = float("inf")
    for _ in range(_TIMES):
        dist.all_reduce(gradients[:1])  # the first call connects the ranks, each call synchronises their start
        float(gradients[0])  # wait for the device
        start_s = time.perf_counter()
        dist.all_reduce(gradients)
        float(gradients[0])
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s
