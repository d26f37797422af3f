"""Regression tests of ceilings."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
import torch
from noted import kinds
from raised import raises
from torch import nn

import autosplit
from autosplit import Workload, find_ceiling
from autosplit.errors import InputError, UserCodeError
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.runtime.cpu import CpuRuntime
from autosplit.runtime.interrupts import held_interrupts
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape


class Branching(nn.Module):
    """Reads a value, so fake tensors cannot trace it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x) * (1.0 if x.sum().item() > -1e9 else 2.0)


def classifier(module: nn.Module, optimizer, samples: int = 8) -> Workload:
    inputs = torch.randn(samples, 32)
    targets = torch.randint(0, 10, (samples,))
    return Workload(module, (inputs, targets), loss_fn=nn.functional.cross_entropy, optimizer=optimizer)


def small(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))


def runs(workload: Workload, budget: str, n: int) -> bool:
    """Run a step of one of two ranks, and return whether it fits a budget."""
    devices = autosplit.parse_devices(f"cpu:{budget}")
    runtime = CpuRuntime(devices, (devices[0].capacity_bytes,), training_copy(workload, device=torch.device("cpu")))
    try:
        runtime.peaks(StepShape(((n,),), "rank", num_ranks=2))
    except OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.ASGD])
def test_optimizers_whose_moment_is_the_fullest_at_small_batches(optimizer):
    """Their state was created outside of the fake mode, or they read values.

    Real traces had a flat peak up to four times the sample batch. The fit never rose, the search began at 65536, and
    the error was "does not fit" at batch 1.
    """
    workload = classifier(small(), optimizer)
    found = find_ceiling(workload, "cpu:1MiB")
    assert runs(workload, "1MiB", found.batch_size)
    assert not runs(workload, "1MiB", found.batch_size + 2), "blocks are rounded, a line between two traces is not"
    assert found.ooms <= 1


@pytest.mark.parametrize("budget", ["8MiB", "16MiB"])
def test_a_model_that_can_not_be_faked_whose_peak_is_flat_at_first(budget):
    """The answer was 2048 after seven errors, and 3000 fit."""
    workload = classifier(Branching(256), torch.optim.AdamW)
    found = find_ceiling(workload, f"cpu:{budget}")
    assert runs(workload, budget, found.batch_size)
    assert not runs(workload, budget, found.batch_size + 1)
    assert found.ooms <= 1
    assert "real-tensors" in kinds(found.notes)


class Jumping(nn.Module):
    """Needs a workspace from a number of samples on."""

    def __init__(self, beyond: int) -> None:
        super().__init__()
        self.layers, self.beyond = small(), beyond

    def forward(self, x):
        workspace = torch.zeros(100_000 if len(x) > self.beyond else 1)
        return self.layers(x) + 0 * workspace[0]


def test_a_jump_between_the_sample_batch_and_twice_it_is_not_taken_for_a_slope():
    """Any two points make a line. It was trusted, and the answer was 8 samples where hundreds fit."""
    workload = classifier(Jumping(5), torch.optim.SGD, samples=4)
    found = find_ceiling(workload, "cpu:1MiB")
    assert runs(workload, "1MiB", found.batch_size)
    assert not runs(workload, "1MiB", found.batch_size + 1)


class TestPlainCpu:
    def test_the_role_is_what_runs(self):
        """Every role ran the step of a primary, under the requested role's name."""
        workload = classifier(small(512), torch.optim.SGD)  # its peak is in the backward; later, gradients are as large
        peaks = {
            role: find_ceiling(workload, "cpu", role=role, max_batch_size=16).peak_bytes
            for role in ("eval", "primary", "rank")
        }
        assert peaks["eval"] < peaks["primary"] < peaks["rank"], "a rank has gradient buckets"

    def test_a_time_limit_ends_it(self):
        """The first step already exceeds the limit, and a short budget repeats it twice on any machine."""
        slow = Slow(0.05)
        found = find_ceiling(classifier(slow, torch.optim.SGD), "cpu", time_limit_s=0.01)
        assert found.limited_by == "time"
        assert found.batch_size < 8
        assert 0 < len(slow.forwards) < 10

    def test_a_model_that_fails_with_few_samples_is_looked_at_from_its_sample_batch_on(self):
        """The search began at one sample, and the model's own error came back unexplained."""
        found = find_ceiling(classifier(AtLeast(4), torch.optim.SGD), "cpu", max_batch_size=32)
        assert found.batch_size >= 8


class Shared(list):
    """A list that a copy of a model shares with the model."""

    def __deepcopy__(self, _memo):
        return self


