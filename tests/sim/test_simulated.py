"""Simulated GPUs: a step composed from traces is equal to the step traced completely."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from marks import for_release
from torch import nn
from torch.nn import functional as F
from traced_memory import traced_parts
from workloads import char_gpt, cnn, without_fakes

from autosplit.devices.spec import parse_devices
from autosplit.errors import UserCodeError
from autosplit.oom import OutOfMemoryError
from autosplit.runtime.memory_tracker import BLOCK_BYTES, rounded
from autosplit.runtime.protocol import StepShape
from autosplit.sim import simulated
from autosplit.sim.clocks import Clocks
from autosplit.sim.op_cost import Work
from autosplit.sim.replay import WholeStep, _play, _reduced
from autosplit.sim.simulated import SimulatedWorker, traced_peaks
from autosplit.sim.tracer import Tracer, make_tracer
from autosplit.torch_versions import cublas_workspace_bytes
from autosplit.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("exact_allocator")

UNLIMITED = 2**60

WORKSPACES = 2 * cublas_workspace_bytes(80)
"""Return cuBLAS's workspaces for the forward and the backward of a traced step."""


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64), nn.LayerNorm(64))
        self.body = nn.Sequential(*(copy.deepcopy(block) for _ in range(3)))

    def forward(self, x, y):
        return {"loss": F.mse_loss(self.body(x), y)}


def with_loss() -> Workload:
    return Workload(WithLoss(), {"x": torch.randn(4, 64), "y": torch.randn(4, 64)}, precision="bf16")


def mlp() -> Workload:
    """Make a model whose gradients take longer to copy and add than to compute."""
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    return Workload(model, (torch.randn(4, 256), torch.randint(0, 10, (4,))), loss_fn=F.cross_entropy)


WORKLOADS = {"char_gpt": lambda: char_gpt(width=64, depth=1, heads=2), "cnn": cnn, "with_loss": with_loss, "mlp": mlp}


@pytest.fixture(scope="module")
def tracers():
    """Return the tracer of a workload. It is made once and keeps its traces."""
    made: dict[str, Tracer] = {}

    def tracer(name: str) -> Tracer:
        if name not in made:
            made[name], reason = make_tracer(WORKLOADS[name](), like_gpu=True)
            assert reason is None
        return made[name]

    return tracer


def worker(tracer: Tracer, spec: str, *, capacities=None, kind: type = SimulatedWorker) -> SimulatedWorker:
    devices = parse_devices(spec)
    return kind(devices, capacities or (UNLIMITED,) * len(devices), tracer)


class Whole(SimulatedWorker):
    """Traces every step on all its devices. Composed steps are compared with it."""

    def measure(self, shape, *, budget_s=0.0):
        with mock.patch.object(simulated, "source_of", WholeStep):
            return super().measure(shape, budget_s=budget_s)


MACHINES = {
    "sim:1xH100-80GB+1xRTX3090": [((12, 4),), ((0, 9),), ((9, 0),), ((5, 3), (5, 3))],
    "sim:3xRTX3090": [((4, 6, 6),), ((0, 5, 8),), ((7, 0, 1),), ((2, 3, 3), (2, 3, 3), (2, 3, 3)), ((0, 4, 4),) * 4],
    "sim:2xA100-40GB+1xTITAN-RTX+1xGTX1080Ti": [((3, 8, 4, 2),), ((0, 8, 0, 2),), ((4, 4, 4, 4), (2, 2, 2, 1))],
    "sim:8xV100-32GB": [((1, 2, 2, 2, 2, 2, 2, 3),), ((0, 2, 0, 2, 5, 2, 2, 2),)],
}
IN_QUICK = ("sim:1xH100-80GB+1xRTX3090", "sim:3xRTX3090")


class TestComposition:
    @pytest.mark.parametrize("name", ["cnn", for_release("mlp"), for_release("char_gpt"), for_release("with_loss")])
    @pytest.mark.parametrize("machine", [m if m in IN_QUICK else for_release(m) for m in MACHINES])
    def test_is_the_whole_step(self, name, machine, tracers):
        """It was compared with itself, and sums of gradients waited for copies in only one of the two."""
        tracer = tracers(name)
        composed, whole = worker(tracer, machine), worker(tracer, machine, kind=Whole)
        for splits in MACHINES[machine]:
            shape = StepShape(splits)
            ours, theirs = composed.measure(shape), whole.measure(shape)
            # The whole step is traced for device 0. An RTX 3090 has smaller workspaces than an H100, two of them.
            smaller = 2 * (cublas_workspace_bytes(90) - cublas_workspace_bytes(86)) if "H100" in machine else 0
            own = (theirs.peak_bytes[0], *(peak and peak - smaller for peak in theirs.peak_bytes[1:]))
            assert ours.peak_bytes == own, splits
            # If device 0 adds losses that replicas compute, the host work for them is not traced one by one.
            assert ours.seconds == pytest.approx(theirs.seconds, rel=3e-3), splits
            assert ours.update_s == pytest.approx(theirs.update_s, rel=1e-3), splits
            assert ours.busy_s == pytest.approx(theirs.busy_s, rel=1e-3), splits
            assert composed.peaks(shape) == ours.peak_bytes


