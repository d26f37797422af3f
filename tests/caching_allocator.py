"""A handwritten model of CUDA's caching allocator, and steps that allocate like a network."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MIB = 2**20
Event = tuple[str, Any, int]


class FullError(Exception):
    """Raised if the allocator reaches its limit."""


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    size: int
    small: bool
    free: bool = True
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Allocates blocks of 512 bytes from segments of 2 and 20 MiB. Without segments it allocates exactly the blocks."""

    def __init__(self, limit_bytes: int, *, segments: bool) -> None:
        self.limit_bytes, self.segments = limit_bytes, segments
        self.kept: list[Block] = []
        self.allocated = self.reserved = self.retries = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def take(self, nbytes: int) -> Block:
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        fitting = [block for block in self.kept if block.small == small and block.size >= size]
        block = min(fitting, key=lambda one: one.size) if fitting else self._segment(size, small=small)
        if block in self.kept:
            self.kept.remove(block)
        rest = block.size - size
        if rest and (rest >= 512 if small else rest > MIB):
            other = Block(rest, small, before=block, after=block.after)
            if block.after:
                block.after.before = other
            block.after, block.size = other, size
            self.kept.append(other)
        block.free = False
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def give(self, block: Block) -> None:
        self.allocated -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            self.kept.remove(other)
            block.size += other.size
            if other is block.before:
                block.before = other.before
                if block.before:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after:
                    block.after.before = block
        self.kept.append(block)
        if not self.segments:
            self.empty_cache()

    def empty_cache(self) -> None:
        whole = [block for block in self.kept if block.before is None and block.after is None]
        self.kept = [block for block in self.kept if block not in whole]
        self.reserved -= sum(block.size for block in whole)

    def _segment(self, size: int, *, small: bool) -> Block:
        nbytes = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        nbytes = nbytes if self.segments else size
        if self.reserved + nbytes > self.limit_bytes:
            self.retries += 1
            self.empty_cache()
            if self.reserved + nbytes > self.limit_bytes:
                raise FullError
        self.reserved += nbytes
        self.most_reserved = max(self.most_reserved, self.reserved)
        return Block(nbytes, small)


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
        self.standing_bytes = 3 * sum(-(-nbytes // 512) * 512 for nbytes in self.parameters)
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
                held[key] = max(512, -(-nbytes // 512) * 512)
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
        self.allocator = CachingAllocator(self.network.limit_bytes, segments=self.segments)
        standing = [nbytes for nbytes in self.network.parameters for _ in range(3)]
        self.held = [self.allocator.take(nbytes) for nbytes in (*standing, self.network.handle_bytes) if nbytes]

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
                len(retries) < 3 and (retries[1] > retries[0] or it.most_reserved > 0.9 * it.limit_bytes)
            ):
                self.run(self.network.step(n))
                retries.append(it.retries)
            if len(retries) == 3 and retries[0] < retries[1] < retries[2]:
                raise FullError
        except FullError:
            self.ooms += 1
            self.start()
            return None
        return it.most_allocated, it.most_reserved, len(retries)

    def run(self, step: Iterator[Event]) -> None:
        held: dict[Any, Block] = {}
        for what, key, nbytes in step:
            if what == "take":
                held[key] = self.allocator.take(max(1, nbytes))
            else:
                self.allocator.give(held.pop(key))


def brute_force(runs: Callable[[int], bool]) -> int:
    """Return the largest size that runs, by halving."""
    low, high = 0, 1
    while runs(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low
