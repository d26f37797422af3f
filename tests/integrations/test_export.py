"""Test exports: other tools get the plan's numbers or the nearest even plan, and notes report what is lost."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fitted_plans import fitted_plan
from handmade import GIB, changed_layout, made_ceiling, made_plan, on_devices, without_ddp
from hypothesis import given, settings
from hypothesis import strategies as st
from raised import raises

from autosplit.cli.main import main
from autosplit.errors import DeviceError, InputError, PlanError
from autosplit.integrations.export import FORMATS
from autosplit.integrations.exported import Export
from autosplit.plan.layout import DdpOptions, Layout, Seat
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_devices, with_layouts
from autosplit.plan.torchrun import command_for
from autosplit.probe.check_result import Check
from autosplit.solve.split import accumulation_steps

TOOLS = ("transformers", "accelerate", "lightning")
TAKERS = {"transformers": "TrainingArguments", "accelerate": "Accelerator", "lightning": "Trainer"}


def ranked(plan: Plan, sizes: tuple[int, ...], ceilings: tuple[int, ...], effective: int, **changes: Any) -> Plan:
    """Give a plan other DDP ranks."""
    seats = tuple(
        Seat(device, size, made_ceiling(device.label, ceiling, 24 * GIB), GIB)
        for device, size, ceiling in zip(plan.devices, sizes, ceilings, strict=True)
    )
    steps = accumulation_steps(effective, sum(sizes))
    ranks = Layout("ddp", seats, steps, effective, 900.0, measured=False, cost=plan.main.cost)
    return with_layouts(plan, plan.main, replace(ranks, **changes))


def uneven_plan(effective: int = 96, **changes: Any) -> Plan:
    """One GPU is three times as fast as the other, which fits 40 samples."""
    plan = fitted_plan((72, 24), (1.0, 3.0), (200, 40), effective=effective, **changes)
    return ranked(plan, (72, 24), (200, 40), effective)


def even_plan(kind: str = "cuda", count: int = 2, **changes: Any) -> Plan:
    """Two equal GPUs with 50 samples each, in 2 forwards."""
    plan = fitted_plan((50,) * count, (1.0,) * count, (60,) * count, effective=100 * count, kind=kind, **changes)
    return ranked(plan, (50,) * count, (60,) * count, 100 * count)


def lone_plan(effective: int = 100, kind: str = "cuda") -> Plan:
    """One GPU, 50 samples per forward."""
    return fitted_plan((50,), (1.0,), (60,), effective=effective, kind=kind)


def numbers(found: Export) -> tuple[int, int]:
    """Return the settings' samples per forward of each rank, and the number of forwards."""
    settings = found.settings
    if found.to == "transformers":
        arguments = settings["TrainingArguments"]
        return arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
    steps = {
        "accelerate": ("Accelerator", "gradient_accumulation_steps"),
        "lightning": ("Trainer", "accumulate_grad_batches"),
    }
    taker, name = steps[found.to]
    return settings["DataLoader"]["batch_size"], settings[taker][name]


# ------------------------------------------------------------------------------------------------- exported numbers


@pytest.mark.parametrize("to", TOOLS)
def test_an_even_plan_is_exact_and_says_nothing(to):
    found = even_plan().export(to)
    assert numbers(found) == (50, 2)
    assert found.exact
    assert found.notes == ()
    assert found.lost_share is None or found.lost_share <= 0.005
    assert not found.text.startswith("#")


@pytest.mark.parametrize("to", TOOLS)
def test_an_uneven_plan_has_the_nearest_even_one_computed(to):
    """72 and 24: the mean, 48 each, does not fit the small GPU, and 24 each wastes the large GPU."""
    found = uneven_plan().export(to)
    assert numbers(found) == (24, 2)
    assert not found.exact
    assert found.even.effective_batch_size == 96
    # 2 forwards of 24 samples at 3 ms per sample. 72 and 24 take 72 ms.
    assert found.even.samples_per_s == pytest.approx(96 / 0.144)
    assert found.lost_share == pytest.approx(0.5)
    nearest = found.notes[0]
    assert "The plan's ranks have (72, 24) samples" in nearest
    assert "24 on each of 2 ranks in 2 forwards, an effective batch of 96, as in the plan" in nearest
    assert nearest.endswith("Predicted: 667 samples/s, 50% fewer than with autosplit.ddp and (72, 24).")
    assert "Without cuda:1" in found.notes[1], "the fast GPU is faster alone than with a slower one"
    assert "1.50 times as fast" in found.notes[1]
    for line in found.notes[0].split()[:4]:
        assert line in found.text, "the text to paste says it, too"


