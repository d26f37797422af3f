"""Predict the memory that torch's allocator reserves for a training step, by replaying the step's allocations.

The replay allocates the parameters and then runs optimizer steps. As in a real training, the first backward creates
gradients that later micro-steps add to, and the first update creates the optimizer state. Both take memory of
activations that are free by then. The steps are repeated until a step reserves no more memory than the step before it.
See Note [Reserved memory] in `caching_allocator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from autosplit.runtime.memory_tracker import BLOCK_BYTES
from autosplit.sim.allocator_settings import AllocatorSettings
from autosplit.sim.caching_allocator import AllocationError, Block, CachingAllocator
from autosplit.sim.kernel_time import Numbers
from autosplit.sim.trace_tracker import BoundedEntry, Stage

MOST_STEPS = 5
"""Maximum number of steps that are replayed."""

_PLACES: dict[Stage, int] = {"before": 0, "kept": 1, "step": 3, "": 3, "update": 4}


def block_bytes(entries: Sequence[BoundedEntry], nbytes: Numbers) -> Numbers:
    """Return the bytes of allocated and freed blocks: within their limits, and rounded up. Negative if freed.

    Args:
        entries: The entries with the limits.
        nbytes: Bytes of each entry before rounding, shape ``(len(entries),)``.
    """
    if not len(entries):
        return np.zeros(0)
    sizes, (least, most) = np.abs(nbytes), np.array([entry.limits for entry in entries]).T
    sizes = np.where(sizes < least, 0.0, np.minimum(sizes, most))
    rounded: Numbers = np.sign(nbytes) * np.ceil(sizes / BLOCK_BYTES) * BLOCK_BYTES
    return rounded


def reserved_bytes(
    entries: Sequence[BoundedEntry],
    nbytes: Numbers,
    device: int,
    settings: AllocatorSettings,
    capacity_bytes: int | None = None,
    *,
    empties_cache: bool = False,
) -> int:
    """Return the most memory that the allocator reserves on a device in repeated optimizer steps.

    Args:
        entries: Allocated and freed blocks of one step, on all devices.
        nbytes: Their bytes (`block_bytes`).
        capacity_bytes: Memory of the device. When it is full, the allocator releases cached segments. If the steps then
            run, the result is at most the capacity. If they still do not, the result is that without a limit.
        empties_cache: Count from the second step on, after `torch.cuda.empty_cache()`, as `AcceleratorWorker` measures.
    """
    chosen = [entry.device == device and size != 0 for entry, size in zip(entries, nbytes, strict=True)]
    blocks = list(compress(entries, chosen))
    sizes = [int(size) for size in compress(nbytes, chosen)]
    needed_bytes = _replayed(blocks, sizes, CachingAllocator(None, settings), empties_cache)
    if capacity_bytes is None or needed_bytes <= capacity_bytes:
        return needed_bytes
    try:
        return _replayed(blocks, sizes, CachingAllocator(capacity_bytes, settings), empties_cache)
    except AllocationError:
        return needed_bytes


def _replayed(
    entries: Sequence[BoundedEntry], sizes: Sequence[int], allocator: CachingAllocator, empties_cache: bool
) -> int:
    """Run steps until the reserved memory settles, and return its maximum.

    Raises:
        AllocationError: A step does not fit, or each step has to release cached segments.
    """
    before, gradients, state, step, update = lists = [list[tuple[int, int]]() for _ in range(5)]
    held = {entry.block for entry in entries if entry.stage in ("before", "kept")}
    for entry, nbytes in zip(entries, sizes, strict=True):
        is_state = entry.stage == "before" and entry.kind == "optimizer"
        if nbytes > 0 or entry.block not in held:  # parameters, gradients and state outlive the step
            lists[2 if is_state else _PLACES[entry.stage]].append((entry.block, nbytes))
    standing: dict[int, Block] = {}
    _run(allocator, before, standing)
    for index in range(MOST_STEPS):
        reserved, retries, live = allocator.max_reserved_bytes, allocator.retries, dict(standing)
        _run(allocator, step, live)
        if index == 0:
            _run(allocator, gradients, standing)
            _run(allocator, state, standing)
        _run(allocator, update, live)
        for number, block in live.items():
            if number not in standing:
                allocator.free(block)
        if index == 0 and empties_cache:
            allocator.empty_cache()
            allocator.reset_peaks()
        elif index and allocator.max_reserved_bytes == reserved and allocator.retries == retries:
            return allocator.max_reserved_bytes
    if allocator.retries > retries:
        raise AllocationError
    return allocator.max_reserved_bytes


def _run(allocator: CachingAllocator, entries: Sequence[tuple[int, int]], live: dict[int, Block]) -> None:
    """Allocate and free blocks. A storage that grows is copied to a new block, as `resize_` does."""
    for number, nbytes in entries:
        block = live.get(number)
        if nbytes > 0:
            live[number] = allocator.allocate(nbytes + (block.nbytes if block else 0))
        if block is not None:
            allocator.free(block)
            if nbytes < 0:
                del live[number]
