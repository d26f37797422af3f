"""The collective back end of the emulated devices: torch's gloo on their memory."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed as dist

from . import KIND

NAME = {"emu": "eccl", "npu": "hccl"}[KIND]


def register() -> None:
    """Register it as the back end of their device kind."""
    if dist.is_available():
        dist.Backend.register_backend(NAME, _made, devices=[KIND])


def _made(store: dist.Store, rank: int, size: int, timeout: timedelta):
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    host = dist.ProcessGroup(store, rank, size)
    host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return dist.ProcessGroup.unbox(torch.ops.emu.group(host.boxed()))._get_backend(torch.device(KIND))