def test_a_step_that_the_ranks_do_not_divide_becomes_another_and_says_so():
    plan = fitted_plan((34, 33, 33), (1.0, 1.0, 1.0), (60, 60, 60), effective=100)
    found = ranked(plan, (34, 33, 33), (60, 60, 60), 100).export("lightning")
    assert numbers(found) == (33, 1)
    assert "an effective batch of 99, and the plan has 100" in found.notes[0]
    assert "no fewer than with" in found.notes[0]


def test_without_an_effective_batch_there_is_one_forward():
    """Those ceilings were found in steps of one forward, without gradients that wait for a second."""
    plan = uneven_plan()
    found = replace(plan, effective_batch_sizes=None).export("transformers")
    assert numbers(found) == (40, 1)
    assert found.even.effective_batch_size == 80


@pytest.mark.parametrize("to", TOOLS)
def test_several_devices_without_ranks(to):
    plan = without_ddp(even_plan(), "cuda:1 can't hold a DDP rank")
    with raises(PlanError):
        plan.export(to)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (ranked(uneven_plan(), (96, 0), (200, 0), 96), "(96, 0)"),
        (replace(uneven_plan(), max_batch_size=1), "no batch size fits all ranks"),
    ],
)
def test_ranks_that_no_common_batch_size_fits(plan, says):
    with raises(PlanError, says):
        plan.export("transformers")


# ------------------------------------------------------------------------------------------------------------- notes


STARTERS = ("torchrun", "slurm", "trainjob", "skypilot")
"""Formats that start a job."""


@pytest.mark.parametrize("to", [one for one in FORMATS if one not in STARTERS])
def test_a_simulated_plan_says_so(to):
    found = even_plan("sim").export(to)
    assert found.notes[0].startswith("The plan is for simulated GPUs (card 0, card 1).")


@pytest.mark.parametrize("to", STARTERS)
def test_no_job_starts_for_simulated_gpus(to):
    with raises(DeviceError):
        even_plan("sim").export(to)


LOSS = Check("loss", 0.1, 0.1, depends=True, advice="it is a mean over tokens")
NORM = Check("BatchNorm2d at features.1", 0.1, 0.1, depends=True)


@pytest.mark.parametrize(
    ("to", "says"),
    [
        (
            "transformers",
            "weights them by all ranks' labels that are not -100, if the model takes num_items_in_batch",
        ),
        ("accelerate", "weights them equally. Scale the loss yourself"),
        ("lightning", "weights them equally. Scale the loss yourself"),
    ],
)
def test_a_loss_that_is_no_mean_over_samples(to, says):
    (note,) = replace(even_plan(), checks=(LOSS,)).export(to).notes
    assert "A step has 4 micro-batches" in note
    assert says in note
    assert replace(fitted_plan((50,), (1.0,), (60,), effective=50), checks=(LOSS,)).export(to).notes == ()


def test_a_batch_norm_is_not_given_a_single_sample():
    plan = fitted_plan((4, 3), (1.0, 3.0), (200, 40), effective=7, checks=(NORM,))
    plan = ranked(plan, (4, 3), (200, 40), 7, least_batch=2)
    assert plan.export("transformers").even.batch_size >= 2


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.sampled_from([1.0, 3.0])), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 20),
    st.sampled_from(TOOLS),
)
def test_exact_or_within_every_ceiling(ranks, steps, short, to):
    """For any ranks, the tool gets the plan's numbers, or numbers that fit every device."""
    sizes, room, paces = zip(*ranks, strict=True)
    ceilings = tuple(size + more for size, more in zip(sizes, room, strict=True))
    effective = max(sum(sizes) * (steps - 1) + 1, sum(sizes) * steps - short)
    plan = fitted_plan(sizes, paces, ceilings, effective=effective)
    plan = ranked(plan, sizes, ceilings, effective)
    found = plan.export(to)
    batch_size, forwards = numbers(found)
    assert batch_size <= min(ceilings)
    assert (batch_size, forwards) == (found.even.batch_size, found.even.accumulation_steps)
    same = batch_size * forwards * len(sizes) == effective
    assert not found.exact or (set(sizes) == {batch_size} and forwards == steps and same)
    assert found.exact == (len(set(sizes)) == 1 and sizes[0] * len(sizes) * steps == effective)
    assert found.exact or same or f", and the plan has {effective}" in found.notes[0]


