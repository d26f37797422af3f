"""A small DDP job on the first two GPUs: its plan, model and samples."""

from __future__ import annotations

import os
from dataclasses import replace

import emulated
import torch
from ddp_jobs import make_plan
from gpus import KIND
from handmade import on_devices
from torch import nn

from autosplit.devices.accelerator import visible_devices
from autosplit.plan.plan import Plan

NUM_SAMPLES = 20
SHARES = (2, 6)


def plan_of_cards() -> Plan:
    """Return a plan with unequal splits for the first two GPUs that all processes together see."""
    plan = make_plan(SHARES, NUM_SAMPLES, device=f"{KIND}:{{}}")
    known = [
        replace(device, name=card.name, uuid=card.uuid)
        for device, card in zip(plan.devices, visible_devices(KIND), strict=False)
    ]
    return on_devices(plan, *known)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(NUM_SAMPLES, size, dtype=torch.float64, generator=generator) for size in (5, 1))


def contexts_here() -> list[int] | None:
    """Return the GPUs on which this process has a context, as global numbers. A real driver does not report them."""
    return list(emulated.contexts().get(os.getpid(), ())) if KIND == "emu" else None
