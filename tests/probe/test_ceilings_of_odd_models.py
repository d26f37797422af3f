"""Ceilings of models that keep data between steps, or whose steps differ."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from marks import for_release, slow
from raised import raises
from torch import nn

import autosplit
from autosplit import Workload, find_ceiling
from autosplit.errors import WorkloadError
from autosplit.oom import OutOfMemoryError
from autosplit.runtime.cpu import CpuRuntime
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
        runtime = CpuRuntime((device,), (device.capacity_bytes,), trainee)
        for step in range(3):
            torch.manual_seed(100 * seed + step)
            random.seed(100 * seed + step)
            try:
                runtime.peaks(StepShape(((n,),), "rank", num_ranks=2))
            except OutOfMemoryError:
                return False
    return True


@pytest.fixture
def counted(monkeypatch):
    """Count real steps by their samples, in any process."""
    steps = []
    real = Trainee.step

    def step(trainee, models, batches, sizes, *rest, **options):
        if trainee.fake_mode is None:
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


@pytest.mark.parametrize("device", ["cpu:1MiB", "sim:RTX3090"])
def test_a_memory_bank_that_grows_with_every_step_has_no_ceiling(device, counted):
    """The data of probes counted: the answer was 85 samples after six errors, and 720 fit at first."""
    with raises(WorkloadError, "memory-grows", "512", "4"):
        find_ceiling(classifier(Noting(lambda outputs: outputs)), device)
    assert counted == []


def test_neither_does_a_custom_step_that_keeps_what_it_sees():
    kept = []

    def step(model, optimizer, batch):
        kept.append(model(batch))  # with its graph
        kept[-1].sum().backward()
        optimizer.step()

    with raises(WorkloadError, "memory-grows"):
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
    with raises(WorkloadError, "memory-unsettled"):
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
