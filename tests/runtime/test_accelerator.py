"""Real steps on accelerators: plain logic of their worker, and steps on real or emulated devices."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import emulated
import pytest
import torch
from folders import TESTS
from gpus import KIND, WORKSPACE_BYTES
from noted import kinds
from torch import nn
from torch.nn import functional as F
from workloads import mlp, small

from autosplit.accelerators import accelerator_kind, backend
from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.oom import OutOfMemoryError
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.probe.primary_memory import primary_fit
from autosplit.probe.prober import Prober
from autosplit.runtime import accelerator
from autosplit.runtime.accelerator import AcceleratorWorker
from autosplit.runtime.cpu import CpuWorker
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import Facts, StepMemory, StepShape
from autosplit.solve.memory import Ceiling, MemoryFit
from autosplit.tuning.tune import tune
from autosplit.workload.workload import Workload

MIB = 2**20


class FakeBackEnd:
    """A back end with one device and the calls that a confirming run makes."""

    def __init__(self, monkeypatch, retries=(), free_bytes=2**30) -> None:
        self.left, self.count, self.free_bytes, self.share = list(retries), 0, free_bytes, 1.0
        self.shares: list[float] = []
        self.steps = 0
        monkeypatch.setattr(accelerator, "backend", lambda _kind: self)

    def step(self, _mark):
        self.steps += 1
        self.count += self.left.pop(0) if self.left else 0

    def synchronize(self, _gpu):
        """Every step has finished when its call returns."""

    def memory_stats(self, _gpu):
        return {"num_alloc_retries": self.count}

    def mem_get_info(self, _gpu):
        return self.free_bytes, 2**30

    def max_memory_allocated(self, _gpu):
        return 2**29

    def max_memory_reserved(self, _gpu):
        return 2**30

    def get_device_properties(self, _gpu):
        return SimpleNamespace(total_memory=2**30)

    def get_per_process_memory_fraction(self, _gpu):
        return self.share

    def set_per_process_memory_fraction(self, share, _gpu):
        if not 0 <= share <= 1:
            raise ValueError(f"Invalid fraction value: {share}. Allowed range: 0~1")
        self.share = share
        self.shares.append(share)

    def empty_cache(self):
        pass

    def reset_peak_memory_stats(self, _gpu):
        pass


def bare_worker() -> AcceleratorWorker:
    worker = AcceleratorWorker((Device("cuda", 0, "NVIDIA RTX 3090", 2**30),), (2**29,), small())
    worker.capacities_bytes = (2**29,)  # without a GPU there is no driver
    return worker


class TestWallsThatDoNotRaise:
    @pytest.mark.parametrize(
        ("retries", "steps"),
        [
            ((3, 0, 0), 3),
            ((3, 1, 0), 3),
            ((0, 0, 1), 4),
            ((0, 1, 2, 0), 4),
            ((0, 1, 2, 1), None),
            ((0, 0, 1, 1, 1), None),
        ],
    )
    def test_the_allocator_has_to_give_back_in_three_steps(self, retries, steps, monkeypatch):
        """The first step may also free memory, because kernels are chosen in it.

        On an H200, the second step of a BERT freed memory again, and the third step did not. Its ceiling was too low.
        """
        back_end = FakeBackEnd(monkeypatch, retries)
        worker = bare_worker()
        if steps is None:
            with pytest.raises(OutOfMemoryError, match="in 3 consecutive steps"):
                worker._confirm(back_end.step, StepShape(((4,),)))
        else:
            assert worker._confirm(back_end.step, StepShape(((4,),))) == StepMemory((2**29,), (2**30,))
            assert back_end.steps == steps

    def test_trials_are_watched_as_well(self, monkeypatch):
        """A configuration that freed memory in each step was timed, and could become the answer."""
        back_end = FakeBackEnd(monkeypatch, [0] * 4 + [1] * 100)
        worker = bare_worker()
        monkeypatch.setattr(worker, "_within_bounds", lambda _shape, use: use(back_end.step))
        monkeypatch.setattr(worker, "wait", lambda: None)
        with pytest.raises(OutOfMemoryError, match="in 3 consecutive steps"):
            worker.measure(StepShape(((4,),)), budget_s=0.1)

    @pytest.mark.parametrize("free_bytes", [0, 2**29])
    def test_steps_that_are_suddenly_slow(self, free_bytes, monkeypatch):
        """Memory that spills to the host slows each sample down many times, and raises no error.

        A loss over the whole batch is slower, too. If the driver has free memory, nothing spilled.
        """
        back_end = FakeBackEnd(monkeypatch, free_bytes=free_bytes)
        worker, now_s = bare_worker(), [0.0]
        monkeypatch.setattr("autosplit.runtime.accelerator.time.perf_counter", lambda: now_s[0])

        def confirm(samples, pace_s):
            def step(mark):
                back_end.step(mark)
                now_s[0] += pace_s * samples

            worker._confirm(step, StepShape(((samples,),)))

        confirm(4, 0.01)
        confirm(64, 0.02)
        if free_bytes:
            confirm(128, 0.05)
        else:
            with pytest.raises(OutOfMemoryError, match="5 times as long"):
                confirm(128, 0.05)


@pytest.mark.parametrize(("own", "bound"), [(1.0, 0.5), (0.25, 0.25)])
def test_the_users_own_limit_is_not_raised(own, bound, monkeypatch):
    """For a user's limit of 25% of a GPU, tuning used all free memory of the GPU."""
    back_end = FakeBackEnd(monkeypatch)
    back_end.share = own
    with bare_worker()._bounded():
        assert back_end.share == bound
    assert back_end.share == own