def test_a_name_can_not_leave_its_comment():
    """A plan may come from an untrusted author, and its text must not become code that users paste."""
    evil = 'x"\n\nimport os; os.system("reboot")\r\x1b[2J\u2028y'
    plan = with_devices(even_plan("sim"), lambda _, device: replace(device, name=evil))
    for to in (*TOOLS, "env"):
        text = plan.export(to).text
        assert text.replace("\n", "").isprintable()
        told = [line for line in text.splitlines() if "reboot" in line]
        assert told
        assert all(line.startswith("#") for line in told)
    with raises(PlanError):
        replace(even_plan(), precision=evil)


# ---------------------------------------------------------------------------------------------------------- the text


def test_which_cards_are_meant():
    plan = even_plan()
    others = on_devices(plan, plan.devices[0], replace(plan.devices[1], index=2, label="cuda:2"))
    assert others.export("transformers").settings["command"].startswith("CUDA_VISIBLE_DEVICES=0,2 torchrun ")
    assert "--gpu_ids=0,2" in others.export("accelerate").settings["command"]
    assert others.export("lightning").settings["Trainer"]["devices"] == [0, 2]
    assert "CUDA_VISIBLE_DEVICES" not in plan.export("transformers").text
    lone = lone_plan()
    assert lone.export("transformers").settings["command"] == "CUDA_VISIBLE_DEVICES=0 python train.py", (
        "Trainer takes all GPUs that it sees"
    )
    assert lone.export("lightning").settings["Trainer"]["devices"] == [0]


def machines(*counts: int) -> Plan:
    return replace(even_plan(count=sum(counts)), machine={"ranks_per_machine": list(counts)})


def test_several_machines():
    plan = machines(2, 2)
    line = plan.export("transformers").settings["command"]
    assert "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d" in line
    assert "Run it on each of 2 machines" in plan.export("transformers").text
    assert plan.export("accelerate").settings["command"] == line
    trainer = plan.export("lightning").settings["Trainer"]
    assert (trainer["num_nodes"], trainer["devices"]) == (2, 2)
    assert "RANKS_HERE is 2, 1" in machines(2, 1).export("transformers").text
    assert "2 machines have (2, 1) ranks" in machines(2, 1).export("torchrun", path="plan.json").notes[0]
    with raises(PlanError, "(2, 1)"):
        machines(2, 1).export("lightning")


def test_torchruns_line_is_that_of_launch(tmp_path):
    path = tmp_path / "a plan.json"
    plan = uneven_plan()
    plan.save(path)
    found = plan.export("torchrun", path=path)
    assert found.text == command_for(Plan.load(path), path, ["train.py"]).line()
    assert shlex.split(found.text)[0] == f"AUTOSPLIT_PROFILE={path}"
    assert found.exact


