"""The gradient noise scale from unequal ranks, compared with the closed form of a linear regression."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan
from ranks import found_by, job_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

from autosplit import ddp
from autosplit.errors import InputError
from autosplit.tools.noise_scale import NoiseScale

pytestmark = pytest.mark.slow

NUM_SAMPLES = 9600
INPUTS = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
NOISE = torch.randn(NUM_SAMPLES, 1, generator=torch.Generator().manual_seed(2))
CLOSED_FORM = 13.0
"""From tests/extras/test_noise_scale.py: S = 416, |G|^2 = 32."""


def estimated(sizes: tuple[int, ...], effective: int, *, own_loader: bool = False) -> tuple[float, int]:
    with ddp.setup(make_plan(sizes, effective)) as ctx:
        net = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(net.weight)
        model = ctx.wrap(net)
        data = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True) + 2 * NOISE)
        sampler: Any = ctx.batch_sampler(NUM_SAMPLES, shuffle=True, seed=7)
        if own_loader:
            sampler = own_batches(sizes, ctx.rank)
        loader = DataLoader(data, batch_sampler=sampler)
        noise_scale = NoiseScale()
        for step in ctx.steps(loader, noise_scale=noise_scale):
            for inputs, targets in step:
                step.backward(nn.functional.mse_loss(model(inputs), targets))
            model.zero_grad()
        return noise_scale.value, len(noise_scale)


def own_batches(sizes: tuple[int, ...], rank: int) -> list[list[int]]:
    """Return one rank's batches of a user's own batch sampler. The ranks divide each `sum(sizes)` samples."""
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(7))
    return [micro_batch.split(sizes)[rank].tolist() for micro_batch in order.split(sum(sizes))]


def refused() -> str:
    with ddp.setup(make_plan((2, 9, 5), 32)) as ctx:
        model = ctx.wrap(nn.Linear(8, 1))
        model.register_comm_hook(None, fp16_compress_hook)
        try:
            ctx.steps([], noise_scale=NoiseScale())
        except InputError as error:
            return str(error)
        return ""


SCENARIOS = {
    "two forwards": partial(estimated, (2, 9, 5), 32),
    "one forward": partial(estimated, (2, 9, 5), 16),
    "no share": partial(estimated, (0, 9, 5), 28),
    "own loader": partial(estimated, (2, 9, 5), 32, own_loader=True),
    "refused": refused,
}


ranks = job_of(__name__, "SCENARIOS", 3)


@pytest.mark.parametrize(
    ("scenario", "num_steps"), [("two forwards", 300), ("one forward", 600), ("no share", 343), ("own loader", 300)]
)
def test_ranks_of_unlike_shares_are_within_ten_percent_of_the_closed_form(ranks, scenario, num_steps):
    first, *others = found_by(ranks, scenario)
    assert first[0] == pytest.approx(CLOSED_FORM, rel=0.1)
    assert first[1] == (num_steps + 1) // 2
    assert others == [first, first]


def test_a_communication_hook_is_refused(ranks):
    assert all("has a communication hook" in said for said in found_by(ranks, "refused"))
