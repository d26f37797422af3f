"""tune(fits=...): a checkpoint on the device, a copy being saved, and evaluation fit next to the training steps."""

from __future__ import annotations

import gc
import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpus import KIND, WORKSPACE_BYTES
from noted import kinds
from raised import raises
from torch import Tensor, nn

from autosplit.accelerators import backend, bounded
from autosplit.devices.spec import parse_devices
from autosplit.errors import WorkloadError
from autosplit.oom import is_oom
from autosplit.plan.plan import Plan
from autosplit.probe.find_ceiling import find_ceiling
from autosplit.tuning.tune import tune
from autosplit.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("without_workspaces")  # devices of a few KiB

WIDTH = 96
MIB = 2**20
COPIES = {"resume": 1, "save": 3}
"""Copies of the parameters in addition to a step. AdamW's state is two more."""


class Net(nn.Module):
    """A model that can keep a number of copies of its parameters as buffers."""

    def __init__(self, copies: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for number in range(copies):
            for place, parameter in enumerate(self.body.parameters()):
                self.register_buffer(f"copy_{number}_{place}", parameter.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        return outputs

    def doubled(self, inputs: Tensor) -> Tensor:
        """Generate until the values stop it, as `generate` does, and keep every step."""
        kept = [inputs]
        while len(kept) < 8 and torch.isfinite(kept[-1]).all():
            kept.append(self(kept[-1]))
        return torch.cat(kept)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).pow(2).mean()


def workload(copies: int = 0, width: int = WIDTH, **options: Any) -> Workload:
    batch = torch.randn(4, width), torch.randn(4, width)
    return Workload(Net(copies, width), batch, loss_fn=squared, optimizer=torch.optim.AdamW, **options)


def tuned(given: Workload | None = None, devices: str = "sim:RTX3090@4MiB", **options: Any) -> Plan:
    return tune(given or workload(), devices=devices, **{"n_trials": 2, "profile": "off", **options})


@pytest.mark.parametrize("device", ["sim:RTX3090@4MiB", "cpu:4MiB"])
@pytest.mark.parametrize("role", COPIES)
def test_ceilings_are_those_of_a_model_that_holds_the_copies_itself(device, role):
    found = find_ceiling(workload(), device, role=role)
    by_hand = find_ceiling(workload(COPIES[role]), device, role="rank")
    assert (found.batch_size, found.peak_bytes) == (by_hand.batch_size, by_hand.peak_bytes)
    assert (found.role, found.confirmed) == (role, device.startswith("cpu"))
    assert 0 < found.batch_size < find_ceiling(workload(), device).batch_size


def test_a_plan_leaves_room_for_what_it_is_asked_to():
    devices = "sim:2xRTX3090@4MiB"
    plain, plan, by_hand = (
        tuned(devices=devices),
        tuned(devices=devices, fits="save,resume"),
        tuned(workload(3), devices),
    )
    assert plain.fits is None
    assert plan.fits is not None
    assert plan.fits.roles == ("resume", "save")
    assert plan.fits.copies_bytes == 3 * sum(-(-p.nbytes // 512) * 512 for p in Net().parameters())
    assert plan.batch_size == by_hand.batch_size
    # The handwritten model keeps buffers, which are sent. One sample more or less on device 0 may be faster.
    assert max(abs(ours - theirs) for ours, theirs in zip(plan.split, by_hand.split, strict=True)) <= 1
    assert plan.ceilings[1] == by_hand.ceilings[1]
    assert [rank.ceiling.batch_size for rank in plan.ddp.ranks] == [
        rank.ceiling.batch_size for rank in by_hand.ddp.ranks
    ]
    assert plan.ceilings[0] < plain.ceilings[0]
    assert plan.explain().sentences()["fits"] == (
        "Each step leaves 870 KiB free for loading a checkpoint and for a copy of model and optimizer that is "
        "being saved."
    )
    assert Plan.from_json(plan.to_json(), source="a test") == plan


@pytest.mark.parametrize("devices", ["sim:RTX3090@4MiB+RTX3090@3MiB", "sim:RTX3090@4MiB", "cpu:4MiB,cpu:3MiB"])
def test_evaluation_fits_beside_what_training_keeps(devices):
    plan = tuned(devices=devices, effective_batch_size=8, fits=("eval",))
    assert plan.fits is not None
    copies = 3 if len(plan.devices) > 1 else 2  # AdamW's state, and DDP's gradient buckets
    by_hand = [find_ceiling(workload(copies), spec, role="eval") for spec in _each(devices)]
    found = [ceiling.batch_size for ceiling in plan.fits.evaluation]
    assert found == [ceiling.batch_size for ceiling in by_hand]
    assert plan.fits.eval_batch_size == min(found) > 8
    assert f"up to {found[0]:,} on {plan.devices[0].label}" in str(plan.explain())


def _each(devices: str) -> Iterator[str]:
    kind = devices.partition(":")[0]
    for one in devices.replace("+", ",").split(","):
        yield one if one.startswith(kind) else f"{kind}:{one}"


def test_what_evaluation_runs_may_look_at_numbers():
    given = workload(evaluate=lambda model, batch: model.doubled(batch[0]))
    plan = tuned(given, "cpu:4MiB", effective_batch_size=8, max_batch_size=512, fits="eval")
    assert plan.fits is not None
    assert plan.fits.eval_batch_size is not None
    forward = tuned(devices="cpu:4MiB", effective_batch_size=8, max_batch_size=512, fits="eval").fits
    assert forward is not None
    assert 8 <= plan.fits.eval_batch_size < (forward.eval_batch_size or 0)
    assert "real-tensors" in kinds(plan.notes)


def test_it_is_remembered_by_what_has_to_fit(caplog):
    first = tuned(profile="auto")
    with caplog.at_level(logging.INFO, logger="autosplit"):
        second = tuned(profile="auto", fits="resume")
    assert first.path != second.path
    assert "fits was none, now resume" in caplog.text
    assert tuned(profile="auto", fits=["resume"]).path == second.path


@pytest.mark.parametrize("fits", ["resum", "eval,save,", ("eval", 3), 5])
def test_what_it_does_not_know_is_refused(fits):
    with raises(WorkloadError, "fits-value", "resume, save, eval"):
        tuned(fits=fits)
    with raises(WorkloadError, "fits-value"):
        workload(fits=fits)


def test_evaluation_of_a_custom_step_is_refused():
    for asked in ({"evaluate": lambda *_: None}, {"fits": "eval"}):
        with raises(WorkloadError, "evaluation-with-step"):
            Workload(Net(), torch.randn(4, WIDTH), step=lambda *_: None, **asked)


WIDE = 512
"""A wide model: a copy of its parameters, 8 MiB, is a large part of the GPU's memory."""


def resumed(samples: int, limit_bytes: int) -> bool:
    """Continue training with the checkpoint still on the device. Return whether it fits."""
    device, module, saved = torch.device(KIND, 0), backend(KIND), io.BytesIO()
    trained = Net(width=WIDE)
    optimizer = torch.optim.AdamW(trained.parameters())
    squared(trained(torch.randn(4, WIDE)), torch.zeros(4, WIDE)).backward()
    optimizer.step()
    torch.save({"model": trained.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    saved.seek(0)
    gc.collect()
    module.empty_cache()
    with bounded(module, device, limit_bytes):
        model = Net(width=WIDE).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoint = torch.load(saved, map_location=device)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        try:
            for _ in range(3):
                inputs, targets = torch.randn(samples, WIDE).to(device), torch.zeros(samples, WIDE).to(device)
                squared(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                del inputs, targets
            module.synchronize(device)
        except Exception as error:
            if not is_oom(error):
                raise
            return False
        return True


@pytest.mark.gpu
def test_a_run_that_keeps_its_checkpoint_on_the_card_fits():
    device, limit_bytes = f"{KIND}:0", 96 * MIB + WORKSPACE_BYTES
    reserve = parse_devices(device)[0].capacity_bytes - limit_bytes
    plan = tuned(workload(width=WIDE), device, reserve=reserve, fits="resume")
    assert resumed(plan.ceilings[0], limit_bytes)
    assert not resumed(int(1.2 * plan.ceilings[0]), limit_bytes)


def test_the_batch_that_evaluates_is_exported():
    plan = tuned(effective_batch_size=64, fits="eval")
    assert plan.fits is not None
    arguments = plan.export("transformers").settings["TrainingArguments"]
    assert arguments["per_device_eval_batch_size"] == plan.fits.eval_batch_size
    assert "per_device_eval_batch_size" not in tuned().export("transformers").settings["TrainingArguments"]


@pytest.mark.slow
def test_a_transformer_that_generates():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    ids = torch.randint(1, 64, (4, 8))
    given = Workload(
        transformers.GPT2LMHeadModel(config),
        {"input_ids": ids, "labels": ids},
        optimizer=torch.optim.AdamW,
        evaluate=lambda model, batch: model.generate(batch["input_ids"], max_new_tokens=24, do_sample=False),
    )
    found = [tuned(given, devices, max_batch_size=256, fits="eval").fits for devices in ("cpu:3MiB", "sim:T4@3MiB")]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].evaluation[0].confirmed
    assert found[0].eval_batch_size == found[1].eval_batch_size
    assert 1 < (found[0].eval_batch_size or 0) < 256


def test_evaluation_beside_sparse_state():
    """SparseAdam got dense zero gradients, which it rejects."""
    given = Workload(
        nn.EmbeddingBag(512, 8, sparse=True),
        torch.randint(512, (4, 16)),
        compute_loss=lambda model, ids: model(ids).pow(2).mean(),
        optimizer=torch.optim.SparseAdam,
    )
    alone = find_ceiling(given, "cpu:1MiB", role="eval")
    beside = find_ceiling(replace(given, fits="eval"), "cpu:1MiB", role="eval")
    assert beside.confirmed
    assert beside.fixed_bytes - alone.fixed_bytes == pytest.approx(2 * 512 * 8 * 4, abs=1024)