class Slow(nn.Module):
    """Is slow, and records the batch size of each forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers, self.seconds = small(), seconds
        self.forwards = Shared()

    def forward(self, x):
        self.forwards.append(len(x))
        time.sleep(self.seconds)
        return self.layers(x)


class AtLeast(nn.Module):
    """Rejects fewer samples, or a number that `multiple` does not divide."""

    def __init__(self, least: int, multiple: int = 1) -> None:
        super().__init__()
        self.layers, self.least, self.multiple = small(), least, multiple

    def forward(self, x):
        if len(x) < self.least or len(x) % self.multiple:
            raise ValueError(f"can't take {len(x)} samples")
        return self.layers(x)


def test_an_error_of_the_users_code_says_with_which_batch():
    """A model that needs multiples of four raised its own ValueError, and no message named the tried size."""
    with pytest.raises(
        UserCodeError,
        match=r"with a batch of \d*[13579] .* raised ValueError: can't",
    ):
        find_ceiling(classifier(AtLeast(1, 4), torch.optim.SGD), "cpu:1MiB")


def test_the_machines_own_lack_of_memory_is_a_lack_of_memory(monkeypatch):
    """The CPU allocator's error came back unchanged in this process, but not in a child process."""
    workload = classifier(small(), torch.optim.SGD)
    devices = autosplit.parse_devices("cpu:1GiB")
    runtime = CpuRuntime(devices, (2**30,), training_copy(workload, device=torch.device("cpu")))
    runtime.peaks(StepShape(((4,),)))

    def refuse(*_args, **_options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr("autosplit.runtime.cpu.run_placed", refuse)
    with pytest.raises(OutOfMemoryError, match="before any budget"):
        runtime.peaks(StepShape(((8,),)))


def test_what_was_assumed_is_told_with_the_ceiling():
    model = nn.Linear(32, 10)
    found = find_ceiling(Workload(model, torch.randn(8, 32)), "sim:RTX3090", max_batch_size=8)
    assert "optimizer-assumed" in kinds(found.notes)
    assert "loss-assumed" in kinds(found.notes)


def test_a_time_limit_that_is_over_before_anything_ran_is_not_a_lack_of_memory():
    found = find_ceiling(classifier(small(), torch.optim.SGD), "cpu:1MiB", time_limit_s=1e-9)
    assert found.batch_size >= 1, "the first steps of all run in any case"


@pytest.mark.parametrize("limit", ["5", [1], True, float("nan"), 0, -1])
def test_a_time_limit_that_is_none(limit):
    with raises(InputError, "time-limit"):
        find_ceiling(classifier(small(), torch.optim.SGD), "cpu:1MiB", time_limit_s=limit)


@pytest.mark.parametrize("most", [2**31, 10**30])
def test_no_batch_is_larger_than_a_kernel_counts(most):
    with raises(InputError, "max-batch-size", "2147483647"):
        find_ceiling(classifier(small(), torch.optim.SGD), "cpu:1MiB", max_batch_size=most)


def test_a_function_that_leaves_the_program_is_the_users_error():
    def leaving() -> Workload:
        raise SystemExit(3)

    with pytest.raises(UserCodeError, match="raised SystemExit"):
        find_ceiling(leaving, "cpu:1MiB")


class TestHeldInterrupts:
    """One Ctrl-C in 25 ended the whole process, because torch's dispatcher cannot pass it on under fake tensors."""

    def test_it_comes_to_whoever_would_have_had_it(self):
        came = []
        before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
        try:
            with held_interrupts():
                signal.raise_signal(signal.SIGINT)
                assert came == []
            assert came == [signal.SIGINT]
        finally:
            signal.signal(signal.SIGINT, before)

    def test_what_is_ignored_stays_ignored(self):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with held_interrupts():
                signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)

    @pytest.mark.slow
    def test_interrupts_at_random_moments_of_a_tuning_are_only_interrupts(self):
        """Press Ctrl-C only during the tuning. An alarm just before or after it failed the test."""
        workload = classifier(small(), torch.optim.AdamW)
        tunes = []
        pressed = lambda _number, _frame: tunes and tunes.pop() and signal.raise_signal(signal.SIGINT)
        before = signal.signal(signal.SIGALRM, pressed)
        try:
            for delay_s in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3):
                with contextlib.suppress(KeyboardInterrupt):
                    tunes.append(True)
                    signal.setitimer(signal.ITIMER_REAL, delay_s)
                    autosplit.tune(workload, devices="sim:2xRTX3090", profile="off", n_trials=4)
                    tunes.clear()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_a_ceiling_that_does_not_exist_still_names_bytes():
    with pytest.raises(DoesNotFitError, match="does not fit on cpu:0"):
        find_ceiling(classifier(small(), torch.optim.SGD), "cpu:1KiB")
