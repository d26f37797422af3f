"""tune_lengths: more short samples fit in the same budget, and the profile records the lengths."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from noted import kinds
from raised import raises
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from autosplit.errors import UserCodeError, WorkloadError
from autosplit.plan.plan import Plan
from autosplit.tools import tune_lengths as tuned_lengths
from autosplit.tools.tune_lengths import tune_lengths
from autosplit.tuning.measure import measure
from autosplit.tuning.tune import TuningInterrupted, tune
from autosplit.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("without_workspaces")  # devices of a few KiB

DRAWN = random.Random(3)
LENGTHS = [min(128, max(8, int(DRAWN.lognormvariate(3, 1)))) for _ in range(6000)]
LENGTHS[0] = 128


class Encoder(nn.Module):
    """One layer of a transformer. Its attention scores grow with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        self.query, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        scores = self.query(x) @ x.transpose(1, 2)
        return self.head(torch.softmax(scores, -1) @ x)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[..., 0] - targets).square().mean()


TOKENS = torch.randint(50, (4, 20))
BATCH = TOKENS, TOKENS.float()


def tuned(devices: str = "sim:2xRTX3090@64MiB", lengths: Any = LENGTHS, **options: Any) -> Plan:
    given = {"loss_fn": loss, "optimizer": torch.optim.AdamW, "profile": "off", "n_trials": 3, **options}
    return tune_lengths(Encoder(), BATCH, devices=devices, lengths=lengths, **given)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return tuned()


