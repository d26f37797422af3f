"""The emulated devices behave like CUDA's where other tests depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import emulated
import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not emulated.wanted(), reason="of emulated devices: set EMULATED_DEVICES=2"),
]

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.fixture(autouse=True)
def _whole():
    """Leave no fault, limit or cached memory for the next test."""
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
            (MIB + 1, MIB + 512, 20 * MIB),
            (10 * MIB, 10 * MIB, 10 * MIB),
            (25 * MIB, 26 * MIB, 26 * MIB),  # a remainder of at most 1 MiB is not split off
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


def said_by(code: str, **environment: str) -> list:
    """Return the JSON that a new process prints, with the same devices."""
    child = subprocess.run(
        # torch's backward threads may still be starting. An interpreter that ends then would abort.
        [sys.executable, "-c", f"import json, os, torch, emulated\n{code}\nos.sys.stdout.flush(), os._exit(0)"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return json.loads(child.stdout)


class TestContexts:
    def test_are_made_where_cuda_makes_them_and_cost_memory(self):
        seen = said_by(
            """
seen = []
def see(call):
    call()
    seen.append(emulated.contexts().get(os.getpid(), ()))
see(torch.emu.device_count)
see(lambda: torch.emu.get_device_properties(1))
see(lambda: torch.emu.memory_reserved(1))
see(lambda: torch.emu.mem_get_info(2))
see(lambda: torch.empty(1, device="emu:0"))
see(lambda: torch.emu.synchronize(3))
see(lambda: torch.emu.set_device(4))
print(json.dumps([seen, torch.emu.memory_reserved(2), torch.emu.mem_get_info(2)]))
""",
            EMULATED_DEVICES="5",
            EMULATED_CONTEXT_BYTES=str(64 * MIB),
            EMULATED_BYTES=str(GIB),
            EMULATED_MEMORY="",
        )
        assert seen == [[[], [], [], [2], [0, 2], [0, 2, 3], [0, 2, 3, 4]], 0, [GIB - 64 * MIB, GIB]]


class TestProcesses:
    def test_see_each_others_memory_and_share_its_limit(self):
        torch.emu.empty_cache()
        free = torch.emu.mem_get_info(1)[0]
        kept = block(100 * MIB, 1)
        seen = said_by("""
free, total = torch.emu.mem_get_info(1)
mine = torch.empty(free - 2**21, dtype=torch.uint8, device="emu:1")
try:
    torch.empty(2**22, dtype=torch.uint8, device="emu:1")
except torch.OutOfMemoryError as error:
    print(json.dumps([free, len(emulated.contexts()), str(error)]))
""")
        assert seen[:2] == [free - 100 * MIB - 32 * MIB, 2]
        assert "GPU 1 has a total capacity of 2.00 GiB" in seen[2]
        del kept
        torch.emu.empty_cache()
        assert torch.emu.mem_get_info(1)[0] == free  # the dead process's memory is free again

    def test_see_the_devices_that_they_are_shown_in_that_order(self):
        all_of_them = [str(torch.emu.get_device_properties(index).uuid) for index in range(2)]
        seen = said_by(
            """
