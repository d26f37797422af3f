"""Define the settings of a DataLoader that a plan stores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LoaderSettings:
    """The settings of a DataLoader that affect its speed, but not its batches.

    Attributes:
        num_workers: Number of worker processes. With 0, the training process loads the batches, and its steps wait for
            them.
        prefetch_factor: Batches that each worker loads ahead. None without workers.
        pin_memory: Whether batches are put into pinned memory, which allows asynchronous copies to a GPU.
        persistent_workers: Whether workers stay after an epoch, so that only the first epoch waits for their start.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as keyword arguments of ``torch.utils.data.DataLoader``."""
        return asdict(self)
