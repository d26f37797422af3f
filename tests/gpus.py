"""The accelerators that tests marked `gpu` run on: real ones, or emulated (tests/emulated)."""

from __future__ import annotations

import torch

from autosplit.accelerators import accelerator_kind, backend

KIND = accelerator_kind() or "cuda"
COUNT = backend(KIND).device_count() if accelerator_kind() else 0
CARDS = (0, 1) if COUNT > 1 else (0, 0)
"""Two GPUs, or one GPU that is named twice."""

WORKSPACE_BYTES = 0 if KIND == "emu" else 256 * 2**20
"""Room for the workspaces of cuBLAS, which stay allocated: 131 MiB on an H100 with torch 2.11, 0 when emulated."""


def card(index: int) -> torch.device:
    return torch.device(KIND, index)
