"""find_ceiling finds the same largest batch as brute force, for every role and many kinds of models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import for_release, slow, whole
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
from autosplit.runtime.cpu import CpuWorker
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import Facts, StepShape
from autosplit.solve.memory import MemoryParts
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


def traced(workload, role: str, sizes) -> dict[int, int]:
    """Return the peak of each size from a trace."""
    from autosplit.sim.simulated import traced_peaks
    from autosplit.sim.tracer import make_tracer

    tracer, _ = make_tracer(workload, like_gpu=True)
    return {n: traced_peaks(tracer, shape_of(role, n))[-1] for n in sizes}


def measured(workload, role: str, n: int, capacity_bytes: int = 2**40) -> int:
    """Return the peak of a real step within a budget."""
    devices, capacities = parse_devices(f"cpu:{capacity_bytes}B"), (capacity_bytes,)
    if role == "replica":
        companion = replace(devices[0], budgeted=False)
        devices, capacities = (companion, replace(devices[0], index=1)), (2**60, capacity_bytes)
    worker = CpuWorker(devices, capacities, training_copy(workload, device=torch.device("cpu")), MOST)
    return worker.peaks(shape_of(role, n))[-1]


def runs(workload, role: str, n: int, capacity_bytes: int) -> bool:
    """Return whether a real step of n samples stays within a budget."""
    try:
        measured(workload, role, n, capacity_bytes)
    except OutOfMemoryError:
        return False
    return True


ROLES = ("primary", "replica", "rank", "eval")
KINDS = ["mlp", slow("cnn"), *(for_release(name) for name in ALL if name not in ("mlp", "cnn"))]
"""Workloads. The tests of the tracer compare the traces of each of them with real steps."""


class TestAgainstBruteForce:
    @pytest.mark.whole
    @pytest.mark.parametrize("role", ROLES)
    @pytest.mark.parametrize("name", KINDS)
    def test_simulated(self, name, role):
        workload = ALL[name]()
        least = 2 if role == "replica" and name == "cnn" else 1
        peaks = traced(workload, role, range(least, 17))
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
        capacity = measured(workload, role, 24) + 256
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
        capacity = measured(workload, "rank", 24) + 256
        found = find_ceiling(workload, f"cpu:{capacity}B", exact=True, max_batch_size=MOST)
        assert found.ooms >= 1
        assert not runs(workload, "rank", found.batch_size + 1, capacity)
        assert found.batch_size == find_ceiling(workload, f"cpu:{capacity}B", max_batch_size=MOST).batch_size


class TestLimits:
    @pytest.mark.parametrize("device", [whole("sim:RTX3090"), "cpu:64MiB"])
    def test_it_looks_no_further_than_asked(self, device):
        found = find_ceiling(mlp(), device, max_batch_size=5)
        assert (found.batch_size, found.limited_by) == (5, "max_batch_size")

    def test_a_plain_cpu_is_limited_by_time(self, monkeypatch):
        monkeypatch.setattr(ceilings, "KNEE_GAIN", 10.0)  # no doubling gains as much
        found = find_ceiling(mlp(), "cpu")
        assert found.limited_by == "time"
        assert found.confirmed
        assert found.role == "rank"

    @pytest.mark.parametrize("device", [whole("sim:RTX3090"), "cpu:64MiB", "cpu"])
    def test_batchnorm_needs_two(self, device):
        assert find_ceiling(small(), device, role="primary", max_batch_size=2).batch_size == 2
        with raises(DoesNotFitError):
            find_ceiling(small(), device, role="primary", max_batch_size=1)

    @pytest.mark.parametrize("kind", [whole("sim:RTX3090@{}B"), "cpu:{}B"])
    def test_batchnorm_where_two_just_fit(self, kind):
        workload = small()
        simulated = kind.startswith("sim")
        capacity = traced(workload, "primary", [2])[2] if simulated else measured(workload, "primary", 2)
        assert find_ceiling(workload, kind.format(capacity), role="primary", max_batch_size=9).batch_size >= 2
        with pytest.raises(DoesNotFitError, match="at batch 2"):
            find_ceiling(workload, kind.format(capacity - 512), role="primary", max_batch_size=9)


FIXED_BYTES, SAMPLE_BYTES = 20_000, 1_000


def bytes_of(n: int) -> int:
    """Return the predicted peak of a step of n samples. An idle device has none."""
    return FIXED_BYTES + SAMPLE_BYTES * n if n else 0


class StandIn:
    """Real devices as the prober uses them. Their peaks are the predictions, plus an amount set by the test."""

    exact = False
    notes = ()

    def __init__(self, capacities, *, offset=lambda n: 0, fails=lambda n: None):
        self.devices = parse_devices(",".join(f"cpu:{capacity}B" for capacity in capacities))
        self.capacities_bytes = tuple(capacities)
        self.offset, self.fails = offset, fails
        self.sizes = []

    @property
    def steps(self):
        return len(self.sizes)

    def facts(self):
        return Facts()

    def known_parts(self, shape):
        return tuple(MemoryParts(FIXED_BYTES, 0, 0, 0, 0) for _ in self.devices)

    def predicted(self, shape):
        return tuple(MemoryParts(0, 0, 0, 0, bytes_of(n)) for n in shape.splits[0])

    def prediction_holds(self, shape):
        return True

    def peaks(self, shape):
        n = max(shape.splits[0])
        self.sizes.append(n)
        error = self.fails(n)
        if error is not None:
            raise error
        peaks = tuple(own and bytes_of(own) + self.offset(n) for own in shape.splits[0])
        for index, (peak, capacity) in enumerate(zip(peaks, self.capacities_bytes, strict=True)):
            if peak > capacity:
                raise OutOfMemoryError("full", device_index=index)
        return peaks


def capacity_for(n: int) -> int:
    return bytes_of(n) + 128


def prober_of(worker) -> Prober:
    return Prober(worker, mlp(), 4096)


class TestOffThePrediction:
    def test_a_constant_beyond_the_prediction_costs_no_failure(self):
        """CUDA workspaces and fragmentation. Small real steps show them before the ceiling is tried."""
        worker = StandIn([capacity_for(300)], offset=lambda n: 30 * KIB)
        found = ceiling_of(prober_of(worker), 0, "primary")
        assert found.ooms == 0
        assert found.batch_size < 300
        worker.peaks(StepShape(((found.batch_size,),)))
        with pytest.raises(OutOfMemoryError):
            worker.peaks(StepShape(((found.batch_size + 1,),)))

    @pytest.mark.parametrize("share", [0.1, -0.1])
    def test_a_slope_beside_the_prediction_is_followed(self, share):
        worker = StandIn([capacity_for(300)], offset=lambda n: int(share * SAMPLE_BYTES * n))
        found = ceiling_of(prober_of(worker), 0, "primary")
        assert found.ooms == 0
        assert found.steps <= 5
        worker.peaks(StepShape(((found.batch_size,),)))
        with pytest.raises(OutOfMemoryError):
            worker.peaks(StepShape(((found.batch_size + 1,),)))

    def test_a_peak_that_falls_with_the_batch_gives_a_line_without_slope(self):
        """A plan with -64 bytes per sample was refused after the whole tuning."""
        prober = prober_of(StandIn([capacity_for(300)]))
        assert prober.line(lambda n: 10_000 - 64 * n, 8) == (10_000 - 64 * 8, 0)


class TestKernelLimits:
    """2^31 elements in a tensor are another kind of ceiling."""

    @staticmethod
    def limited(n):
        return RuntimeError("input tensor must fit into 32-bit index math") if n > 37 else None

    def test_end_the_search_and_are_no_lack_of_memory(self):
        worker = StandIn([capacity_for(300)], fails=self.limited)
        found = ceiling_of(prober_of(worker), 0, "primary")
        assert (found.limited_by, found.ooms, found.confirmed) == ("kernel", 0, True)
        assert 30 <= found.batch_size <= 37

    def test_another_error_passes(self):
        fails = lambda n: RuntimeError("illegal memory access") if n > 37 else None
        with pytest.raises(RuntimeError, match="illegal memory access"):
            ceiling_of(prober_of(StandIn([capacity_for(300)], fails=fails)), 0, "primary")


class TestEqualDevices:
    def test_are_probed_once_and_confirmed_on_each(self):
        prober = prober_of(StandIn([capacity_for(300)] * 3))
        found = [ceiling_of(prober, index, "rank") for index in range(3)]
        assert [ceiling.batch_size for ceiling in found] == [300] * 3
        assert [ceiling.steps for ceiling in found] == [2, 1, 1]
        assert all(ceiling.confirmed for ceiling in found)

    def test_one_that_turns_out_otherwise_is_searched(self):
        worker = StandIn([capacity_for(300)] * 2)
        prober = prober_of(worker)
        first = ceiling_of(prober, 0, "rank")
        worker.offset = lambda n: 20 * KIB
        second = ceiling_of(prober, 1, "rank")
        assert 0 < second.batch_size < first.batch_size
        assert second.ooms == 1


class TestUnfakeable:
    @pytest.mark.whole
    def test_the_plan_says_so(self):
        plan = tune(without_fakes(), devices="sim:2xRTX3090", max_batch_size=8, n_trials=2, profile="off")
        assert "real-tensors" in kinds(plan.notes)


class TestErrors:
    def test_several_devices(self):
        with raises(InputError, "2"):
            find_ceiling(mlp(), "sim:2xRTX3090")

    def test_an_unknown_role(self):
        with raises(InputError, "'boss'"):
            find_ceiling(mlp(), "sim:RTX3090", role="boss")

    @pytest.mark.parametrize("device", [whole("sim:RTX3090@1KiB"), "cpu:1KiB"])
    @pytest.mark.parametrize("role", ROLES)
    def test_what_does_not_fit(self, device, role):
        with pytest.raises(DoesNotFitError, match="needs") as caught:
            find_ceiling(mlp(), device, role=role)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_isolated():
    here = find_ceiling(cnn(), "sim:RTX3090@64MiB", max_batch_size=64)
    assert find_ceiling(cnn(), "sim:RTX3090@64MiB", max_batch_size=64, isolate=True) == here
