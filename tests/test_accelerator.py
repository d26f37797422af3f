"""Real GPUs: what of their runtime is plain logic, and, where there are some, what they really do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from workloads import char_gpt, small

from autosplit.balanced import BalancedDataParallel
from autosplit.devices import parse_devices
from autosplit.oom import OutOfMemoryError
from autosplit.probe import find_ceiling
from autosplit.runtime.accelerator import AcceleratorRuntime, _failed_gpu
from autosplit.runtime.measurement import StepShape
from autosplit.tuning import tune

GPUS = [torch.device("cuda", 2), torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("error", "position"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"), 1),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of"), 0),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of"), None),
        (RuntimeError("CUDA error: out of memory"), None),
        (OutOfMemoryError("full", device="cuda:0"), 1),
        (OutOfMemoryError("full on GPU 0", device="cuda:7"), None),
        (OutOfMemoryError("GPU 2 is full"), 0),
    ],
)
def test_the_gpu_that_is_full_is_found_in_the_message(error, position):
    assert _failed_gpu(error, GPUS) == position


class FakeAllocator:
    """torch.cuda, as far as a confirming run asks it."""

    def __init__(self, monkeypatch, retries=()):
        self.retries = list(retries)
        self.count = 0
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda gpu: {"num_alloc_retries": self.count})

    def step(self, _mark):
        self.count += self.retries.pop(0) if self.retries else 0


def bare_runtime() -> AcceleratorRuntime:
    device = parse_devices("sim:RTX3090")[0]
    return AcceleratorRuntime((device,), (2**30,), small())


class TestWallsThatDoNotRaise:
    @pytest.mark.parametrize(
        ("retries", "full"), [((3, 0, 0), False), ((0, 1, 0), False), ((1, 1, 1), True), ((0, 1, 2), True)]
    )
    def test_the_allocator_has_to_give_back_in_two_steps(self, retries, full, monkeypatch):
        """The first step may: what it frees is the cache of before."""
        allocator, runtime = FakeAllocator(monkeypatch, retries), bare_runtime()
        if full:
            with pytest.raises(OutOfMemoryError, match="had to give back memory in two steps"):
                runtime._confirm(allocator.step, StepShape(((4,),)))
        else:
            runtime._confirm(allocator.step, StepShape(((4,),)))

    def test_steps_that_are_suddenly_slow(self, monkeypatch):
        """Memory that spills to the host slows each sample down many times over, and raises nothing."""
        allocator, runtime = FakeAllocator(monkeypatch), bare_runtime()
        now_s = [0.0]
        monkeypatch.setattr("autosplit.runtime.cuda.time.perf_counter", lambda: now_s[0])

        def confirm(samples, pace_s):
            def step(mark):
                allocator.step(mark)
                now_s[0] += pace_s * samples

            runtime._confirm(step, StepShape(((samples,),)))

        confirm(4, 0.01)
        confirm(8, 0.01)
        confirm(64, 0.02)
        with pytest.raises(OutOfMemoryError, match="5 times as long for each sample"):
            confirm(128, 0.05)


def cuda_runtime(spec: str, workload) -> AcceleratorRuntime:
    devices = parse_devices(spec)
    return AcceleratorRuntime(devices, tuple(device.capacity_bytes for device in devices), workload)


def fits(workload, n: int, capacity_bytes: int) -> bool:
    devices = parse_devices("cuda:0")
    runtime = AcceleratorRuntime(devices, (capacity_bytes,), workload)
    try:
        runtime.peaks(StepShape(((n,),)))
    except OutOfMemoryError:
        return False
    finally:
        runtime.close()
    return True


needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
class TestOneGpu:
    @pytest.mark.timeout(600)
    def test_the_main_job_end_to_end(self):
        workload = char_gpt()
        before = {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}
        torch.cuda.init()
        allocated, generator = torch.cuda.memory_allocated(0), torch.cuda.get_rng_state(0)
        plan = tune(workload, devices="cuda:0", effective_batch_size=2048, max_batch_size=1024, profile="off")
        assert sum(plan.split) == plan.batch_size
        assert all(device.peak_bytes <= device.capacity_bytes for device in plan.devices)
        after = workload.model.state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        assert {parameter.device.type for parameter in workload.model.parameters()} == {"cpu"}
        assert torch.cuda.memory_allocated(0) == allocated
        assert torch.equal(torch.cuda.get_rng_state(0), generator)

    @pytest.mark.timeout(600)
    def test_a_ceiling_is_within_2_percent_of_brute_force(self):
        workload = char_gpt()
        total = torch.cuda.get_device_properties(0).total_memory
        capacity = parse_devices("cuda:0")[0].capacity_bytes
        room = 3 * 2**30
        found = find_ceiling(workload, "cuda:0", role="primary", reserve=capacity - room)
        assert found.confirmed
        assert found.capacity_bytes == room < total
        low, high = found.batch_size, 2 * found.batch_size
        while high - low > max(1, found.batch_size // 200):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(workload, middle, room) else (low, middle)
        assert fits(workload, found.batch_size, room)
        assert found.batch_size >= 0.98 * low

    def test_the_full_gpu_is_named_and_the_next_step_runs(self):
        runtime = cuda_runtime("cuda:0", char_gpt())
        runtime.capacities_bytes = (512 * 2**20,)
        with pytest.raises(OutOfMemoryError, match="cuda:0") as caught:
            runtime.peaks(StepShape(((8192,),)))
        assert (caught.value.device, caught.value.device_index) == ("cuda:0", 0)
        assert 0 < runtime.peaks(StepShape(((8,),)))[0] <= 512 * 2**20
        runtime.close()

    def test_a_measured_step(self):
        runtime = cuda_runtime("cuda:0", small())
        found = runtime.measure(StepShape(((8,), (8,))), budget_s=0.1)
        assert found.seconds > found.update_s > 0
        assert found.peak_bytes[0] > 0
        runtime.close()


@pytest.mark.gpu
@needs_two
class TestTwoGpus:
    @pytest.mark.parametrize("split", [(2, 6), (6, 2), (0, 8), (8, 0)])
    def test_gradients_are_those_of_the_whole_batch(self, split):
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5)).double().to("cuda:0")
        x, y = torch.randn(8, 16, dtype=torch.double, device="cuda:0"), torch.randint(0, 5, (8,), device="cuda:0")
        plain = copy.deepcopy(model)
        F.cross_entropy(plain(x), y).backward()
        wrapped = BalancedDataParallel(None, model, ["cuda:0", "cuda:1"], split=split)
        F.cross_entropy(wrapped(x), y).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12) for one, other in pairs)

    @pytest.mark.timeout(600)
    def test_tuned_over_both(self):
        workload = char_gpt()
        plan = tune(workload, devices="cuda:0,1", effective_batch_size=2048, max_batch_size=1024, profile="off")
        assert sum(plan.split) == plan.batch_size
        assert all(device.peak_bytes <= device.capacity_bytes for device in plan.devices)
