"""A model of torch's caching allocator for GPU memory. It computes addresses and sizes, and allocates nothing.

The constants, the choice of a block and the order of attempts are those of torch 2.11's CUDACachingAllocator.cpp in
c10/cuda. The model has one stream. It has no garbage collection (`garbage_collection_threshold`) and no private pools.

Note [Reserved memory]
~~~~~~~~~~~~~~~~~~~~~~
The allocator reserves *segments* from the driver, and cuts *blocks* from them. A GPU is full when the segments do not
fit, even if the blocks would. Example: a network allocates 12 MiB, frees them, and allocates 14 MiB:

    12 MiB   segment of 12 MiB:  [12 used]
    freed                        [12 free]
    14 MiB   does not fit, so a second segment of 14 MiB is reserved

So 26 MiB are reserved, although at most 14 MiB are in use. If the driver has no more memory, the allocator releases
segments without a used block, and tries again. With `expandable_segments`, the first segment grows by 20 MiB instead.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from autosplit.sim.allocator_settings import LARGE_SEGMENT_BYTES, MIB, MIN_BLOCK_BYTES, AllocatorSettings

SMALL_BYTES = MIB
"""The largest block of the pool of small blocks (kSmallSize). A larger rest of a large block is split off."""

SMALL_SEGMENT_BYTES = 2 * MIB
"""Size of a segment for small blocks (kSmallBuffer)."""

OWN_SEGMENT_BYTES = 10 * MIB
"""A block of at least this size gets its own segment (kMinLargeAlloc), a multiple of 2 MiB (kRoundLarge)."""


class AllocationError(Exception):
    """Raised if a request does not fit within the limit, even after all cached segments are released."""


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment.

    Attributes:
        nbytes: Size in bytes.
        address: First byte. Segments never overlap.
        is_mapped: Whether the driver has memory for it. False only for the rest of an expandable segment.
        before: The block in front of it in its segment.
        after: The block behind it in its segment.
    """

    nbytes: int
    address: int
    pool: _Pool
    is_free: bool = True
    is_mapped: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks, ordered by size and then address, and the unmapped blocks of expandable segments by address."""

    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    @property
    def page_bytes(self) -> int:
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES

    def put(self, block: Block) -> None:
        if block.is_mapped:
            insort(self.free, (block.nbytes, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.nbytes, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """Allocate and free blocks like torch's CUDA allocator on one device.

    Args:
        limit_bytes: Maximum bytes of all segments. None for no limit.
        settings: The allocator's settings.

    Attributes:
        allocated_bytes: Bytes of the blocks in use (`torch.cuda.memory_allocated`).
        reserved_bytes: Bytes of all segments (`torch.cuda.memory_reserved`).
        max_allocated_bytes: Maximum of `allocated_bytes` since `reset_peaks`.
        max_reserved_bytes: Maximum of `reserved_bytes` since `reset_peaks`.
        retries: How often cached segments were released to make room.
    """

    def __init__(self, limit_bytes: int | None = None, settings: AllocatorSettings | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.settings = settings or AllocatorSettings()
        self.allocated_bytes = self.reserved_bytes = self.retries = 0
        self.max_allocated_bytes = self.max_reserved_bytes = 0
        self._pools = (_Pool(is_small=False), _Pool(is_small=True))
        self._next_address = 0

    def reset_peaks(self) -> None:
        """Set the maximums to the current values."""
        self.max_allocated_bytes, self.max_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def allocate(self, nbytes: int) -> Block:
        """Return a block for a request.

        Raises:
            AllocationError: The limit has no room for it.
        """
        settings = self.settings
        wanted = settings.rounded(nbytes) if settings.caches else max(1, nbytes)
        pool = self._pools[wanted <= SMALL_BYTES]
        block = self._cached(pool, wanted) or self._reserved(pool, wanted)
        if self._splits(block, wanted):
            rest = self._cut(block, wanted)
            pool.put(rest)
        block.is_free = False
        self.allocated_bytes += block.nbytes
        self.max_allocated_bytes = max(self.max_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool, merged with free neighbours in its segment."""
        assert not block.is_free, "a block is freed once"
        self.allocated_bytes -= block.nbytes
        block.is_free = True
        self._merge_neighbours(block)
        block.pool.put(block)
        if not self.settings.caches:
            self.empty_cache()

    def empty_cache(self) -> None:
        """Release the segments without a used block. Of an expandable segment, release the unused pages."""
        for pool in self._pools:
            for _, _, block in list(pool.free):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._release(block)

    # Attempts to get a block, in torch's order

    def _cached(self, pool: _Pool, wanted: int) -> Block | None:
        """Remove the smallest block that is large enough from the pool (`get_free_block` in torch)."""
        free = pool.free
        place = bisect_left(free, (wanted,))
        if place == len(free):
            return None
        if self.settings.expandable_segments:
            # A block counts as large as it can grow. So prefer a later block that can't grow as far.
            while place + 1 < len(free) and _growable(free[place + 1][2]) < _growable(free[place][2]):
                place += 1
        block, most = free[place][2], self.settings.max_split_bytes
        if most is not None:
            excess = self.settings.max_non_split_rounding_bytes
            if block.nbytes >= most if wanted < most else block.nbytes >= wanted + excess:
                return None
        del free[place]
        return block

    def _reserved(self, pool: _Pool, wanted: int) -> Block:
        """Reserve a segment for a block. If the limit is reached, release cached segments and try again."""
        block = self._new(pool, wanted)
        if block is None and self._release_oversize(pool, wanted):
            block = self._new(pool, wanted)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new(pool, wanted)
        if block is None:
            raise AllocationError
        return block

    def _new(self, pool: _Pool, wanted: int) -> Block | None:
        if self.settings.expandable_segments:
            return self._expanded(pool, wanted)
        nbytes = self._segment_bytes(wanted)
        if not self._has_room(nbytes):
            return None
        self._reserve(nbytes)
        block = Block(nbytes, self._next_address, pool)
        self._next_address += nbytes
        return block

    def _segment_bytes(self, wanted: int) -> int:
        if not self.settings.caches:
            return wanted
        if wanted <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        return LARGE_SEGMENT_BYTES if wanted < OWN_SEGMENT_BYTES else -(-wanted // (2 * MIB)) * 2 * MIB

    def _has_room(self, nbytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + nbytes <= self.limit_bytes

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.max_reserved_bytes = max(self.max_reserved_bytes, self.reserved_bytes)

    def _release_oversize(self, pool: _Pool, wanted: int) -> bool:
        """Release blocks that are never split, the largest first, until the request has room (max_split_size)."""
        most = self.settings.max_split_bytes
        if most is None:
            return False
        at_least = max(wanted, most)
        whole = [block for _, _, block in pool.free if block.before is None and block.after is None]
        large_enough = next((block for block in whole if block.nbytes >= at_least), None)
        if large_enough is not None:
            self._release(large_enough)
            return True
        released = 0
        for block in reversed(whole):
            if block.nbytes < most or released >= at_least:
                break
            released += block.nbytes
            self._release(block)
        return released >= at_least

    # Blocks within a segment

    def _splits(self, block: Block, wanted: int) -> bool:
        rest = block.nbytes - wanted
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        most = self.settings.max_split_bytes
        return rest > SMALL_BYTES and (most is None or wanted < most)

    def _cut(self, block: Block, nbytes: int) -> Block:
        """Shorten a block, and return the rest."""
        rest = Block(block.nbytes - nbytes, block.address + nbytes, block.pool, is_mapped=block.is_mapped)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.nbytes = rest, nbytes
        return rest

    def _merge_neighbours(self, block: Block) -> None:
        for other in (block.before, block.after):
            if other is None or not other.is_free or other.is_mapped != block.is_mapped:
                continue
            other.pool.remove(other)
            block.nbytes += other.nbytes
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.nbytes

    # Expandable segments

    def _expanded(self, pool: _Pool, wanted: int) -> Block | None:
        """Map pages behind the first free block with room for the request (`try_allocate_expandable_block`)."""
        block = self._first_with_space(pool, wanted)
        if not block.is_mapped and not self._map(block, min(block.nbytes, wanted)):
            return None
        while block.nbytes < wanted:
            after = block.after
            assert after is not None, "there is space"
            if not self._map(after, min(wanted - block.nbytes, after.nbytes)):
                return None
            block = after
        pool.remove(block)
        return block

    def _first_with_space(self, pool: _Pool, wanted: int) -> Block:
        for _, block in pool.unmapped:
            first = block.before if block.before is not None and block.before.is_free else block
            if _space(first, wanted) >= wanted:
                return first
        segment = Block(_ADDRESS_SPACE, self._next_address, pool, is_mapped=False)
        self._next_address += _ADDRESS_SPACE
        pool.put(segment)
        return segment

    def _map(self, block: Block, nbytes: int) -> bool:
        """Map pages at the beginning of an unmapped block, and merge them with free neighbours."""
        page = block.pool.page_bytes
        nbytes = min(-(-nbytes // page) * page, block.nbytes)
        if not self._has_room(nbytes):
            return False
        self._reserve(nbytes)
        block.pool.remove(block)
        if nbytes < block.nbytes:
            block.pool.put(self._cut(block, nbytes))
        block.is_mapped = True
        self._merge_neighbours(block)
        block.pool.put(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Release the whole pages inside of a free block."""
        page = block.pool.page_bytes
        begin = -(-block.address // page) * page
        end = (block.address + block.nbytes) // page * page
        if end <= begin:
            return
        block.pool.remove(block)
        if begin > block.address:
            front, block = block, self._cut(block, begin - block.address)
            front.pool.put(front)
        if end < block.address + block.nbytes:
            block.pool.put(self._cut(block, end - block.address))
        block.is_mapped = False
        self.reserved_bytes -= block.nbytes
        self._merge_neighbours(block)
        block.pool.put(block)


_ADDRESS_SPACE = 2**50 // LARGE_SEGMENT_BYTES * LARGE_SEGMENT_BYTES
"""Addresses of an expandable segment. torch uses 1.125 times the memory of the GPU."""


def _growable(block: Block) -> int:
    after = block.after
    return block.nbytes + (after.nbytes if after is not None and not after.is_mapped else 0)


def _space(block: Block | None, wanted: int) -> int:
    """Return the bytes of free and unmapped blocks from a block on, at most as many as are wanted."""
    nbytes = 0
    while nbytes < wanted and block is not None and block.is_free:
        nbytes += block.nbytes
        block = block.after
    return nbytes