def test_an_allocator_that_was_never_limited(monkeypatch):
    """cudaMallocAsync reports a limit of 2**64 bytes. Setting it again as a fraction ended every step."""
    back_end = FakeBackEnd(monkeypatch)
    back_end.share = (2.0**64 - 1) / 2**30
    with bare_worker()._bounded():
        assert back_end.share == 0.5
    assert back_end.share == 1.0


class Twins(AcceleratorWorker):
    """Two equal accelerators. The first also holds 2 KiB for each sample of the whole batch.

    Args:
        capacity_bytes: Memory of each device.
    """

    def __init__(self, capacity_bytes: int = 2**40) -> None:
        self.devices = tuple(Device("cuda", index, "A", 2**40) for index in range(2))
        self.capacities_bytes = (capacity_bytes,) * 2
        self.splits: list[tuple[int, ...]] = []

    def facts(self):
        return Facts()

    def memory(self, shape):
        split = shape.splits[0]
        self.splits.append(split)
        held = 3 * MIB + 8192 * split[0] + 2048 * sum(split), 3 * MIB + 8192 * split[1]
        if max(held) > self.capacities_bytes[0]:
            raise OutOfMemoryError("a device is full")
        return StepMemory(held, held)


def test_device_0s_plane_has_the_slope_of_real_steps():
    """A CPU trace of attention with dropout keeps four times the bytes of a GPU's.

    Of two equal GPUs that fit 2048 samples each, device 0 was limited to 862 next to the other. So no trace is used.
    """
    prober = Prober(Twins(), small(), 10_000)
    alone = Ceiling("cuda:0", "primary", 2048, "memory", 3 * MIB, 10_240, 24_117_248, 2**40)
    fit = primary_fit(prober, alone, 256, (256,), accumulates=False)
    assert prober.worker.splits == [(64, 64), (128, 64), (64, 128)]
    for split in ((64, 200), (200, 64), (256, 256)):
        real = prober.worker.memory(StepShape((split,))).allocated_bytes[0]
        assert fit.peak_bytes(split[0], sum(split)) == pytest.approx(real)


