"""FSDP2 by the same context: the gradient is that of the whole batch, and checkpoints fit any number of ranks."""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ddp import INPUTS, NUM_SAMPLES, TARGETS, kept_labels, kept_loss, loader_of, make_plan, mean_loss
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit import ddp
from autosplit.ddp.context import BatchNormWarning
from autosplit.errors import CheckpointError, InputError
from autosplit.schedule import OptimizerStep, ScheduledBatchSampler

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:
    pytest.skip(f"torch {torch.__version__} has no fully_shard", allow_module_level=True)

LIMIT_S = 90
SIZES = (1, 7)
EFFECTIVE = 20
PASSED = 3
"""Optimizer steps before a checkpoint, and as many after it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def make_model(seed: int = 3) -> nn.Module:
    """Layers of 7 rows, which no two or three ranks share evenly, and one of a single row."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), Block(), Block(), nn.Linear(7, 1)).double()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole(p.grad).flatten().double() for p in model.parameters()])


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole(p.detach()).flatten().double() for p in model.parameters()])


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def sharded(ctx: ddp.Context, model: nn.Module | None = None, **options: Any) -> nn.Module:
    return ctx.shard(make_model() if model is None else model, layers=Block, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(ctx: ddp.Context, model: nn.Module, optimizer: Any, loader: Any, most: int) -> list[torch.Tensor]:
    """Train for so many steps, as many epochs as they take; return the weights after each."""
    found: list[torch.Tensor] = []
    while True:
        for step in ctx.steps(loader):
            for indices in step:
                step.backward(mean_loss(model, indices))
            optimizer.step()
            optimizer.zero_grad()
            found.append(weights(model))
            if len(found) == most:
                return found
        loader.batch_sampler.set_epoch(loader.batch_sampler.epoch + 1)


def one_device(most: int, clip: float | None = None) -> list[torch.Tensor]:
    """The weights after each of so many steps on a single device, with batches as large as all ranks' together."""
    model = make_model()
    optimizer = adamw(model)
    sampler = ScheduledBatchSampler(NUM_SAMPLES, EFFECTIVE, EFFECTIVE, shuffle=True, seed=7)
    found: list[torch.Tensor] = []
    while True:
        for indices in sampler:
            mean_loss(model, indices).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            found.append(weights(model))
            if len(found) == most:
                return found
        sampler.set_epoch(sampler.epoch + 1)


# ------------------------------------------------------------------------------------------------------- scenarios
#
# Two processes run all of them, then three some; each in a group of its own.

GRADIENTS = {
    "1 and 7": ((1, 7), 8),
    "3 and 5, accumulated": ((3, 5), 24),
    "a rank without any share": ((0, 8), 24),
    "the last micro-batch short": ((1, 7), 20),
    "empty shares in the short last step": ((1, 7), 44),
}


def epoch_gradients(sizes: tuple[int, ...], effective: int, **options: Any) -> list[torch.Tensor]:
    found = []
    with ddp.setup(make_plan(sizes, effective)) as ctx:
        model = sharded(ctx, **options)
        for step in ctx.steps(loader_of(ctx, shuffle=True, seed=7)):
            for indices in step:
                step.backward(mean_loss(model, indices))
            found.append(gradient(model))
            model.zero_grad()
    return found


def token_gradients() -> list[torch.Tensor]:
    found = []
    with ddp.setup(make_plan((0, 8), EFFECTIVE)) as ctx:
        model = sharded(ctx)
        for step in ctx.steps(loader_of(ctx, shuffle=True, seed=7), count=kept_labels):
            for indices in step:
                step.backward(kept_loss(model, indices))
            found.append(gradient(model))
            model.zero_grad()
    return found


def without_weights() -> torch.Tensor:
    """The gradient that FSDP2 makes of the ranks' plain means."""
    with ddp.setup(make_plan((2, 6))) as ctx:
        model = sharded(ctx)
        mean_loss(model, [0, 1] if ctx.rank == 0 else list(range(2, 8))).backward()
        return gradient(model)


def trajectory() -> list[torch.Tensor]:
    with ddp.setup(make_plan(SIZES, EFFECTIVE)) as ctx:
        model = sharded(ctx)
        return train(ctx, model, adamw(model), loader_of(ctx, shuffle=True, seed=7), 20)


def communication() -> list[bool]:
    """Whether gradients were to meet when each forward ran."""
    found = []
    with ddp.setup(make_plan((2, 6), 20)) as ctx:
        model = sharded(ctx)
        group = model._get_fsdp_state()._fsdp_param_groups[0]
        model.register_forward_pre_hook(lambda *_: found.append(group.reduce_grads))
        for step in ctx.steps(loader_of(ctx)):
            for indices in step:
                step.backward(mean_loss(model, indices))
    return found


class Failing(nn.Module):
    """Raises in its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 2:
            raise ZeroDivisionError
        return self.linear(x)


def left_half_way(how: str, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of a step after one that was left in its second micro-batch, and that of one after none."""
    found = []
    with ddp.setup(make_plan((2, 6), 24)) as ctx:
        for leaves in (True, False):
            torch.manual_seed(3)
            body = Failing() if how == "in the forward" else nn.Linear(7, 7)
            dtype = torch.float32 if options else torch.float64
            model = nn.Sequential(nn.Linear(5, 7), body, nn.Linear(7, 1)).to(dtype)
            model = ctx.shard(model, layers=(Failing, nn.Linear), **options)
            loader = loader_of(ctx)

            def loss(indices: Any, model: nn.Module = model, dtype: torch.dtype = dtype) -> torch.Tensor:
                return nn.functional.mse_loss(model(INPUTS[indices].to(dtype)).to(dtype), TARGETS[indices].to(dtype))

            if not leaves and how == "in the forward":
                body.forwards = 2
            try:
                for step in ctx.steps(loader) if leaves else ():
                    for number, indices in enumerate(step):
                        if number == 1 and how == "break":
                            break
                        if number == 1 and how == "in the loop":
                            raise ZeroDivisionError
                        step.backward(loss(indices))
                    break
            except ZeroDivisionError as error:
                kept = error  # and with it the frames, as a caller that reports errors at the end would
                assert kept is not None
            model.zero_grad()
            step = next(ctx.steps(loader))
            for indices in step:
                step.backward(loss(indices))
            found.append(gradient(model))
    return found[0], found[1]


LEFT = {
    f"{how}{' in low precision' if options else ''}": (how, options)
    for how in ("break", "in the loop", "in the forward")
    for options in ({}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)})
}


