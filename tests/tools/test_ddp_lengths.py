"""Batches of similar lengths under DDP give the weights of one process, with unequal or empty ranks and cuts."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan, weights
from ranks import found_by, job_of
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import autosplit
from autosplit import ddp
from autosplit.oom import OutOfMemoryError
from autosplit.solve.length_plan import LengthPlan, LengthPoint
from autosplit.tools.token_sampler import TokenBatchSampler

pytestmark = pytest.mark.slow

POINTS = (LengthPoint(64, 1.0, 10.0, 10.0), LengthPoint(32, 2.5, 25.0, 25.0), LengthPoint(16, 6.0, 60.0, 60.0))
FOUND = LengthPlan(POINTS, 20.0, 10.0, 0.1, 0.5)
DRAWN = random.Random(5)
LENGTHS = [DRAWN.randint(8, 64) for _ in range(120)]
DATA = [torch.randint(1, 50, (length,), generator=torch.Generator().manual_seed(i)) for i, length in enumerate(LENGTHS)]


def pad(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True)


def make_net() -> nn.Module:
    torch.manual_seed(0)

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 6, padding_idx=0), nn.Linear(6, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens).sum(1).tanh())

    return Sequences().double()


def trained(sizes: tuple[int, ...], effective: int | None, *, fails: bool = False) -> tuple[torch.Tensor, list[int]]:
    asked = None if effective is None else (effective, effective)
    with ddp.setup(make_plan(sizes, effective, lengths=FOUND, effective_batch_sizes=asked)) as ctx:
        model = ctx.wrap(make_net())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader: Any = DataLoader(DATA, batch_sampler=ctx.token_sampler(LENGTHS, shuffle=True), collate_fn=pad)
        noise_scale = None if effective is None else autosplit.NoiseScale()
        options: Any = {"on_oom": "cut"} if fails else {"noise_scale": noise_scale}
        tokens_held, drawn = [], 0
        for epoch in range(2):
            loader.batch_sampler.set_epoch(epoch)
            for step in ctx.steps(loader, **options):
                for tokens in step:
                    drawn += 1
                    if not fails:
                        tokens_held.append(tokens.numel())
                        step.backward(model(tokens).square().mean())
                        continue
                    with step.attempt():
                        if ctx.rank == 1 and drawn % 5 == 0 and len(tokens) > 1:
                            raise OutOfMemoryError("out of memory")
                        step.backward(model(tokens).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return weights(model), tokens_held


def by_one_process(sizes: tuple[int, ...], effective: int | None) -> torch.Tensor:
    """Train on the same optimizer steps, one sample at a time."""
    total = sum(sizes)
    keeps = effective is not None
    sampler = TokenBatchSampler(FOUND, LENGTHS, sizes, effective or total, keeps_effective=keeps, shuffle=True)
    model = make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = iter(sampler)
        for step in sampler.schedule:
            for _ in step.micro_batch_sizes:
                for sample in next(batches):
                    (model(DATA[sample][None]).square().mean() / step.num_samples).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


JOBS: dict[str, tuple[tuple[int, ...], int | None, bool]] = {
    "an effective batch": ((4, 1, 2), 30, False),
    "no share": ((4, 0, 2), 30, False),
    "cut": ((4, 2, 2), 30, True),
}
SCENARIOS: dict[str, Any] = {
    name: partial(trained, sizes, effective, fails=fails) for name, (sizes, effective, fails) in JOBS.items()
}


def tuned_together() -> tuple[str, int]:
    """Tune with all ranks and return the batches of an epoch. The last rank has half of the others' memory."""
    tokens = torch.randint(1, 50, (4, 16))
    plan = autosplit.tune_lengths(
        make_net(),
        (tokens, torch.zeros(4, 1, dtype=torch.float64)),
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.Adam,
        devices="cpu:512KiB,cpu:512KiB,cpu:256KiB",
        strategy="ddp",
        effective_batch_size=64,
        lengths=LENGTHS,
        profile="off",
        n_trials=2,
    )
    with ddp.setup(plan) as ctx:
        return plan.to_json(), len([*ctx.token_sampler(LENGTHS)])


SCENARIOS["together"] = tuned_together


ranks = job_of(__name__, "SCENARIOS", 3)


@pytest.mark.parametrize("name", JOBS)
def test_the_weights_are_those_of_one_process(ranks, name):
    sizes, effective, _ = JOBS[name]
    expected = by_one_process(sizes, effective)
    for found, _ in found_by(ranks, name):
        assert (found - expected).abs().max() < 1e-9


@pytest.mark.parametrize("name", ["an effective batch", "no share"])
def test_no_rank_holds_more_tokens_than_it_holds_of_short_samples(ranks, name):
    """Here, more tokens fit at shorter lengths, so a batch of the shortest samples has the most tokens."""
    sizes = JOBS[name][0]
    for size, (_, held) in zip(sizes, found_by(ranks, name), strict=True):
        assert max(held) <= max(6 * size * 16, 64)


def test_ranks_that_tune_together_agree_on_what_fits_all_of_them(ranks):
    found = found_by(ranks, "together")
    assert found[1:] == found[:1] * 2
    plan = autosplit.Plan.from_json(found[0][0])
    assert plan.lengths is not None
    assert [point.length for point in plan.lengths.points] == [64, 32, 16, 8]
    assert plan.lengths.points[-1].times > 4
