"""The types of the public names for a user's type checker. `mypy` reads this file. It is never run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import autosplit
from autosplit.devices.device import Device
from autosplit.integrations.exported import Export
from autosplit.parallel.batch_sampler import ScheduledBatchSampler
from autosplit.parallel.epoch_steps import Steps
from autosplit.plan.measured_step import MeasuredStep
from autosplit.plan.split_comparison import SplitComparison
from autosplit.probe.check_result import Check
from autosplit.runtime.memory_tracker import Tracker
from autosplit.sim.compare import Comparison
from autosplit.solve.memory import Ceiling
from autosplit.tools.goodput import Goodput


def names() -> None:
    assert_type(autosplit.__version__, str)
    autosplit.tunes  # type: ignore[attr-defined]  # noqa: B018 - a misspelt name is an error


def tuning(model: nn.Module, batch: Tensor) -> None:
    workload = autosplit.Workload(model, batch)
    assert_type(workload, autosplit.Workload)
    assert_type(autosplit.workload_from_name("timm:resnet18"), autosplit.Workload)
    assert_type(autosplit.tune(model, batch, effective_batch_size=512), autosplit.Plan)
    autosplit.tune(model, batch, gpus=2)  # type: ignore[call-arg]  # an unknown keyword is an error
    assert_type(autosplit.tune(lambda: workload, devices="sim:2xL4", precision="bf16"), autosplit.Plan)
    assert_type(autosplit.tune_best(lambda: workload, precision=("none", "bf16")).plan, autosplit.Plan)
    assert_type(autosplit.tune_lengths(workload, lengths=[3, 5]), autosplit.Plan)
    assert_type(autosplit.measure(workload, devices="sim:2xL4", split=(8, 4)), MeasuredStep)
    assert_type(autosplit.compare(workload, devices=["sim:2xL4"], prices={"2xL4": 1.2}), Comparison)
    assert_type(autosplit.find_ceiling(workload, "cpu:2GiB", role="primary"), Ceiling)
    assert_type(autosplit.check(workload), tuple[Check, ...])
    assert_type(autosplit.list_devices(), tuple[Device, ...])
    assert_type(autosplit.parse_devices("cuda:0,2"), tuple[Device, ...])


def plan(model: nn.Module, loader: DataLoader[Any]) -> None:
    plan = autosplit.Plan.load("plan.json")
    assert_type(plan, autosplit.Plan)
    assert_type(plan.split, tuple[int, ...])
    assert_type(plan.gpu0_bsz, int)
    assert_type(plan.samples_per_s, float)
    assert_type(plan.wrap(model), autosplit.BalancedDataParallel)
    assert_type(plan.batch_sampler(1000, shuffle=True, seed=0), ScheduledBatchSampler)
    assert_type(plan.steps(loader), Steps)
    assert_type(plan.compare_with((8, 4)), SplitComparison)
    assert_type(plan.goodput(400), Goodput)
    assert_type(plan.export("accelerate"), Export)
    assert_type(plan.to_dict(), dict[str, Any])
    assert_type(plan.ddp.split[0] if plan.ddp else None, int | None)
    with plan.budgets() as tracker:
        assert_type(tracker, Tracker)
    for step in plan.steps(loader):
        step.backward(torch.zeros(()))


def ranks(model: nn.Module, loader: DataLoader[Any]) -> None:
    with autosplit.ddp.setup("plan.json") as context:
        assert_type(context, autosplit.ddp.Context)
        assert_type(context.device, torch.device)
        assert_type(context.wrap(model, sync_batchnorm=True), DistributedDataParallel)
        assert_type(context.steps(loader), Steps)
        assert_type(context.load_checkpoint("checkpoint.pt"), dict[str, Any])


def wrapping(model: nn.Module, batch: Tensor) -> None:
    assert_type(autosplit.BalancedDataParallel(2, model, [0, 1], split=[2, 4]), autosplit.BalancedDataParallel)
    assert_type(autosplit.matching_state_dict(model, model.state_dict()), dict[str, Any])
    autosplit.data_parallel(model, batch, split=(2, 4), reduce="sum")
    raise autosplit.OutOfMemoryError("full") from autosplit.AutosplitError("too large")
