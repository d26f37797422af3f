"""FSDP2 with the same context: the gradient is the whole batch's, and any number of ranks can load its checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import INPUTS, NUM_SAMPLES, TARGETS, loader_of, make_plan, mean_loss
from raised import raises
from ranks import found_by, job_of, run_ranks_once
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from autosplit import ddp
from autosplit.ddp.batchnorms import BatchNormWarning
from autosplit.errors import CheckpointError, InputError
from autosplit.parallel.batch_sampler import ScheduledBatchSampler
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.parallel.step_listener import StepListener
from autosplit.torch_versions import fsdp_groups

SIZES = (1, 7)
EFFECTIVE = 20
PASSED = 3
"""Number of optimizer steps before a checkpoint, and again after it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def make_model(seed: int = 3) -> nn.Module:
    """Layers with 7 rows, which 2 or 3 ranks cannot split evenly, and a layer with a single row."""
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
    """Train for a number of steps over several epochs. Return the weights after each."""
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
    """Return the weights after each step on one device, with batches as large as all ranks' together."""
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
# Two processes run all of them, then three run some, each in its own group.

GRADIENTS = {
    "3 and 5, accumulated": ((3, 5), 24),
    "a rank without any share": ((0, 8), 24),
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


def communication() -> list[bool]:
    """Return the all-reduce flag at each forward."""
    found = []
    with ddp.setup(make_plan((2, 6), 20)) as ctx:
        model = sharded(ctx)
        [group] = fsdp_groups(model)
        model.register_forward_pre_hook(lambda *_: found.append(group.reduce_grads))
        for step in ctx.steps(loader_of(ctx)):
            for indices in step:
                step.backward(mean_loss(model, indices))
    return found


class Failing(nn.Module):
    """Raises in its second forward, or the backward of that."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.where = where
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.linear(x)
        if self.forwards == 2 and self.where == "in the backward":
            x.register_hook(lambda _: 1 / 0)
        return x


def left_half_way(how: str, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a step after a step abandoned in its second micro-batch, and of a step without that."""
    found = []
    with ddp.setup(make_plan((2, 6), 24)) as ctx:
        for leaves in (True, False):
            torch.manual_seed(3)
            dtype = torch.float32 if options else torch.float64
            model = nn.Sequential(nn.Linear(5, 7), Failing(how if leaves else ""), nn.Linear(7, 1)).to(dtype)
            model = ctx.shard(model, layers=(Failing, nn.Linear), **options)
            loader = loader_of(ctx)

            def loss(indices: Any, model: nn.Module = model, dtype: torch.dtype = dtype) -> torch.Tensor:
                return nn.functional.mse_loss(model(INPUTS[indices].to(dtype)).to(dtype), TARGETS[indices].to(dtype))

            try:
                for step in ctx.steps(loader) if leaves else ():
                    for number, indices in enumerate(step):
                        if number == 1 and how == "break":
                            break
                        step.backward(loss(indices))
                    break
            except ZeroDivisionError as error:
                kept = error  # and keep its frames, like a caller that reports errors at the end
                assert kept is not None
            model.zero_grad()
            step = next(ctx.steps(loader))
            for indices in step:
                step.backward(loss(indices))
            found.append(gradient(model))
    return found[0], found[1]


LEFT = {
    f"{how}{' in low precision' if options else ''}": (how, options)
    for how in ("break", "in the backward")
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
    """Return weights with a GradScaler. The second step overflows on rank 1 only."""
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
    """Return every step's gradients of a wrapped model that feeds a sharded model."""
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
    """Return the result of sharding a model that differs between ranks."""
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
    """Return the gradient of a model whose weights were created after sharding."""
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
    """Return the folder of the checkpoints, the same for two ranks, for three, and for the test's process."""
    path = Path(os.environ["AUTOSPLIT_CACHE_DIR"]).parents[1] / "shared checkpoints"
    path.mkdir(exist_ok=True)
    return path


def written_by_one_device() -> str:
    """Write a checkpoint of a plain model, on each rank the same. Return the folder."""
    model = make_model()
    parts = {"model": model, "optimizer": adamw(model)}
    sampler = ScheduledBatchSampler(NUM_SAMPLES, EFFECTIVE, EFFECTIVE, shuffle=True, seed=7)
    for indices in sampler:
        mean_loss(model, indices).backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
    sampler.resume(NUM_SAMPLES)
    if os.environ["RANK"] == "0":
        states = {name: part.state_dict() for name, part in (*parts.items(), ("sampler", sampler))}
        torch.save(states, folder() / "plain.pt")
    return str(folder())


def parts_of(ctx: ddp.Context, model: nn.Module) -> dict[str, Any]:
    loader = loader_of(ctx, shuffle=True, seed=7)
    return {"model": model, "optimizer": adamw(model), "sampler": loader.batch_sampler}


def loader_for(parts: dict[str, Any]) -> Any:
    return torch.utils.data.DataLoader(range(NUM_SAMPLES), batch_sampler=parts["sampler"])


def going_on(ctx: ddp.Context, parts: dict[str, Any]) -> list[torch.Tensor]:
    """Return the loaded weights, and the weights after each further step."""
    found = [weights(parts["model"])]
    return found + train(ctx, parts["model"], parts["optimizer"], loader_for(parts), PASSED)


def written() -> None:
    """Train for a while, and write complete and sharded checkpoints."""
    with ddp.setup(make_plan(SIZES, EFFECTIVE)) as ctx:
        parts = parts_of(ctx, sharded(ctx))
        train(ctx, parts["model"], parts["optimizer"], loader_for(parts), PASSED)
        parts["model"][1].seen += 10 + ctx.rank
        values = {"step": PASSED, "table": {"a": [torch.arange(3), (torch.ones(2), "b")]}}
        ctx.save_sharded(folder() / "parts", **parts, **values)
        ctx.save_checkpoint(folder() / "whole.pt", **parts, **values)
        with torch.no_grad():
            parts["model"](INPUTS)  # the model's own parameters are unsharded afterwards
        ctx.save_checkpoint(folder() / "again.pt", **parts, **values)


LOADED = {
    "parts": lambda ctx, parts: ctx.load_sharded(folder() / "parts", **parts),
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
    """Load a checkpoint and continue."""
    with ddp.setup(make_plan(sizes, EFFECTIVE)) as ctx:
        parts = parts_of(ctx, INTO[into](ctx))
        rest = LOADED[source](ctx, parts)
        seen = [int(buffer) for buffer in parts["model"].buffers()]
        # A plain model does not communicate, so it cannot run on several ranks.
        after = [weights(parts["model"])] if into == "plain" and ctx.world_size > 1 else going_on(ctx, parts)
        return {"rest": rest, "seen": seen, "weights": after}


def failures() -> dict[str, str]:
    """Return the errors of all ranks if one cannot write, and if one cannot load."""
    found: dict[str, str] = {}
    with ddp.setup(make_plan(SIZES, EFFECTIVE)) as ctx:
        parts = parts_of(ctx, sharded(ctx))
        path = folder() / "failures"
        ctx.save_sharded(path, **parts)
        before = sorted(path.rglob("*"))

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        def save_on_a_full_disk() -> None:
            with pytest.MonkeyPatch.context() as patched:
                if ctx.rank == 1:
                    patched.setattr(FileSystemWriter, "write_data", full)
                ctx.save_sharded(path, **parts)

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
    "communication": communication,
    **{f"left: {name}": lambda job=job: left_half_way(*job) for name, job in LEFT.items()},
    "clipped": clipped,
    "scaled": scaled,
    "mixed": mixed,
    "rank 0's model": rank_0s_model,
    "refusals": refusals,
    "meta": on_meta,
    "one device": written_by_one_device,
    "written": written,
    **{f"2: {s} -> {i}": lambda s=s, i=i: resumed(SIZES, s, i) for s in LOADED for i in INTO},
    "failures": failures,
}
THREE: dict[str, Callable[[], Any]] = {
    **{f"3: {s} -> shared out": lambda s=s: resumed((1, 2, 5), s, "shared out") for s in LOADED},
}


two = job_of(__name__, "TWO", 2)


@pytest.fixture(scope="module")
def three(two: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of three ranks with the checkpoints of two."""
    assert two
    return run_ranks_once(tmp_path_factory, __name__, "THREE", 3, limit_s=250)


def order_of_epoch() -> list[int]:
    return [i for batch in ScheduledBatchSampler(NUM_SAMPLES, 1, 1, shuffle=True, seed=7) for i in batch]


def assert_gradients(found: list[torch.Tensor], effective: int, tolerance: float = 1e-12) -> None:
    order = order_of_epoch()
    assert len(found) == -(-NUM_SAMPLES // effective)
    for number, got in enumerate(found):
        expected = make_model()
        mean_loss(expected, order[number * effective : (number + 1) * effective]).backward()
        assert relative_error(got, gradient(expected)) < tolerance


@pytest.mark.slow
class TestGradients:
    @pytest.mark.parametrize("name", GRADIENTS)
    def test_every_steps_is_that_of_its_samples_in_one_batch(self, two, name):
        for found in found_by(two, name):
            assert_gradients(found, GRADIENTS[name][1])

    def test_they_meet_in_the_last_micro_batch_of_each_step_only(self, two):
        for found in found_by(two, "communication"):
            assert found == [False, False, True, False, False, True, True]

    @pytest.mark.parametrize("name", LEFT)
    def test_a_step_that_was_left_half_way_leaves_nothing_of_them(self, two, name):
        for after_it, after_none in found_by(two, f"left: {name}"):
            assert torch.equal(after_it, after_none)

    def test_a_wrapped_model_beside_a_sharded_one(self, two):
        for found in found_by(two, "mixed"):
            for number, got in enumerate(found):
                torch.manual_seed(4)
                first = nn.Linear(5, 5).double()
                second = make_model()
                indices = list(range(NUM_SAMPLES))[24 * number : 24 * number + 24]
                nn.functional.mse_loss(second(first(INPUTS[indices])), TARGETS[indices]).backward()
                assert relative_error(got, torch.cat([gradient(first), gradient(second)])) < 1e-12

    def test_of_a_model_whose_weights_were_made_afterwards(self, two):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1)).double()
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.1 * number)
        mean_loss(model, list(range(8))).backward()
        for got in found_by(two, "meta"):
            assert relative_error(got, gradient(model)) < 1e-12


def test_a_rank_without_samples_runs_every_backward():
    """FSDP2 gathers parameters in the backward. Without a backward on this rank, the other ranks would wait forever."""
    parameter = torch.ones((), requires_grad=True)
    step = OptimizerStep([1.0, 1.0], [0, 0], count=2, num_ranks=2)
    always = StepListener()
    always.draw = lambda _is_last: True
    step.listeners.append(always)
    ran = []
    for value in step:
        step.backward(parameter * value)
        ran.append(parameter.grad is not None)
    assert ran == [True, True]


@pytest.mark.slow
class TestTraining:
    def test_clipping_after_the_ranks_have_met(self, two):
        for found, norms in found_by(two, "clipped"):
            assert min(norms) > 0.05, "or nothing was clipped"
            for got, expected in zip(found, one_device(3, clip=0.05), strict=True):
                assert relative_error(got, expected) < 1e-10

    def test_an_overflow_on_one_rank_is_everyones(self, two):
        order = order_of_epoch()
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = [weights(model)]
        for number in range(3):
            mean_loss(model, order[20 * number : 20 * number + 20]).backward()
            if number != 1:
                optimizer.step()
            optimizer.zero_grad()
            expected.append(weights(model))
        for found in found_by(two, "scaled"):
            assert found["scale"] == 512
            for got, wanted in zip(found["weights"], expected[1:], strict=True):
                assert relative_error(got, wanted) < 1e-10

    def test_all_ranks_begin_with_rank_0s_model(self, two):
        (first, buffers), (second, others) = found_by(two, "rank 0's model")
        assert torch.equal(first, second)
        assert torch.equal(first, weights(make_model(0)))
        assert all(map(torch.equal, buffers, others))
        assert all(not buffer.any() for buffer in buffers)

    def test_what_is_refused_is_refused_by_all(self, two):
        for rank, told in enumerate(found_by(two, "refusals")):
            assert told[0].startswith("The model of rank 1 differs from rank 0's. Expected the same names, shapes")
            assert told[1].startswith("mesh has 1 ranks. Expected all 2")
            assert len(told) == (3 if rank == 0 else 2)
            assert all("in checkpoints are from rank 0 alone. Rank 0 has 2 samples of 8. " in text for text in told[2:])


REST = {"step": PASSED, "table": {"a": [torch.arange(3), (torch.ones(2), "b")]}}


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    else:
        assert got == expected


def assert_resumed(found: dict[str, Any], source: str) -> None:
    """Check that it continues like one device without a pause. Buffers are rank 0's."""
    expected = one_device(2 * PASSED)[PASSED - 1 :]
    if len(found["weights"]) > 1:
        assert len(found["weights"]) == 1 + PASSED
    for got, wanted in zip(found["weights"], expected, strict=False):
        assert relative_error(got, wanted) < 1e-10
    assert_same(found["rest"], {} if source == "a plain model's" else REST)
    assert found["seen"] == ([0, 0] if source == "a plain model's" else [10, 0])


@pytest.mark.slow
class TestCheckpoints:
    @pytest.mark.parametrize("into", INTO)
    @pytest.mark.parametrize("source", LOADED)
    def test_two_ranks_go_on(self, two, source, into):
        for found in found_by(two, f"2: {source} -> {into}"):
            assert_resumed(found, source)

    @pytest.mark.parametrize("source", LOADED)
    def test_three_ranks_go_on(self, three, source):
        for found in found_by(three, f"3: {source} -> shared out"):
            assert_resumed(found, source)

    @pytest.mark.parametrize("into", INTO)
    @pytest.mark.parametrize("source", LOADED)
    def test_one_goes_on(self, two, monkeypatch, source, into):
        shared_folder = Path(found_by(two, "one device")[0])
        monkeypatch.setenv("AUTOSPLIT_CACHE_DIR", str(shared_folder.with_name("job") / "cache"))
        assert_resumed(resumed((8,), source, into), source)

    def test_the_whole_one_is_a_plain_models(self, two):
        shared_folder = Path(found_by(two, "one device")[0])
        state = torch.load(shared_folder / "whole.pt", weights_only=True)
        model = make_model(8)
        model.load_state_dict(state["model"])
        adamw(model).load_state_dict(state["optimizer"])
        assert relative_error(weights(model), one_device(PASSED)[-1]) < 1e-10

    def test_what_fails_on_one_rank_fails_on_all(self, two):
        for found in found_by(two, "failures"):
            assert "was not written. Rank 1 can't write its part: The disk is full" in found["unwritten"]
            for name in ("no state", "no whole state"):
                assert "was not written on rank 1. 'model' returned no state (ZeroDivisionError)" in found[name]
            assert "was not loaded on rank 1. 'model' is the state of another model" in found["unloaded"]
            assert found["unchanged"] == "True"


# ----------------------------------------------------------------------------------------------------- one process


@pytest.fixture
def ctx(monkeypatch: pytest.MonkeyPatch) -> Iterator[ddp.Context]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with ddp.setup(make_plan((4,), 8)) as context:
        yield context


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.second.inner.weight = self.first.inner.weight


class TestRefusals:
    @pytest.mark.parametrize(
        ("model", "options", "message"),
        [
            (make_model, {"not_an_option": 1}, r"has no option not_an_option. Expected one of: mesh, .*mp_policy"),
            (
                make_model,
                {"layers": nn.Conv2d},
                r"Conv2d'> selects no module of the model.* Block, Linea",
            ),
            (lambda: nn.Sequential(Tied()), {"layers": Block}, "second.inner.weight is the same parameter as 0.first"),
            (lambda: DistributedDataParallel(make_model()), {}, "is wrapped in DistributedDataParallel at itself"),
            (lambda: nn.ParameterList([torch.ones(())]), {}, r"has parameters without a dimension, .*: 0\. Expected"),
        ],
        ids=["option", "class", "tied", "wrapped", "scalar"],
    )
    def test_are_made_before_anything_changes(self, ctx, model, options, message):
        made = model()
        kind = type(made)
        with pytest.raises(InputError, match=message):
            ctx.shard(made, **options)
        assert type(made) is kind
        assert all(type(part).__name__[:4] != "FSDP" for part in made.modules())

    def test_a_model_is_shared_out_once(self, ctx):
        model = sharded(ctx)
        with raises(InputError, "is"):
            ctx.shard(model)
        with raises(InputError, "is"):
            ctx.shard(nn.Sequential(model))


@pytest.fixture
def checkpoint(ctx, tmp_path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint after one step, and other parts to load it into."""
    parts = parts_of(ctx, sharded(ctx))
    train(ctx, parts["model"], parts["optimizer"], loader_for(parts), 1)
    ctx.save_sharded(tmp_path / "last", **parts, step=1)
    return tmp_path / "last", parts_of(ctx, sharded(ctx, make_model(8)))


def refused(ctx: ddp.Context, path: Path, parts: dict[str, Any], match: str) -> None:
    """Nothing is loaded, and the error is one line with the folder's name."""
    models = [part for part in parts.values() if isinstance(part, nn.Module)]
    before = [weights(model) for model in models]
    with pytest.raises(CheckpointError, match=match) as caught:
        ctx.load_sharded(path, **parts)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(map(torch.equal, map(weights, models), before))
    assert not any(getattr(part, "samples_consumed", 0) for part in parts.values())


class TestBadFolders:
    def test_missing(self, ctx, tmp_path, checkpoint):
        path, parts = checkpoint
        refused(
            ctx,
            tmp_path / "none",
            parts,
            "not a folder with a .metadata file. Expected a folder that save_sharded wrote",
        )
        refused(ctx, path / ".metadata", parts, "The path is a file. Expected a folder .* load_checkpoint")
        with pytest.raises(CheckpointError, match="is not a file"):
            ctx.load_checkpoint(path, **parts)

    @pytest.mark.parametrize("share", [None, 0.0, 0.7])
    @pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
    def test_cut_short(self, ctx, checkpoint, name, share):
        path, parts = checkpoint
        content = (path / name).read_bytes()
        if share is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content[: int(share * len(content))])
        refused(ctx, path, parts, "Expected a (checkpoint|folder) that save_sharded wrote")

    def test_somebody_elses_checkpoint(self, ctx, checkpoint, tmp_path):
        _, parts = checkpoint
        save({"model": torch.ones(3)}, checkpoint_id=tmp_path / "theirs")
        refused(
            ctx,
            tmp_path / "theirs",
            parts,
            "Missing key in checkpoint .* Expected a checkpoint that save_sharded wrote",
        )

    def test_of_other_parts(self, ctx, checkpoint):
        path, parts = checkpoint
        refused(ctx, path, {"model": nn.Linear(2, 2)}, "'model' is the state of another model. It lacks weight, bias")
        refused(ctx, path, {"optimizer": adamw(nn.Linear(2, 2))}, "'optimizer' is the state of another optimizer")
        refused(ctx, path, {"scaler": torch.amp.GradScaler("cpu")}, "Expected 'scaler', too")
        parts["sampler"].seed = 8
        refused(ctx, path, parts, "a different order of samples: seed 7 instead of 8")


class TestWriting:
    @pytest.mark.parametrize("place", ["write_data", "finish"])
    def test_an_interrupted_write_leaves_the_earlier_one(self, ctx, checkpoint, monkeypatch, place):
        path, parts = checkpoint
        before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

        def interrupted(*arguments: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(FileSystemWriter, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                ctx.save_sharded(path, **parts)
        assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
        ctx.load_sharded(path, **parts)

    def test_one_that_ended_between_two_renames_says_where_the_earlier_one_is(self, ctx, checkpoint):
        path, parts = checkpoint
        path.rename(path.with_name(".last.old"))
        refused(ctx, path, parts, r"the checkpoint before it does\. .* Rename '\S+\.last\.old'")
        path.with_name(".last.old").rename(path)
        ctx.load_sharded(path, **parts)

    def test_what_an_ended_process_left_is_removed_by_the_next(self, ctx, checkpoint, tmp_path):
        path, parts = checkpoint
        left = path.with_name(".last.part")
        left.mkdir()
        (left / "__1_0.distcp").write_bytes(b"half of it")
        ctx.save_sharded(path, **parts)
        assert [each.name for each in tmp_path.iterdir()] == ["last"]
        assert not (path / "__1_0.distcp").exists()

    def test_a_folder_with_other_files_is_left_alone(self, ctx, checkpoint):
        path, parts = checkpoint
        (path / "notes.txt").write_text("mine")
        with pytest.raises(
            CheckpointError, match=r"was not written. The folder contains 'notes.txt', which would be lost"
        ):
            ctx.save_sharded(path, **parts)
        assert (path / "notes.txt").read_text() == "mine"
        ctx.load_sharded(path, **parts)

    def test_what_can_not_be_kept_replaces_nothing(self, ctx, checkpoint):
        path, parts = checkpoint
        with pytest.raises(CheckpointError, match=r"was not written. Rank 0 can't write its part: \w+: .*pickle"):
            ctx.save_sharded(path, step=lambda: 1)
        with pytest.raises(CheckpointError, match=r"Two tensors have the name 'a.b.c'"):
            ctx.save_sharded(path, a={"b": {"c": torch.ones(1)}, "b.c": torch.ones(1)})
        assert ctx.load_sharded(path, **parts) == {"step": 1}

    def test_parts_that_something_else_keeps_are_refused_in_one_file(self, ctx, tmp_path):
        class Keeper:
            def __init__(self, model: nn.Module) -> None:
                self.model = model

            def state_dict(self) -> dict[str, Any]:
                return self.model.state_dict()

        keeper = Keeper(sharded(ctx))
        with pytest.raises(CheckpointError, match=r"'keeper' has a sharded tensor.* Save it with save_sharded"):
            ctx.save_checkpoint(tmp_path / "last.pt", keeper=keeper)
        ctx.save_sharded(tmp_path / "last", keeper=keeper)
