"""If one rank has another seed, epoch, size or checkpoint, all ranks report it before training."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import INPUTS, NUM_SAMPLES, make_model, make_plan, weights
from ranks import found_by, job_of
from torch import nn
from torch.utils.data import DataLoader

from autosplit import ddp
from autosplit.errors import CheckpointError, InputError


def refused(steps_of: Callable[[ddp.Context], Any]) -> list[str]:
    """Begin a loop. Return the error on this rank, or an empty string."""
    with ddp.setup(make_plan((2, 6), 16)) as ctx:
        ctx.wrap(make_model())
        try:
            next(iter(steps_of(ctx)))
        except InputError as error:
            return [str(error)]
        return [""]


def of_sampler(ctx: ddp.Context, num_samples: int = NUM_SAMPLES, **options: Any) -> Any:
    return ctx.steps(DataLoader(range(num_samples), batch_sampler=ctx.batch_sampler(num_samples, **options)))


def of_epoch(ctx: ddp.Context) -> Any:
    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=ctx.batch_sampler(NUM_SAMPLES, shuffle=True))
    loader.batch_sampler.set_epoch(3 + ctx.rank)
    return ctx.steps(loader)


def resumed(ctx: ddp.Context) -> Any:
    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=ctx.batch_sampler(NUM_SAMPLES))
    if ctx.rank:
        loader.batch_sampler.resume(16)
    return ctx.steps(loader)


def of_own_loader(ctx: ddp.Context) -> Any:
    return ctx.steps([torch.arange(3)]) if ctx.rank else of_sampler(ctx)


def counting(ctx: ddp.Context) -> Any:
    loader = DataLoader(range(NUM_SAMPLES), batch_sampler=ctx.batch_sampler(NUM_SAMPLES))
    return ctx.steps(loader, count=len if ctx.rank else None)


DISAGREEMENTS: dict[str, tuple[Callable[[ddp.Context], Any], str]] = {
    "seed": (lambda ctx: of_sampler(ctx, shuffle=True, seed=7 + ctx.rank), "seed is 7 on rank 0, 8 on rank 1."),
    "num_samples": (lambda ctx: of_sampler(ctx, 44 + ctx.rank), "num_samples is 44 on rank 0, 45 on rank 1"),
    "epoch": (of_epoch, "epoch is 3 on rank 0, 4 on rank 1."),
    "position": (resumed, "samples_consumed is 0 on rank 0, 16 on rank 1"),
    "kind of loader": (of_own_loader, "a loader without ctx.batch_sampler' on rank 1"),
    "count": (counting, "count= is False on rank 0, True on rank 1."),
}


def later_epoch() -> list[str]:
    """The first epoch agrees; in the second, one rank chooses another epoch."""
    with ddp.setup(make_plan((2, 6), 16)) as ctx:
        model = ctx.wrap(make_model())
        loader = DataLoader(range(NUM_SAMPLES), batch_sampler=ctx.batch_sampler(NUM_SAMPLES, shuffle=True))
        for step in ctx.steps(loader):
            for indices in step:
                step.backward(model(INPUTS[indices]).square().mean())
        if ctx.rank:
            loader.batch_sampler.set_epoch(5)
        with pytest.raises(InputError) as caught:
            next(ctx.steps(loader))
        return [str(caught.value)]


def checkpoint(which: str) -> list[str]:
    """Load a file from this rank's own folder, as on machines without a shared disk."""
    folder = Path(os.environ["AUTOSPLIT_CACHE_DIR"]).parent / f"disk {os.environ['RANK']}"
    folder.mkdir(exist_ok=True)
    path = folder / "last.pt"
    with ddp.setup(make_plan((2, 6), 16)) as ctx:
        model = make_model()
        sampler = ctx.batch_sampler(NUM_SAMPLES)
        if which == "older" and ctx.rank:
            with torch.no_grad():
                model[0].weight += 1
        own = ctx.rank if which == "own values" else 0
        state = {"model": model.state_dict(), "sampler": sampler.state_dict(), "epoch": 3 - ctx.rank, "own": own}
        if which != "older":
            state["epoch"] = 3
        torch.save(state, path)
        if which == "without checksums" and ctx.rank:
            with_no_crc(state, path)
        loaded = nn.Sequential(*make_model())
        nn.init.zeros_(loaded[0].weight)
        before = weights(loaded)
        try:
            rest = ctx.load_checkpoint(path, model=loaded, sampler=sampler)
        except CheckpointError as error:
            assert torch.equal(weights(loaded), before)
            return [str(error)]
        assert torch.equal(weights(loaded), weights(model))
        return ["loaded", rest["own"]]


