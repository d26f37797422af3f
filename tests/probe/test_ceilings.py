"""Ceilings on small devices, also of models that keep data between steps, or whose steps differ."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable

import pytest
import torch
from marks import for_release, slow, whole
from noted import kinds
from raised import raises
from torch import nn

import autosplit
from autosplit import Workload, find_ceiling
from autosplit.errors import InputError, UserCodeError, WorkloadError
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.runtime.cpu import MOST_FEW, CpuWorker
from autosplit.runtime.interrupts import held_interrupts
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.trainee import Trainee

MOST_STEPS = 8

pytestmark = pytest.mark.usefixtures("without_workspaces")  # devices of a few MiB


def classifier(module: nn.Module, samples: int = 8, optimizer=torch.optim.AdamW, **options) -> Workload:
    batch = torch.randn(samples, 32), torch.randint(0, 10, (samples,))
    return Workload(module, batch, loss_fn=nn.functional.cross_entropy, optimizer=optimizer, **options)


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def runs(make: Callable[[], Workload], budget: str, n: int, seeds=(0,)) -> bool:
    """Run three steps of one of two ranks on a new copy, and return whether they fit a budget."""
    (device,) = autosplit.parse_devices(f"cpu:{budget}")
    for seed in seeds:
        torch.manual_seed(0)
        trainee = training_copy(make(), device=torch.device("cpu"))
        trainee.draws.draw = lambda: None  # random, as in training
        worker = CpuWorker((device,), (device.capacity_bytes,), trainee, n)
        for step in range(3):
            torch.manual_seed(100 * seed + step)
            random.seed(100 * seed + step)
            try:
                worker.peaks(StepShape(((n,),), "rank", num_ranks=2))
            except OutOfMemoryError:
                return False
    return True


@pytest.fixture
def counted(monkeypatch):
    """Count real steps of more samples than those that predict others, by their samples."""
    steps = []
    real = Trainee.step

    def step(trainee, models, batches, sizes, *rest, **options):
        if getattr(trainee, "fake_mode", None) is None and sum(sizes) > 3 * MOST_FEW:
            steps.append(sum(sizes))
        return real(trainee, models, batches, sizes, *rest, **options)

    monkeypatch.setattr(Trainee, "step", step)
    return steps


def assert_right(make: Callable[[], Workload], budget: str, counted: list[int], seeds=(0,)) -> None:
    torch.manual_seed(0)
    found = find_ceiling(make(), f"cpu:{budget}")
    assert len(counted) <= MOST_STEPS
    assert found.ooms <= 1
    assert runs(make, budget, found.batch_size, seeds)
    assert not runs(make, budget, int(found.batch_size * 1.02) + 1, seeds)


class Averaged(nn.Module):
    """Keeps an average of its weights in buffers, in a dict, in a dict that the first step fills, or elsewhere."""

    outside: dict[str, torch.Tensor]

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers, self.where = mlp(256), where
        copies = {name.replace(".", "_"): p.detach().clone() for name, p in self.layers.named_parameters()}
        if where == "buffers":
            for name, value in copies.items():
                self.register_buffer(name, value)
        self.average = copies if where == "dict" else {}

    def forward(self, x):
        average = Averaged.outside if self.where == "outside" else self.average
        for name, weight in self.layers.named_parameters() if self.training else ():
            weight = weight.detach()
            kept = self._buffers.get(name.replace(".", "_"))
            kept = average.setdefault(name.replace(".", "_"), weight.clone()) if kept is None else kept
            kept.mul_(0.99).add_(weight, alpha=0.01)
        return self.layers(x)


@pytest.mark.parametrize("where", ["dict", for_release("lazily"), for_release("outside")])
@pytest.mark.parametrize("device", ["cpu:4MiB", for_release("sim:RTX3090@4MiB")])
def test_an_average_of_the_weights_takes_its_bytes_wherever_it_is_kept(where, device, counted):
    """Only parameters and buffers counted: for a dict the answer was 1033 samples, and 919 fit."""
    Averaged.outside = {}
    expected = find_ceiling(classifier(Averaged("buffers")), device)
    counted.clear()
    found = find_ceiling(classifier(Averaged(where)), device)
    assert found.batch_size == expected.batch_size
    assert found.peak_bytes == expected.peak_bytes
    assert found.ooms == 0
    assert len(counted) <= MOST_STEPS
    Averaged.outside = {}


class Noting(nn.Module):
    """Keeps data of each step."""

    def __init__(self, note: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.note, self.notes = mlp(64), note, []

    def forward(self, x):
        outputs = self.layers(x)
        self.notes.append(self.note(outputs.detach()))
        return outputs


@pytest.mark.parametrize("device", ["cpu:1MiB", whole("sim:RTX3090")])
def test_a_memory_bank_that_grows_with_every_step_has_no_ceiling(device, counted):
    """The data of probes counted: the answer was 85 samples after six errors, and 720 fit at first."""
    with raises(WorkloadError, "512", "4"):
        find_ceiling(classifier(Noting(lambda outputs: outputs)), device)
    assert counted == []


def test_neither_does_a_custom_step_that_keeps_what_it_sees():
    kept = []

    def step(model, optimizer, batch):
        kept.append(model(batch))  # with its graph
        kept[-1].sum().backward()
        optimizer.step()

    with raises(WorkloadError):
        find_ceiling(Workload(mlp(32), torch.randn(8, 32), step=step, optimizer=torch.optim.SGD), "cpu:1MiB")


def test_a_list_of_losses_is_no_memory_bank(counted):
    assert_right(lambda: classifier(Noting(torch.mean)), "1MiB", counted)


class Queued(Noting):
    """Keeps its data in a ring of fixed size."""

    def __init__(self) -> None:
        super().__init__(lambda outputs: outputs)
        self.ring, self.at = torch.zeros(4096, 10), 0

    def forward(self, x):
        outputs = self.layers(x)
        for row in range(0, len(x), 64):
            part = outputs.detach()[row : row + 64]
            self.at = self.at if self.at + len(part) <= len(self.ring) else 0
            self.ring[self.at : self.at + len(part)] = part
            self.at += len(part)
        return outputs


@pytest.mark.slow
def test_a_ring_of_fixed_size_counts_once(counted):
    assert_right(lambda: classifier(Queued()), "1MiB", counted)


def test_an_optimizer_of_which_no_two_steps_are_alike_is_refused():
    """L-BFGS: the answer was 574 samples after 18 steps, and 900 fit."""

    def step(model, optimizer, batch):
        def closure():
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    given = Workload(mlp(32), torch.randn(8, 32), step=step, optimizer=torch.optim.LBFGS)
    with raises(WorkloadError):
        find_ceiling(given, "cpu:1MiB")


class Rows(nn.Module):
    """Returns the mean of the rows that a sample selects."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width, sparse=True)

    def forward(self, names):
        return self.table(names).mean(1)[:, :10]


