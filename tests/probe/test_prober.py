"""find_ceiling finds the same largest batch as brute force, for every role and many kinds of models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import for_release, slow
from noted import kinds
from raised import raises
from workloads import ALL, cnn, mlp, small, without_fakes

from autosplit.devices.spec import parse_devices
from autosplit.errors import InputError
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.probe import ceilings
from autosplit.probe.ceilings import ceiling_of
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.probe.prober import Prober
from autosplit.runtime.cpu import CpuRuntime
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.simulated import traced_peaks
from autosplit.runtime.tracer import make_tracer
from autosplit.tuning.tune import tune

pytestmark = pytest.mark.usefixtures("without_workspaces")  # devices of a few KiB

KIB = 2**10
MOST = 40


def shape_of(role: str, n: int) -> StepShape:
    """Return the step that probes a role, with one rank in the job."""
    if role == "replica":
        return StepShape(((0, n),))
    if role == "primary":
        return StepShape(((n,),))
    return StepShape(((n,),), role, num_ranks=2 if role == "rank" else 1)


def traced(workload, role: str, n: int, *, like_gpu: bool = True) -> int:
    tracer, _ = make_tracer(workload, like_gpu=like_gpu)
    return traced_peaks(tracer, shape_of(role, n))[-1]


def runs(workload, role: str, n: int, capacity_bytes: int) -> bool:
    """Return whether a real step of n samples stays within a budget."""
    devices, capacities = parse_devices(f"cpu:{capacity_bytes}B"), (capacity_bytes,)
    if role == "replica":
        companion = replace(devices[0], budgeted=False)
        devices, capacities = (companion, replace(devices[0], index=1)), (2**60, capacity_bytes)
    runtime = CpuRuntime(devices, capacities, training_copy(workload, device=torch.device("cpu")))
    try:
        runtime.peaks(shape_of(role, n))
    except OutOfMemoryError:
        return False
    return True


ROLES = ("primary", "replica", "rank", "eval")
KINDS = ["mlp", slow("cnn"), *(for_release(name) for name in ALL if name not in ("mlp", "cnn"))]
"""Workloads. The tests of the tracer compare the traces of each of them with real steps."""


class TestAgainstBruteForce:
    @pytest.mark.parametrize("role", ROLES)
    @pytest.mark.parametrize("name", KINDS)
    def test_simulated(self, name, role):
        workload = ALL[name]()
        tracer, _ = make_tracer(workload, like_gpu=True)
        least = 2 if role == "replica" and name == "cnn" else 1
        peaks = {n: traced_peaks(tracer, shape_of(role, n))[-1] for n in range(least, 17)}
        capacity = (peaks[10] + peaks[11]) // 2 if peaks[11] > peaks[10] else peaks[11]
        expected = max(n for n in peaks if peaks[n] <= capacity)
        found = find_ceiling(workload, f"sim:RTX3090@{capacity}B", role=role, max_batch_size=16)
        assert (found.batch_size, found.steps, found.confirmed) == (expected, 0, False)
        assert found.peak_bytes == peaks[expected]
        assert found.role == role

    @pytest.mark.parametrize("role", ROLES)
    @pytest.mark.parametrize("name", KINDS)
    def test_a_budget(self, name, role):
        workload = ALL[name]()
        capacity = traced(workload, role, 24, like_gpu=False) + 256
        found = find_ceiling(workload, f"cpu:{capacity}B", role=role, max_batch_size=MOST)
        assert found.confirmed
        assert runs(workload, role, found.batch_size, capacity)
        assert found.batch_size == MOST or not runs(workload, role, found.batch_size + 1, capacity)
        assert found.peak_bytes <= found.capacity_bytes == capacity
        assert found.steps <= 8
        assert found.ooms == 0

    @pytest.mark.slow
    def test_exact_also_refutes_one_more(self):
        workload = ALL["char_gpt"]()
        capacity = traced(workload, "rank", 24, like_gpu=False) + 256
        found = find_ceiling(workload, f"cpu:{capacity}B", exact=True, max_batch_size=MOST)
        assert found.ooms >= 1
        assert not runs(workload, "rank", found.batch_size + 1, capacity)
        assert found.batch_size == find_ceiling(workload, f"cpu:{capacity}B", max_batch_size=MOST).batch_size


class TestLimits:
    @pytest.mark.parametrize("device", ["sim:RTX3090", "cpu:64MiB"])
    def test_it_looks_no_further_than_asked(self, device):
        found = find_ceiling(mlp(), device, max_batch_size=5)
        assert (found.batch_size, found.limited_by) == (5, "max_batch_size")

    def test_a_plain_cpu_is_limited_by_time(self, monkeypatch):
        monkeypatch.setattr(ceilings, "KNEE_GAIN", 10.0)  # no doubling gains as much
        found = find_ceiling(mlp(), "cpu")
        assert found.limited_by == "time"
        assert found.confirmed
        assert found.role == "rank"

    @pytest.mark.parametrize("device", ["sim:RTX3090", "cpu:64MiB", "cpu"])
    def test_batchnorm_needs_two(self, device):
        assert find_ceiling(small(), device, role="primary", max_batch_size=2).batch_size == 2
        with raises(DoesNotFitError):
            find_ceiling(small(), device, role="primary", max_batch_size=1)

    @pytest.mark.parametrize("kind", ["sim:RTX3090@{}B", "cpu:{}B"])
    def test_batchnorm_where_two_just_fit(self, kind):
        workload = small()
        capacity = traced(workload, "primary", 2, like_gpu=kind.startswith("sim"))
        assert find_ceiling(workload, kind.format(capacity), role="primary", max_batch_size=9).batch_size >= 2
        with pytest.raises(DoesNotFitError, match="at batch 2"):
            find_ceiling(workload, kind.format(capacity - 512), role="primary", max_batch_size=9)


class StandIn:
    """Real devices as the prober uses them. Their peaks come from traces, plus an amount set by the test."""

    simulated = False
    shares_processor = True

    def __init__(self, tracer, capacities, *, offset=lambda n: 0, fails=lambda n: None):
        self.devices = parse_devices(",".join(f"cpu:{capacity}B" for capacity in capacities))
        self.capacities_bytes = tuple(capacities)
        self.tracer, self.offset, self.fails = tracer, offset, fails
        self.sizes = []

    def peaks(self, shape):
        n = max(shape.splits[0])
        self.sizes.append(n)
        error = self.fails(n)
        if error is not None:
            raise error
        peaks = tuple(peak and peak + self.offset(n) for peak in traced_peaks(self.tracer, shape))
        for index, (peak, capacity) in enumerate(zip(peaks, self.capacities_bytes, strict=True)):
            if peak > capacity:
                raise OutOfMemoryError("full", device_index=index)
        return peaks


@pytest.fixture(scope="module")
def tracer():
    return make_tracer(mlp(), like_gpu=False)[0]


def capacity_for(tracer, n: int) -> int:
    return traced_peaks(tracer, StepShape(((n,),)))[0] + 128


class TestOffTheTrace:
    def test_a_constant_beyond_the_trace_costs_no_failure(self, tracer):
        """CUDA workspaces and fragmentation. Small real steps show them before the ceiling is tried."""
        runtime = StandIn(tracer, [capacity_for(tracer, 300)], offset=lambda n: 30 * KIB)
        found = ceiling_of(Prober(runtime, tracer, 4096), 0, "primary")
        assert found.ooms == 0
        assert found.batch_size < 300
        runtime.peaks(StepShape(((found.batch_size,),)))
        with pytest.raises(OutOfMemoryError):
            runtime.peaks(StepShape(((found.batch_size + 1,),)))

    @pytest.mark.parametrize("share", [0.1, -0.1])
    def test_a_slope_beside_the_trace_is_followed(self, tracer, share):
        per_sample = capacity_for(tracer, 301) - capacity_for(tracer, 300)
        runtime = StandIn(tracer, [capacity_for(tracer, 300)], offset=lambda n: int(share * per_sample * n))
        found = ceiling_of(Prober(runtime, tracer, 4096), 0, "primary")
        assert found.ooms == 0
        assert found.steps <= 5
        runtime.peaks(StepShape(((found.batch_size,),)))
        with pytest.raises(OutOfMemoryError):
            runtime.peaks(StepShape(((found.batch_size + 1,),)))

    def test_a_peak_that_falls_with_the_batch_gives_a_line_without_slope(self, tracer):
        """A plan with -64 bytes per sample was refused after the whole tuning."""
        prober = Prober(StandIn(tracer, [capacity_for(tracer, 300)]), tracer, 4096)
        assert prober.line(lambda n: 10_000 - 64 * n, 8) == (10_000 - 64 * 8, 0)


class TestKernelLimits:
    """2^31 elements in a tensor are another kind of ceiling."""

    @staticmethod
    def limited(n):
        return RuntimeError("input tensor must fit into 32-bit index math") if n > 37 else None

    def test_end_the_search_and_are_no_lack_of_memory(self, tracer):
        runtime = StandIn(tracer, [capacity_for(tracer, 300)], fails=self.limited)
        found = ceiling_of(Prober(runtime, tracer, 4096), 0, "primary")
        assert (found.limited_by, found.ooms, found.confirmed) == ("kernel", 0, True)
        assert 30 <= found.batch_size <= 37

    def test_another_error_passes(self, tracer):
        fails = lambda n: RuntimeError("illegal memory access") if n > 37 else None
        with pytest.raises(RuntimeError, match="illegal memory access"):
            ceiling_of(Prober(StandIn(tracer, [capacity_for(tracer, 300)], fails=fails), tracer, 4096), 0, "primary")


class TestEqualDevices:
    def test_are_probed_once_and_confirmed_on_each(self, tracer):
        capacity = capacity_for(tracer, 300)
        runtime = StandIn(tracer, [capacity] * 3)
        prober = Prober(runtime, tracer, 4096)
        found = [ceiling_of(prober, index, "rank") for index in range(3)]
        assert [ceiling.batch_size for ceiling in found] == [found[0].batch_size] * 3
        assert [ceiling.steps for ceiling in found] == [3, 1, 1]
        assert all(ceiling.confirmed for ceiling in found)

    def test_one_that_turns_out_otherwise_is_searched(self, tracer):
        capacity = capacity_for(tracer, 300)
        runtime = StandIn(tracer, [capacity] * 2)
        prober = Prober(runtime, tracer, 4096)
        first = ceiling_of(prober, 0, "rank")
        runtime.offset = lambda n: 20 * KIB
        second = ceiling_of(prober, 1, "rank")
        assert 0 < second.batch_size < first.batch_size
        assert second.ooms == 1


class TestUnfakeable:
    @pytest.mark.parametrize("devices", ["sim:2xRTX3090", "cpu:1MiB,cpu:1MiB"])
    def test_the_plan_says_so(self, devices):
        plan = tune(without_fakes(), devices=devices, max_batch_size=8, n_trials=2, profile="off")
        assert "real-tensors" in kinds(plan.notes)


class TestErrors:
    def test_several_devices(self):
        with raises(InputError, "2"):
            find_ceiling(mlp(), "sim:2xRTX3090")

    def test_an_unknown_role(self):
        with raises(InputError, "'boss'"):
            find_ceiling(mlp(), "sim:RTX3090", role="boss")

    @pytest.mark.parametrize("device", ["sim:RTX3090@1KiB", "cpu:1KiB"])
    @pytest.mark.parametrize("role", ROLES)
    def test_what_does_not_fit(self, device, role):
        with pytest.raises(DoesNotFitError, match="needs") as caught:
            find_ceiling(mlp(), device, role=role)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_isolated():
    here = find_ceiling(cnn(), "sim:RTX3090@64MiB", max_batch_size=64)
    assert find_ceiling(cnn(), "sim:RTX3090@64MiB", max_batch_size=64, isolate=True) == here
