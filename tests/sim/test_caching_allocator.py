"""The model of torch's caching allocator. `benchmarks/allocator.py` compares it with torch's own."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from gpus import card
from hypothesis import given
from hypothesis import strategies as st

from autosplit.accelerators import backend
from autosplit.sim.allocator_settings import MIB, AllocatorSettings
from autosplit.sim.caching_allocator import AllocationError, Block, CachingAllocator
from autosplit.sim.simulated import notes_on

KINDS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:[1:2,4:8,>:4]",
)


def allocator(text: str = "", limit_mib: int | None = None) -> CachingAllocator:
    return CachingAllocator(limit_mib and limit_mib * MIB, AllocatorSettings.parsed(text))


class TestSegments:
    @pytest.mark.parametrize(
        ("nbytes", "reserved"),
        [
            (1, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 1, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (21 * MIB, 22 * MIB),
        ],
    )
    def test_have_the_sizes_of_torch(self, nbytes, reserved):
        made = allocator()
        made.allocate(nbytes)
        assert made.reserved_bytes == reserved

    def test_a_freed_block_that_is_too_small_is_no_help(self):
        """The example of Note [Reserved memory]."""
        made = allocator()
        made.free(made.allocate(12 * MIB))
        made.allocate(14 * MIB)
        assert made.reserved_bytes == 26 * MIB
        assert made.max_allocated_bytes == 14 * MIB

    def test_expandable_segments_grow_by_pages(self):
        made = allocator("expandable_segments:True")
        made.free(made.allocate(12 * MIB))
        made.allocate(14 * MIB)
        assert made.reserved_bytes == 20 * MIB
        made.allocate(20 * MIB)
        assert made.reserved_bytes == 40 * MIB

    def test_the_smallest_free_block_that_fits_is_used(self):
        made = allocator()
        blocks = [made.allocate(size * MIB) for size in (40, 30, 50)]
        for block in blocks:
            made.free(block)
        assert made.allocate(25 * MIB).address == blocks[1].address

    def test_neighbours_merge(self):
        made = allocator()
        blocks = [made.allocate(5 * MIB) for _ in range(4)]
        assert made.reserved_bytes == 20 * MIB
        for block in (blocks[0], blocks[2], blocks[1]):
            made.free(block)
        assert made.allocate(15 * MIB).address == 0
        assert made.reserved_bytes == 20 * MIB

    def test_up_to_one_mib_of_a_large_block_is_not_split_off(self):
        made = allocator()
        made.free(made.allocate(12 * MIB))
        made.allocate(11 * MIB)
        assert made.allocated_bytes == 12 * MIB

    def test_oversize_blocks_are_kept_whole(self):
        made = allocator("max_split_size_mb:32")
        made.free(made.allocate(64 * MIB))
        made.allocate(16 * MIB)
        assert made.reserved_bytes == 80 * MIB
        made.allocate(50 * MIB)  # less than 20 MiB smaller
        assert made.reserved_bytes == 80 * MIB


class TestFull:
    def test_cached_segments_are_released_first(self):
        made = allocator(limit_mib=30)
        made.free(made.allocate(20 * MIB))
        made.allocate(30 * MIB)
        assert (made.retries, made.reserved_bytes) == (1, 30 * MIB)

    def test_segments_in_use_are_not(self):
        made = allocator(limit_mib=30)
        made.allocate(2 * MIB)
        with pytest.raises(AllocationError):
            made.allocate(20 * MIB)

    def test_expandable_segments_give_back_pages(self):
        made = allocator("expandable_segments:True", limit_mib=60)
        first, second = made.allocate(40 * MIB), made.allocate(20 * MIB)
        made.free(first)
        made.empty_cache()
        assert made.reserved_bytes == 20 * MIB
        made.free(second)
        made.empty_cache()
        assert made.reserved_bytes == 0

    def test_without_a_cache_nothing_is_kept(self):
        made = CachingAllocator(None, AllocatorSettings(caches=False))
        made.free(made.allocate(3 * MIB))
        assert (made.reserved_bytes, made.max_reserved_bytes) == (0, 3 * MIB)


class TestSettings:
    def test_are_those_of_the_environment(self):
        of = AllocatorSettings.of_environment
        assert of({}) == AllocatorSettings()
        assert of({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}).expandable_segments
        both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}
        assert of(both).max_split_bytes == 64 * MIB
        assert not of({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}).caches

    @pytest.mark.parametrize("text", ["", "nonsense", "max_split_size_mb:all", "backend:native", "a:b:c,,"])
    def test_unknown_settings_are_ignored(self, text):
        assert AllocatorSettings.parsed(text) == AllocatorSettings()

    @pytest.mark.parametrize("text", ["backend:cudaMallocAsync", "garbage_collection_threshold:0.6"])
    def test_settings_that_change_the_memory_are_named(self, text):
        (note,) = notes_on(AllocatorSettings.parsed(f"{text},max_split_size_mb:64"))
        assert note.kind == "allocator-settings"
        assert text in note.text
        assert notes_on(AllocatorSettings.parsed("max_split_size_mb:64")) == ()

    @pytest.mark.parametrize(
        ("text", "nbytes", "rounded"),
        [
            ("roundup_power2_divisions:4", 1200 * 1024, 1280 * 1024),
            ("roundup_power2_divisions:4", MIB, MIB),
            ("roundup_power2_divisions:4", 513, 1024),
            ("roundup_power2_divisions:[1:2,4:8,>:4]", 1200 * 1024, 1536 * 1024),
            ("roundup_power2_divisions:[1:2,4:8,>:4]", 3 * MIB - 1, 3 * MIB),
            ("roundup_power2_divisions:[1:2,4:8,>:4]", 9 * MIB, 10 * MIB),
            ("", 1200 * 1024 + 1, 1200 * 1024 + 512),
        ],
    )
    def test_round_sizes(self, text, nbytes, rounded):
        assert AllocatorSettings.parsed(text).rounded(nbytes) == rounded


def operations(draw: random.Random, count: int) -> list[tuple[str, int, int]]:
    """Return random allocations, each with a number and its bytes, and frees with the number of the allocation."""
    found: list[tuple[str, int, int]] = []
    live: list[int] = []
    for number in range(count):
        if live and draw.random() < 0.45:
            found.append(("free", live.pop(draw.randrange(len(live))), 0))
        else:
            found.append(("allocate", number, int(2 ** draw.uniform(9, 25.5))))
            live.append(number)
    return found


@given(st.integers(0, 2**32), st.sampled_from(KINDS))
def test_no_two_blocks_overlap(seed, text):
    made = allocator(text)
    live: dict[int, Block] = {}
    for what, number, nbytes in operations(random.Random(seed), 120):
        if what == "free":
            made.free(live.pop(number))
        else:
            live[number] = made.allocate(nbytes)
        placed = sorted(live.values(), key=lambda b: b.address)
        assert sum(b.nbytes for b in placed) == made.allocated_bytes <= made.reserved_bytes
        assert all(one.address + one.nbytes <= other.address for one, other in itertools.pairwise(placed))
    for block in live.values():
        made.free(block)
    made.empty_cache()
    assert made.reserved_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_reserves_what_the_device_reserves(seed):
    """If two free blocks are equally large, the driver's addresses decide. Then the rest is not compared."""
    device = card(0)
    module = backend(device.type)
    module.empty_cache()
    base = module.memory_reserved(device), module.memory_allocated(device)
    made = allocator()
    tensors: dict[int, torch.Tensor] = {}
    blocks: dict[int, Block] = {}
    compared = 0
    for what, number, nbytes in operations(random.Random(seed), 200):
        if what == "free":
            del tensors[number]
            made.free(blocks.pop(number))
        elif _is_ambiguous(made, nbytes):
            break
        else:
            tensors[number] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            blocks[number] = made.allocate(nbytes)
        found = module.memory_reserved(device) - base[0], module.memory_allocated(device) - base[1]
        assert found == (made.reserved_bytes, made.allocated_bytes)
        compared += 1
    assert compared > 20


def _is_ambiguous(made: CachingAllocator, nbytes: int) -> bool:
    wanted = made.settings.rounded(nbytes)
    sizes = [size for size, _, _ in made._pools[wanted <= MIB].free if size >= wanted]
    return len(sizes) > 1 and sizes[0] == sizes[1]
