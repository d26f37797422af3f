"""Four ranks in two shard groups: weights, checkpoints and memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import loader_of, make_plan
from ranks import found_by, job_of
from test_ddp_sharding import adamw, one_device, relative_error, sharded, train
from torch import distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from autosplit import Plan, ddp
from autosplit.tools.fsdp import groups_of
from autosplit.tools.sharded_plan import gathered_bytes, state_bytes

pytestmark = pytest.mark.slow  # the job takes about 20 s on two cores

SIZES, EFFECTIVE = (1, 4, 0, 3), 20
"""The rank batch sizes differ within a shard group and between the groups."""

STEPS = 12


def hybrid_plan(sizes: tuple[int, ...] = SIZES, effective: int = EFFECTIVE, shard_size: int = 2) -> Plan:
    return make_plan(sizes, effective, shard_size=shard_size)


def trajectory() -> dict[str, Any]:
    with ddp.setup(hybrid_plan()) as ctx:
        model = sharded(ctx)
        mesh = next(model.parameters()).device_mesh
        found = train(ctx, model, adamw(model), loader_of(ctx, shuffle=True, seed=7), STEPS)
        return {"weights": found, "mesh": mesh.mesh.tolist()}


def resumed(kind: str) -> list[torch.Tensor]:
    """Save after 3 steps, load into a new model, and continue. Return the weights after each step."""
    path = Path(os.environ["AUTOSPLIT_CACHE_DIR"]).parents[1] / f"hybrid {kind}"
    with ddp.setup(hybrid_plan()) as ctx:
        parts = parts_of(ctx)
        found = train(ctx, parts["model"], parts["optimizer"], parts["loader"], 3)
        states = {name: parts[name] for name in ("model", "optimizer")} | {"sampler": parts["loader"].batch_sampler}
        save, load = (getattr(ctx, f"{verb}_{kind}") for verb in ("save", "load"))
        save(path, **states)
        dist.barrier()
        parts = parts_of(ctx)
        states = {name: parts[name] for name in ("model", "optimizer")} | {"sampler": parts["loader"].batch_sampler}
        load(path, **states)
        return [*found, *train(ctx, parts["model"], parts["optimizer"], parts["loader"], 3)]


def parts_of(ctx: ddp.Context) -> dict[str, Any]:
    model = sharded(ctx)
    return {"model": model, "optimizer": adamw(model), "loader": loader_of(ctx, shuffle=True, seed=7)}


# --------------------------------------------------------------------------------------------------------------- memory


class Peak(TorchDispatchMode):
    """Track the bytes of all storages that operators return. FSDP2 frees parameters by resizing their storage."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}
        self.peak_bytes = 0
        for tensor in known:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self.storages.get(key)
        if known is None or known() is None:
            self.storages[key] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in tree_iter(found):
            if isinstance(value, torch.Tensor) and not hasattr(value, "to_local"):
                self.add(value)
        alive = {key: ref() for key, ref in self.storages.items() if ref() is not None}
        self.storages = {key: self.storages[key] for key in alive}
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in alive.values()))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(60, 250), nn.Linear(250, 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


def large_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(30, 60), *(Block() for _ in range(4)), nn.Linear(60, 30))


def predicted_bytes(model: nn.Module, layers: Any, ranks: int, *, reshards: bool = True, several: bool = False) -> int:
    """Return the predicted peak of AdamW, which has two tensors per parameter."""
    groups = groups_of(model, layers)
    parameters, gradients = state_bytes([parameter for group in groups for parameter in group], ranks)
    return parameters + 3 * gradients + gathered_bytes(groups, ranks, reshards=reshards, several=several)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, device: Any, forwards: int) -> None:
    for number in range(forwards):
        model.set_requires_gradient_sync(number == forwards - 1)
        model(torch.ones(1, 30, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def peak(*, layers: Any = Block, forwards: int = 1, shard_size: int = 2, **options: Any) -> dict[str, int]:
    """Return the peak of a step with one sample per rank, the prediction, and the bytes of this rank's shards."""
    with ddp.setup(hybrid_plan((1, 1, 1, 1), 4 * forwards, shard_size)) as ctx:
        model, reshards = large_model(), options.get("reshard_after_forward", True)
        predicted = predicted_bytes(model, layers, shard_size, reshards=reshards, several=forwards > 1)
        parameters, _ = state_bytes(model.parameters(), shard_size)
        model = ctx.shard(model, layers=layers, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        steps_of(model, optimizer, ctx.device, forwards)
        states = [value for state in optimizer.state.values() for value in state.values()]
        local = [value.to_local() if hasattr(value, "to_local") else value for value in [*model.parameters(), *states]]
        tracker = Peak(local)
        with tracker:
            steps_of(model, optimizer, ctx.device, forwards)
        held = sum(value.numel() * value.element_size() for value in local)
        return {"peak": tracker.peak_bytes, "predicted": predicted, "held": held, "shards": 3 * parameters}


MEMORY: dict[str, Callable[[], Any]] = {
    "layers": peak,
    "several forwards": lambda: peak(forwards=3),
    "kept gathered": lambda: peak(reshard_after_forward=False),
    "one group": lambda: peak(layers=None),
}

FOUR: dict[str, Callable[[], Any]] = {
    "trajectory": trajectory,
    "sharded": lambda: resumed("sharded"),
    "checkpoint": lambda: resumed("checkpoint"),
    **MEMORY,
}

four = job_of(__name__, "FOUR", 4)


def test_the_weights_are_those_of_one_process(four):
    for found in found_by(four, "trajectory"):
        assert found["mesh"] == [[0, 1], [2, 3]]
        for got, expected in zip(found["weights"], one_device(STEPS), strict=True):
            assert relative_error(got, expected) < 1e-9


@pytest.mark.parametrize("kind", ["sharded", "checkpoint"])
def test_a_checkpoint_continues_the_training(four, kind):
    for found in found_by(four, kind):
        for got, expected in zip(found, one_device(6), strict=True):
            assert relative_error(got, expected) < 1e-9


@pytest.mark.parametrize("name", MEMORY)
def test_the_memory_is_predicted(four, name):
    for found in found_by(four, name):
        # The last rank may hold fewer rows. AdamW also has step counters.
        assert 0.95 * found["shards"] < found["held"] < 1.01 * found["shards"]
        assert 0.75 < found["peak"] / found["predicted"] < 1.01, found  # a sample has activations of a few KB