def test_device_0s_plane_counts_all_samples_where_a_step_of_both_does_not_fit():
    prober = Prober(Twins(4 * MIB), small(), 10_000)
    alone = Ceiling("cuda:0", "primary", 100, "memory", 3 * MIB, 10_240, 4 * MIB, 4 * MIB)
    fit = primary_fit(prober, alone, 256, (256,), accumulates=False)
    assert fit == MemoryFit(3 * MIB, 10_240, 10_240)
    assert prober.ooms == 1


# --------------------------------------------------------------------------------------- on real or emulated devices


@contextmanager
def running(spec: str, workload, capacity_bytes: int | None = None):
    devices = parse_devices(spec)
    capacities = tuple(capacity_bytes or device.capacity_bytes for device in devices)
    worker = AcceleratorWorker(devices, capacities, workload)
    try:
        yield worker
    finally:
        worker.close()


def fits(workload, n: int, capacity_bytes: int) -> bool:
    with running(f"{KIND}:0", workload, capacity_bytes) as worker:
        try:
            worker.peaks(StepShape(((n,),)))
        except OutOfMemoryError:
            return False
    return True


def room(spec: str, nbytes: int) -> int:
    """Return the reserve that leaves so much of a device. A context that is created later would need some of it."""
    torch.empty(1, device=spec)
    return parse_devices(spec)[0].capacity_bytes - nbytes


needs_two = pytest.mark.skipif(
    accelerator_kind() is None or backend(KIND).device_count() < 2, reason="needs two accelerators"
)
needs_emulated = pytest.mark.skipif(KIND != "emu", reason="orders a fault, which only emulated devices take")


