"""Move a batch to the device of a training loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autosplit.workload.tree import map_leaves


def to_device(batch: Any, device: torch.device | str | int) -> Any:
    """Return a batch with its tensors on a device.

    Args:
        batch: Tensors in nested containers. Other objects with a `to` method, such as PyG's batches, are moved by it.
            Other values are unchanged.
        device: The device. Copies from pinned memory to CUDA devices run asynchronously.
    """
    target = torch.device(device)
    is_cuda = target.type == "cuda"

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(target, non_blocking=is_cuda)
        to = getattr(leaf, "to", None)
        return to(target) if callable(to) and not isinstance(leaf, type) else leaf

    return map_leaves(moved, batch)
