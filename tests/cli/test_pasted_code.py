"""The lines that `show --code` prints: every variant runs, and trains as one process does on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_jobs import make_plan as ranks_plan
from gpus import COUNT, KIND
from handmade import made_plan, on_devices
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import autosplit
from autosplit.cli.pasted_code import Origin, paste_lines
from autosplit.devices.accelerator import visible_devices
from autosplit.parallel.awaited_update import StepsWarning
from autosplit.parallel.moved_batch import to_device
from autosplit.plan.plan import Plan
from autosplit.probe.check_result import Check, is_count_expression
from autosplit.solve.length_plan import LengthPlan, LengthPoint
from autosplit.tuning.tune import AssumedLossWarning
from autosplit.workload.workload import Workload

NUM_SAMPLES = 20
SPLIT = (3, 5)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A mean loss. torch's own warns on emulated devices."""
    return (outputs - targets).square().mean()


@dataclass
class Output:
    loss: torch.Tensor


class Net(nn.Module):
    """A model for all variants: inputs as one tensor, as arguments or as keywords; a loss in its output if asked."""

    def __init__(self, has_loss: bool = False) -> None:
        super().__init__()
        self.layer, self.has_loss = nn.Linear(4, 1).double(), has_loss

    def forward(self, x, scale=None, names=None, y=None):
        assert names is None or len(names) == len(x)
        found = self.layer(x if scale is None else x * scale)
        return Output(squares(found, y)) if self.has_loss else found


def samples(called_with: str, loss_from: str) -> list[Any]:
    """Return the samples of a data set whose batches the model takes as the plan has it."""
    generator = torch.Generator().manual_seed(3)
    x, y, scale = (torch.randn(NUM_SAMPLES, size, dtype=torch.float64, generator=generator) for size in (4, 1, 4))
    if loss_from == "output":  # the whole batch goes to the model, with its targets
        rows = {
            "keywords": [{"x": a, "scale": c, "y": b} for a, b, c in zip(x, y, scale, strict=True)],
            "arguments": [(a, c, f"name {i}", b) for i, (a, b, c) in enumerate(zip(x, y, scale, strict=True))],
        }
        return rows[called_with]
    inputs = {
        "tensor": list(x),
        "arguments": list(zip(x, scale, strict=True)),
        "keywords": [{"x": a, "names": f"name {i}"} for i, a in enumerate(x)],
    }[called_with]
    return list(zip(inputs, y, strict=True))


def called(model: Callable[..., Any], inputs: Any) -> torch.Tensor:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs)


def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a user's own function, which expects its batch on the first device."""
    inputs, targets = batch
    return squares(called(model, inputs), targets)


def own_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    compute_loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


VARIANTS = [
    *((loss_from, how) for loss_from in ("loss_fn", "compute_loss") for how in ("tensor", "arguments", "keywords")),
    *(("output", how) for how in ("arguments", "keywords")),
    ("step", "tensor"),
]


def workload_facts(loss_from: str) -> dict[str, Any]:
    return {"loss_fn": "its"} if loss_from == "loss_fn" else {"loss_fn": None, loss_from: "its"}


def trained(lines: tuple[str, ...], loss_from: str, called_with: str) -> torch.Tensor:
    """Run the lines with the names that a user's script has, and return the weights."""
    torch.manual_seed(0)
    model = Net(loss_from == "output")
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(samples(called_with, loss_from), batch_size=7, collate_fn=collated),
        "loss_fn": squares,
        "compute_loss": compute_loss,
        "step": own_step,
    }
    exec("\n".join(lines), names)
    assert names["loader"].collate_fn is collated
    return model.layer.weight.detach().cpu()


def collated(rows: list[Any]) -> Any:
    """The user's own collate_fn."""
    return torch.utils.data.default_collate(rows)


def expected(loss_from: str, called_with: str, effective: int = NUM_SAMPLES) -> torch.Tensor:
    """Return the weights after optimizer steps of `effective` samples over the whole data set, in one process."""
    torch.manual_seed(0)
    model = Net(loss_from == "output")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = samples(called_with, loss_from)
    for begin in range(0, len(rows), effective):
        batch = collated(rows[begin : begin + effective])
        loss = called(model, batch).loss if loss_from == "output" else compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.layer.weight.detach()


def plan_here(kind: str, count: int, loss_from: str, called_with: str) -> Plan:
    """Return a plan for devices of this machine. A custom step cannot be accumulated."""
    split, effective = SPLIT[:count], sum(SPLIT[:count]) if loss_from == "step" else NUM_SAMPLES
    plan = made_plan(split, kind="cpu", effective=effective)
    if kind != "cpu":
        cards = visible_devices(kind)
        plan = on_devices(
            plan,
            *(
                replace(device, kind=kind, label=f"{kind}:{index}", name=cards[index].name, uuid=cards[index].uuid)
                for index, device in enumerate(plan.devices)
            ),
        )
    return replace(plan, called_with=called_with, workload=workload_facts(loss_from))