@pytest.mark.parametrize("distinct", [for_release(False), True])
@pytest.mark.parametrize(
    ("rows", "width", "names", "samples", "budget"), [for_release(2000, 16, 20, 8, "2MiB"), (1000, 32, 20, 4, "1MiB")]
)
def test_sparse_gradients_are_followed_for_real(rows, width, names, samples, budget, distinct, counted):
    """A fake sparse gradient has no rows. The trace had two thirds of a real step, and two of six steps ran out of
    memory.
    """

    def batch(n):
        return torch.randint(0, rows, (n, names)), torch.randint(0, 10, (n,))

    def make() -> Workload:
        return Workload(
            Rows(rows, width),
            batch(samples),
            loss_fn=nn.functional.cross_entropy,
            optimizer=torch.optim.SparseAdam,
            make_batch=batch if distinct else None,
        )

    assert_right(make, budget, counted)


class LayerDrop(nn.Module):
    """Skips a layer if a random number is low, or high."""

    def __init__(self, draw: Callable[[], float], *, low: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 128), nn.Linear(128, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4))
        self.draw, self.low = draw, low

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            drawn = self.draw()
            if not self.training or (drawn >= 0.3 if self.low else drawn <= 0.7):
                x = x + block(x)
        return self.last(x)


def tensor_draw():
    return torch.rand([])


def number_draw():
    return torch.rand(1).item()


def in_place_draw():
    return torch.empty(1).uniform_(0, 1).item()


def signed_draw():
    return (torch.empty(()).uniform_(-1, 1) + 1) / 2


def coin():
    return torch.bernoulli(torch.tensor(0.7))


def python_draw():
    return random.random()


@pytest.mark.parametrize(
    ("draw", "low"),
    [
        (tensor_draw, True),
        slow(python_draw, False),
        for_release(tensor_draw, False),
        for_release(python_draw, True),
        *(for_release(number_draw, low) for low in (True, False)),
        *(for_release(draw, True) for draw in (in_place_draw, signed_draw, coin)),
    ],
)
def test_layers_that_are_left_out_at_random_count(draw, low, counted):
    """A probe had skipped most layers. The answer was 929 samples after ten steps, and 335 fit with all layers."""
    assert_right(lambda: classifier(LayerDrop(draw, low=low)), "4MiB", counted, seeds=range(4))


@pytest.mark.slow
def test_who_waits_for_a_number_gets_it():
    def draw():
        while True:
            drawn = torch.rand([])
            if 0.2 < drawn < 0.9:
                return drawn

    assert find_ceiling(classifier(LayerDrop(draw)), "cpu:4MiB").batch_size > 0


def small(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))


