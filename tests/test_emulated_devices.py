"""The emulated devices themselves: that they behave as CUDA's do, where tests of other files rely on it."""

from __future__ import annotations

import emulated
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not emulated.wanted(), reason="of emulated devices: set EMULATED_DEVICES=2"),
]

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.fixture(autouse=True)
def _whole():
    """Leave no fault, no limit and no cached memory to the next test."""
    torch.emu.empty_cache()
    yield
    emulated.mend()
    emulated.workspaces(0)
    for device in range(2):
        torch.emu.set_per_process_memory_fraction(1.0, device)
    torch.emu.empty_cache()


def block(size_bytes: int, device: int = 0) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=f"emu:{device}")


def held(device: int = 0) -> tuple[int, int]:
    return torch.emu.memory_allocated(device), torch.emu.memory_reserved(device)


class TestAllocator:
    @pytest.mark.parametrize(
        ("wanted", "allocated", "reserved"),
        [
            (1, 512, 2 * MIB),
            (513, 1024, 2 * MIB),
            (MIB, MIB, 2 * MIB),
            (MIB + 1, MIB + 512, 20 * MIB),
            (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB, 10 * MIB),
            (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
            (25 * MIB, 26 * MIB, 26 * MIB),  # a rest of no more than 1 MiB is not split off
        ],
    )
    def test_sizes_are_cudas(self, wanted, allocated, reserved):
        before = held()
        kept = block(wanted)
        assert (held()[0] - before[0], held()[1] - before[1]) == (allocated, reserved)
        del kept
        assert held() == (before[0], before[1] + reserved)  # kept for the next
        torch.emu.empty_cache()
        assert held() == before

    def test_the_smallest_free_block_is_taken_split_and_put_together_again(self):
        start = held()[1]
        parts = [block(4 * MIB) for _ in range(5)]
        assert held()[1] - start == 20 * MIB
        first = parts[0].data_ptr()
        assert [part.data_ptr() - first for part in parts] == [4 * MIB * index for index in range(5)]
        parts[1:4] = [None] * 3
        parts.append(block(12 * MIB))
        assert parts[-1].data_ptr() - first == 4 * MIB
        assert held()[1] - start == 20 * MIB

    def test_a_segment_is_given_back_only_whole(self):
        start = held()[1]
        one, other = block(4 * MIB), block(4 * MIB)
        del one
        torch.emu.empty_cache()
        assert held()[1] - start == 20 * MIB
        del other
        torch.emu.empty_cache()
        assert held()[1] == start

    def test_peaks_and_their_reset(self):
        torch.emu.reset_peak_memory_stats(0)
        start = held()
        block(30 * MIB)
        assert torch.emu.max_memory_allocated(0) == start[0] + 30 * MIB
        torch.emu.empty_cache()
        torch.emu.reset_peak_memory_stats(0)
        assert (torch.emu.max_memory_allocated(0), torch.emu.max_memory_reserved(0)) == held() == start
        assert torch.accelerator.max_memory_allocated(0) == start[0]

    def test_before_it_gives_up_it_gives_back_what_is_cached_and_counts_it(self):
        free, total = torch.emu.mem_get_info(0)
        room = total - free + 32 * MIB
        with emulated.memory(room):
            before = torch.emu.memory_stats(0)
            block(20 * MIB)
            kept = block(30 * MIB)
            after = torch.emu.memory_stats(0)
            assert after["num_alloc_retries"] - before["num_alloc_retries"] == 1
            assert after["num_ooms"] == before["num_ooms"]
            with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate 20\.00 MiB\. GPU 0"):
                block(20 * MIB)
            assert torch.emu.memory_stats(0)["num_ooms"] - before["num_ooms"] == 1
            assert torch.emu.mem_get_info(0) == (2 * MIB, room)
            del kept

    def test_a_fraction_bounds_this_process(self):
        torch.emu.set_per_process_memory_fraction(0.05, 0)
        assert torch.emu.get_per_process_memory_fraction(0) == 0.05
        with pytest.raises(torch.OutOfMemoryError, match=r"102\.40 MiB allowed"):
            block(110 * MIB)
        block(110 * MIB, 1)

    def test_an_allocation_fails_by_order(self):
        emulated.fail_allocation(1, 2)
        block(KIB, 1)
        with pytest.raises(torch.OutOfMemoryError, match="GPU 1"):
            block(KIB, 1)
        block(KIB, 1)
