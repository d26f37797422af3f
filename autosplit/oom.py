"""What "out of memory" is: one error class, and one predicate for everybody else's.

Stands above the wrapper and the runtimes, because both raise it and the prober catches it.
"""

from __future__ import annotations

import torch

from autosplit.errors import AutosplitError

__all__ = ["DoesNotFitError", "OutOfMemoryError", "is_oom"]


class OutOfMemoryError(AutosplitError, torch.OutOfMemoryError):
    """A device ran out of memory; `except torch.OutOfMemoryError` catches it, as it catches CUDA's.

    Attributes:
        device: Which device, in the words of the device spec (``"cpu:1"``, ``"cuda:0"``), or None where unknown.
        device_index: Its position among the devices of the step, or None where unknown.
        requested_bytes: What was asked for when it failed; 0 where unknown.
        live_bytes: What was held just before; 0 where unknown.
        capacity_bytes: What the device may hold; 0 where unknown.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        device: str | None = None,
        device_index: int | None = None,
        requested_bytes: int = 0,
        live_bytes: int = 0,
        capacity_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.device = device
        self.device_index = device_index
        self.requested_bytes = requested_bytes
        self.live_bytes = live_bytes
        self.capacity_bytes = capacity_bytes


class DoesNotFitError(OutOfMemoryError):
    """The workload does not fit at the smallest batch that it can run; the message has the bytes."""


# Each text with where it comes from. A message is an out-of-memory message if it holds one of them.
_OOM_TEXTS = (
    # torch c10/cuda/CUDACachingAllocator.cpp: "CUDA out of memory. Tried to allocate ..."; HIP and XPU say their name.
    "out of memory. Tried to allocate",
    # The driver's own text, torch c10/cuda/CUDAException.cpp (Lightning#6819): cudaErrorMemoryAllocation.
    "CUDA error: out of memory",
    "HIP error: out of memory",
    # torch c10/core/impl/alloc_cpu.cpp: "DefaultCPUAllocator: can't allocate memory: you tried to allocate ...".
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    # aten/src/ATen/mps: "MPS backend out of memory (MPS allocated: ...)".
    "MPS backend out of memory",
    # torch aten/src/ATen/cuda/CUDABlas.cpp, when the handle's workspace can't be had (deepmd-kit#5443).
    "CUBLAS_STATUS_ALLOC_FAILED",
    # cudnnStatus_t, cuDNN's workspace (Lightning#5897 was one).
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_oom(error: BaseException) -> bool:
    """Tell whether an exception means that a device ran out of memory.

    Args:
        error: What was raised.

    Returns:
        True for torch's own class, and for a RuntimeError with a text from the table above.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OOM_TEXTS)
