"""The tracker counts every byte on its device, ends at zero, and raises if a device is full."""

from __future__ import annotations

import gc
import random

import pytest
import torch
import workloads
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.devices.transfer import transfer
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.parallel.balanced import BalancedDataParallel
from autosplit.rng import HIGHEST, LOWEST, ExtremeDraws
from autosplit.runtime.memory_tracker import BLOCK_BYTES, Entry, Tracker
from autosplit.runtime.model_copy import training_copy
from autosplit.workload.workload import Workload


def follow(num_devices: int = 1, capacity: int | None = None, **kwargs) -> Tracker:
    return Tracker([f"cpu:{i}" for i in range(num_devices)], [capacity] * num_devices, **kwargs)


def placed(tracker: Tracker, *shape: int, device: int = 0, **kwargs) -> Tensor:
    tensor = torch.zeros(*shape, **kwargs)
    tracker.adopt(tensor, device)
    return tensor


def char_gpt() -> Workload:
    return workloads.char_gpt(width=32, depth=2, heads=2)


def mlp(**kwargs) -> Workload:
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.LayerNorm(50), nn.Dropout(0.1), nn.Linear(50, 10))
    return Workload(model, (torch.randn(4, 20), torch.randint(0, 10, (4,))), loss_fn=F.cross_entropy, **kwargs)


def lstm() -> Workload:
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 16, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0][:, -1]

    return Workload(Last(), torch.randn(4, 6, 8))


class TestCounting:
    def test_rounds_up_to_a_block(self):
        with follow() as tracker:
            tensor = placed(tracker, 1)
            assert tracker.live_bytes == [BLOCK_BYTES]
            grown = tensor.expand(129).contiguous()
            assert tracker.live_bytes == [3 * BLOCK_BYTES]
            del grown
            assert tracker.live_bytes == [BLOCK_BYTES]
            assert tracker.peak_bytes == [3 * BLOCK_BYTES]

    def test_views_and_in_place_ops_are_not_new(self):
        with follow() as tracker:
            tensor = placed(tracker, 128, 4)
            views = [tensor.t(), tensor[3:], tensor.view(-1), tensor.detach()]
            tensor.add_(1).relu_()
            assert tracker.live_bytes == [2048]
            assert all(tracker.device_of(view) == 0 for view in views)

    def test_a_tensor_of_the_host_that_an_op_takes_beside_a_placed_one_has_to_be_there_too(self):
        """An average of the weights in a plain dict did not count, so the ceiling did not fit."""
        average = torch.zeros(256)
        with follow(2) as tracker:
            weight = placed(tracker, 256, device=1)
            average.mul_(0.9)
            assert tracker.live_bytes == [0, 1024]
            average.add_(weight)
            assert tracker.live_bytes == [0, 2048]
            left = tracker.left_on(1)
        with follow() as tracker:
            tracker.adopt_left(left, 0)
            assert tracker.live_bytes == [2048], "a referenced tensor still counts in the next step"
            del average
            assert tracker.live_bytes == [1024]

    def test_sparse_is_its_indices_and_values(self):
        with follow() as tracker:
            dense = placed(tracker, 64, 64)
            before = tracker.live_bytes[0]
            sparse = (dense + torch.eye(64)).to_sparse()
            assert tracker.device_of(sparse) == 0
            doubled = sparse.coalesce() * 2
            assert tracker.live_bytes[0] > before
            del sparse, doubled
            gc.collect()
            assert tracker.live_bytes[0] == before


class TestEntries:
    def test_are_all_storages_in_order_with_their_exact_sizes(self):
        with follow(2, accounts=True) as tracker:
            weight = placed(tracker, 100, device=1)
            tracker.classify(weight, "parameters")
            product = weight * 2
            tracker.classify(product, "gradients")  # a gradient is known only when it is on its parameter
            del product
            assert tracker.live_bytes == [0, 512]
        assert tracker.entries() == (
            Entry("parameters", 1, 400),
            Entry("gradients", 1, 400),
            Entry("gradients", 1, -400),
        )

    def test_a_copy_has_the_purpose_of_its_transfer(self):
        with follow(2, accounts=True) as tracker:
            weight = placed(tracker, 100)
            copies = [transfer(weight, 0, 1, purpose) for purpose in ("parameter", "input")]
            assert [tracker.device_of(copy) for copy in copies] == [1, 1]
        assert [(entry.kind, entry.device) for entry in tracker.entries()] == [
            ("activations", 0),
            ("parameters", 1),
            ("activations", 1),
        ]