def with_no_crc(state: Any, path: Path) -> None:
    set_option = getattr(
        torch.serialization, "set_crc32_options", lambda _: None
    )  # older versions of torch always write them
    set_option(False)
    try:
        torch.save(state, path)
    finally:
        set_option(True)


def sharded() -> list[str]:
    folder = Path(os.environ["AUTOSPLIT_CACHE_DIR"]).parent / f"folder {os.environ['RANK']}"
    with ddp.setup(make_plan((2, 6), 16)) as ctx:
        for rank in range(2):  # both ranks write both folders, and each has another checkpoint
            ctx.save_sharded(folder.with_name(f"folder {rank}"), model=make_model())
        with pytest.raises(CheckpointError) as caught:
            ctx.load_sharded(folder, model=make_model())
        return [str(caught.value)]


def scaled(on_oom: Any, sizes: tuple[int, int]) -> list[float]:
    """Train with a GradScaler and a rank without samples in a step. Return the weights."""
    with ddp.setup(make_plan(sizes, 8)) as ctx:
        model = ctx.wrap(make_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in ctx.steps(DataLoader(range(17), batch_sampler=ctx.batch_sampler(17)), on_oom=on_oom):
            for indices in step:
                with step.attempt():
                    step.backward(model(INPUTS[indices]).square().mean(), scaler)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weights(model).tolist()


SCALED = {f"{on_oom} {sizes}": (on_oom, sizes) for on_oom, sizes in (("cut", (8, 0)), ("raise", (0, 8)))}

SCENARIOS: dict[str, Callable[[], Any]] = {
    **{name: lambda steps_of=steps_of: refused(steps_of) for name, (steps_of, _) in DISAGREEMENTS.items()},
    "later epoch": later_epoch,
    **{f"checkpoint {which}": lambda w=which: checkpoint(w) for which in ("older", "own values", "without checksums")},
    "sharded": sharded,
    **{name: lambda case=case: scaled(*case) for name, case in SCALED.items()},
}


ranks = job_of(__name__, "SCENARIOS", 2)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_disagreement_is_named_on_all_ranks_before_the_first_step(ranks, name):
    """With a different seed on each rank, a job used 43 of 64 samples, some twice, and exited with 0."""
    _, expected = DISAGREEMENTS[name]
    for (text,) in found_by(ranks, name):
        assert "The ranks' settings of this loop differ" in text
        assert expected in text
    assert len({text for (text,) in found_by(ranks, name)}) == 1


def test_every_epoch_is_compared(ranks):
    for (text,) in found_by(ranks, "later epoch"):
        assert "epoch is 0 on rank 0, 5 on rank 1" in text


def test_ranks_that_read_different_checkpoints_load_neither(ranks):
    """On machines with separate disks, one rank loaded older weights, so the ranks trained different models."""
    for (text,) in found_by(ranks, "checkpoint older"):
        assert "The ranks read different checkpoints, because ['model'] of rank 1 differ from those of rank 0" in text
        assert text.endswith("Nothing was changed on any rank.")
    for (text,) in found_by(ranks, "sharded"):
        assert "because ['.metadata'] of rank 1 differ from those of rank 0" in text


def test_a_rank_may_keep_values_of_its_own_with_the_same_model(ranks):
    assert found_by(ranks, "checkpoint own values") == [["loaded", 0], ["loaded", 1]]
    assert found_by(ranks, "checkpoint without checksums") == [["loaded", 0], ["loaded", 0]]


@pytest.mark.whole
@pytest.mark.parametrize("name", SCALED)
def test_a_grad_scaler_steps_where_a_rank_has_no_samples(ranks, name):
    """scaler.step raised AssertionError ("_scale is None") on the rank without samples."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for indices in (range(8), range(8, 16), range(16, 17)):
        model(INPUTS[[*indices]]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in found_by(ranks, name):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), weights(model), rtol=1e-12, atol=0)
