"""Models with ragged batches train on unequal ranks as in one process, except for rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan, relative_error, weights
from ragged_models import RAGGED
from ranks import found_by, job_of
from torch.utils.data import DataLoader

from autosplit import ddp
from autosplit.parallel.batch_sampler import ScheduledBatchSampler

NUM_SAMPLES = 45

JOBS = {
    "a short last micro-step": ((2, 6), 20),
    "empty shares in the short last step": ((1, 7), 42),
    "a rank without any share": ((0, 8), 16),
}


def trained(model: str, job: str, **options: Any) -> torch.Tensor:
    """Train an epoch with SGD. Return the weights."""
    ragged = RAGGED[model]
    with ddp.setup(make_plan(*JOBS[job])) as ctx:
        net = ctx.wrap(ragged.built())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        sampler = ctx.batch_sampler(NUM_SAMPLES, shuffle=True, seed=7)
        loader = DataLoader(ragged.data(NUM_SAMPLES), batch_sampler=sampler, collate_fn=ragged.collate)
        for step in ctx.steps(loader, **options):
            for batch in step:
                step.backward(ragged.compute_loss(net, batch))
            optimizer.step()
            optimizer.zero_grad()
        return weights(net)


def alone(model: str, job: str) -> torch.Tensor:
    """Train the same epoch in one process without autosplit: each step is one batch."""
    ragged, (_, effective) = RAGGED[model], JOBS[job]
    net = ragged.built()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    order = [i for batch in ScheduledBatchSampler(NUM_SAMPLES, 1, 1, shuffle=True, seed=7) for i in batch]
    for first in range(0, NUM_SAMPLES, effective):
        batch = ragged.collate([ragged.sample(index) for index in order[first : first + effective]])
        ragged.compute_loss(net, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


SCENARIOS: dict[str, Callable[[], Any]] = {
    f"{model}, {job}": lambda model=model, job=job: trained(model, job) for model in RAGGED for job in JOBS
}


ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("model", RAGGED)
def test_an_epoch_is_that_of_one_process(ranks, model, job):
    expected = alone(model, job)
    for found in found_by(ranks, f"{model}, {job}"):
        assert relative_error(found, expected) < 1e-12
