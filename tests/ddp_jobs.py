"""Plans, data and a model for tests of DDP, small enough for one device to tell what is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from autosplit import ddp
from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpPlan, PlanDevice, RankSettings
from autosplit.solve.memory import Ceiling
from autosplit.solve.split import accumulation_steps

NUM_SAMPLES = 45
INPUTS = torch.randn(NUM_SAMPLES, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(NUM_SAMPLES, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def make_plan(
    batch_sizes: tuple[int, ...],
    effective_batch_size: int | None = None,
    *,
    forwards: int | None = None,
    device: str = "cpu:{}",
    **changes: Any,
) -> Plan:
    """A plan whose split and whose ranks have these sizes, for that effective batch."""
    total = sum(batch_sizes)
    effective = total if effective_batch_size is None else effective_batch_size
    forwards = accumulation_steps(effective, total) if forwards is None else forwards
    labels = [device.format(rank) for rank in range(len(batch_sizes))]
    ceilings = [Ceiling(label, "rank", 64, "memory", 1000, 10, 1640, 2000) for label in labels]
    kind: Any = labels[0].partition(":")[0]
    plan = Plan(
        split=batch_sizes,
        gpu0_bsz=batch_sizes[0],
        batch_size=total,
        accumulation_steps=accumulation_steps(effective, total),
        effective_batch_size=effective,
        samples_per_s=10.0,
        even_samples_per_s=None,
        ceilings=(64,) * len(labels),
        devices=tuple(
            PlanDevice(label, kind, rank, f"a {kind}", 2000, 2000, True, batch_sizes[rank], 1640, 0.1, ceilings[rank])
            for rank, label in enumerate(labels)
        ),
        trials=(),
        ddp=DdpPlan(
            tuple(
                RankSettings(rank, label, batch_sizes[rank], forwards, ceilings[rank], 1640)
                for rank, label in enumerate(labels)
            ),
            10.0,
        ),
        precision="none",
        simulated=kind == "sim",
    )
    return replace(plan, **changes)


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


def kept_labels(indices: Any) -> int:
    """Labels that count, for a loss that leaves every third sample out."""
    return int(sum(int(index) % 3 > 0 for index in indices))


def kept_loss(model: torch.nn.Module, indices: Any) -> torch.Tensor:
    kept = [int(index) for index in indices if int(index) % 3]
    return mean_loss(model, kept) if kept else model(INPUTS[:1]).sum() * 0