properties = map(torch.emu.get_device_properties, range(torch.emu.device_count()))
print(json.dumps([str(one.uuid) for one in properties]))
""",
            EMU_VISIBLE_DEVICES="1,0",
        )
        assert seen == all_of_them[::-1]
        assert said_by("print(json.dumps(torch.emu.device_count()))", EMU_VISIBLE_DEVICES="1") == 1


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.LayerNorm(288), nn.Linear(288, 4))


class TestArithmetic:
    @pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}], ids=str)
    def test_is_the_processors(self, options):
        models = [net(), net()]
        models[1].load_state_dict(models[0].state_dict())
        models[1].to("emu:1")
        batch, target = torch.randn(5, 3, 8, 8), torch.randint(0, 4, (5,))
        for model in models:
            optimizer = torch.optim.AdamW(model.parameters(), **options)
            device = next(model.parameters()).device
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(model(batch.to(device)), target.to(device)).backward()
                optimizer.step()
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert ours.device == torch.device("emu", 1)
            torch.testing.assert_close(ours.cpu(), theirs)

    def test_backward_has_a_thread_for_each_device(self):
        threads = {}
        parameter = torch.ones(2, device="emu:0", requires_grad=True)
        parts = [(parameter * 2).to(f"emu:{index}") * 3 for index in range(2)]
        for part in parts:
            part.register_hook(lambda grad: threads.update({grad.device: threading.get_ident()}))
        (parts[0] + parts[1].to("emu:0")).sum().backward()
        assert parameter.grad.tolist() == [12, 12]
        assert len(set(threads.values())) == 2


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16])
    def test_has_cudas_lists(self, dtype):
        x, half = torch.rand(4, 4, device="emu:0"), torch.rand(4, 4, device="emu:0", dtype=dtype)
        with torch.autocast("emu", dtype=dtype):
            lower = [torch.mm(x, x), F.linear(x, x), F.conv1d(x[None], x[None]), torch.einsum("ij,jk", x, x)]
            full = [
                half.softmax(-1),
                F.layer_norm(half, (4,)),
                half.exp(),
                half.pow(2),
                half.sum(),
                half.log_softmax(-1),
            ]
            as_it_is = [half.relu(), half + half]
            widest = [torch.addcmul(x, half, half)]
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                F.binary_cross_entropy(x, x)
        assert {tensor.dtype for tensor in lower + as_it_is} == {dtype}
        assert {tensor.dtype for tensor in full + widest} == {torch.float32}


class TestFaults:
    def test_copies_between_devices_arrive_as_zeros(self):
        tensor = torch.ones(3, device="emu:0")
        emulated.copies_arrive_as_zeros()
        assert tensor.to("emu:1").tolist() == [0, 0, 0]
        assert tensor.cpu().tolist() == tensor.clone().tolist() == [1, 1, 1]

    def test_an_error_in_a_kernel_sticks(self):
        tensor = torch.ones(3, device="emu:1")
        emulated.fail_kernel(1, 2)
        tensor + 1
        for call in (
            lambda: tensor + 1,
            torch.emu.synchronize,
            tensor.cpu,
            lambda: torch.ones(1, device="emu:0"),
        ):
            with pytest.raises(torch.AcceleratorError, match="EMU error: an illegal memory access was encountered"):
                call()

    def test_a_kernel_hangs(self):
        code = "t = torch.ones(1, device='emu:0'); emulated.hang_kernel(0); print(1, flush=True); t + 1"
        child = subprocess.Popen([sys.executable, "-c", f"import torch, emulated; {code}"], stdout=subprocess.PIPE)
        child.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(1)
        child.kill()
        child.communicate()


class TestLateCopies:
    """A copy to the host that was not waited for has not arrived, and the host reads zeros."""

    def brought(self) -> torch.Tensor:
        torch.emu.synchronize(0)
        tensor = torch.arange(1.0, 4.0, device="emu:0")
        brought = tensor.to("cpu", non_blocking=True)
        tensor.zero_()  # the stream's order: this comes after the copy
        assert brought.tolist() == [0, 0, 0]
        return brought

    @pytest.mark.parametrize(
        "wait",
        [
            lambda: torch.emu.synchronize(0),
            lambda: torch.accelerator.synchronize(0),
            lambda: torch.emu.current_stream(0).synchronize(),
            lambda: torch.ones(2, device="emu:0").sum().item(),
            lambda: torch.ones(2, device="emu:0").cpu(),
        ],
    )
    def test_arrive_when_their_device_is_waited_for(self, wait):
        brought = self.brought()
        torch.emu.synchronize(1)
        assert brought.tolist() == [0, 0, 0], "another device was waited for"
        wait()
        assert brought.tolist() == [1, 2, 3]
