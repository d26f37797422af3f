"""Checkpoints of a job are complete or absent, load into any wrapper, and change nothing if they do not fit.

test_ddp.py tests the communication of the ranks about checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddp_jobs import NUM_SAMPLES, loader_of, make_model, make_plan, mean_loss, weights
from error_types import CheckpointError
from torch import nn

from autosplit import BalancedDataParallel, ddp


@pytest.fixture
def ctx() -> Iterator[ddp.Context]:
    with ddp.setup(make_plan((4,), 8)) as context:
        yield context


def train(ctx: ddp.Context, parts: dict[str, Any], loader: Any, *, most: int = 10**9) -> list[torch.Tensor]:
    """Train the rest of the epoch up to a number of steps. Return the weights after each."""
    found = []
    for step in ctx.steps(loader):
        for indices in step:
            step.backward(mean_loss(parts["model"], indices))
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        found.append(weights(parts["model"]))
        if len(found) == most:
            break
    return found


def begun(ctx: ddp.Context, **options: Any) -> tuple[dict[str, Any], Any]:
    model = ctx.wrap(make_model())
    loader = loader_of(ctx, shuffle=True, seed=7, **options)
    parts = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
        "sampler": loader.batch_sampler,
    }
    return parts, loader


class TestResuming:
    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_in_mid_epoch_goes_on_as_if_nothing_had_been(self, ctx, tmp_path, workers):
        """Workers draw ahead. Only samples of completed optimizer steps count."""
        parts, loader = begun(ctx)
        whole = train(ctx, parts, loader)
        parts, loader = begun(ctx)
        loader = torch.utils.data.DataLoader(
            range(NUM_SAMPLES), batch_sampler=loader.batch_sampler, num_workers=workers
        )
        train(ctx, parts, loader, most=2)
        ctx.save_checkpoint(tmp_path / "last.pt", **parts, step=2)
        parts, loader = begun(ctx)
        rest = ctx.load_checkpoint(tmp_path / "last.pt", **parts)
        assert rest == {"step": 2}
        resumed = train(ctx, parts, loader)
        assert len(resumed) == len(whole) - 2
        for got, expected in zip(resumed, whole[2:], strict=True):
            assert torch.equal(got, expected)

    def test_at_the_end_of_an_epoch(self, ctx, tmp_path):
        parts, loader = begun(ctx)
        train(ctx, parts, loader)
        ctx.save_checkpoint(tmp_path / "last.pt", **parts)
        parts, loader = begun(ctx)
        ctx.load_checkpoint(tmp_path / "last.pt", **parts)
        loader.batch_sampler.set_epoch(0)
        assert train(ctx, parts, loader) == [], "nothing is left of that epoch"
        ctx.load_checkpoint(tmp_path / "last.pt", **parts)
        assert len(train(ctx, parts, loader)) == len(loader.batch_sampler.schedule)
        assert loader.batch_sampler.epoch == 1, "a loop that chooses none goes on as the job that saved would"

    def test_the_last_step_may_be_dropped(self, ctx):
        _, loader = begun(ctx, drop_last=True)
        assert [step.num_samples for step in loader.batch_sampler.schedule] == [8] * (NUM_SAMPLES // 8)


WRAPPERS = {
    "plain": lambda model: model,
    "nn.DataParallel": nn.DataParallel,
    "balanced": lambda model: BalancedDataParallel(None, model, ["cpu", "cpu"]),
}


class TestInterchange:
    @pytest.mark.parametrize("name", WRAPPERS)
    @pytest.mark.parametrize("bare", [False, True])
    def test_loads_what_others_saved(self, ctx, tmp_path, name, bare):
        saved = WRAPPERS[name](make_model())
        nn.init.ones_(next(saved.parameters()))
        state = saved.state_dict() if bare else {"model": saved.state_dict(), "epoch": 3}
        torch.save(state, tmp_path / "theirs.pt")
        model = ctx.wrap(make_model())
        rest = ctx.load_checkpoint(tmp_path / "theirs.pt", model=model)
        assert rest == ({} if bare else {"epoch": 3})
        assert torch.equal(weights(model), weights(saved))

    @pytest.mark.parametrize("name", WRAPPERS)
    def test_others_load_what_it_saved(self, ctx, tmp_path, name):
        model = ctx.wrap(make_model())
        nn.init.ones_(next(model.parameters()))
        ctx.save_checkpoint(tmp_path / "ours.pt", model=model)
        state = torch.load(tmp_path / "ours.pt", weights_only=True)["model"]
        other = WRAPPERS[name](make_model())
        getattr(other, "module", other).load_state_dict(state)
        assert torch.equal(weights(other), weights(model))

    @pytest.mark.parametrize("part", ["whole", "a layer", "in DDP"])
    def test_a_compiled_model_is_saved_under_plain_names(self, ctx, tmp_path, part):
        """They contained `_orig_mod.`, so only a compiled model with the same parameters could load them."""
        model = make_model()
        if part == "a layer":
            model[0] = torch.compile(model[0], backend="eager")
        else:
            model = torch.compile(model, backend="eager")
        ctx.save_checkpoint(tmp_path / "last.pt", model=ctx.wrap(model) if part == "in DDP" else model)
        plain = make_model()
        state = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
        plain.load_state_dict(state)
        assert set(state) == set(plain.state_dict())
        again = torch.compile(make_model(), backend="eager")
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        ctx.load_checkpoint(tmp_path / "last.pt", model=again)
        assert torch.equal(weights(again), weights(plain))


class Executed:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def whole_file(ctx: ddp.Context, path: Path) -> bytes:
    parts, _ = begun(ctx)
    nn.init.ones_(next(parts["model"].parameters()))
    ctx.save_checkpoint(path, **parts)
    return path.read_bytes()


class TestBadFiles:
    def refused(self, ctx: ddp.Context, path: Path, match: str, **others: Any) -> None:
        """Nothing is loaded, and the error is one line with the file's name."""
        parts, _ = begun(ctx)
        before = weights(parts["model"])
        with pytest.raises(CheckpointError, match=match) as caught:
            ctx.load_checkpoint(path, **{**parts, **others})
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert torch.equal(weights(parts["model"]), before)
        assert parts["sampler"].samples_consumed == 0

    def test_missing(self, ctx, tmp_path):
        self.refused(ctx, tmp_path / "none.pt", "is not a file")
        self.refused(ctx, tmp_path, "is not a file")

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
    def test_cut_short(self, ctx, tmp_path, share):
        path = tmp_path / "last.pt"
        content = whole_file(ctx, path)
        path.write_bytes(content[: int(share * len(content))])
        self.refused(ctx, path, "incomplete or not a checkpoint")

    def test_something_else(self, ctx, tmp_path):
        for number, text in enumerate(("not a checkpoint\n" * 100, "epoch 3\n", "\x80", "{}", "cos\nsystem\n")):
            path = tmp_path / f"{number}.pt"
            path.write_text(text)
            self.refused(ctx, path, "The file is incomplete or not a checkpoint|objects other than tensors")
        torch.save([1, 2], tmp_path / "list.pt")
        self.refused(ctx, tmp_path / "list.pt", "The file contains a list")

    def test_nothing_in_it_is_executed(self, ctx, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        torch.save({"model": Executed()}, tmp_path / "evil.pt")
        self.refused(ctx, tmp_path / "evil.pt", "objects other than tensors and plain values")
        assert not (tmp_path / "executed").exists()

    def test_of_another_model(self, ctx, tmp_path):
        path = tmp_path / "last.pt"
        whole_file(ctx, path)
        wider = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1)).double()
        deeper = nn.Sequential(*make_model(), nn.Linear(1, 1)).double()
        self.refused(ctx, path, "a different shape 0.weight", model=wider)
        self.refused(ctx, path, "lacks 3.weight", model=deeper)
        self.refused(ctx, path, "has unknown 2.weight", model=make_model()[:2])

    def test_of_another_optimizer_or_order(self, ctx, tmp_path):
        path = tmp_path / "last.pt"
        whole_file(ctx, path)
        self.refused(ctx, path, "another optimizer", optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
        self.refused(ctx, path, "Expected 'scaler', too", scaler=torch.amp.GradScaler("cpu"))
        self.refused(
            ctx,
            path,
            "a different order of samples: seed 7 instead of 8",
            sampler=loader_of(ctx, shuffle=True, seed=8).batch_sampler,
        )


def changed(ctx: ddp.Context, path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write a checkpoint of another model after a step, with one change."""
    parts, loader = begun(ctx)
    train(ctx, parts, loader, most=1)
    ctx.save_checkpoint(path, **parts)
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def moments(state: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return state["optimizer"]["state"][number]


def group(state: dict[str, Any]) -> dict[str, Any]:
    return state["optimizer"]["param_groups"][0]


NO_OPTIMIZER = r"'optimizer' is a dict without an optimizer's state and param_groups\."

BAD_PARTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "weight None": (
        lambda s: s["model"].update({"0.weight": None}),
        "something other than a tensor at module.0.weight",
    ),
    "weight a number": (lambda s: s["model"].update({"2.bias": 5}), "something other than a tensor at module.2.bias"),
    "weight meta": (lambda s: s["model"].update({"0.weight": s["model"]["0.weight"].to("meta")}), "on the meta device"),
    "no state": (lambda s: s["optimizer"].pop("state"), NO_OPTIMIZER),
    "state a list": (lambda s: s["optimizer"].update(state=[1]), NO_OPTIMIZER),
    "shape": (lambda s: moments(s).update(exp_avg=torch.zeros(2, 2)), r"exp_avg of parameter 0 has the shape \(2, 2\)"),
    "no lr": (lambda s: group(s).pop("lr"), "Its group 0 lacks lr"),
    "no betas": (lambda s: group(s).pop("betas"), "Its group 0 lacks betas"),
    "group a number": (lambda s: s["optimizer"].update(param_groups=[5]), NO_OPTIMIZER),
    "no groups": (lambda s: s["optimizer"].pop("param_groups"), NO_OPTIMIZER),
    "no parameters": (lambda s: group(s).pop("params"), r"Its groups have \[0\] parameters"),
    "not a dict": (lambda s: s.update(optimizer=3), "'optimizer' is a int without an optimizer's state"),
}

OPTIMIZERS = [
    getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD", "Muon"),
    )
    if hasattr(torch.optim, name)
]


class TestBadParts:
    @pytest.mark.parametrize("name", BAD_PARTS)
    def test_are_refused_before_anything_changes(self, ctx, tmp_path, name):
        """Errors that load_state_dict finds half-way, or that the next step finds, are found before loading."""
        change, match = BAD_PARTS[name]
        changed(ctx, tmp_path / "last.pt", change)
        parts, loader = begun(ctx)
        before = copy.deepcopy([part.state_dict() for part in parts.values()])
        with pytest.raises(CheckpointError, match=match) as caught:
            ctx.load_checkpoint(tmp_path / "last.pt", **parts)
        assert "Nothing was changed on any rank" in str(caught.value)
        assert str(before) == str([part.state_dict() for part in parts.values()])
        train(ctx, parts, loader, most=1)

    @pytest.mark.parametrize("bad", [{}, {"scale": 1.0}])
    def test_of_a_scaler(self, ctx, tmp_path, bad):
        parts, _ = begun(ctx)
        enabled, disabled = (torch.amp.GradScaler("cpu", enabled=on) for on in (True, False))
        with torch.no_grad():
            next(parts["model"].parameters()).fill_(1)
        torch.save({"model": parts["model"].state_dict(), "scaler": bad}, tmp_path / "last.pt")
        parts, _ = begun(ctx)
        before = weights(parts["model"])
        with pytest.raises(CheckpointError, match=r"'scaler' is not the state of an enabled GradScaler. It lacks"):
            ctx.load_checkpoint(tmp_path / "last.pt", model=parts["model"], scaler=enabled)
        assert torch.equal(weights(parts["model"]), before)
        ctx.load_checkpoint(tmp_path / "last.pt", model=parts["model"], scaler=disabled)
        ctx.save_checkpoint(tmp_path / "last.pt", scaler=enabled)
        ctx.load_checkpoint(tmp_path / "last.pt", scaler=enabled)

    def test_what_an_older_torch_lacked_is_loaded(self, ctx, tmp_path):
        def older(state: dict[str, Any]) -> None:
            for key in ("decoupled_weight_decay", "fused", "foreach", "maximize", "capturable", "differentiable"):
                group(state).pop(key, None)
            for kept in state["optimizer"]["state"].values():
                kept["step"] = int(kept["step"])

        changed(ctx, tmp_path / "last.pt", older)
        parts, loader = begun(ctx)
        ctx.load_checkpoint(tmp_path / "last.pt", **parts)
        assert len(train(ctx, parts, loader, most=1)) == 1

    @pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
    def test_what_an_optimizer_of_torch_writes_is_loaded(self, ctx, tmp_path, kind):
        model = make_model()
        tensors = [p for p in model.parameters() if p.dim() == 2 or kind.__name__ != "Muon"]
        optimizer = kind(tensors, **({"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_loss(model, list(range(8)))
            loss.backward()
            return loss

        optimizer.step(closure)
        ctx.save_checkpoint(tmp_path / "last.pt", model=model, optimizer=optimizer)
        optimizer.step(closure)
        after = weights(model)
        ctx.load_checkpoint(tmp_path / "last.pt", model=model, optimizer=optimizer)
        optimizer.step(closure)
        assert torch.allclose(weights(model), after, rtol=1e-6), "torch loads some numbers in another precision"

    def test_another_optimizer_may_keep_other_things_by_the_same_names(self, ctx, tmp_path):
        class Projected(torch.optim.Optimizer):
            def step(self, closure=None):
                for parameter in self.param_groups[0]["params"]:
                    self.state[parameter]["exp_avg"] = torch.ones(2)
                self.state["all"] = {"seen": 3}

        made = [Projected(make_model().parameters(), {"lr": 1}) for _ in range(2)]
        made[0].step()
        ctx.save_checkpoint(tmp_path / "last.pt", optimizer=made[0])
        ctx.load_checkpoint(tmp_path / "last.pt", optimizer=made[1])
        assert made[1].state["all"] == {"seen": 3}

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of any sparse tensor that torch 2.11 loads
    def test_sgd_keeps_sparse_gradients(self, ctx, tmp_path):
        layer = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        ctx.save_checkpoint(tmp_path / "last.pt", optimizer=optimizer)
        ctx.load_checkpoint(tmp_path / "last.pt", optimizer=optimizer)
        assert optimizer.state[layer.weight]["momentum_buffer"].is_sparse


class TestWriting:
    def test_what_can_not_be_read_again_replaces_nothing(self, ctx, tmp_path):
        path = tmp_path / "last.pt"
        content = whole_file(ctx, path)
        for bad in (argparse.Namespace(lr=0.1), lambda: 0, [{"deep": object()}]):
            with pytest.raises(
                CheckpointError, match=r"was not written. 'arguments' can't be saved \(.*Leave arguments="
            ) as e:
                ctx.save_checkpoint(path, model=make_model(), arguments=bad, step=1)
            assert "\n" not in str(e.value)
        # torch begins with instructions, in bold, to load such a file anyway.
        with pytest.raises(CheckpointError, match=r"'arguments' can't be saved \(numpy.*scalar\)\. Expected numbers"):
            ctx.save_checkpoint(path, model=make_model(), arguments=np.float64(3.0))
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]

    def test_an_interrupted_write_replaces_nothing(self, ctx, tmp_path, monkeypatch):
        path = tmp_path / "last.pt"
        content = whole_file(ctx, path)

        def half(state, file):
            file.write(content[:100])
            raise KeyboardInterrupt

        monkeypatch.setattr(torch, "save", half)
        with pytest.raises(KeyboardInterrupt):
            ctx.save_checkpoint(path, step=1)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]

    def test_a_folder_that_is_not_there(self, ctx, tmp_path):
        with pytest.raises(CheckpointError, match=r"was not written. FileNotFoundError"):
            ctx.save_checkpoint(tmp_path / "none" / "last.pt", step=1)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # of torch 2.6
class TestLoadedValues:
    @pytest.mark.parametrize("overwrite", ["in place", "by torch.save"])
    def test_do_not_change_with_the_file(self, ctx, tmp_path, overwrite):
        """Loaded values were maps of the file.

        A copy over the file changed Adam's state and the returned values. torch.save to the path killed the process.
        """
        model = ctx.wrap(make_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        mean_loss(model, [0, 1]).backward()
        optimizer.step()
        path, average = tmp_path / "last.pt", {"ema": [torch.ones(2000), {"more": torch.ones(3)}]}
        ctx.save_checkpoint(path, model=model, optimizer=optimizer, average=average, scale=torch.ones(3))
        expected = copy.deepcopy((model.state_dict(), optimizer.state_dict(), average))
        rest = ctx.load_checkpoint(path, model=model, optimizer=optimizer, scale=None)
        if overwrite == "in place":
            with path.open("r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
        else:
            torch.save({"optimizer": optimizer.state_dict(), **rest}, path)
            assert torch.equal(torch.load(path)["average"]["ema"][0], torch.ones(2000))
        found = model.state_dict(), optimizer.state_dict(), rest["average"]
        assert str(found) == str(expected)
        assert torch.equal(rest["scale"], torch.ones(3))

    def test_of_a_sharded_checkpoint_stay_when_its_folder_goes(self, ctx, tmp_path):
        model, path = ctx.wrap(make_model()), tmp_path / "last"
        ctx.save_sharded(path, model=model, ema=torch.ones(2000))
        rest = ctx.load_sharded(path, model=model)
        for file in path.glob("*.distcp"):
            with file.open("r+b") as opened:
                opened.write(b"\xff" * file.stat().st_size)
        assert torch.equal(rest["ema"], torch.ones(2000))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # of torch 2.6
class TestShardedCheckpointsThatCannotBeWritten:
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
    @pytest.mark.parametrize("suffix", [".distcp", ".tmp"])
    def test_on_a_full_disk(self, ctx, tmp_path, monkeypatch, suffix):
        """The error had torch's internal message, such as `enforce fail at inline_container.cc`."""
        path, model = tmp_path / "last", ctx.wrap(make_model())
        ctx.save_sharded(path, model=model)
        before = {file: file.read_bytes() for file in path.iterdir()}
        opened = Path.open

        def on_a_full_disk(file: Path, mode: str = "r", *arguments: Any) -> Any:
            return opened(Path("/dev/full") if file.suffix == suffix else file, mode, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", on_a_full_disk)
            with pytest.raises(CheckpointError) as caught:
                ctx.save_sharded(path, model=model)
        for part in (str(path), f"{str(tmp_path)!r} has", "The disk is full. The tensors take", "Free some space"):
            assert part in str(caught.value)
        assert {file: file.read_bytes() for file in path.iterdir()} == before
        assert [*tmp_path.iterdir()] == [path]

    def test_over_a_file(self, ctx, tmp_path):
        (tmp_path / "last.pt").write_text("notes")
        with pytest.raises(CheckpointError, match="The path is a file"):
            ctx.save_sharded(tmp_path / "last.pt", model=make_model())
        with pytest.raises(CheckpointError, match="NotADirectoryError"):
            ctx.save_sharded(tmp_path / "last.pt" / "below", model=make_model())
        assert (tmp_path / "last.pt").read_text() == "notes"