def test_what_device_0_does_with_outputs_is_started_after_they_were_made(tracers):
    """Device 0 without samples started the loss at once, during a forward. Such steps were predicted 48% too fast."""
    machine = worker(tracers("cnn"), "sim:2xRTX3090")
    alone, elsewhere = (machine.measure(StepShape((split,) * 26)).seconds for split in [(2, 0), (0, 2)])
    assert elsewhere > alone


class TestKeptReplicas:
    """A step of several micro-steps is composed from one. Here it is traced completely."""

    @pytest.mark.parametrize("name", ["cnn", for_release("char_gpt"), for_release("with_loss")])
    @pytest.mark.parametrize("split", [(400, 600, 600), for_release((0, 800, 800))], ids=str)
    def test_is_the_whole_step(self, name, split, tracers):
        tracer = tracers(name)
        machine = worker(tracer, "sim:1xRTX3090+2xRTX2080Ti")
        shape = StepShape((split, split, split, tuple(n // 2 for n in split)))
        followed = tracer._run(shape)
        clocks = Clocks(machine._specs, replicas=sum(map(bool, split)))
        ends_s = []
        for _ in range(2):
            _play(clocks, _reduced(followed.micro), (0, 1, 2))
            clocks.meet()
            _play(clocks, followed.update, (0, 1, 2))
            ends_s.append(clocks.meet())
        found = machine.measure(shape)
        # Device 0's trace has one replica for all, with one scalar loss: one block less than with two replicas.
        block_bytes = BLOCK_BYTES if name == "with_loss" and split[0] else 0
        assert found.peak_bytes == (followed.peak_bytes[0] - block_bytes, *followed.peak_bytes[1:])
        # The first micro-step has no sums of gradients. Their host time is subtracted as a whole.
        assert found.seconds == pytest.approx(ends_s[1] - ends_s[0], rel=0.001)
        assert found.busy_s == pytest.approx([busy_s / 2 for busy_s in clocks.busy_s], rel=0.01)


class TestTime:
    @pytest.mark.parametrize("precision", ["none", "fp16"])
    def test_the_host_runs_ahead_unless_a_scaler_waits(self, precision, monkeypatch):
        """The first step of a loop waits for the host. All steps were predicted like the first."""
        small, large = (nn.Tanh() for _ in range(50)), (nn.Linear(2048, 2048) for _ in range(4))
        model = nn.Sequential(*small, nn.Linear(8, 2048), *large)
        batch = torch.randn(2, 8), torch.randn(2, 2048)
        given = Workload(model, batch, loss_fn=F.mse_loss, optimizer=torch.optim.SGD, precision=precision)
        devices, free = parse_devices("sim:A100-40GB"), frozenset({"input"})
        machine = SimulatedWorker(devices, (UNLIMITED,), make_tracer(given, like_gpu=True)[0], free=free)
        shape = StepShape(((16_384,),))
        source, clocks = simulated.source_of([machine.tracer], shape), Clocks(machine._specs, free)
        _, first_s = machine._played(source, shape, clocks)
        later_s = machine.measure(shape).seconds
        assert first_s > clocks.busy_s[0] + 1e-3
        assert (later_s > clocks.busy_s[0] + 1e-3) == (precision == "fp16")

    def test_the_same_answer_twice(self, tracers):
        shape = StepShape(((3, 5),))
        found = [worker(tracers("cnn"), "sim:2xRTX3090").measure(shape) for _ in range(2)]
        fresh, _ = make_tracer(cnn(), like_gpu=True)
        assert found[0] == found[1] == worker(fresh, "sim:2xRTX3090").measure(shape)
        assert found[0].error_s == 0

    def test_small_kernels_wait_for_the_host(self):
        machine = worker(make_tracer(cnn(), like_gpu=True)[0], "sim:2xH100-80GB")
        small, double = (machine.measure(StepShape(((n, 0),))).seconds for n in (2, 4))
        assert double == pytest.approx(small, rel=0.02)
        both = machine.measure(StepShape(((2, 2),)))
        # One interpreter launches the ops of both GPUs, so a second GPU brings no gain.
        assert both.seconds > 1.3 * small
        assert max(both.busy_s) < small / 2


class TestMemory:
    def test_a_full_card_is_named(self, tracers):
        shape = StepShape(((4, 6, 6),))
        peaks = worker(tracers("cnn"), "sim:3xRTX3090").peaks(shape)
        for index in range(3):
            capacities = tuple(peak - (position == index) for position, peak in enumerate(peaks))
            machine = worker(tracers("cnn"), "sim:3xRTX3090", capacities=capacities)
            for ask in (machine.peaks, machine.measure):
                with pytest.raises(
                    OutOfMemoryError, match=rf"RTX.*3090\) is out of memory: {shape.splits[0][index]} samples"
                ) as caught:
                    ask(shape)
                assert caught.value.device == machine.devices[index].label
                assert caught.value.device_index == index
                assert caught.value.requested_bytes == peaks[index]
                assert caught.value.capacity_bytes == peaks[index] - 1
                assert "\n" not in str(caught.value)
        fits = worker(tracers("cnn"), "sim:3xRTX3090", capacities=peaks)
        assert fits.peaks(shape) == peaks == traced_peaks(tracers("cnn"), shape)

    @pytest.mark.parametrize(("micro_steps", "times"), [(1, 2), (2, 3)])
    def test_gradients_that_meet_at_once_are_views_of_the_buckets(self, micro_steps, times):
        """A model that is mostly parameters counted them twice, though DDP needs one copy."""
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        given = Workload(model, torch.randn(1, 256), compute_loss=lambda m, x: m(x).sum(), optimizer=torch.optim.SGD)
        tracer, _ = make_tracer(given, like_gpu=True)
        shape = StepShape(((1,),) * micro_steps, "rank", 4)
        peaks = traced_peaks(tracer, shape)
        # A gradient is created first. Then it is moved into the buckets, or added to the last micro-step's.
        assert peaks[0] - WORKSPACES == pytest.approx(4 * 256 * 256 * (8 * times + 1), rel=0.02)
        assert sum(part.total_bytes for part in traced_parts(tracer, shape)) == peaks[0]


class TestParts:
    @pytest.mark.parametrize("name", ["cnn", for_release("char_gpt"), for_release("mlp"), "with_loss"])
    @pytest.mark.parametrize(
        "shape",
        [
            StepShape(((9,),)),
            StepShape(((9, 0),)),
            StepShape(((3, 8, 4, 2),)),
            StepShape(((4, 6, 6), (4, 6, 6))),
            StepShape(((0, 8, 0),), "rank", 3),
        ],
    )
    def test_add_up_to_the_peak(self, name, shape, tracers):
        parts = traced_parts(tracers(name), shape)
        assert tuple(one.total_bytes for one in parts) == traced_peaks(tracers(name), shape)
        assert not any(one.untraced_bytes for one in parts)

    def test_each_is_where_it_belongs(self, tracers):
        tracer = tracers("char_gpt")
        own_bytes = sum(rounded(p.numel() * 4) for p in tracer.trainee.models.given.parameters())
        first, second = traced_parts(tracer, StepShape(((8, 8),)))
        assert first.parameters_bytes == own_bytes
        assert first.optimizer_bytes == pytest.approx(2 * own_bytes, rel=0.01), "AdamW"
        assert second.optimizer_bytes == 0
        assert 0 < second.parameters_bytes <= own_bytes
        kept = traced_parts(tracer, StepShape(((8, 8), (8, 8))))
        assert kept[0].gradients_bytes == kept[1].gradients_bytes == pytest.approx(own_bytes, rel=0.05)
        buckets = traced_parts(tracer, StepShape(((8,),) * 2, "rank", 4))[0].gradients_bytes
        alone = traced_parts(tracer, StepShape(((8,),) * 2, "rank", 1))[0].gradients_bytes
        assert buckets - alone == pytest.approx(own_bytes, rel=0.05)
        views = traced_parts(tracer, StepShape(((8,),), "rank", 4))[0].gradients_bytes
        assert views == pytest.approx(own_bytes, rel=0.05)


class TestRealTensors:
    def test_what_can_not_be_faked_is_followed_for_real(self):
        tracer, reason = make_tracer(without_fakes(), like_gpu=True)
        assert not tracer.fake
        assert "(NotImplementedError: the kernel" in reason
        assert "\n" not in reason
        found = worker(tracer, "sim:2xRTX3090").measure(StepShape(((2, 3),)))
        assert found.seconds > 0
        assert all(found.peak_bytes)

    def test_a_model_that_fails_on_its_own_sample(self):
        said = r"own sample batch \(4 samples along dimension 0 of shapes \(4, 8\)\) raised RuntimeError: mat1 and mat2"
        with pytest.raises(UserCodeError, match=said):
            make_tracer(Workload(nn.Linear(3, 3), torch.rand(4, 8)), like_gpu=True)


def test_questions_about_tensors_cost_no_time():
    """Fake tensors call `prim.device` constantly. Each call counted as a kernel: 4 times the time for small steps."""
    kernels = []
    for fake in (True, False):
        trace = Tracer(cnn(), fake=fake, like_gpu=True).trace(StepShape(((2,),)))
        kernels.append(sum(len(event.labels) for event in (*trace.micro, *trace.update) if isinstance(event, Work)))
    assert kernels[0] == kernels[1]