@pytest.mark.slow
def test_shorter_samples_take_the_memory_of_the_longest_and_no_more(plan):
    assert plan.lengths is not None
    assert [point.length for point in plan.lengths.points] == [128, 64, 32, 16, 8]
    for point in plan.lengths.points:
        tokens = TOKENS[:, torch.arange(point.length) % 20]
        at = Workload(Encoder(), (tokens, tokens.float()), loss_fn=loss, optimizer=torch.optim.AdamW)
        limits = [seat.peak_bytes for seat in plan.main.seats]
        shares = plan.lengths.split_of(point.length, plan.split)
        found = measure(at, devices="sim:2xRTX3090@1GiB", split=shares)
        assert all(peak <= limit for peak, limit in zip(found.peak_bytes, limits, strict=True))
        if point.length < 128:  # one sample in a hundred more would not fit
            more = measure(at, devices="sim:2xRTX3090@1GiB", split=tuple(-(-102 * n // 100) for n in shares))
            assert any(peak > limit for peak, limit in zip(more.peak_bytes, limits, strict=True))
    assert 2 < plan.lengths.points[1].times < 4  # between the linear and the quadratic


def test_the_report_and_explain_say_what_it_brings(plan):
    assert plan.lengths is not None
    assert plan.lengths.samples_per_s > 1.5 * plan.lengths.fixed_samples_per_s
    assert plan.lengths.padding_share < plan.lengths.fixed_padding_share
    said = plan.explain().sentences()["lengths"]
    assert said.startswith("Batches of similar length give ")
    assert Plan.from_json(plan.to_json()) == plan
    assert "deliver" in plan.explain().sentences()["data"]


@pytest.mark.slow
def test_a_profile_knows_the_lengths_and_says_nothing_of_them_unasked():
    first = tuned(profile="auto")
    calls: list[str] = []
    again = tuned(profile="auto", progress=lambda part: calls.append(part.message))
    assert again.lengths == first.lengths
    assert not [message for message in calls if message.startswith("samples of length")]
    fewer = tuned(profile="auto", lengths=[length for length in LENGTHS[:100] if length > 20])
    assert fewer.lengths is not None
    assert first.lengths is not None
    assert fewer.lengths.points == first.lengths.points
    assert fewer.lengths.padding_share != first.lengths.padding_share
    tokens = TOKENS[:, torch.arange(128) % 20]
    plain = tune(
        Encoder(), (tokens, tokens.float()), loss_fn=loss, optimizer=torch.optim.AdamW, devices="sim:2xRTX3090@64MiB"
    )
    assert plain.split == first.split
    assert plain.lengths is None


class Positions(nn.Module):
    """A model with a fixed number of positions, and memory proportional to tokens."""

    def __init__(self, most: int = 64) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(50, 64), nn.Embedding(most, 64)
        self.layers, self.head = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), nn.Linear(64, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.layers(x).tanh())


@pytest.mark.slow
def test_no_device_gets_more_of_any_length_than_it_was_seen_to_hold():
    """43 samples ran as (24, 18). (12, 9) times 2.05 was derived from them, and ran out of memory at length 31."""
    lengths = [*range(4, 65)]
    options: Any = {"effective_batch_size": 256, "profile": "off", "n_trials": 4}
    plan = tune_lengths(
        Positions(), BATCH, loss_fn=loss, devices="sim:RTX3090@1331KiB+RTX3090@1126KiB", lengths=lengths, **options
    )
    assert min(plan.split) > 1
    assert plan.lengths is not None
    for length in lengths:
        for share, most in zip(plan.split, plan.lengths.split_of(length, plan.split), strict=True):
            assert most * length <= share * 64


def test_shorter_samples_that_take_as_much_are_as_many(monkeypatch):
    """Derived from rounded times of the next larger length, they were fewer, and no plan was made."""
    real = tuned_lengths._most_within

    def stuck(worker: Any, plan: Any, full: Any, least: int, most: int) -> int:
        return real(worker, plan, full, least, most) if least == plan.batch_size else least

    monkeypatch.setattr(tuned_lengths, "_most_within", stuck)
    found = tuned("sim:RTX3090@1331KiB+RTX3090@1126KiB", lengths=[64, 8])
    assert found.lengths is not None
    assert len({point.times for point in found.lengths.points[1:]}) == 1


def test_a_model_that_takes_none_so_long_is_told_by_the_length():
    with pytest.raises(UserCodeError, match=r"its samples had the longest of the lengths, 128. If the model"):
        tune_lengths(Positions(64), BATCH, loss_fn=loss, devices="cpu", lengths=[128, 64], profile="off")


def test_where_the_width_is_taken_for_the_length_the_plan_of_the_longest_is_kept():
    """The tuned plan is kept without shorter samples. A note gives the reason and the remedy."""
    batch = torch.randn(4, 16, 16), torch.randn(4, 1)
    model = nn.Sequential(nn.Linear(16, 8), nn.Flatten(), nn.LazyLinear(1))
    model(batch[0])
    found = tune_lengths(
        model, batch, loss_fn=nn.MSELoss(), devices="cpu", lengths=[16, 8], profile="off", max_batch_size=8
    )
    assert found.lengths is not None
    assert len(found.lengths.points) == 1
    assert any(
        "did not measure samples of length 8 and below" in str(note) and "make_batch(n, l" in str(note)
        for note in found.notes
    )


def test_batchnorms_that_need_two_samples_leave_lengths_out():
    class Pooled(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mean(1))

    model = Pooled(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    batch = torch.randn(4, 20, 16), torch.randn(4, 1)
    found = tune_lengths(
        model, batch, loss_fn=nn.MSELoss(), devices="sim:T4", lengths=[20, 10], profile="off", n_trials=2
    )
    assert found.lengths is None
    assert "lengths-not-measured" in kinds(found.notes)


@pytest.mark.slow
def test_a_forwards_most_samples_are_kept():
    found = tuned(max_batch_size=40)
    assert found.lengths is not None
    assert max(sum(found.lengths.split_of(point.length, found.split)) for point in found.lengths.points) <= 40


def test_a_make_batch_without_a_length_is_refused():
    given = Workload(Encoder(), BATCH, loss_fn=loss, make_batch=lambda n: (TOKENS[:1].expand(n, -1),) * 2)
    with raises(WorkloadError):
        tune_lengths(given, devices="sim:RTX3090@64MiB", lengths=[64, 8], profile="off", n_trials=2)


def test_ctrl_c_among_the_lengths_gives_the_plan_of_the_longest(monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuned_lengths, "_looked_at", interrupted)
    with pytest.raises(TuningInterrupted) as caught:
        tuned()
    assert caught.value.plan is not None
    assert caught.value.plan.complete
    assert caught.value.plan.notes[0].kind == "interrupted"


def test_no_time_leaves_the_longest_alone():
    found = tuned(time_limit_s=0.01)
    assert found.lengths is not None
    assert [point.length for point in found.lengths.points] == [128]
    assert any("the time limit ended" in str(note) and "length 64 and below" in str(note) for note in found.notes)


@pytest.mark.slow
def test_no_batch_of_an_epoch_is_over_an_enforced_budget():
    plan = tuned("cpu:24MiB,cpu:12MiB", n_trials=6)
    assert plan.lengths is not None
    assert plan.lengths.points[-1].times > 10
    data = [torch.randint(50, (length,)) for length in LENGTHS]

    def pad(samples: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(samples, batch_first=True)

    loader = DataLoader(data, batch_sampler=plan.token_sampler(LENGTHS, shuffle=True), collate_fn=pad)
    with plan.budgets() as tracker:
        model = plan.wrap(Encoder())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in plan.steps(loader):
            for tokens in step:
                step.backward(loss(model(tokens), tokens.float()))
            optimizer.step()
            optimizer.zero_grad()
    most = [device.capacity_bytes for device in plan.devices]
    assert all(0 < peak <= limit for peak, limit in zip(tracker.peak_bytes, most, strict=True))
    sizes = [n for step in loader.batch_sampler.schedule for n in step.micro_batch_sizes]  # type: ignore[union-attr]
    assert max(sizes) > 5 * plan.batch_size
