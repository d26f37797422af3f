"""Plans, data and a model for tests of training, small enough to compute the expected result on one device.

Plans are made from JSON, which is the public way to write a plan.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from autosplit import Plan, ddp

NUM_SAMPLES = 45
INPUTS = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(NUM_SAMPLES, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def _ceiling(label: str, capacity_bytes: int) -> dict[str, Any]:
    return {
        "device": label,
        "role": "rank",
        "batch_size": 64,
        "limited_by": "memory",
        "fixed_bytes": 1000,
        "bytes_per_sample": 10,
        "peak_bytes": 1640,
        "capacity_bytes": capacity_bytes,
    }


def _seat(label: str, rank: int, batch_size: int, capacity_bytes: int) -> dict[str, Any]:
    kind = label.partition(":")[0]
    device = {
        "label": label,
        "kind": kind,
        "index": rank,
        "name": f"a {kind}",
        "memory_bytes": capacity_bytes,
        "capacity_bytes": capacity_bytes,
        "budgeted": True,
    }
    ceiling = _ceiling(label, capacity_bytes)
    return {"device": device, "samples": batch_size, "peak_bytes": 1640, "busy_s": 0.1, "ceiling": ceiling}


def make_plan(
    batch_sizes: tuple[int, ...],
    effective_batch_size: int | None = None,
    *,
    device: str = "cpu:{}",
    capacity_bytes: int = 2000,
    **changes: Any,
) -> Plan:
    """Return a plan for DDP only, with these ranks and this effective batch.

    `changes` replaces fields of the plan or of its layout.
    """
    total = sum(batch_sizes)
    effective = total if effective_batch_size is None else effective_batch_size
    layout = {
        "strategy": "ddp",
        "seats": [_seat(device.format(rank), rank, size, capacity_bytes) for rank, size in enumerate(batch_sizes)],
        "accumulation_steps": -(-effective // total),
        "effective_batch_size": effective,
        "samples_per_s": 10.0,
        "measured": False,
    }
    plain = {"schema_version": 3, "layouts": [layout], "precision": "none"}
    return changed_plan(Plan.from_json(json.dumps(plain)), **changes)


def changed_plan(plan: Plan, **changes: Any) -> Plan:
    """Return the plan with other fields, of the plan or of its main layout."""
    of_plan = {one.name for one in fields(Plan)}
    of_layout = {name: value for name, value in changes.items() if name not in of_plan}
    layouts = tuple(replace(one, **of_layout) if one is plan.main else one for one in plan.layouts)
    return replace(plan, **{"layouts": layouts, **{name: changes[name] for name in of_plan & {*changes}}})


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def mean_loss(model: torch.nn.Module, indices: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(INPUTS[indices]), TARGETS[indices])


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def loader_of(ctx: ddp.Context, **options: Any) -> DataLoader:
    return DataLoader(range(NUM_SAMPLES), batch_sampler=ctx.batch_sampler(NUM_SAMPLES, **options))
