"""A checkpoint between the last backward and the update resumes with that step, from the weights before it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ddp_jobs import NUM_SAMPLES, make_model, mean_loss, weights
from torch.utils.data import DataLoader

from autosplit.parallel.batch_sampler import ScheduledBatchSampler
from autosplit.parallel.epoch_steps import steps

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "foreach Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
}


def a_loader() -> DataLoader[Any]:
    return DataLoader(range(NUM_SAMPLES), batch_sampler=ScheduledBatchSampler(NUM_SAMPLES, 4, 8, shuffle=True, seed=7))


def train(model: Any, optimizer: Any, loader: Any, save_at: int | None = None, *, after: bool = False) -> Any:
    """Train the rest of an epoch. Return the states at a step, saved before or right after its update."""
    saved = None

    def save() -> Any:
        return copy.deepcopy([part.state_dict() for part in (model, optimizer, loader.batch_sampler)])

    for number, step in enumerate(steps(loader, batch_size=4, effective_batch_size=8)):
        for indices in step:
            step.backward(mean_loss(model, indices))
        if number == save_at and not after:
            saved = save()
        optimizer.step()
        if number == save_at and after:
            saved = save()
        optimizer.zero_grad()
    return saved


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_resumed_run_is_exact(kind: str, after: bool, number: int) -> None:
    """The resumed run left out the update of one step, so the weights were 5% off at the end of the epoch."""
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    saved = train(model, optimizer, a_loader(), number, after=after)
    assert saved[2]["samples_consumed"] == 8 * (number + after)
    resumed, loader = make_model(), a_loader()
    other = OPTIMIZERS[kind](resumed.parameters())
    for part, state in zip((resumed, other, loader.batch_sampler), saved, strict=True):
        part.load_state_dict(state)
    train(resumed, other, loader)
    assert torch.equal(weights(resumed), weights(model))


def test_an_optimizer_in_a_hook_has_made_its_update() -> None:
    model, loader = make_model(), DataLoader(range(16), batch_sampler=ScheduledBatchSampler(16, 8, 8))
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def update(_: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for number, step in enumerate(steps(loader, batch_size=8, effective_batch_size=8), 1):
        for indices in step:
            step.backward(mean_loss(model, indices))
        assert loader.batch_sampler.samples_consumed == 8 * number


def test_an_update_that_a_grad_scaler_leaves_out_is_an_update() -> None:
    model, loader = make_model(), a_loader()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    step = next(steps(loader, batch_size=4, effective_batch_size=8))
    for indices in step:
        step.backward(mean_loss(model, indices) * float("inf"), scaler)
    before = weights(model)
    assert loader.batch_sampler.samples_consumed == 0
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert torch.equal(weights(model), before)
    assert loader.batch_sampler.samples_consumed == 8


def test_a_loop_without_updates_counts_at_once() -> None:
    """torch does not see some updates, such as custom code. After one such step, the loop counts each step at once."""
    model, loader = make_model(), a_loader()
    counted = []
    for step in steps(loader, batch_size=4, effective_batch_size=8):
        for indices in step:
            step.backward(mean_loss(model, indices))
        counted.append(loader.batch_sampler.samples_consumed)
    assert counted == [0, 16, 24, 32, 40, NUM_SAMPLES]
    assert loader.batch_sampler.samples_consumed == NUM_SAMPLES