class OnItsDevice(nn.Module):
    """Creates a tensor on the accelerator, wherever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x) + torch.ones(64, device=KIND)


class Asking(OnItsDevice):
    """Also reads a value, which only a real step has."""

    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > -1e9 else 2.0)


def on_its_device(kind: type[nn.Module]) -> Workload:
    batch = torch.randn(4, 64), torch.randint(0, 64, (4,))
    return Workload(kind(), batch, loss_fn=F.cross_entropy, optimizer=torch.optim.AdamW)


@pytest.mark.gpu
class TestOneDevice:
    @pytest.mark.timeout(600)
    def test_the_main_job_end_to_end(self):
        workload, module = mlp(), backend(KIND)
        before = {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}
        module.init()
        allocated, generator = module.memory_allocated(0), module.get_rng_state(0)
        plan = tune(
            workload, devices=f"{KIND}:0", effective_batch_size=64, max_batch_size=32, profile="off", n_trials=2
        )
        assert sum(plan.split) == plan.batch_size
        assert all(seat.peak_bytes <= seat.device.capacity_bytes for seat in plan.main.seats)
        after = workload.model.state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        assert {parameter.device.type for parameter in workload.model.parameters()} == {"cpu"}
        assert 0 <= module.memory_allocated(0) - allocated <= WORKSPACE_BYTES
        assert torch.equal(module.get_rng_state(0), generator)

    @pytest.mark.timeout(600)
    @pytest.mark.skipif(KIND == "emu", reason="tests/probe/test_emulated_ceilings.py compares many more")
    def test_a_ceiling_is_within_3_percent_of_brute_force(self):
        workload, limit_bytes = mlp(), 96 * MIB + WORKSPACE_BYTES
        found = find_ceiling(workload, f"{KIND}:0", role="primary", reserve=room(f"{KIND}:0", limit_bytes))
        assert found.confirmed
        assert found.capacity_bytes == limit_bytes
        assert found.steps <= 24
        low, high = found.batch_size, int(1.5 * found.batch_size)
        while high - low > max(1, found.batch_size // 100):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(workload, middle, limit_bytes) else (low, middle)
        assert fits(workload, found.batch_size, limit_bytes)
        assert found.batch_size >= 0.96 * low

    @needs_emulated
    def test_what_was_free_before_its_context_is_no_room_for_steps(self):
        """NVML reports the memory without a CUDA context."""
        devices = parse_devices("emu:0", ask_memory=False)
        reserve_bytes = 2**20
        module = backend(KIND)
        capacities = (devices[0].capacity_bytes - reserve_bytes,)
        held_bytes = module.memory_reserved(0)
        there_bytes = AcceleratorWorker(devices, capacities, mlp()).capacities_bytes
        assert there_bytes == (module.mem_get_info(0)[0] + held_bytes - reserve_bytes,)
        module.set_per_process_memory_fraction(0.25, 0)  # the user's own limit leaves no more memory
        try:
            assert AcceleratorWorker(devices, capacities, mlp()).capacities_bytes == (devices[0].capacity_bytes // 4,)
        finally:
            module.set_per_process_memory_fraction(1.0, 0)

    def test_the_full_device_is_named_and_the_next_step_runs(self):
        limit_bytes = 32 * MIB + WORKSPACE_BYTES
        with running(f"{KIND}:0", mlp(), limit_bytes) as worker:
            with pytest.raises(OutOfMemoryError, match=f"{KIND}:0") as caught:
                worker.peaks(StepShape(((limit_bytes // 256,),)))
            assert (caught.value.device, caught.value.device_index) == (f"{KIND}:0", 0)
            assert 0 < worker.peaks(StepShape(((8,),)))[0] <= limit_bytes

    @needs_emulated
    def test_an_optimizer_that_ran_out_of_memory_half_way_starts_anew(self):
        """The next step raised KeyError: 'exp_avg_sq', and the user's code was blamed."""
        with running("emu:0", mlp()) as worker:
            step = AcceleratorWorker._guarded

            def failing(self, run, shape):
                def broken():
                    update = torch.optim.AdamW.step

                    def out_of_memory(optimizer, *args):
                        emulated.fail_allocation(0, 3)
                        return update(optimizer, *args)

                    torch.optim.AdamW.step = out_of_memory
                    try:
                        return run()
                    finally:
                        torch.optim.AdamW.step = update

                return step(self, broken, shape)

            worker._guarded = failing.__get__(worker)
            with pytest.raises(OutOfMemoryError):
                worker.peaks(StepShape(((8,),)))
            del worker._guarded
            assert worker.peaks(StepShape(((4,),)))[0] > 0

    def test_its_batches_are_pinned(self, monkeypatch):
        """Pageable batches took 10% to 30% of an image model's step, on one GPU after another."""
        ran = []
        step = lambda _trainee, _models, batches, *_, **__: ran.extend(batches)
        with running(f"{KIND}:0", small()) as worker:
            monkeypatch.setattr("autosplit.runtime.trainee.Trainee.step", step)
            worker._prepared(StepShape(((8,),)))(lambda _phase: None)
        inputs, targets = ran[0]
        assert inputs.is_pinned()
        assert targets.is_pinned()

    @needs_emulated
    @pytest.mark.parametrize("samples", [2, 2048])
    def test_a_ranks_gradients_lie_in_its_buckets(self, samples):
        """They counted in addition to the buckets. With DDP's views that is too much by the size of the parameters."""
        model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
        workload = Workload(model, torch.randn(4, 512), optimizer=torch.optim.SGD)
        shape = StepShape(((samples,),), "rank", num_ranks=2)
        on_cpu = CpuWorker(parse_devices("cpu:1GiB"), (2**30,), training_copy(workload), 4096)
        with running("emu:0", workload) as worker:
            assert worker.peaks(shape)[0] == pytest.approx(on_cpu.predicted(shape)[0].total_bytes, rel=0.02)

    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_half_precision_has_the_optimizers_state(self, precision):
        workload = small(precision=precision)
        with running(f"{KIND}:0", workload) as worker:
            worker.peaks(StepShape(((8,),)))
            assert all(state for state in worker._trainee.optimizers.given.state.values())
            assert worker._trainee.optimizers.given.state

    def test_a_model_that_makes_tensors_on_the_device_is_not_run_elsewhere(self):
        """A UserCodeError reported a failure on the CPU, but the model was never meant to run there."""
        found = find_ceiling(on_its_device(OnItsDevice), f"{KIND}:0", role="primary", max_batch_size=256)
        assert (found.batch_size, found.confirmed, found.notes) == (256, True, ())

    def test_a_model_that_reads_values_needs_nothing_but_real_steps(self):
        reserve = room(f"{KIND}:0", 48 * MIB + WORKSPACE_BYTES)
        found = find_ceiling(on_its_device(Asking), f"{KIND}:0", role="primary", reserve=reserve)
        assert found.batch_size > 1000
        assert (found.confirmed, found.notes) == (True, ())
        plan = tune(on_its_device(Asking), devices=f"{KIND}:0", max_batch_size=16, n_trials=1, profile="off")
        assert plan.batch_size >= 1

    def test_a_model_that_is_there_already_counts_once(self):
        """autosplit made a second copy there, and found a ceiling that was too low by the model."""
        found = []
        for home in ("cpu", f"{KIND}:0"):
            reserve = room(f"{KIND}:0", 64 * MIB + WORKSPACE_BYTES)
            workload = live(home)
            before = state_of(workload.model)
            ceiling = find_ceiling(workload, f"{KIND}:0", role="primary", reserve=reserve)
            assert ceiling.confirmed
            assert "model-on-device" not in kinds(ceiling.notes)
            assert state_of(workload.model) == before
            found.append(ceiling.batch_size)
        assert found[0] > 500
        assert found[1] == pytest.approx(found[0], rel=0.01)  # the allocator may place blocks differently

    def test_a_model_that_is_there_already_and_has_no_copy_counts_once(self):
        """deepcopy rejects results of operators, such as the weight of `torch.nn.utils.weight_norm`."""
        peaks = []
        for home in ("cpu", f"{KIND}:0"):
            workload = live(home)
            workload.model.computed = workload.model[0].bias[:2] * 2
            before = state_of(workload.model)
            with running(f"{KIND}:0", workload) as worker:
                peaks.append(worker.peaks(StepShape(((4,),)))[0])
                assert state_of(workload.model) != before
            assert state_of(workload.model) == before
        assert peaks[1] == pytest.approx(peaks[0], rel=0.01)

    def test_a_model_that_is_there_already_gets_its_values_back_after_an_error(self):
        workload = live(f"{KIND}:0")
        before = state_of(workload.model)
        ran = []

        def fails(model, batch):
            ran.append(state_of(model.module if hasattr(model, "module") else model))
            if len(ran) == 5:
                raise ArithmeticError("no")
            return F.cross_entropy(model(batch[0]), batch[1])

        worker = AcceleratorWorker(
            parse_devices(f"{KIND}:0"), (64 * MIB,), replace(workload, compute_loss=fails, loss_fn=None)
        )
        worker.peaks(StepShape(((4,),)))
        with pytest.raises(ArithmeticError):
            worker.measure(StepShape(((4,),)), budget_s=0.5)
        assert ran[-1] != before  # the copy trained the live memory
        worker.close()
        assert state_of(workload.model) == before

    def test_optimizer_states_that_are_there_already_are_said_with_their_bytes(self):
        model = nn.Linear(1024, 1024, bias=False).to(f"{KIND}:0")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 1024, device=f"{KIND}:0")).sum().backward()
        optimizer.step()
        found = find_ceiling(Workload(model, torch.randn(4, 1024), optimizer=optimizer), f"{KIND}:0", max_batch_size=8)
        said = f"Optimizer states are already on {KIND}:0 and take 8 MiB there"
        assert any(said in str(note) for note in found.notes), [*map(str, found.notes)]


