"""The worker of the CPU, the clock, and separate processes."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from marks import for_release
from torch import nn
from torch.nn import functional as F
from workloads import char_gpt, cnn, recurrent, small

from autosplit.devices.spec import parse_devices
from autosplit.oom import OutOfMemoryError
from autosplit.runtime.cpu import NO_PARTS, CpuWorker
from autosplit.runtime.memory_tracker import rounded
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.timing import median_error, timed
from autosplit.workload.workload import Workload


def worker(spec: str, workload: Workload | None = None, largest_batch: int = 512) -> CpuWorker:
    devices = parse_devices(spec)
    trainee = training_copy(workload or small(), device=torch.device("cpu"))
    return CpuWorker(devices, tuple(device.capacity_bytes for device in devices), trainee, largest_batch)


class TestCpu:
    def test_an_idle_device_holds_nothing(self):
        assert worker("cpu:1MiB,cpu:1MiB").peaks(StepShape(((6, 0),)))[1] == 0

    def test_a_rank_is_alone_wherever_it_stands(self):
        machine = worker("cpu:1MiB,cpu:1MiB")
        first = machine.peaks(StepShape(((6, 0),), "rank", num_ranks=2))
        second = machine.peaks(StepShape(((0, 6),), "rank", num_ranks=2))
        assert second == first[::-1]

    def test_the_device_that_is_full_is_named_and_the_next_step_runs(self):
        machine = worker("cpu:1MiB,cpu:16KiB")
        with pytest.raises(OutOfMemoryError, match="cpu:1 is out of memory") as caught:
            machine.peaks(StepShape(((4, 64),)))
        assert (caught.value.device, caught.value.device_index) == ("cpu:1", 1)
        assert caught.value.capacity_bytes == 16 * 1024
        before = machine.peaks(StepShape(((4, 4),)))
        with pytest.raises(OutOfMemoryError):
            machine.peaks(StepShape(((4, 64),)))
        assert machine.peaks(StepShape(((4, 4),))) == before

    def test_random_numbers_go_on_as_if_nothing_had_run(self):
        machine = worker("cpu:1MiB")
        before = torch.get_rng_state()
        machine.peaks(StepShape(((6,),)))
        machine.measure(StepShape(((6,),)), budget_s=0.01)
        assert torch.equal(torch.get_rng_state(), before)


def mlp() -> Workload:
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.LayerNorm(50), nn.Dropout(0.1), nn.Linear(50, 10))
    return Workload(model, (torch.randn(4, 20), torch.randint(0, 10, (4,))), loss_fn=F.cross_entropy)


def frozen_first() -> Workload:
    workload = mlp()
    workload.model[0].requires_grad_(False)
    return workload


def all_pairs() -> Workload:
    """The loss compares each sample with every other one, so its memory grows with the square of the batch."""
    return Workload(nn.Linear(20, 50), torch.randn(4, 20), compute_loss=lambda m, x: (m(x) @ m(x).T).square().sum())


SHAPES = [
    StepShape(((37, 0, 0),)),
    StepShape(((17, 29, 0),)),
    StepShape(((0, 5, 20),)),
    StepShape(((30, 40, 20), (30, 40, 20))),
    StepShape(((0, 37, 0),), "rank", num_ranks=3),
    StepShape(((0, 37, 0), (0, 37, 0)), "rank", num_ranks=3),
    StepShape(((0, 37, 0),), "eval"),
]


class TestPredicted:
    @pytest.mark.parametrize("make", [mlp, cnn, small, frozen_first, for_release(lambda: char_gpt(width=32, depth=1))])
    def test_is_what_a_step_takes_to_the_byte(self, make):
        machine = worker("cpu:1GiB,cpu:1GiB,cpu:1GiB", make())
        for shape in SHAPES:
            assert tuple(parts.total_bytes for parts in machine.predicted(shape)) == machine.peaks(shape), shape

    @pytest.mark.parametrize(("make", "split"), [(mlp, (1, 0)), (mlp, (9, 1)), (all_pairs, (64, 0))])
    def test_is_exact_for_a_batch_of_one_and_for_a_loss_over_all_pairs(self, make, split):
        machine, shape = worker("cpu:1GiB,cpu:1GiB", make()), StepShape((split,))
        assert tuple(parts.total_bytes for parts in machine.predicted(shape)) == machine.peaks(shape)

    @pytest.mark.parametrize(("is_onednn", "within"), [(True, 0.05), (False, 0.0)])
    def test_an_lstm_of_many_samples(self, is_onednn, within, monkeypatch):
        """oneDNN rounds an LSTM's blocks. The curve through three small steps predicted ten times the memory."""
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", is_onednn)
        machine, shape = worker("cpu:1GiB", recurrent(nn.LSTM), 4096), StepShape(((2000,),))
        (parts,), (peak_bytes,) = machine.predicted(shape), machine.peaks(shape)
        assert parts.total_bytes == pytest.approx(peak_bytes, rel=within, abs=0)

    def test_needs_few_steps_of_few_samples(self):
        seen = set()
        loss_fn = lambda outputs, targets: seen.add(len(targets)) or F.cross_entropy(outputs, targets)
        machine = worker("cpu:1GiB", small(loss_fn=loss_fn))
        machine.predicted(StepShape(((37,),)))
        assert seen == {4, 8, 12}
        steps = machine.steps
        assert steps <= 8
        machine.predicted(StepShape(((500,),)))
        assert machine.steps == steps

    def test_runs_no_batch_above_the_largest(self):
        seen = set()
        loss_fn = lambda outputs, targets: seen.add(len(targets)) or F.cross_entropy(outputs, targets)
        machine = worker("cpu:1GiB", small(loss_fn=loss_fn), largest_batch=5)
        assert machine.predicted(StepShape(((5,),)))[0].total_bytes == machine.peaks(StepShape(((5,),)))[0]
        assert seen == {2, 4, 5}

    def test_a_device_without_a_rank_holds_nothing(self):
        assert worker("cpu:1GiB,cpu:1GiB").predicted(StepShape(((0, 9),), "rank"))[0] == NO_PARTS

    @pytest.mark.parametrize("splits", [((5,),), ((2, 3),), ((3, 4), (3, 4))], ids=str)
    def test_what_is_frozen_has_neither_gradient_nor_optimizer_state(self, splits):
        machine = worker(",".join(["cpu:1GiB"] * len(splits[0])), frozen_first())
        parts = machine.predicted(StepShape(splits))[0]
        held_bytes, trained_bytes = (
            sum(rounded(p.nbytes) for p in machine.trainee.parameters() if p.requires_grad or not only_trained)
            for only_trained in (False, True)
        )
        assert parts.parameters_bytes == held_bytes > trained_bytes
        assert parts.optimizer_bytes == 2 * trained_bytes  # AdamW's two moments


class TestFacts:
    def test_are_shown_by_small_steps(self):
        machine = worker("cpu:1GiB")
        found = machine.facts()
        assert found.least_batch == 2, "BatchNorm1d raises an error for one sample"
        assert found.gradient_bytes == sum(p.nbytes for p in machine.trainee.parameters())
        assert not found.leaves_unused
        assert found.largest_batch is None
        assert machine.steps <= 5

    def test_a_parameter_that_no_layer_uses_is_unused(self):
        workload = small()
        workload.model[3].idle = nn.Parameter(torch.ones(3))
        assert worker("cpu:1GiB", workload).facts().leaves_unused


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