class TestDraws:
    @pytest.mark.parametrize(("turned", "number"), [(False, HIGHEST), (True, LOWEST)])
    def test_few_random_numbers_are_the_most_extreme(self, turned, number):
        """They decide which layers run. A layer that was skipped by chance took no memory."""
        draws = ExtremeDraws()
        if turned:
            draws.turn()
        with follow(draws=draws):
            assert torch.rand(3).tolist() == [number] * 3
            assert torch.bernoulli(torch.full((2,), 0.5)).tolist() == [round(number)] * 2
            assert 0 < torch.rand(1000).std() < 1, "no layers are chosen by so many numbers"
        assert draws.count == 2

    def test_numbers_on_a_device_are_random(self):
        with follow(draws=ExtremeDraws()) as tracker:
            assert placed(tracker, 8).uniform_().unique().numel() > 1


class TestProvisional:
    def test_charged_when_it_meets_a_placed_tensor(self):
        with follow(2) as tracker:
            tensor, mask = placed(tracker, 128, device=1), torch.zeros(128)
            assert tracker.live_bytes == [0, 512]
            made = tensor + mask
            assert tracker.device_of(mask) == 1
            assert tracker.live_bytes == [0, 1536]
            del made


class TestLeavesNothing:
    @staticmethod
    def step(workload_trainee, capacities, split=(2, 3)):
        tracker = Tracker(["cpu:0", "cpu:1"], capacities)
        trainee = workload_trainee
        models = trainee.wrapped(lambda module: BalancedDataParallel(None, module, ["cpu"] * 2, split=split))
        batch = trainee.batch(sum(split))
        with tracker:
            trainee.adopt_on(tracker)
            before = list(tracker.live_bytes)
            failed = None
            try:
                trainee.step(models, [batch], [sum(split)])
            except OutOfMemoryError as error:
                failed = error.with_traceback(None)
            for optimizer in [trainee.optimizers.given]:
                optimizer.zero_grad(set_to_none=True)
            gc.collect()
            after = list(tracker.live_bytes)
        return before, after, tuple(tracker.peak_bytes), failed

    @pytest.mark.parametrize("make", [char_gpt, mlp, lstm])
    def test_a_step_returns_to_the_start(self, make):
        trainee = training_copy(make())
        self.step(trainee, [None, None])  # the optimizer's state appears
        for _ in range(2):
            before, after, _, _ = self.step(trainee, [None, None])
            assert after == before

    @pytest.mark.parametrize("make", [char_gpt, mlp])
    @pytest.mark.parametrize("device", [0, 1])
    def test_so_does_one_that_runs_out_of_memory_anywhere(self, make, device):
        trainee = training_copy(make())
        self.step(trainee, [None, None])
        start, _, peaks, _ = self.step(trainee, [None, None])
        generator, failures = random.Random(0), 0
        for _ in range(12):
            capacities = [None, None]
            capacities[device] = generator.randrange(start[device], peaks[device])
            before, after, _, failed = self.step(trainee, capacities)
            assert failed is not None
            assert failed.device_index == device
            assert before == start
            assert after == before
            failures += 1
        assert failures == 12


class TestOutOfMemory:
    def test_says_who_what_and_how_much(self):
        with follow(2, 2048) as tracker:
            held = placed(tracker, 256, device=1)
            with pytest.raises(OutOfMemoryError) as caught:
                held.repeat(2)
        error = caught.value
        assert (error.device, error.device_index) == ("cpu:1", 1)
        assert (error.requested_bytes, error.live_bytes, error.capacity_bytes) == (2048, 1024, 2048)
        assert str(error) == (
            "cpu:1 is out of memory. It requested 2048 bytes, and 1024 of the 2048 allowed bytes are in use. "
            "Give it fewer samples or a larger budget."
        )

    def test_is_what_cuda_raises(self):
        with follow(1, 512) as tracker, pytest.raises(torch.OutOfMemoryError) as caught:
            placed(tracker, 1000)
        assert isinstance(caught.value, RuntimeError)
        assert is_oom(caught.value)

    def test_in_a_transfer(self):
        with Tracker(["cpu:0", "cpu:1"], [None, 100]) as tracker:
            with pytest.raises(OutOfMemoryError) as caught:
                transfer(placed(tracker, 100), 0, 1, "input")
            assert caught.value.device == "cpu:1"
            del caught
            gc.collect()
            assert tracker.live_bytes == [0, 0]