def live(home: str) -> Workload:
    """Return a workload whose model has weights, buffers, tied weights and an expanded buffer on a device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    model[3].weight = model[2].weight
    model.register_buffer("expanded", torch.ones(1, 8).expand(4, 8))
    batch = torch.randn(4, 1024), torch.randint(0, 1024, (4,))
    return Workload(model.to(home), batch, F.cross_entropy, optimizer=torch.optim.AdamW)


def state_of(module: nn.Module) -> list[tuple[int, int, int, str]]:
    """Return the identity, place and version of each tensor, and a hash of its bytes."""
    tensors = [*module.parameters(), *module.buffers()]
    return [(id(t), t.data_ptr(), t._version, sha256(t.detach().cpu().numpy().tobytes()).hexdigest()) for t in tensors]


@pytest.mark.gpu
@needs_two
class TestTwoDevices:
    @pytest.mark.parametrize("split", [(2, 6), (6, 2), (0, 8), (8, 0)])
    def test_gradients_are_those_of_the_whole_batch(self, split):
        first = f"{KIND}:0"
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5)).double().to(first)
        x, y = torch.randn(8, 16, dtype=torch.double, device=first), torch.randint(0, 5, (8,), device=first)
        plain = copy.deepcopy(model)
        F.cross_entropy(plain(x), y).backward()
        wrapped = BalancedDataParallel(None, model, [first, f"{KIND}:1"], split=split)
        F.cross_entropy(wrapped(x), y).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.allclose(one.grad, other.grad, rtol=1e-9, atol=1e-12) for one, other in pairs)

    @pytest.mark.timeout(600)
    def test_tuned_over_both(self):
        options = {"effective_batch_size": 64, "max_batch_size": 32, "profile": "off", "n_trials": 2}
        plan = tune(mlp(), devices=f"{KIND}:0,1", **options)
        assert sum(plan.split) == plan.batch_size
        assert all(seat.peak_bytes <= seat.device.capacity_bytes for seat in plan.main.seats)

    def test_a_model_that_is_on_the_first_already_is_unchanged(self):
        """Ceilings of the second device need a copy there. Other steps train the live memory of the first device."""
        workload = live(f"{KIND}:0")
        before = state_of(workload.model)
        tune(workload, devices=f"{KIND}:0,1", effective_batch_size=64, max_batch_size=32, profile="off", n_trials=2)
        assert state_of(workload.model) == before

    def test_the_state_of_a_single_number_moves_with_its_parameter(self):
        """The state of CLIP's `logit_scale` stayed on the first device. The update on the second raised an error."""

        class Scaled(nn.Linear):
            def forward(self, x):
                return super().forward(x) * self.scale

        model = Scaled(4, 4)
        model.scale = nn.Parameter(torch.tensor(1.0))
        model.to(f"{KIND}:0")
        optimizer = torch.optim.AdamW(model.parameters())
        model.scale.grad = torch.ones_like(model.scale)
        optimizer.step()
        with running(f"{KIND}:1", Workload(model, torch.randn(4, 4), optimizer=optimizer)) as worker:
            assert worker.peaks(StepShape(((4,),), "rank"))[0] > 0
            state = worker._trainee.optimizers.given.state[worker._trainee.models.given.scale]
            assert {name: str(value.device) for name, value in state.items()} == {
                "step": "cpu",
                "exp_avg": f"{KIND}:1",
                "exp_avg_sq": f"{KIND}:1",
            }

    @needs_emulated
    def test_alone_on_the_second_the_first_has_no_context(self):
        """Switching back to the first device created a context of half a GB there until the process ended."""
        code = """
import os, torch, emulated
from workloads import small
from autosplit import tune
tune(small(), devices="emu:1", max_batch_size=8, n_trials=1, profile="off")
assert emulated.contexts()[os.getpid()] == (1,), emulated.contexts()
"""
        path = os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])
        environment = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_what_a_model_puts_on_the_accelerator_goes_where_it_runs(self):
        """On the second device alone, `device="cuda"` in a forward still meant the first."""
        with running(f"{KIND}:1", on_its_device(OnItsDevice)) as worker:
            assert worker.peaks(StepShape(((8,),), "rank"))[0] > 0
        assert backend(KIND).current_device() == 0
