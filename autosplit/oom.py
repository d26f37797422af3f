"""Detect out-of-memory errors: autosplit's own class, and a predicate for errors of other libraries.

A separate predicate detects kernels that can't process such a large tensor even with free memory.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from autosplit.accelerators import accelerator_in_use
from autosplit.errors import AutosplitError, causes_of
from autosplit.text import size_text


class OutOfMemoryError(AutosplitError, torch.OutOfMemoryError):
    """A device ran out of memory. `except torch.OutOfMemoryError` catches this error, too.

    Attributes:
        device: The device, as in a device spec (``"cpu:1"``, ``"cuda:0"``), or None if unknown.
        device_index: Position of the device in the step, or None if unknown.
        requested_bytes: Size of the failed request, or 0 if unknown.
        live_bytes: Bytes in use before the request, or 0 if unknown.
        capacity_bytes: Memory limit of the device, or 0 if unknown.
    """

    code = "out-of-memory"
    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        device: str | None = None,
        device_index: int | None = None,
        requested_bytes: int = 0,
        live_bytes: int = 0,
        capacity_bytes: int = 0,
    ) -> None:
        super().__init__(message, code=code)
        self.device = device
        self.device_index = device_index
        self.requested_bytes = requested_bytes
        self.live_bytes = live_bytes
        self.capacity_bytes = capacity_bytes


class StepLostError(OutOfMemoryError):
    """The isolated process that ran a step died. The error counts as out of memory, which is the usual cause."""

    code = "step-lost"


class DoesNotFitError(OutOfMemoryError):
    """The workload does not fit at its smallest possible batch size. The message contains the bytes."""

    code = "does-not-fit"


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


# Complete messages and their sources are in tests/test_oom.py. Paths are torch's unless noted otherwise.
_OOM = _any_of(
    # The caching allocators of CUDA, HIP, XPU and similar back ends (c10/cuda/CUDACachingAllocator.cpp). Usually their
    # exception class is enough. The text is needed if another exception repeats it: from a compiled graph, or a
    # worker's traceback.
    r"out of memory\. Tried to allocate",
    r"out of memory\. Allocation was preemptively rejected",
    r"would exceed allowed memory\. \(out of memory\)",  # c10/cuda/CUDAMallocAsyncAllocator.cpp
    # For its message, CUDA's allocator asks NVML which processes use memory. If NVML fails, this is the message.
    r"NVML_SUCCESS == .* INTERNAL ASSERT FAILED at .*CUDACachingAllocator\.cpp",
    # The CUDA runtime and driver: torch, Triton and NCCL also allocate without the allocator, for example pinned
    # memory.
    r"(?:CUDA|HIP)(?: driver)? error: out of memory",
    r"cuda runtime error \(2\) ?: out of memory",
    r"Triton Error \[(?:CUDA|HIP)\]: .*out of memory",
    r"Cuda failure (?:2 )?'out of memory'",  # NCCL src/include/checks.h, behind torch's "Last error:"
    r"Failed to CUDA (?:c|m)alloc",  # NCCL src/include/alloc.h
    r"MPS backend out of memory",  # aten/src/ATen/mps/MPSAllocator.mm
    r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY",  # Level Zero, below XPU
    # c10/core/impl/alloc_cpu.cpp: Linux, then Windows and Android. "alloc_cpu() seems to have been called with
    # negative number" reports an overflow, so it is not listed here.
    r"DefaultCPUAllocator: can't allocate memory",
    r"DefaultCPUAllocator: not enough memory",
    r"std::bad_alloc",  # any C++ code
    # NVIDIA's and AMD's libraries if they cannot allocate a handle or a workspace.
    r"(?:CUBLAS|HIPBLAS|CUDNN|CUSOLVER)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED",
    r"CUDNN_STATUS_INTERNAL_ERROR_(?:HOST|DEVICE)_ALLOCATION_FAILED",
    r"OOM trying to allocate workspace for cublaslt",  # aten/src/ATen/cuda/CUDABlas.cpp
    r"Not enough memory for workspace!",  # aten/src/ATen/native/cudnn/Conv_v7.cpp
    r"MAGMA error: cannot allocate memory on (?:CPU host|GPU device)",  # aten/src/ATen/native/cuda/linalg
)

# Messages with several possible causes: too little memory, a GPU without a kernel, a broken driver. The other causes
# also stop the smallest step. So after a smaller step has run, these messages mean too little memory.
_PERHAPS_OOM = _any_of(
    # torch tries cuDNN's engines in turn and drops their errors, including OutOfMemoryError
    # (aten/src/ATen/native/cudnn/Conv_v8.cpp, Conv_v7.cpp).
    r"[Uu]nable to find an engine to execute this computation",
    r"Unable to find a valid cuDNN algorithm",
    # Creating a handle needs memory, which the caching allocator may have reserved. An index out of bounds causes the
    # same message, even after the caches are emptied.
    r"(?:CUBLAS|HIPBLAS)_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR) when calling `(?:cublas|hipblas)(?:Lt)?Create\(",
    r"CUSOLVER_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR), when calling `cusolver\w*Create\(",
    r"CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)\b",
    r"CUFFT_INTERNAL_ERROR",
    r"UR_RESULT_ERROR_OUT_OF_RESOURCES|PI_ERROR_OUT_OF_RESOURCES",
    # torch/csrc/cuda/nccl.cpp: communicators of one process's GPUs allocate memory outside the allocator.
    r"NCCL Error 1: unhandled cuda error",
)

_KERNEL_LIMIT = _any_of(
    # 2^31 elements, in the messages of kernels that count them with 32 bits.
    r"must fit into 32-bit index math",
    r"Expected canUse32BitIndexMath\(",
    r"(?:more|less|larger) than INT_MAX",
    r"<= std::numeric_limits<int(?:32_t|eger_t)?>::max\(\) to be true",
    r"(?:^|RuntimeError: )integer out of range",  # safe_downcast in aten/src/ATen/native/Pool.h
    r"cuda_int_cast: The value of .* is too large to fit into a int",
    r"at::cuda::blas::\S+ argument \w+ must be .* and less than",
    r"(?:Input|Output|Padded input) tensor is too large\.",
    r"\.stride\(\d+\) overflows",  # the memory-efficient attention
    # The grid of a launch has at most 65,535 blocks in two of its dimensions.
    r"(?:CUDA|HIP|cuda runtime) error(?: \(9\))? ?: invalid configuration argument",
    r"Can't schedule too many blocks on CUDA device",
    # Metal limits the size of one buffer, even if more memory is free.
    r"(?:^|RuntimeError: )Invalid buffer size: ",
)


def is_oom(error: BaseException, *, smaller_ran: bool = True) -> bool:
    """Return whether an exception means that a device ran out of memory.

    Explicit causes count too, so a `UserCodeError` around an out-of-memory error matches. An exception matches if it is
    torch's class, a MemoryError, or a RuntimeError with a message of the tables above. After a kernel failure that left
    a device unusable, no exception matches.

    Args:
        smaller_ran: Whether a smaller step of the same model ran on the device. Some messages mean either too little
            memory or that the model can't run there at all. If a smaller step ran (the default), they mean too little
            memory.
    """
    return any(_is_oom_link(link, smaller_ran=smaller_ran) for link in causes_of(error))


def is_kernel_limit(error: BaseException) -> bool:
    """Return whether an exception means that a kernel can't process such a large tensor, even with free memory.

    The exception or an explicit cause is a RuntimeError about 2^31 elements, 32-bit indices, a launch's grid, or the
    size of one buffer.
    """
    return any(isinstance(link, RuntimeError) and _KERNEL_LIMIT.search(str(link)) for link in causes_of(error))


def scarcity() -> str:
    """Explain why accelerator memory is unavailable to this process: fragmentation, or other processes.

    Call this while an out-of-memory error is handled. By then the allocator has released all blocks that were free.

    Returns:
        The facts and advice for the first affected device, or an empty string if there is none.
    """
    accelerator = accelerator_in_use()
    for index in range(0 if accelerator is None else accelerator.device_count()):
        reserved = accelerator.memory_reserved(index)
        if not reserved:
            continue
        free, total = accelerator.mem_get_info(index)
        least = max(total // 10, 2**30)
        unused, others = reserved - accelerator.memory_allocated(index), total - free - reserved
        if others >= least:
            return f"Other processes use {size_text(others)} of device {index}. End them, or tune again while they run"
        if unused >= least:
            return (
                f"Device {index} has {size_text(unused)} of reserved memory in fragments that are too small. Set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )
    return ""


def _is_oom_link(error: BaseException, *, smaller_ran: bool) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    found = _OOM.search(text) or (smaller_ran and _PERHAPS_OOM.search(text))
    return bool(found) and not _is_broken(accelerator_in_use())


def _is_broken(accelerator: Any) -> bool:
    """Return whether a device fails at every call after a kernel failed (label out of range, illegal access).

    A library that can't make its handle then reports too little memory. Only devices with allocated memory are checked,
    because the check would create a context on the others.
    """
    if accelerator is None:
        return False
    try:
        for index in range(accelerator.device_count()):
            if accelerator.memory_reserved(index):
                accelerator.synchronize(index)
    except RuntimeError:
        return True
    return False
