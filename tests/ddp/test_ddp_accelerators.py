"""DDP on accelerators: each rank on its own GPU, splits that follow the GPUs, and a rank without memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from card_jobs import NUM_SAMPLES, SHARES, contexts_here, make_model, plan_of_cards, samples
from ddp_jobs import make_plan
from folders import TESTS
from gpus import COUNT, KIND
from handmade import on_devices
from ranks import found_by, run_ranks
from short_budgets import short_budgets
from torch import distributed as dist
from torch import nn

import autosplit
from autosplit import ddp
from autosplit.accelerators import backend
from autosplit.devices.accelerator import visible_devices
from autosplit.plan.plan import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two cards")]

LIMIT_S = 240


def gradient_of(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().cpu() for p in module.parameters() if p.grad is not None])


def trained_by(ctx: ddp.Context) -> dict[str, Any]:
    """Take one step, and return the error of its gradient against the whole batch on a CPU."""
    inputs, targets = samples()
    model = ctx.wrap(make_model())
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=ctx.batch_sampler(NUM_SAMPLES))
    for step in ctx.steps(loader):
        for some, wanted in step:
            step.backward(nn.functional.mse_loss(model(some), wanted.to(ctx.device)))
    whole = make_model()
    nn.functional.mse_loss(whole(inputs), targets).backward()
    expected = gradient_of(whole)
    return {
        "error": float((gradient_of(model) - expected).norm() / expected.norm()),
        "device": str(ctx.device),
        "uuid": visible_devices(KIND)[ctx.device.index].uuid,
        "share": ctx.seat.samples,
        "backend": dist.get_backend(),
        "contexts": contexts_here(),
    }


# ------------------------------------------------------------------------------------------------------- scenarios


def trained() -> dict[str, Any]:
    with ddp.setup(plan_of_cards()) as ctx:
        return trained_by(ctx)


def resumed() -> float:
    """Train, save, load into another model, and compare."""
    path = Path(os.environ["SCENARIO_FOLDER"]) / "last.pt"
    with ddp.setup(plan_of_cards()) as ctx:
        models = [ctx.wrap(make_model()), ctx.wrap(make_model())]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        models[0](samples()[0].to(ctx.device)).sum().backward()
        optimizers[0].step()
        ctx.save_checkpoint(path, model=models[0], optimizer=optimizers[0])
        dist.barrier()
        ctx.load_checkpoint(path, model=models[1], optimizer=optimizers[1])
        for model, optimizer in zip(models, optimizers, strict=True):
            model.zero_grad()
            model(samples()[0].to(ctx.device)).sum().backward()
            optimizer.step()
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        assert all(parameter.device == ctx.device for parameter in models[1].parameters())
        return max(float((one - other).abs().max()) for one, other in pairs)


class Net(nn.Module):
    """A small model with one or two parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)


