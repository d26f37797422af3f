"""Whether the ranks of a job meet: a process for each device, by the back end that torch has for it."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from autosplit.accelerators import backend, is_accelerator
from autosplit.devices.examination import Meeting
from autosplit.errors import first_line

__all__ = ["met"]

LIMIT_S = 40.0
"""For processes that start, meet and add up a few times; on a busy machine torch alone takes ten seconds to import."""

_BYTES = 64 * 2**20
_TIMES = 5


def met(devices: Sequence[torch.device]) -> Meeting:
    """Let a process for each device add up gradients with the others.

    Args:
        devices: One for each rank, of one kind.
    """
    name = dist.get_default_backend_for_device(devices[0].type)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        store = Path(folder) / "store"
        ranks = [
            context.Process(target=_rank, args=(rank, len(devices), name, device, store, answers), daemon=True)
            for rank, device in enumerate(devices)
        ]
        for process in ranks:
            process.start()
        found = _answers(ranks, answers)
        for process in ranks:
            process.kill()
            process.join()
    failures = [answer for answer in found if isinstance(answer, str)]
    cure = "set NCCL_DEBUG=INFO and run it again; NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 tell which way is broken"
    if failures or len(found) < len(devices):
        failure = failures[0] if failures else f"{len(devices) - len(found)} of {len(devices)} gave no answer"
        return Meeting(name, len(devices), failure=failure, cure=cure if name == "nccl" else "look at the message")
    return Meeting(name, len(devices), gb_per_s=_BYTES / max(found) / 1e9)


def _answers(ranks: Sequence[Any], answers: Any) -> list[Any]:
    """Wait for what the ranks say, until one has failed or the time is over."""
    found: list[Any] = []
    ends_s = time.monotonic() + LIMIT_S
    while len(found) < len(ranks) and time.monotonic() < ends_s:
        if not answers.empty():
            found.append(answers.get())
            if isinstance(found[-1], str):
                break
        elif not any(process.is_alive() for process in ranks):
            break
        else:
            time.sleep(0.02)
    return found


def _rank(rank: int, size: int, name: str, device: torch.device, store: Path, answers: Any) -> None:
    try:
        answers.put(_seconds(rank, size, name, device, store))
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what the examination is for)
        answers.put(first_line(error))
    while True:  # the others may still need this one's end of a connection; it is ended from outside
        time.sleep(1)


def _seconds(rank: int, size: int, name: str, device: torch.device, store: Path) -> float:
    if is_accelerator(device.type):
        backend(device.type).set_device(device)
    dist.init_process_group(name, init_method=store.as_uri(), rank=rank, world_size=size)
    gradients = torch.ones(_BYTES // 4, device=device)
    best_s = float("inf")
    for _ in range(_TIMES):
        dist.all_reduce(gradients[:1])  # the first makes the connections, each lets the ranks begin together
        float(gradients[0])  # waits
        start_s = time.perf_counter()
        dist.all_reduce(gradients)
        float(gradients[0])
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s
