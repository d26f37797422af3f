"""Measure the rates of this machine's devices: matrix products, memory, and copies.

Each rate is the best of a few short runs, timed by the wall clock with the device idle before and after. So it is an
upper limit for a training step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from autosplit.accelerators import backend, is_accelerator

_RUNS = 5
_LEAST_S = 0.01
"""Shortest run in seconds. The clock and the wait for the device take 0.1% of it."""

_COPIED_BYTES = 64 * 2**20


def synchronize(device: torch.device) -> None:
    """Wait until a device finishes all its work."""
    if is_accelerator(device.type):
        backend(device.type).synchronize(device)


def matmul_flops(device: torch.device, dtype: torch.dtype, *, largest_bytes: int) -> float | None:
    """Return operations per second of matrix products, or None if the device does not support them.

    The matrices grow until a product is long enough to fill the device, or three matrices exceed `largest_bytes`.
    """
    best, size = 0.0, 256
    try:
        while True:
            left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
            seconds = best_seconds(lambda a=left, b=right: a @ b, device)  # type: ignore[misc]  # bound at once
            best = max(best, 2 * size**3 / seconds)
            if seconds >= _LEAST_S or 3 * (2 * size) ** 2 * dtype.itemsize > largest_bytes:
                return best
            size *= 2
    except (RuntimeError, TypeError):  # Metal raises TypeError for float64
        return best or None


def memory_bytes_per_s(device: torch.device, *, largest_bytes: int) -> float:
    """Return the bytes read and written per second by copies within a device's memory."""
    source = torch.ones(min(largest_bytes, 8 * _COPIED_BYTES) // 8, dtype=torch.float32, device=device)
    destination = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: destination.copy_(source), device)


def copy_bytes_per_s(source: torch.device, destination: torch.device) -> float:
    """Return the bytes per second of copies from one device to another."""
    sent = torch.ones(_COPIED_BYTES // 4, dtype=torch.float32, device=source)
    into = torch.empty(sent.shape, dtype=sent.dtype, device=destination)
    return sent.nbytes / best_seconds(lambda: into.copy_(sent), source, destination)


def best_seconds(run: Callable[[], Tensor | None], *devices: torch.device) -> float:
    """Run a function a few times, and return the shortest time in seconds. Wait for the devices around each run."""
    found: list[float] = []
    count = 1
    run()
    while len(found) < _RUNS:
        for device in devices:
            synchronize(device)
        start_s = time.perf_counter()
        for _ in range(count):
            run()
        for device in devices:
            synchronize(device)
        taken_s = time.perf_counter() - start_s
        if taken_s < _LEAST_S and count < 2**12:
            count *= 2
            continue
        found.append(taken_s / count)
    return min(found)