def tuned(model: nn.Module | None = None, *, profile: str = "auto", **options: Any) -> Plan:
    """Tune with a loss that takes its targets from the batch's device. Only the tuning moves them."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(8, 16, generator=generator), torch.randn(8, 1, generator=generator)
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": torch.optim.AdamW, **options}
    workload = autosplit.Workload(model or Net(), batch, **given)
    with short_budgets():
        return autosplit.tune(
            workload, devices=KIND, strategy="ddp", effective_batch_size=64, n_trials=2, profile=profile
        )


def tuned_and_trained() -> dict[str, Any]:
    """Tune, and train with the saved plan."""
    plan = tuned()
    with ddp.setup() as ctx:
        assert ctx.plan.split == plan.split
        device = str(ctx.device)
    return {"plan": plan.to_json(), "device": device, "contexts": contexts_here()}


def without_memory() -> dict[str, Any]:
    """Run out of memory on one rank while the other waits for its gradients. The models are on the GPUs already."""
    sprung: list[bool] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        meets = isinstance(model, nn.parallel.DistributedDataParallel) and model.require_backward_grad_sync
        if meets and os.environ["RANK"] == "1" and not sprung:
            sprung.append(True)
            torch.empty(2**45, device=batch[0].device)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    model = Net().to(f"{KIND}:{os.environ['RANK']}")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    plan = tuned(model, compute_loss=loss, loss_fn=None, profile="off")
    return {
        "unchanged": all(map(torch.equal, model.parameters(), before)),
        "failures": [trial.failure for trial in plan.trials],
        "split": plan.split,
        "ooms": plan.real_ooms,
    }


ON_CARDS: dict[str, Callable[[], Any]] = {
    "trained": trained,
    "resumed": resumed,
    "without memory": without_memory,
    "tuned": tuned_and_trained,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCENARIO_FOLDER", str(folder))
        return run_ranks(__name__, "ON_CARDS", 2, folder, limit_s=LIMIT_S, spawned=True)


@pytest.mark.timeout(LIMIT_S + 60)
class TestTwoRanks:
    def test_train_with_unlike_shares_each_on_its_own_card(self, ranks: Any) -> None:
        for rank, found in enumerate(found_by(ranks, "trained")):
            assert found["error"] < 1e-12
            assert found["device"] == f"{KIND}:{rank}"
            assert found["share"] == SHARES[rank]
            assert found["backend"] == dist.get_default_backend_for_device(KIND)
            assert found["contexts"] in (None, [rank])

    def test_save_and_load(self, ranks: Any) -> None:
        assert found_by(ranks, "resumed") == [0.0, 0.0]

    def test_tune_a_loss_that_moves_nothing(self, ranks: Any) -> None:
        """The dry pass gave a model on the GPU a batch on the host, and all ranks ended."""
        one, other = found_by(ranks, "tuned")
        assert one["plan"] == other["plan"]
        plan = Plan.from_json(one["plan"], source="a scenario")
        assert plan.ddp.measured
        assert all(trial.failure is None for trial in plan.trials)
        assert all(0 < seat.peak_bytes <= seat.ceiling.capacity_bytes for seat in plan.ddp.seats)

    def test_have_no_context_on_another_ranks_card(self, ranks: Any) -> None:
        for rank, found in enumerate(found_by(ranks, "tuned")):
            assert found["device"] == f"{KIND}:{rank}"
            assert found["contexts"] in (None, [rank])

    def test_one_that_lacks_memory_among_the_others_gradients_is_a_failed_trial(self, ranks: Any) -> None:
        """The back end would have ended the waiting process."""
        one, other = found_by(ranks, "without memory")
        assert one["failures"] == other["failures"]
        assert any(f"rank 1: {KIND}:1 is out of memory" in failure for failure in one["failures"] if failure)
        assert one["split"] == other["split"]
        assert one["ooms"] >= 1
        assert one["unchanged"]
        assert other["unchanged"]


# --------------------------------------------------------------------------------------------- the command, and Slurm

WORK = """
import torch
import autosplit

def workload():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    return autosplit.Workload(model, (torch.randn(8, 16), torch.randn(8, 1)), loss_fn=torch.nn.functional.mse_loss)
"""

TRAIN = """
import json, os, sys
sys.path[:0] = {path!r}
from test_ddp_accelerators import trained_by
from autosplit import ddp
with ddp.setup() as ctx:
    found = trained_by(ctx)
with open(os.path.join({folder!r}, os.environ.get("RANK") or os.environ["SLURM_PROCID"]), "w") as file:
    json.dump(found, file)
