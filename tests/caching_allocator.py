"""Steps that allocate like a network, on the model of torch's caching allocator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from autosplit.sim.allocator_settings import AllocatorSettings
from autosplit.sim.caching_allocator import AllocationError, Block, CachingAllocator

MIB = 2**20
Event = tuple[str, Any, int]


class Network:
    """Layers of random sizes, trained with two optimizer states. `tries` workspaces like cudnn.benchmark."""

    def __init__(self, seed: int, *, tries: bool) -> None:
        draw = random.Random(seed)
        layers = range(draw.randint(2, 12))
        self.parameters = [int(10 ** draw.uniform(3.5, 6.8)) for _ in layers]
        self.kept = [int(10 ** draw.uniform(2.5, 5.5)) for _ in layers]
        self.passing = [int(draw.choice([0, 0.5, 1, 2]) * nbytes) for nbytes in self.kept]
        self.workspace = [int(draw.choice([0, 0, 0.3, 1]) * nbytes) * tries for nbytes in self.kept]
        self.handle_bytes = draw.choice([0, 0, MIB])
        self.standing_bytes = 3 * sum(map(_block_bytes, self.parameters))
        self.limit_bytes = 2 * self.standing_bytes + draw.choice([64, 256, 1024]) * MIB

    def step(self, n: int, *, first: bool = False, seen: float = 1.0) -> Iterator[Event]:
        """Yield what comes and goes; `seen` of the activations, and no workspace unless all are seen."""
        layers = range(len(self.parameters))
        yield "take", "batch", 512 * n
        for i in layers:
            if self.workspace[i] and seen == 1:
                if first:
                    yield from (("take", ("tried", i), 3 * self.workspace[i] * n), ("give", ("tried", i), 0))
                yield "take", ("workspace", i), self.workspace[i] * n
            yield "take", ("passing", i), int(self.passing[i] * n * seen)
            yield "take", ("kept", i), int(self.kept[i] * n * seen)
            yield "give", ("passing", i), 0
            if self.workspace[i] and seen == 1:
                yield "give", ("workspace", i), 0
        for i in reversed(layers):
            yield "take", ("gradient", i), self.parameters[i]
            yield "take", ("incoming", i), int(self.kept[i] * n * seen)
            if i < len(self.parameters) - 1:
                yield "give", ("incoming", i + 1), 0
            yield "give", ("kept", i), 0
        yield "give", ("incoming", 0), 0
        for i in layers:
            yield "take", ("moment", i), self.parameters[i]
        for i in layers:
            yield from (("give", ("moment", i), 0), ("give", ("gradient", i), 0))
        yield "give", "batch", 0

    def traced(self, n: int, seen: float) -> int:
        """Return the peak of a trace that sees this share of the activations."""
        live = peak = self.standing_bytes
        held: dict[Any, int] = {}
        for what, key, nbytes in self.step(n, seen=seen if seen != 1 else 1 - 1e-12):
            if what == "take":
                held[key] = _block_bytes(nbytes)
                live += held[key]
                peak = max(peak, live)
            else:
                live -= held.pop(key)
        return peak


class Card:
    """A GPU that runs a network's steps like `AcceleratorWorker`: one step to settle, and one or two to measure."""

    def __init__(self, network: Network, *, segments: bool) -> None:
        self.network, self.segments, self.ooms = network, segments, 0
        self.start()

    def start(self) -> None:
        """Allocate the parameters and the optimizer's state."""
        self.allocator = CachingAllocator(self.network.limit_bytes, AllocatorSettings(caches=self.segments))
        standing = [nbytes for nbytes in self.network.parameters for _ in range(3)]
        self.held = [
            self.allocator.allocate(_block_bytes(nbytes)) for nbytes in (*standing, self.network.handle_bytes) if nbytes
        ]

    def memory(self, n: int) -> tuple[int, int, int] | None:
        """Return the peaks of allocated and reserved memory, and the number of steps. Return None if it is full."""
        it = self.allocator
        try:
            it.empty_cache()
            self.run(self.network.step(n, first=True))
            it.empty_cache()
            it.reset_peaks()
            retries = [it.retries]
            while len(retries) < 2 or (
                len(retries) < 3 and (retries[1] > retries[0] or it.max_reserved_bytes > 0.9 * it.limit_bytes)
            ):
                self.run(self.network.step(n))
                retries.append(it.retries)
            if len(retries) == 3 and retries[0] < retries[1] < retries[2]:
                raise AllocationError
        except AllocationError:
            self.ooms += 1
            self.start()
            return None
        return it.max_allocated_bytes, it.max_reserved_bytes, len(retries)

    def run(self, step: Iterator[Event]) -> None:
        held: dict[Any, Block] = {}
        for what, key, nbytes in step:
            if what == "take":
                held[key] = self.allocator.allocate(_block_bytes(nbytes))
            else:
                self.allocator.free(held.pop(key))


def _block_bytes(nbytes: int) -> int:
    return max(512, -(-nbytes // 512) * 512)


def brute_force(runs: Callable[[int], bool]) -> int:
    """Return the largest size that runs, by halving."""
    low, high = 0, 1
    while runs(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low
