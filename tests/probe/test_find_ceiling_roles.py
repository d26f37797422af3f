"""find_ceiling(role=...): a checkpoint on the device, a copy being saved, and evaluation."""

from __future__ import annotations

import gc
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpus import KIND, WORKSPACE_BYTES
from marks import whole
from raised import raises
from torch import Tensor, nn

from autosplit.accelerators import backend, bounded
from autosplit.devices.spec import parse_devices
from autosplit.errors import InputError, WorkloadError
from autosplit.oom import is_oom
from autosplit.probe.find_ceiling import find_ceiling
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


@pytest.mark.parametrize("device", [whole("sim:RTX3090@4MiB"), "cpu:4MiB"])
@pytest.mark.parametrize("role", COPIES)
def test_ceilings_are_those_of_a_model_that_holds_the_copies_itself(device, role):
    found = find_ceiling(workload(), device, role=role)
    by_hand = find_ceiling(workload(COPIES[role]), device, role="rank")
    assert (found.batch_size, found.peak_bytes) == (by_hand.batch_size, by_hand.peak_bytes)
    assert (found.role, found.confirmed) == (role, device.startswith("cpu"))
    assert 0 < found.batch_size < find_ceiling(workload(), device).batch_size


def test_what_evaluation_runs_may_look_at_numbers():
    given = workload(evaluate=lambda model, batch: model.doubled(batch[0]))
    found = find_ceiling(given, "cpu:2MiB", role="eval")
    forward = find_ceiling(workload(), "cpu:2MiB", role="eval")
    assert 8 <= found.batch_size < forward.batch_size


def test_evaluation_of_a_custom_step_is_refused():
    with raises(WorkloadError):
        Workload(Net(), torch.randn(4, WIDTH), step=lambda *_: None, evaluate=lambda *_: None)


def test_the_removed_argument_names_what_replaces_it():
    with pytest.raises(InputError, match="find_ceiling"):
        workload(fits="resume")


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
    given = replace(workload(width=WIDE), held=("resume",))
    found = find_ceiling(given, device, role="primary", reserve=reserve)  # one process: no buckets of DDP
    assert resumed(found.batch_size, limit_bytes)
    assert not resumed(int(1.2 * found.batch_size), limit_bytes)


def test_evaluation_beside_sparse_state():
    """SparseAdam got dense zero gradients, which it rejects."""
    given = Workload(
        nn.EmbeddingBag(512, 8, sparse=True),
        torch.randint(512, (4, 16)),
        compute_loss=lambda model, ids: model(ids).pow(2).mean(),
        optimizer=torch.optim.SparseAdam,
    )
    alone = find_ceiling(given, "cpu:1MiB", role="eval")
    beside = find_ceiling(replace(given, held=("eval",)), "cpu:1MiB", role="eval")
    assert beside.confirmed
    assert beside.fixed_bytes - alone.fixed_bytes == pytest.approx(2 * 512 * 8 * 4, abs=1024)