def test_variables_are_a_shells(tmp_path):
    path = tmp_path / "it's a $plan;.json"
    found = uneven_plan().export("env", path=path)
    script = (
        f"{found.text}\nexec {shlex.quote(sys.executable)} -c 'import os, json; print(json.dumps(dict(os.environ)))'"
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert {name: told[name] for name in found.settings} == dict(found.settings)
    assert told["AUTOSPLIT_PROFILE"] == str(path)
    assert (told["AUTOSPLIT_SPLIT"], told["AUTOSPLIT_DDP_BATCH_SIZES"]) == ("72,24", "72,24")


@pytest.mark.parametrize("to", ["jax", 3])
def test_an_unknown_format_lists_those_that_there_are(to):
    with raises(InputError, str(", ".join(FORMATS))) as caught:
        even_plan().export(to)
    assert len(str(caught.value)) < 400


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    # Cluster managers ask for GPUs of one kind on each machine.
    with_devices(uneven_plan(), lambda _, device: replace(device, name="NVIDIA A10G")).save(path)
    return str(path)


@pytest.mark.parametrize("to", FORMATS)
def test_stdout_has_the_text_alone(plan_file, capsys, to):
    assert main(["export", plan_file, "--to", to]) == 0
    out, err = capsys.readouterr()
    found = Plan.load(plan_file).export(to, path=plan_file)
    assert out == f"{found.text}\n"
    assert err == ("" if found.text_has_notes else "".join(f"note: {note}\n" for note in found.notes))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["export", "PLAN"],
            f"--to is missing. Choose one of {', '.join(FORMATS)}",
        ),
        (["export", "PLAN", "--to", "env", "-o", "FOLDER"], "is a folder, not a file"),
        (["export", "none.json", "--to", "env"], "none.json can't be read"),
    ],
)
def test_errors_are_one_line(plan_file, tmp_path, capsys, arguments, says):
    places = {"PLAN": plan_file, "FOLDER": str(tmp_path)}
    given = [re.sub("PLAN|FOLDER", lambda found: places[found[0]], argument) for argument in arguments]
    assert main(given) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert err.count("\n") == 1
    assert out == ""


# ------------------------------------------------------------------------------------------------ the tools themselves


def built(text: str) -> dict[str, Any]:
    """Run the exported text with a dataset."""
    names: dict[str, Any] = {"dataset": list(range(600))}
    exec(text, names)
    return names


PLANS: dict[str, Callable[[], Plan]] = {
    "one": lambda: lone_plan(kind="cpu"),
    "even": lambda: even_plan("cpu"),
    "uneven": lambda: uneven_plan(kind="cpu"),
}