def clipped() -> tuple[list[torch.Tensor], list[float]]:
    found, norms = [], []
    with ddp.setup(make_plan(SIZES, EFFECTIVE)) as ctx:
        model = sharded(ctx)
        optimizer = adamw(model)
        for step in ctx.steps(loader_of(ctx, shuffle=True, seed=7)):
            for indices in step:
                step.backward(mean_loss(model, indices))
            norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.05))))
            optimizer.step()
            optimizer.zero_grad()
            found.append(weights(model))
    return found, norms


def scaled() -> dict[str, Any]:
    """Weights with a GradScaler, the second step of which overflows on rank 1 alone."""
    found: dict[str, Any] = {"weights": []}
    with ddp.setup(make_plan(SIZES, EFFECTIVE)) as ctx:
        model = sharded(ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, step in enumerate(ctx.steps(loader_of(ctx, shuffle=True, seed=7))):
            for indices in step:
                loss = mean_loss(model, indices)
                step.backward(loss * torch.inf if number == 1 and ctx.rank == 1 else loss, scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found["weights"].append(weights(model))
        found["scale"] = scaler.get_scale()
    return found


def mixed() -> list[torch.Tensor]:
    """Every step's gradients of a model that is wrapped, which feeds one that is shared out."""
    found = []
    with ddp.setup(make_plan((0, 8), 24)) as ctx:
        torch.manual_seed(4)
        first = ctx.wrap(nn.Linear(5, 5).double())
        second = sharded(ctx)
        for step in ctx.steps(loader_of(ctx)):
            for indices in step:
                step.backward(nn.functional.mse_loss(second(first(INPUTS[indices])), TARGETS[indices]))
            found.append(torch.cat([gradient(first), gradient(second)]))
            first.zero_grad()
            second.zero_grad()
    return found


def rank_0s_model() -> list[Any]:
    """What a model becomes that was another on each rank."""
    with ddp.setup(make_plan((2, 6))) as ctx:
        model = make_model(ctx.rank)
        for index, dtype in enumerate((torch.bool, torch.bfloat16, torch.complex64)):
            model.register_buffer(f"buffer{index}", torch.full((2, 3), ctx.rank, dtype=dtype).T)
        model.register_buffer("none", torch.empty(0))
        model[1].seen += ctx.rank
        model = sharded(ctx, model)
        return [weights(model), [buffer.contiguous() for buffer in model.buffers()]]


def refusals() -> list[str]:
    told = []
    with ddp.setup(make_plan((2, 6))) as ctx:
        for refused in (
            lambda: sharded(ctx, make_model() if ctx.rank else nn.Sequential(Block(), Block())),
            lambda: sharded(ctx, mesh=dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]),
        ):
            with pytest.raises(InputError) as caught:
                refused()
            told.append(str(caught.value))
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            ctx.shard(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        told += [str(warning.message) for warning in caught_warnings if warning.category is BatchNormWarning]
    return told


def on_meta() -> torch.Tensor:
    """The gradient of a model whose weights were made after it was shared out."""
    with ddp.setup(make_plan((2, 6))) as ctx:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1)).double()
        model = ctx.shard(model)
        model.to_empty(device=ctx.device)
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.1 * number)
        for step in ctx.steps(loader_of(ctx)):
            for indices in step:
                step.backward(mean_loss(model, indices))
            return gradient(model)
    raise AssertionError