def check_variant(kind: str, count: int, loss_from: str, called_with: str, path: Path) -> None:
    plan = plan_here(kind, count, loss_from, called_with)
    plan.save(path)
    found = trained(paste_lines(plan, Origin(str(path))), loss_from, called_with)
    wanted = expected(loss_from, called_with, plan.effective_batch_size)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("loss_from", "called_with"), VARIANTS)
def test_every_variant_trains_as_one_process_on_the_cpu(tmp_path, loss_from, called_with, count):
    check_variant("cpu", count, loss_from, called_with, tmp_path / "plan.json")


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("loss_from", "called_with"), VARIANTS)
def test_every_variant_trains_as_one_process_on_accelerators(tmp_path, loss_from, called_with, count):
    """With `step=`, no line moved the batch. On a GPU: "Expected all tensors to be on the same device"."""
    if count > COUNT:
        pytest.skip("needs two cards")
    check_variant(KIND, count, loss_from, called_with, tmp_path / "plan.json")


# One by one


@pytest.mark.parametrize(("precision", "off_by"), [("none", 1e-6), ("bf16", 1e-2), ("fp16", 1e-3)])
def test_the_lines_to_paste_train_exactly_and_in_the_plans_precision(tmp_path, precision, off_by):
    """They had no autocast: a plan of half the memory was trained in float32."""
    plan = replace(made_plan((3, 5), kind="cpu", effective=20), precision=precision)
    path = tmp_path / "plan.json"
    plan.save(path)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    plain = torch.nn.Linear(4, 1)
    plain.load_state_dict(model.state_dict())
    dataset = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randn(20, 1))
    names = {
        "model": model,
        "loader": DataLoader(dataset, batch_size=6),
        "loss_fn": lambda outputs, targets: seen.append(outputs.dtype) or F.mse_loss(outputs.float(), targets),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    seen = []
    exec("\n".join(paste_lines(plan, Origin(str(path)))), names)
    F.mse_loss(plain(dataset.tensors[0]), dataset.tensors[1]).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert isinstance(names["plan"], Plan)
    assert {*seen} == {{"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    for trained, exact in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(trained, exact, rtol=0, atol=off_by)


def test_the_lines_to_paste_of_a_step_of_ones_own_call_it(tmp_path):
    """They were written for a model with a loss in its output, and used their loop variable as the step."""
    models = {"one": nn.Linear(4, 1), "other": nn.Linear(4, 1)}

    def step(models, optimizers, batch):
        seen.append(len(batch))
        for name, model in models.items():
            model(batch).square().mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()

    made = dict.fromkeys(models, torch.optim.SGD)
    workload = Workload(models, torch.randn(8, 4), step=step, optimizer=made)
    seen = []
    options = {"effective_batch_size": 8, "n_trials": 1, "profile": "off"}
    plan = autosplit.tune(workload, devices="cpu:1MiB,cpu:1MiB", **options)
    plan.save(tmp_path / "plan.json")
    lines = paste_lines(plan, Origin(str(tmp_path / "plan.json")))
    assert lines[0].endswith(". Wrap several models one by one.")
    text = "\n".join(lines).replace("plan.wrap(model)", "{key: plan.wrap(one) for key, one in model.items()}")
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    seen.clear()
    loader = DataLoader(torch.randn(16, 4), batch_size=3)
    exec(text, {"model": models, "optimizer": optimizers, "step": step, "loader": loader})
    assert seen == [8, 8]
    ranks = paste_lines(replace(ranks_plan((3, 5)), workload=plan.workload, precision="bf16"))
    assert ranks[-3:] == (
        "    for batch in loader:",
        '        with torch.autocast("cpu", torch.bfloat16):',
        "            step(model, optimizer, autosplit.to_device(batch, ctx.device))",
    )
    assert ranks[-4].endswith("multiply each mean loss by ctx.batch_size * ctx.world_size / 8")


def test_without_a_loss_no_loop_is_printed():
    """The lines took a loss from outputs that have none, or pairs from a loader of single tensors."""
    options = {"effective_batch_size": 8, "n_trials": 1, "profile": "off"}
    with pytest.warns(AssumedLossWarning, match="Pass loss_fn="):
        plan = autosplit.tune(nn.Linear(4, 1), torch.randn(8, 4), devices="cpu:1MiB", **options)
    assert paste_lines(plan)[-2:] == (
        "# No loop is printed, because it would not train as one process does.",
        "# No loss was given, so the plan is for the mean of the model's outputs. Tune with loss_fn=.",
    )


COUNTS = [
    "int((batch[1] != -100).sum())",
    "float(batch['weights'].sum())",
    "float(loss_fn.weight[batch[1][batch[1] != -100]].sum())",
]
HOSTILE_COUNTS = [
    "__import__('os').system('touch /tmp/owned') or 1",
    "int(batch[0].sum())):\n    import os; os.abort()  #",
    "int(batch[0].sum()) # nothing",
    "int(batch['\x1b[2J'].sum())",
    "int(batch[" + "0][" * 200 + "0].sum())",
    "",
]


@pytest.mark.parametrize("count", COUNTS)
def test_what_the_check_counts_is_shown(count):
    check = Check("loss", 0.0, 0.4, depends=True, advice="count", count=count)
    assert f"for step in plan.steps(loader, count=lambda batch: {count}):" in paste_lines(made_plan(checks=(check,)))


@pytest.mark.parametrize("count", HOSTILE_COUNTS)
def test_code_that_autosplit_did_not_write_is_not_shown(count):
    """A plan's file may come from an untrusted author, and users paste these lines."""
    assert not is_count_expression(count)
    lines = paste_lines(made_plan(checks=(Check("loss", 0.0, 0.4, depends=True, advice="", count=count),)))
    assert not any(line.startswith("for step") for line in lines)
    assert not count or count not in "\n".join(lines)
    assert any("autosplit did not write the plan's count=" in line for line in lines) == bool(count)


def test_a_loop_that_would_train_wrongly_is_not_printed():
    """The comment named the cure for a sum, but the loop under it trained wrongly."""
    check = Check("loss", 0.4, 0.4, depends=True, advice="it is a sum: pass loss_reduction='sum'")
    lines = paste_lines(made_plan(checks=(check,)))
    assert lines[-2:] == ("# No loop is printed, because it would not train as one process does.", f"# {check.advice}")
    whole = made_plan((128,), effective=128, checks=(check,))
    assert any(line.startswith("for step") for line in paste_lines(whole)), "nothing is split"


def test_advice_that_the_loop_follows_is_not_printed():
    """ "It is a mean over the labels. Accumulate with count=" stood above a loop with this count=."""
    check = Check("loss", 2e-16, 0.4, depends=True, advice="Accumulate with count=", count=COUNTS[0])
    assert not any(check.advice in line for line in paste_lines(made_plan(checks=(check,))))


LENGTHS = LengthPlan((LengthPoint(64, 1.0, 100.0, 100.0), LengthPoint(32, 3.0, 300.0, 200.0)), 300.0, 150.0, 0.1, 0.5)


@pytest.mark.parametrize(
    ("plan", "of"), [(made_plan(lengths=LENGTHS), "plan"), (ranks_plan((2, 6), lengths=LENGTHS), "ctx")]
)
def test_the_lines_to_paste_make_batches_of_like_length(plan, of):
    lines = "\n".join(paste_lines(plan))
    assert f"sampler = {of}.token_sampler(lengths, shuffle=True)" in lines
    assert "collate_fn=pad)" in lines
    assert lines.startswith("# Your script defines model, optimizer, loss_fn, dataset, lengths and pad")


# Building blocks of the lines


class Encoding:
    """A library's batch class that moves itself."""

    def __init__(self, ids):
        self.ids = ids

    def to(self, device):
        return Encoding(self.ids.to(device))


def test_to_device_moves_tensors_at_any_depth_and_leaves_the_rest():
    batch = {
        "image": torch.zeros(2),
        "more": [(torch.ones(2), "a")],
        "names": ["a", "b"],
        "ids": Encoding(torch.ones(1)),
    }
    moved = to_device(batch, "meta")
    assert moved["image"].is_meta
    assert moved["more"][0][0].is_meta
    assert moved["ids"].ids.is_meta
    assert (moved["names"], moved["more"][0][1]) == (["a", "b"], "a")
    assert not batch["image"].is_meta


@pytest.mark.parametrize(
    ("steps_every", "warning"), [(1, "3 micro-batches per optimizer step"), (3, "a step have 8 and 4 samples")]
)
def test_a_loop_without_steps_is_warned_of(steps_every, warning):
    """Each update had 8 samples instead of 20. With accumulation by hand, 4 samples had the weight of 8."""
    plan = made_plan(SPLIT, kind="cpu", effective=NUM_SAMPLES)
    loader = plan.loader(samples("tensor", "loss_fn") * 3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for number, (inputs, targets) in enumerate(loader, 1):
            (F.mse_loss(model(inputs), targets) / steps_every).backward()
            if number % steps_every == 0:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.warns(StepsWarning, match=warning) as caught:
        train()
    assert len(caught) == 1
