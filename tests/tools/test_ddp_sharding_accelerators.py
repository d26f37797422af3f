"""FSDP2 on accelerators: the step of one process, and the predicted memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from card_jobs import NUM_SAMPLES, contexts_here, make_model, plan_of_cards, samples
from events import until
from gpus import COUNT, KIND
from ranks import found_by, run_ranks
from test_ddp_hybrid_sharding import Block, large_model, predicted_bytes, steps_of
from torch import nn

from autosplit import ddp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two cards")]

LIMIT_S = 240


def sharded() -> dict[str, Any]:
    """Take a step with parameters sharded by FSDP2, and compare the weights with one process."""
    inputs, targets = samples()
    with ddp.setup(plan_of_cards()) as ctx:
        # FSDP2 moves parameters in place, which torch does not support for other back ends.
        model = ctx.shard(make_model().to(ctx.device), layers=nn.Linear)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dataset = torch.utils.data.TensorDataset(inputs, targets)
        for step in ctx.steps(torch.utils.data.DataLoader(dataset, batch_sampler=ctx.batch_sampler(NUM_SAMPLES))):
            for some, wanted in step:
                step.backward(nn.functional.mse_loss(model(some.to(ctx.device)), wanted.to(ctx.device)))
            optimizer.step()
        found = [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]
    whole = make_model()
    nn.functional.mse_loss(whole(inputs), targets).backward()
    pairs = zip(found, whole.parameters(), strict=True)
    return {
        "error": max(float((got - (p.detach() - 0.1 * p.grad)).abs().max()) for got, p in pairs if p.grad is not None),
        "contexts": contexts_here(),
    }


def allocated_bytes(device: torch.device) -> int:
    gc.collect()
    return torch.accelerator.memory_allocated(device)


def sharded_memory() -> dict[str, float]:
    """Return the allocator's peak of a step with a sharded model, as a part of the prediction."""
    found = {}
    with ddp.setup(plan_of_cards()) as ctx:
        for forwards in (1, 2):
            model = large_model().to(ctx.device)
            predicted = predicted_bytes(model, Block, 2, several=forwards > 1)
            model = ctx.shard(model, layers=Block)
            optimizer = torch.optim.AdamW(model.parameters())
            steps_of(model, optimizer, ctx.device, forwards)
            before = torch.accelerator.memory_allocated(ctx.device)
            torch.accelerator.reset_peak_memory_stats(ctx.device)
            steps_of(model, optimizer, ctx.device, forwards)
            found[f"{forwards} forwards"] = torch.accelerator.max_memory_allocated(ctx.device) / predicted
            del model, optimizer
            # The engine's thread of this device drops the graph after backward returned. The graph's FSDP hooks form
            # reference cycles with the parameters, so a collection before that does not free them.
            until(lambda most=before / 10: allocated_bytes(ctx.device) < most)
    return found


ON_CARDS = {"sharded": sharded, "sharded memory": sharded_memory}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCENARIO_FOLDER", str(folder))
        return run_ranks(__name__, "ON_CARDS", 2, folder, limit_s=LIMIT_S, spawned=True)


@pytest.mark.timeout(LIMIT_S + 60)
class TestTwoRanks:
    def test_share_a_model_out(self, ranks: Any) -> None:
        for rank, found in enumerate(found_by(ranks, "sharded")):
            assert found["error"] < 1e-12
            assert found["contexts"] in (None, [rank])

    @pytest.mark.skipif(KIND != "emu", reason="a GPU's libraries also have workspaces")
    def test_a_sharded_model_needs_the_predicted_memory(self, ranks: Any) -> None:
        for found in found_by(ranks, "sharded memory"):
            assert all(0.75 < ratio < 1.02 for ratio in found.values()), found