def folder() -> Path:
    return Path(os.environ["SCENARIO_FOLDER"])


def parts_of(ctx: ddp.Context, model: nn.Module) -> dict[str, Any]:
    loader = loader_of(ctx, shuffle=True, seed=7)
    return {"model": model, "optimizer": adamw(model), "sampler": loader.batch_sampler}


def loader_for(parts: dict[str, Any]) -> Any:
    return torch.utils.data.DataLoader(range(NUM_SAMPLES), batch_sampler=parts["sampler"])


def going_on(ctx: ddp.Context, parts: dict[str, Any]) -> list[torch.Tensor]:
    """The weights as they were loaded, and after each step from there."""
    found = [weights(parts["model"])]
    return found + train(ctx, parts["model"], parts["optimizer"], loader_for(parts), PASSED)


def written() -> dict[str, Any]:
    """Train for a while, and write what there is, whole and in parts."""
    found: dict[str, Any] = {}
    with ddp.setup(make_plan(SIZES, EFFECTIVE)) as ctx:
        parts = parts_of(ctx, sharded(ctx))
        train(ctx, parts["model"], parts["optimizer"], loader_for(parts), PASSED)
        parts["model"][1].seen += 10 + ctx.rank
        values = {"step": PASSED, "table": {"a": [torch.arange(3), (torch.ones(2), "b")]}}
        ctx.save_sharded(folder() / "parts", **parts, **values)
        ctx.save_checkpoint(folder() / "whole.pt", **parts, **values)
        with torch.no_grad():
            parts["model"](INPUTS)  # what the model itself holds is together after it
        ctx.save_checkpoint(folder() / "again.pt", **parts, **values)
        ctx.save_sharded(folder() / "again", **parts, **values)
        found["files"] = sorted(path.name for path in next((folder() / "parts").glob("tensors-*")).iterdir())
        found["together"] = weights(parts["model"])
    return found


LOADED = {
    "parts": lambda ctx, parts: ctx.load_sharded(folder() / "parts", **parts),
    "parts, written after a forward": lambda ctx, parts: ctx.load_sharded(folder() / "again", **parts),
    "whole": lambda ctx, parts: ctx.load_checkpoint(folder() / "whole.pt", **parts),
    "whole, written after a forward": lambda ctx, parts: ctx.load_checkpoint(folder() / "again.pt", **parts),
    "a plain model's": lambda ctx, parts: ctx.load_checkpoint(folder() / "plain.pt", **parts),
}
INTO = {
    "shared out": lambda ctx: sharded(ctx, make_model(8)),
    "wrapped": lambda ctx: ctx.wrap(make_model(8)),
    "plain": lambda ctx: make_model(8),
}


