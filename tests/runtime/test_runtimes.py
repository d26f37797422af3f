"""The runtime of the CPU, the clock, and separate processes."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from workloads import small

from autosplit.devices.spec import parse_devices
from autosplit.oom import OutOfMemoryError
from autosplit.runtime.cpu import CpuRuntime
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.timing import median_error, timed


def runtime(spec: str, **options) -> CpuRuntime:
    devices = parse_devices(spec)
    trainee = training_copy(small(**options), device=torch.device("cpu"))
    return CpuRuntime(devices, tuple(device.capacity_bytes for device in devices), trainee)


class TestCpu:
    def test_an_idle_device_holds_nothing(self):
        assert runtime("cpu:1MiB,cpu:1MiB").peaks(StepShape(((6, 0),)))[1] == 0

    def test_a_rank_is_alone_wherever_it_stands(self):
        machine = runtime("cpu:1MiB,cpu:1MiB")
        first = machine.peaks(StepShape(((6, 0),), "rank", num_ranks=2))
        second = machine.peaks(StepShape(((0, 6),), "rank", num_ranks=2))
        assert second == first[::-1]

    def test_the_device_that_is_full_is_named_and_the_next_step_runs(self):
        machine = runtime("cpu:1MiB,cpu:16KiB")
        with pytest.raises(OutOfMemoryError, match="cpu:1 is out of memory") as caught:
            machine.peaks(StepShape(((4, 64),)))
        assert (caught.value.device, caught.value.device_index) == ("cpu:1", 1)
        assert caught.value.capacity_bytes == 16 * 1024
        before = machine.peaks(StepShape(((4, 4),)))
        with pytest.raises(OutOfMemoryError):
            machine.peaks(StepShape(((4, 64),)))
        assert machine.peaks(StepShape(((4, 4),))) == before

    def test_random_numbers_go_on_as_if_nothing_had_run(self):
        machine = runtime("cpu:1MiB")
        before = torch.get_rng_state()
        machine.peaks(StepShape(((6,),)))
        machine.measure(StepShape(((6,),)), budget_s=0.01)
        assert torch.equal(torch.get_rng_state(), before)


class TestTimed:
    def test_the_update_is_what_follows_its_mark(self):
        def run(mark):
            time.sleep(0.002)
            mark("update")
            time.sleep(0.004)

        found = timed(run, 0.02)
        assert 0.003 < found.update_s < found.seconds

    @given(st.lists(st.floats(0.001, 10), min_size=2, max_size=20))
    def test_the_error_is_of_the_values_scale(self, values):
        assert median_error([3 * value for value in values]) == pytest.approx(3 * median_error(values))
        assert median_error([values[0]] * len(values)) == 0
