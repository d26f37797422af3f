"""Checkpoint files that are damaged, interrupted, of another class or on a full disk raise an error before any change.

One process is enough for these. Ranks that read different files are in test_ddp_agreement.py.
"""

from __future__ import annotations

import copy
import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import make_model, make_plan, mean_loss, weights
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, save

from autosplit import ddp
from autosplit.ddp.checkpoint_state import digest_of
from autosplit.errors import CheckpointError


@pytest.fixture
def ctx() -> Iterator[ddp.Context]:
    with ddp.setup(make_plan((4,), 8)) as context:
        yield context


def stepped(kind: Any, **options: Any) -> tuple[nn.Module, Any]:
    """Return a model and an optimizer of this class that has made one step."""
    model = make_model()
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    mean_loss(model, [0, 1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flip(path: Path, place: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


class TestPlainValues:
    def test_they_are_returned(self, ctx, tmp_path):
        """`epoch=3` was accepted by save_checkpoint. load_checkpoint changed the model, then raised AttributeError."""
        model = make_model()
        ctx.save_checkpoint(tmp_path / "last.pt", model=model, epoch=3, best=torch.ones(2))
        found = ctx.load_checkpoint(tmp_path / "last.pt", model=make_model(), epoch=0, best=None)
        assert found["epoch"] == 3
        assert torch.equal(found["best"], torch.ones(2))
        ctx.save_sharded(tmp_path / "folder", model=model, epoch=3)
        assert ctx.load_sharded(tmp_path / "folder", model=make_model(), epoch=0) == {"epoch": 3}

    def test_a_value_that_the_file_lacks_is_refused_first(self, ctx, tmp_path):
        ctx.save_checkpoint(tmp_path / "last.pt", model=nn.Linear(5, 7))
        model = nn.Linear(5, 7)
        before = weights(model)
        with pytest.raises(CheckpointError, match="Expected 'epoch', too"):
            ctx.load_checkpoint(tmp_path / "last.pt", model=model, epoch=0)
        assert torch.equal(weights(model), before)

    def test_a_state_without_a_way_to_load_it_is_refused_first(self, ctx, tmp_path):
        class Saves:
            def state_dict(self) -> dict[str, int]:
                return {"a": 1}

        ctx.save_checkpoint(tmp_path / "last.pt", saves=Saves())
        with pytest.raises(CheckpointError, match=r"'saves' is a Saves with state_dict\(\) and without load_state"):
            ctx.load_checkpoint(tmp_path / "last.pt", saves=Saves())


class TestPartsThatRefuse:
    def test_earlier_parts_are_put_back(self, ctx, tmp_path):
        """A user's class may reject its state at any time. The parts loaded before it are then restored."""

        class Counter:
            def __init__(self, count: int, limit: int = 10) -> None:
                self.count, self.limit = count, limit

            def state_dict(self) -> dict[str, int]:
                return {"count": self.count}

            def load_state_dict(self, state: dict[str, int]) -> None:
                self.count = state["count"]
                if self.count > self.limit:
                    raise ValueError(f"{self.count} is above {self.limit}")

        ctx.save_checkpoint(tmp_path / "last.pt", model=make_model(), a=Counter(7), b=Counter(7))
        model, a, b = nn.Sequential(*make_model()), Counter(1), Counter(2, limit=5)
        nn.init.zeros_(next(model.parameters()))
        before = weights(model)
        with pytest.raises(
            CheckpointError, match=r"The load_state_dict\(\) of 'b' failed \(ValueError: 7 is above 5\)"
        ):
            ctx.load_checkpoint(tmp_path / "last.pt", model=model, a=a, b=b)
        assert (a.count, b.count) == (1, 2)
        assert torch.equal(weights(model), before)


CLASSES = {
    "SGD for AdamW": (torch.optim.SGD, {}, torch.optim.AdamW, {}, "lacks betas"),
    "Adamax for RAdam": (torch.optim.Adamax, {}, torch.optim.RAdam, {}, "lacks exp_avg_sq"),
    "RMSprop for Adagrad": (torch.optim.RMSprop, {}, torch.optim.Adagrad, {}, "lacks lr_decay"),
}


class TestOtherOptimizers:
    @pytest.mark.parametrize("name", CLASSES)
    def test_the_state_of_another_class_is_refused_first(self, ctx, tmp_path, name):
        """It loaded, and the first step raised KeyError after the model had changed."""
        saved, saved_options, own, options, match = CLASSES[name]
        model, optimizer = stepped(saved, **saved_options)
        ctx.save_checkpoint(tmp_path / "last.pt", model=model, optimizer=optimizer)
        model, optimizer = stepped(own, **options)
        before, state = weights(model), copy.deepcopy(optimizer.state_dict())
        with pytest.raises(
            CheckpointError, match=f"'optimizer' is the state of another optimizer. Its group 0 {match}"
        ):
            ctx.load_checkpoint(tmp_path / "last.pt", model=model, optimizer=optimizer)
        assert torch.equal(weights(model), before)
        assert str(state) == str(optimizer.state_dict())

    def test_a_scheduler_adds_options_that_belong_to_no_class(self, ctx, tmp_path):
        model, optimizer = stepped(torch.optim.AdamW)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
        ctx.save_checkpoint(tmp_path / "last.pt", model=model, optimizer=optimizer, scheduler=scheduler)
        model, optimizer = stepped(torch.optim.AdamW)
        with pytest.raises(
            CheckpointError, match=r"'scheduler' is not the state of a CosineAnnealingLR\. It lacks T_max, eta_min"
        ):
            ctx.load_checkpoint(
                tmp_path / "last.pt", scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
            )
        again = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
        ctx.load_checkpoint(tmp_path / "last.pt", model=model, optimizer=optimizer, scheduler=again)
        assert again.state_dict() == scheduler.state_dict()


class TestDamage:
    def test_no_flipped_bit_changes_a_weight(self, ctx, tmp_path):
        """A flip in a bit that is never read may pass. Any other flip makes the file unreadable."""
        path = tmp_path / "last.pt"
        expected = make_model()
        ctx.save_checkpoint(path, model=expected)
        content = path.read_bytes()
        refused = 0
        for place in range(0, len(content), 41):
            path.write_bytes(content)
            flip(path, place)
            model = make_model()
            try:
                ctx.load_checkpoint(path, model=model)
            except CheckpointError:
                refused += 1
            assert torch.equal(weights(model), weights(expected))
        assert refused > 10

    def test_of_a_sharded_checkpoint(self, ctx, tmp_path):
        ctx.save_sharded(tmp_path / "folder", model=make_model())
        stored = FileSystemReader(tmp_path / "folder").read_metadata().storage_data
        record = next(one for index, one in stored.items() if index.fqn == "model.0.weight")
        path = tmp_path / "folder" / record.relative_path
        flip(path, path.read_bytes().index(make_model()[0].weight.detach().numpy().tobytes()))
        with pytest.raises(CheckpointError, match=r"'model.0.weight' in __0_0.distcp does not match its checksum"):
            ctx.load_sharded(tmp_path / "folder", model=make_model())


def part_files(folder: Path) -> list[Path]:
    return [*folder.glob(".*.part")]


KILLED = """
import os, signal, sys
import torch
from torch.distributed.checkpoint import FileSystemWriter
from ddp_jobs import make_model, make_plan
from autosplit import ddp
from autosplit.ddp.checkpoint_state import digest_of

def killed(*arguments):
    if isinstance(arguments[0], dict):
        arguments[1].write(b"half of a checkpoint")
        arguments[1].flush()
    os.kill(os.getpid(), signal.SIGKILL)

torch.save = FileSystemWriter.finish = killed
with ddp.setup(make_plan((4,), 8)) as ctx:
    getattr(ctx, sys.argv[1])(sys.argv[2], model=make_model(), step=2)
"""
"""A script that saves a checkpoint and is killed before the checkpoint is complete."""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@pytest.mark.parametrize("kind", ["checkpoint", "sharded"])
def test_a_killed_save_leaves_the_earlier_checkpoint(ctx, tmp_path, kind):
    path, model = tmp_path / "last", make_model()
    save, load = (getattr(ctx, f"{what}_{kind}") for what in ("save", "load"))
    save(path, model=model, step=1)
    here = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    script = [sys.executable, "-c", KILLED, f"save_{kind}", str(path)]
    done = subprocess.run(script, env={**os.environ, "PYTHONPATH": here}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) == 2, "the earlier checkpoint, and a part of the new one"
    assert load(path, model=make_model()) == {"step": 1}
    save(path, model=model, step=3)
    assert [*tmp_path.iterdir()] == [path]
    assert load(path, model=make_model()) == {"step": 3}


def test_a_folder_of_version_0_2_loads(ctx, tmp_path):
    """Its tensors have the names of their places. All other values are in one entry."""
    model = make_model()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    places = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    values = {"model": places, "step": 3, "ema": [torch.ones(3, device="meta")]}
    state = {**tensors, "ema.0": torch.arange(3.0), "(values)": (values, ["model"])}
    save(state, checkpoint_id=tmp_path / "old", planner=DefaultSavePlanner(flatten_state_dict=False))
    loaded = make_model()
    nn.init.zeros_(loaded[0].weight)
    rest = ctx.load_sharded(tmp_path / "old", model=loaded)
    assert torch.equal(weights(loaded), weights(model))
    assert rest["step"] == 3
    assert torch.equal(rest["ema"][0], torch.arange(3.0))


KINDS_OF_TENSORS: dict[str, Callable[[float], torch.Tensor]] = {
    **{str(kind): lambda x, kind=kind: torch.full((2,), x, dtype=kind) for kind in (torch.bfloat16, torch.complex64)},
    "sparse": lambda x: torch.full((2, 2), x).to_sparse(),
    "conjugated": lambda x: torch.full((2,), complex(x, 1)).conj(),
    "nested": lambda x: torch.nested.nested_tensor([torch.full((1,), x), torch.ones(2)]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", KINDS_OF_TENSORS)
def test_ranks_compare_values_of_any_kind(name):
    one, same, other = (digest_of({"a": KINDS_OF_TENSORS[name](x)}) for x in (1.0, 1.0, 2.0))
    assert one == same
    assert one != other


class TestLeftovers:
    def test_a_save_removes_the_part_file_of_a_killed_process(self, ctx, tmp_path):
        """Five kills of a 40 MB save left 200 MB behind."""
        other = tmp_path / ".last.pt.mine.part"
        for left in (tmp_path / ".last.pt.part", other):
            left.write_text("half of a checkpoint")
        ctx.save_checkpoint(tmp_path / "last.pt", model=make_model())
        assert part_files(tmp_path) == [other]

    def test_a_symbolic_link_is_followed(self, ctx, tmp_path):
        """The link was replaced by a file, so the target kept the old weights."""
        (tmp_path / "store").mkdir()
        link = tmp_path / "last.pt"
        link.symlink_to(tmp_path / "store" / "target.pt")
        for step in range(2):
            ctx.save_checkpoint(link, step=step)
            assert link.is_symlink()
            assert torch.load(tmp_path / "store" / "target.pt") == {"step": step}
        assert part_files(tmp_path) == part_files(tmp_path / "store") == []


class Full(io.BufferedWriter):
    """A file on a disk that fails."""

    number = errno.ENOSPC

    def write(self, data: Any) -> int:
        raise OSError(self.number, os.strerror(self.number))


class TestFullDisk:
    @pytest.mark.parametrize(
        ("number", "expected"),
        [
            (errno.ENOSPC, r"was not written. The disk is full. The tensors take .*, and '.*' has .* free next to"),
            (errno.EDQUOT, "was not written. The disk quota is used up"),
            (errno.EIO, r"was not written. OSError: \[Errno 5\]"),
        ],
    )
    def test_the_disk_is_named(self, ctx, tmp_path, monkeypatch, number, expected):
        """For the system's error, torch raises "enforce fail at inline_container.cc:672"."""
        path = tmp_path / "last.pt"
        ctx.save_checkpoint(path, step=1)
        content = path.read_bytes()
        monkeypatch.setattr(Full, "number", number)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", lambda part, _: Full(io.FileIO(part, "x")))
            with pytest.raises(CheckpointError, match=expected):
                ctx.save_checkpoint(path, model=make_model())
        assert path.read_bytes() == content
        assert part_files(tmp_path) == []