def resumed(sizes: tuple[int, ...], source: str, into: str) -> dict[str, Any]:
    """Load a checkpoint and go on from it."""
    with ddp.setup(make_plan(sizes, EFFECTIVE)) as ctx:
        parts = parts_of(ctx, INTO[into](ctx))
        rest = LOADED[source](ctx, parts)
        seen = [int(buffer) for buffer in parts["model"].buffers()]
        return {"rest": rest, "seen": seen, "weights": going_on(ctx, parts) if into != "plain" or not dist.get_rank() and ctx.world_size == 1 else [weights(parts["model"])]}


def failures() -> dict[str, str]:
    """What all ranks hear where one of them can't write, and where one can't load."""
    from autosplit.ddp import folders

    found: dict[str, str] = {}
    with ddp.setup(make_plan(SIZES, EFFECTIVE)) as ctx:
        parts = parts_of(ctx, sharded(ctx))
        path = folder() / "failures"
        ctx.save_sharded(path, **parts)
        before = sorted(path.rglob("*"))

        class Full(folders.Writer):
            def write_data(self, *arguments: Any) -> Any:
                if ctx.rank == 1:
                    raise OSError(28, "No space left on device")
                return super().write_data(*arguments)

        def save_on_a_full_disk() -> None:
            own, folders.Writer = folders.Writer, Full
            try:
                ctx.save_sharded(path, **parts)
            finally:
                folders.Writer = own

        class Unsaved(nn.Linear):
            def state_dict(self, *arguments: Any, **options: Any) -> Any:
                if ctx.rank == 1:
                    raise ZeroDivisionError
                return super().state_dict(*arguments, **options)

        unsaved = ctx.shard(Unsaved(2, 2))
        for name, refused in {
            "unwritten": save_on_a_full_disk,
            "no state": lambda: ctx.save_sharded(path, model=unsaved),
            "no whole state": lambda: ctx.save_checkpoint(folder() / "none.pt", model=unsaved),
            "unloaded": lambda: ctx.load_sharded(path, model=nn.Linear(2, 2) if ctx.rank else parts["model"]),
        }.items():
            with pytest.raises(CheckpointError) as caught:
                refused()
            found[name] = str(caught.value)
        dist.barrier()
        found["unchanged"] = str(sorted(path.rglob("*")) == before and not (folder() / "none.pt").exists())
        ctx.load_sharded(path, **parts)
    return found


TWO: dict[str, Callable[[], Any]] = {
    **{name: lambda job=job: epoch_gradients(*job) for name, job in GRADIENTS.items()},
    "kept together after the forward": lambda: epoch_gradients((1, 7), 20, reshard_after_forward=False),
    "tokens": token_gradients,
    "without weights": without_weights,
    "trajectory": trajectory,
    "communication": communication,
    **{f"left: {name}": lambda job=job: left_half_way(*job) for name, job in LEFT.items()},
    "clipped": clipped,
    "scaled": scaled,
    "mixed": mixed,
    "rank 0's model": rank_0s_model,
    "refusals": refusals,
    "meta": on_meta,
    "written": written,
    **{f"2: {s} -> {i}": lambda s=s, i=i: resumed(SIZES, s, i) for s in LOADED for i in INTO},
    "failures": failures,
}
THREE: dict[str, Callable[[], Any]] = {
    "gradients": lambda: epoch_gradients((0, 3, 5), 24),
    **{f"3: {s} -> shared out": lambda s=s: resumed((1, 2, 5), s, "shared out") for s in LOADED},
}


def run_rank(rank: int, world_size: int, port: int, folder: str) -> None:
    """Run every scenario as one of the ranks, and keep what each returned or raised."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["SCENARIO_FOLDER"] = folder
    found = {}
    for name, scenario in (TWO if world_size == 2 else THREE).items():
        try:
            found[name] = scenario()
        except Exception:  # noqa: BLE001 - the test that reads it shows it, whatever it is
            found[name] = traceback.format_exc()
            break  # the other rank waits in vain: better it is ended than it goes on out of step
    torch.save(found, Path(folder) / f"{rank} of {world_size}.pt")


def run_ranks(world_size: int, folder: Path) -> list[dict[str, Any]]:
    context = torch.multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=run_rank, args=(rank, world_size, store.port, str(folder)))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    for process in processes:
        process.kill()
        process.join()
    paths = [folder / f"{rank} of {world_size}.pt" for rank in range(world_size)]
    return [torch.load(path) if path.exists() else {} for path in paths]