@pytest.mark.parametrize("precision", ["none", "bf16"])
@pytest.mark.parametrize("which", PLANS)
def test_transformers_takes_it(which, precision, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    found = replace(PLANS[which](), precision=precision).export("transformers")
    arguments = built(found.text)["arguments"]
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == numbers(found)
    assert arguments.train_batch_size == found.even.batch_size, "of one process, with as many devices"
    assert arguments.mixed_precision == {"none": "no", "bf16": "bf16"}[precision]
    assert arguments.average_tokens_across_devices
    assert arguments.ddp_find_unused_parameters is (None if which == "one" else False)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Reset accelerate's state, which its objects share."""
    state = pytest.importorskip("accelerate.state")
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("which", PLANS)
def test_accelerate_takes_it(which):
    found = PLANS[which]().export("accelerate")
    names = built(found.text)
    accelerator, loader = names["accelerator"], names["loader"]
    assert (loader.batch_size, accelerator.gradient_accumulation_steps) == numbers(found)
    assert accelerator.mixed_precision == "no"
    assert not accelerator.dataloader_config.split_batches
    assert (accelerator.ddp_handler is None) == (which == "one")
    if accelerator.ddp_handler is not None:
        assert accelerator.ddp_handler.gradient_as_bucket_view


@pytest.mark.parametrize("plan", [lone_plan(), lone_plan(kind="cpu")])
def test_accelerate_launch_takes_its_line(plan):
    launch = pytest.importorskip("accelerate.commands.launch")
    words = shlex.split(plan.export("accelerate").settings["command"])
    assert words[:2] == ["accelerate", "launch"]
    given = launch.launch_command_parser().parse_args(words[2:])
    given, _, _ = launch._validate_launch_command(given)
    assert given.num_processes == len(plan.devices)
    assert given.training_script == "train.py"


@pytest.mark.parametrize("which", PLANS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_lightning_takes_it(which, tmp_path, monkeypatch):
    pytest.importorskip("lightning.pytorch")
    monkeypatch.chdir(tmp_path)
    plan = PLANS[which]()
    found = plan.export("lightning")
    names = built(found.text)
    trainer, loader = names["trainer"], names["loader"]
    assert (loader.batch_size, trainer.accumulate_grad_batches) == numbers(found)
    assert trainer.world_size == len(plan.devices)
    assert trainer.precision == "32-true"
    if which != "one":
        assert trainer.strategy._ddp_kwargs == {
            "gradient_as_bucket_view": True,
            "find_unused_parameters": False,
            "static_graph": False,
        }


HOMES = {
    "DistributedDataParallelKwargs": "accelerate.utils",
    "DataLoaderConfiguration": "accelerate.utils",
    "DDPStrategy": "torch.nn.parallel",  # it passes them on to this
    "Trainer": "lightning.pytorch",
    "DataLoader": "torch.utils.data",
}


def keywords_of(tool: str, taker: str) -> set[str]:
    module = pytest.importorskip(HOMES.get(taker, tool))
    name = "DistributedDataParallel" if taker == "DDPStrategy" else taker
    return set(inspect.signature(getattr(module, name)).parameters)


@pytest.mark.parametrize("precision", ["none", "fp16"])
@pytest.mark.parametrize("to", TOOLS)
def test_gpu_plans_use_keywords_that_there_are(to, precision):
    """Code that needs a GPU is checked for its keyword names."""
    plan = replace(machines(2, 2), precision=precision)
    options = DdpOptions(find_unused_parameters=True, static_graph=True)
    found = changed_layout(plan, options=options).export(to)
    compile(found.text, to, "exec")
    takers = [name for name in found.settings if name != "command"]
    assert TAKERS[to] in takers
    for taker in takers:
        assert set(found.settings[taker]) <= keywords_of(to, taker)


DATA = """
import os
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return {"x": torch.full((2,), float(index)), "labels": torch.zeros(1)}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.samples = torch.nn.Linear(2, 1), 0

    def forward(self, x, labels):
        self.samples += len(x)
        return {"loss": (self.line(x) - labels).square().mean()}

class Counting(torch.optim.SGD):
    def step(self, closure=None):
        found = super().step(closure)  # Lightning runs the last forward in it
        seen.append(net.samples)
        net.samples = 0
        return found

seen, net, dataset = [], Net(), Numbers()
optimizer = Counting(net.parameters(), lr=1e-9)
"""

LOOPS = {
    "transformers": """
from transformers import Trainer

arguments.report_to, arguments.num_train_epochs, arguments.save_strategy = [], 1, "no"
Trainer(net, arguments, train_dataset=dataset, optimizers=(optimizer, None)).train()
""",
    "accelerate": """
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
""",
    "lightning": """
import lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, _):
        return self.net(**batch)["loss"]

    def configure_optimizers(self):
        return optimizer

trainer.fit_loop.max_epochs = 1
trainer.fit(Module(), loader)
""",
}

# These scripts do not use autosplit, so gloo's threads survive and may crash the process at its end.
TELLING = """
with open(f'{os.environ.get("LOCAL_RANK", 0)}.txt', "w") as told:
    told.write(" ".join(map(str, seen)))
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", TOOLS)
def test_two_real_ranks_take_the_samples_that_were_promised(to, tmp_path):
    """These tools cannot run 9 and 3 samples in 2 forwards. 4 each in 3 forwards give the same step of 24."""
    pytest.importorskip({"lightning": "lightning.pytorch"}.get(to, "accelerate"))
    pytest.importorskip("transformers")
    plan = fitted_plan((9, 3), (1.0, 3.0), (20, 4), effective=24, kind="cpu")
    found = ranked(plan, (9, 3), (20, 4), 24).export(to)
    assert numbers(found) == (4, 3)
    (tmp_path / "train.py").write_text("\n".join((DATA, found.text, LOOPS[to], TELLING)))
    command = shlex.split(found.settings["command"])
    programs = {"torchrun": ["-m", "torch.distributed.run"], "python": []}
    command = [sys.executable, *programs[command[0]], *command[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == "12 12", "of each rank, in both steps of the epoch"


def test_what_has_no_setting_for_it_is_not_exported_to():
    plan = replace(made_plan(), checkpointed=("blocks.0", "blocks.1"))
    with raises(PlanError, "2", "blocks.0", "'accelerate'"):
        plan.export("accelerate")
    assert plan.export("json")