"""


def script(folder: Path) -> Path:
    path = folder / "train.py"
    path.write_text(TRAIN.format(path=sys.path, folder=str(folder)))
    return path


def run(*arguments: str, **variables: str) -> str:
    command = [sys.executable, "-m", "autosplit", *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


VISIBLE = "EMU_VISIBLE_DEVICES" if KIND == "emu" else "CUDA_VISIBLE_DEVICES"


def test_shares_follow_the_cards_whatever_is_visible(tmp_path: Path) -> None:
    """The command starts a rank for each GPU. With the GPUs in another order, each still has its own split."""
    plan = plan_of_cards()
    plan.save(tmp_path / "plan.json")
    run("launch", "--plan", str(tmp_path / "plan.json"), str(script(tmp_path)), **{VISIBLE: "1,0"})
    for rank in range(2):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found["error"] < 1e-12
        assert found["device"] == f"{KIND}:{1 - rank}"
        assert (found["uuid"], found["share"]) == (plan.devices[rank].uuid, SHARES[rank])
        assert found["contexts"] in (None, [rank])


@pytest.mark.slow
def test_the_command_tunes_with_a_rank_on_each_card(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    options = ["--strategy", "ddp", "--devices", KIND, "--effective-batch-size", "64", "--n-trials", "1", "--json"]
    plan = Plan.from_json(run("tune", str(tmp_path / "work.py"), *options), source="stdout")
    assert plan.ddp.measured
    assert [device.label for device in plan.devices] == [f"{KIND}:{index}" for index in range(COUNT)]


@pytest.mark.slow
@pytest.mark.release  # ranks of `tune` measure, too
def test_the_command_measures_with_a_rank_on_each_card(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    options = ["--strategy", "ddp", "--devices", KIND, "--split", ",".join(["4"] * COUNT), "--accumulation-steps", "2"]
    found = json.loads(run("measure", str(tmp_path / "work.py"), *options, "--json"))
    assert (found["strategy"], found["predicted"], found["effective_batch_size"]) == ("ddp", False, 8 * COUNT)
    assert found["devices"] == [f"{KIND}:{index}" for index in range(COUNT)]
    assert all(0 < peak <= most for peak, most in zip(found["peak_bytes"], found["capacity_bytes"], strict=True))


def test_two_nodes_of_slurms_whose_ranks_see_one_card_each(tmp_path: Path) -> None:
    """All ranks call their GPU number 0. It counted as one GPU, and gloo was chosen instead of NCCL."""
    if KIND != "emu":
        pytest.skip("needs four cards, and processes that each see one of them")
    plan = make_plan((2, 6, 2, 6), NUM_SAMPLES, device="emu:{}")
    labels = ("emu:0", "emu:1", "emu:0", "emu:1")
    known = [
        replace(device, label=label, name="Emulated GPU", uuid=f"GPU-elsewhere-{device.index}")
        for device, label in zip(plan.devices, labels, strict=True)
    ]
    plan = on_devices(plan, *known)
    plan.save(tmp_path / "plan.json")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = str(store.port)
    del store
    same = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "EMULATED_DEVICES": "4"}
    path, processes = script(tmp_path), []
    for rank in range(4):
        own_words = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)}
        environment = {**os.environ, **same, **where, **own_words, "EMU_VISIBLE_DEVICES": str(rank)}
        environment["AUTOSPLIT_PROFILE"] = str(tmp_path / "plan.json")
        environment["EMULATED_MEMORY"] = str(tmp_path / "memory")
        processes.append(subprocess.Popen([sys.executable, str(path)], env=environment))
    try:
        assert [process.wait(200) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
    for rank in range(4):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found["error"] < 1e-12
        assert (found["device"], found["backend"], found["contexts"]) == ("emu:0", "eccl", [rank])


def test_the_launcher_has_no_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start ranks or look for a plan must not use a GPU."""
    code = """
import os, sys
import emulated
from autosplit.profiles.validity import usable_here
from autosplit.cli.workload_arguments import checked_arguments
from autosplit.ddp.device import card_of
import torch
asked = checked_arguments("", {}, {"strategy": "ddp", "devices": "emu"})
assert asked.num_processes == 2 and asked.isolate
list(usable_here())
card_of(torch.device("emu", 1))
assert not emulated.contexts().get(os.getpid()), emulated.contexts()
"""
    if KIND != "emu":
        pytest.skip("a real driver does not tell who has a context")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert backend(KIND).device_count() == 2
