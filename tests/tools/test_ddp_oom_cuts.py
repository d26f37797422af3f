"""A rank that runs out of memory runs its micro-batch in parts while the others wait. The training stays the same."""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan, weights
from faults import Faults, Network
from marks import FOR_RELEASE
from ranks import found_by, job_of
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autosplit import ddp
from autosplit.errors import InputError
from autosplit.tools.oom_cuts import CutWarning

pytestmark = pytest.mark.slow

NUM_SAMPLES = 203
NUMBERS = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SHARES = (2, 9, 5)


def trained(
    faults: Faults,
    sizes: tuple[int, ...],
    effective: int,
    num_steps: int,
    *,
    on: tuple[int, ...],
    norm: bool = False,
    on_oom: Any = "cut",
) -> dict[str, Any]:
    """Train with faults on some ranks. Return the weights after each step, the warnings, and the last buffers."""
    found: dict[str, Any] = {"weights": []}
    with ddp.setup(make_plan(sizes, effective)) as ctx, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", CutWarning)
        network = Network(faults if ctx.rank in on else Faults())
        model = ctx.wrap(nn.Sequential(nn.BatchNorm1d(4).double(), network) if norm else network)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(NUMBERS[:, :4], NUMBERS[:, 4:])
        loader = DataLoader(data, batch_sampler=ctx.batch_sampler(NUM_SAMPLES, shuffle=True, seed=7))
        while len(found["weights"]) < num_steps:
            loader.batch_sampler.set_epoch(len(found["weights"]))
            for step in ctx.steps(loader, on_oom=on_oom):
                for inputs, targets in step:
                    with step.attempt():
                        step.backward(F.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                found["weights"].append(weights(model))
        found["buffers"] = [buffer.clone() for buffer in model.buffers()]
        found["warned"] = [str(one.message) for one in warned]
    return found


def as_ever(sizes: tuple[int, ...], effective: int, num_steps: int) -> list[torch.Tensor]:
    """Train without faults, in a loop that all-reduces gradients in the backward. `attempt` does nothing there."""
    return trained(Faults(), sizes, effective, num_steps, on=(), on_oom="raise")["weights"]


RUNS = 50 if FOR_RELEASE else 15


def many_runs() -> float:
    """Train `RUNS` times with faults on random ranks and in random runs. Return the largest difference of weights."""
    chance, most = random.Random(5), 0.0
    for _run in range(RUNS):
        every, on = chance.randint(3, 9), tuple(rank for rank in range(3) if chance.random() < 0.6)
        place = chance.choice(["forward", "backward"])
        found = trained(Faults(every, place=place), (16, 24, 8), 96, 2, on=on)
        most = max(most, float((found["weights"][-1] - TOLD.setdefault(0, found["weights"][-1])).abs().max()))
    return most


TOLD: dict[int, torch.Tensor] = {}


def refused() -> list[str]:
    said = []
    with ddp.setup(make_plan(SHARES, 16)) as ctx:
        for make in (
            lambda: ctx.wrap(Network(Faults()), static_graph=True),
            lambda: ctx.shard(Network(Faults())),
        ):
            model = make()
            with pytest.raises(InputError) as caught:
                ctx.steps([], on_oom="cut")
            said.append(str(caught.value))
            del model
    return said


SCENARIOS = {
    **{
        f"{place}, {effective}": partial(trained, Faults(10, place=place), SHARES, effective, 25, on=(1,))
        for place in ("forward", "backward")
        for effective in (16, 40)
    },
    **{f"as ever, {effective}": partial(as_ever, SHARES, effective, 25) for effective in (16, 40)},
    "all ranks, too large": partial(trained, Faults(above=3), SHARES, 40, 20, on=(0, 1, 2)),
    "no share": partial(trained, Faults(10), (0, 9, 7), 40, 20, on=(1, 2)),
    "a rank without samples": partial(as_ever, (0, 9, 7), 40, 20),
    "norm": partial(trained, Faults(10), SHARES, 40, 20, on=(1,), norm=True),
    "many runs": many_runs,
    "refused": refused,
}


ranks = job_of(__name__, "SCENARIOS", 3, limit_s=400)


@pytest.mark.parametrize("effective", [16, 40])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_fault_in_every_tenth_run_on_one_rank_of_three(ranks, place, effective):
    told = found_by(ranks, f"as ever, {effective}")[0]
    for rank, found in enumerate(found_by(ranks, f"{place}, {effective}")):
        for ours, theirs in zip(found["weights"], told, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert len(found["warned"]) == (rank == 1)


def test_what_never_fits_is_cut_before_it_runs(ranks):
    told = found_by(ranks, "as ever, 40")[0][:20]
    found = found_by(ranks, "all ranks, too large")
    torch.testing.assert_close(found[0]["weights"][:20], told, rtol=1e-9, atol=1e-12)
    assert [len(one["warned"]) for one in found] == [0, 1, 1]  # rank 0 has two samples of each


def test_beside_a_rank_without_a_share(ranks):
    told = found_by(ranks, "a rank without samples")[0]
    for found in found_by(ranks, "no share"):
        torch.testing.assert_close(found["weights"], told, rtol=1e-9, atol=1e-12)


def test_all_ranks_have_rank_0s_buffers_as_ever(ranks):
    first, *others = (found["buffers"] for found in found_by(ranks, "norm"))
    assert first
    for buffers in others:
        torch.testing.assert_close(buffers, first, rtol=0, atol=0)


def test_two_hundred_runs_end_and_are_alike(ranks):
    assert max(found_by(ranks, "many runs")) < 1e-9


def test_models_whose_ranks_meet_elsewhere_are_refused(ranks):
    for said in found_by(ranks, "refused"):
        static, sharded = said
        assert "the wrapped model has static_graph=True." in static
        assert "the model is sharded (ctx.shard), so its forward runs collectives" in sharded
