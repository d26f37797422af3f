"""Compare the model of torch's caching allocator with torch's own, by random sequences of allocations and frees.

    python benchmarks/allocator.py [--sequences 100] [--output FILE]

torch's allocator runs in a CUDA build of torch on a GPU that does nothing (`cuda_stub`), so no GPU is needed. After
each operation, allocated bytes, reserved bytes and retries are compared. The stub's addresses only grow. On a real GPU,
the driver's addresses decide which of two equally large free blocks is used.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from answer import of_this_run
from kernel_tracing import build_stub, stubbed_environment

from autosplit.sim.allocator_settings import MIB, AllocatorSettings
from autosplit.sim.caching_allocator import AllocationError, CachingAllocator

RESULTS = Path(__file__).parent / "results" / "allocator.json"
OPERATIONS = 400
LIMIT_MIB = 700
"""A limit at which about every second sequence has to release cached segments."""

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,4:8,>:4]",
)

Figures = tuple[int, int, int]
"""Allocated bytes, reserved bytes and retries."""


def operations(seed: int) -> Iterator[tuple[str, int, int]]:
    """Yield allocations, each with a number and its bytes, frees with the number, and a few releases of the cache."""
    draw = random.Random(seed)  # noqa: S311  # not for cryptography
    live: list[int] = []
    edges = (512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 21 * MIB + 512)
    for number in range(OPERATIONS):
        chance = draw.random()
        if live and chance < 0.45:
            yield "free", live.pop(draw.randrange(len(live))), 0
        elif chance < 0.47:
            yield "empty", 0, 0
        else:
            live.append(number)
            size = draw.choice(edges) if chance > 0.95 else draw.randint(1, draw.choice((1, 10, 60)) * MIB)
            yield "allocate", number, size


def of_torch(seed: int) -> list[Figures]:
    """Run a sequence on torch's allocator. This process sees the stub's GPU."""
    cuda: Any = torch.cuda
    cuda.init()
    cuda.empty_cache()
    before = cuda.memory_stats().get("num_alloc_retries", 0)
    live: dict[int, int] = {}
    figures: list[Figures] = []
    for what, number, nbytes in operations(seed):
        if what == "free" and number in live:
            cuda.caching_allocator_delete(live.pop(number))
        elif what == "empty":
            cuda.empty_cache()
        elif what == "allocate":
            with suppress(torch.OutOfMemoryError):
                live[number] = cuda.caching_allocator_alloc(nbytes)
        stats = cuda.memory_stats()
        found = (stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"])
        figures.append((*found, stats["num_alloc_retries"] - before))
    for address in live.values():
        cuda.caching_allocator_delete(address)
    return figures


def of_model(seed: int, limit_mib: int, settings: AllocatorSettings) -> list[Figures]:
    """Run a sequence on the model."""
    model = CachingAllocator(limit_mib * MIB or None, settings)
    live: dict[int, Any] = {}
    figures: list[Figures] = []
    for what, number, nbytes in operations(seed):
        if what == "free" and number in live:
            model.free(live.pop(number))
        elif what == "empty":
            model.empty_cache()
        elif what == "allocate":
            with suppress(AllocationError):
                live[number] = model.allocate(nbytes)
        figures.append((model.allocated_bytes, model.reserved_bytes, model.retries))
    return figures


def compare(text: str, limit_mib: int, sequences: int, library: Path) -> dict[str, Any]:
    """Compare sequences with the same settings and limit."""
    command = [sys.executable, __file__, "--of-torch", str(sequences)]
    environment = {**stubbed_environment(library, 80), "PYTORCH_ALLOC_CONF": text, "PYTORCH_CUDA_ALLOC_CONF": text}
    if limit_mib:
        environment["CUDA_STUB_MEMORY_BYTES"] = str(limit_mib * MIB)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603  # itself
    theirs = [[tuple(one) for one in figures] for figures in json.loads(ran.stdout.splitlines()[-1])]
    ours = [of_model(seed, limit_mib, AllocatorSettings.parsed(text)) for seed in range(sequences)]
    return {
        "settings": text or "defaults",
        "limit MiB": limit_mib or None,
        "sequences": sequences,
        "operations": sum(map(len, ours)),
        "with retries": sum(figures[-1][2] > 0 for figures in ours),
        "equal sequences": sum(own == other for own, other in zip(ours, theirs, strict=True)),
    }


def main() -> None:
    """Compare all settings, with and without a limit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--of-torch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of_torch:
        print(json.dumps([of_torch(seed) for seed in range(options.of_torch)]))
        return
    with tempfile.TemporaryDirectory() as folder:
        library = build_stub(Path(folder))
        pairs = [(text, limit_mib) for text in SETTINGS for limit_mib in (0, LIMIT_MIB)]
        found = [compare(text, limit_mib, options.sequences, library) for text, limit_mib in pairs]
    report = {**of_this_run(), "compared": found}
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