class Branching(nn.Module):
    """Reads a value, so fake tensors cannot trace it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x) * (1.0 if x.sum().item() > -1e9 else 2.0)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.ASGD])
def test_optimizers_whose_moment_is_the_fullest_at_small_batches(optimizer):
    """Their state was created outside of the fake mode, or they read values.

    Real traces had a flat peak up to four times the sample batch. The fit never rose, the search began at 65536, and
    the error was "does not fit" at batch 1.
    """
    workload = classifier(small(), optimizer=optimizer)
    found = find_ceiling(workload, "cpu:1MiB")
    assert runs(lambda: workload, "1MiB", found.batch_size)
    assert not runs(lambda: workload, "1MiB", found.batch_size + 2), "blocks are rounded, a line is not"
    assert found.ooms <= 1


@pytest.mark.parametrize("budget", ["8MiB", "16MiB"])
def test_a_model_that_can_not_be_faked_whose_peak_is_flat_at_first(budget):
    """The answer was 2048 after seven errors, and 3000 fit."""
    workload = classifier(Branching(256), optimizer=torch.optim.AdamW)
    found = find_ceiling(workload, f"cpu:{budget}")
    assert runs(lambda: workload, budget, found.batch_size)
    assert not runs(lambda: workload, budget, found.batch_size + 1)
    assert found.ooms <= 1


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
    workload = classifier(Jumping(5), optimizer=torch.optim.SGD, samples=4)
    found = find_ceiling(workload, "cpu:1MiB")
    assert runs(lambda: workload, "1MiB", found.batch_size)
    assert not runs(lambda: workload, "1MiB", found.batch_size + 1)


class TestPlainCpu:
    def test_the_role_is_what_runs(self):
        """Every role ran the step of a primary, under the requested role's name."""
        workload = classifier(small(512), optimizer=torch.optim.SGD)  # its peak is in the backward
        peaks = {
            role: find_ceiling(workload, "cpu", role=role, max_batch_size=16).peak_bytes
            for role in ("eval", "primary", "rank")
        }
        assert peaks["eval"] < peaks["primary"] < peaks["rank"], "a rank has gradient buckets"

    def test_a_time_limit_ends_it(self):
        """The first step already exceeds the limit, and a short budget repeats it twice on any machine."""
        waiting = Slow(0.05)
        found = find_ceiling(classifier(waiting, optimizer=torch.optim.SGD), "cpu", time_limit_s=0.01)
        assert found.limited_by == "time"
        assert found.batch_size < 8
        assert 0 < len(waiting.forwards) < 10

    def test_a_model_that_fails_with_few_samples_is_looked_at_from_its_sample_batch_on(self):
        """The search began at one sample, and the model's own error came back unexplained."""
        found = find_ceiling(classifier(AtLeast(4), optimizer=torch.optim.SGD), "cpu", max_batch_size=32)
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
    with pytest.raises(UserCodeError, match=r"with a batch of \d*[13579] .* raised ValueError: can't"):
        find_ceiling(classifier(AtLeast(1, 4)), "cpu:1MiB")


def test_the_machines_own_lack_of_memory_is_a_lack_of_memory(monkeypatch):
    """The CPU allocator's error came back unchanged in this process, but not in a child process."""
    workload = classifier(small(), optimizer=torch.optim.SGD)
    devices = autosplit.parse_devices("cpu:1GiB")
    worker = CpuWorker(devices, (2**30,), training_copy(workload, device=torch.device("cpu")), 64)
    worker.peaks(StepShape(((4,),)))

    def refuse(*_args, **_options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr("autosplit.runtime.cpu.run_placed", refuse)
    with pytest.raises(OutOfMemoryError, match="before any budget"):
        worker.peaks(StepShape(((8,),)))


@pytest.mark.whole
def test_what_was_assumed_is_told_with_the_ceiling():
    model = nn.Linear(32, 10)
    found = find_ceiling(Workload(model, torch.randn(8, 32)), "sim:RTX3090", max_batch_size=8)
    assert "optimizer-assumed" in kinds(found.notes)
    assert "loss-assumed" in kinds(found.notes)


def test_a_time_limit_that_is_over_before_anything_ran_is_not_a_lack_of_memory():
    found = find_ceiling(classifier(small(), optimizer=torch.optim.SGD), "cpu:1MiB", time_limit_s=1e-9)
    assert found.batch_size >= 1, "the first steps of all run in any case"


@pytest.mark.parametrize("limit", ["5", [1], True, float("nan"), 0, -1])
def test_a_time_limit_that_is_none(limit):
    with raises(InputError):
        find_ceiling(classifier(small(), optimizer=torch.optim.SGD), "cpu:1MiB", time_limit_s=limit)


@pytest.mark.parametrize("most", [2**31, 10**30])
def test_no_batch_is_larger_than_a_kernel_counts(most):
    with raises(InputError, "2147483647"):
        find_ceiling(classifier(small(), optimizer=torch.optim.SGD), "cpu:1MiB", max_batch_size=most)


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
        workload = classifier(small(), optimizer=torch.optim.AdamW)
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
        find_ceiling(classifier(small(), optimizer=torch.optim.SGD), "cpu:1KiB")
