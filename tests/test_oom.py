"""Classify messages: too little memory, a kernel's own limit, or neither.

Every message is real. "torch X" is a source file, "torch 2.13" a text in that release's libraries, and owner/name#1 an
issue that quotes it.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper

from autosplit import oom
from autosplit.errors import UserCodeError, WorkloadError, from_user_code
from autosplit.oom import DoesNotFitError, OutOfMemoryError, is_kernel_limit, is_oom

CUDA_HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)

OOM = [
    # The caching allocators.
    (
        (
            "CUDA out of memory. Tried to allocate 546.00 MiB. GPU 0 has a total capacity of 15.77 GiB of which 514.19 "
            "MiB is free."
        ),
        "torch c10/cuda/CUDACachingAllocator.cpp; kaito-project/kaito#976",
    ),
    (
        (
            "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
            "per_process_memory_fraction limit. Requested size: 2.00 GiB."
        ),
        "torch 2.13 libc10_cuda",
    ),
    (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 9.58 GiB",
        "torch c10/cuda/CUDAMallocAsyncAllocator.cpp",
    ),
    (
        (
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please report a '
            "bug to PyTorch. "
        ),
        "pytorch/pytorch#112377, #185240",
    ),
    (
        (
            "MPS backend out of memory (MPS allocated: 20.48 GiB, other allocations: 146.27 GiB, max allowed: 163.20 "
            "GiB). Tried to allocate 256.00 MiB on private pool."
        ),
        "torch aten/src/ATen/mps/MPSAllocator.mm",
    ),
    # Other allocators: the runtime, the driver, pinned host memory, Triton, Level Zero.
    ("CUDA error: out of memory" + CUDA_HINTS, "torch c10/cuda/CUDAException.cpp; Lightning-AI/lightning#6819"),
    ("cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCGeneral.cpp:50", "torch 1.x THCGeneral.cpp"),
    (
        "CUDA driver error: out of memory",
        "torch c10/cuda/driver_api.h, with expandable_segments; unslothai/unsloth#2401",
    ),
    ("Triton Error [CUDA]: out of memory", "triton third_party/nvidia/backend/driver.c"),
    (
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        "open-edge-platform/physical-ai-studio#440",
    ),
    # The host.
    (
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 140737488355328 bytes. Error code 12 (Cannot allocate memory)"
        ),
        "torch c10/core/impl/alloc_cpu.cpp on Linux",
    ),
    (
        (
            "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
            "6576668672 bytes."
        ),
        "torch c10/core/impl/alloc_cpu.cpp on Windows",
    ),
    ("std::bad_alloc", "ZPdesu/Barbershop#48"),
    # NVIDIA's and AMD's libraries.
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "pytorch/pytorch#128601"),
    ("OOM trying to allocate workspace for cublaslt", "torch aten/src/ATen/cuda/CUDABlas.cpp"),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "amdegroot/ssd.pytorch#33, QwenLM/Qwen3-VL#151"),
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cuDNN 9 cudnn_graph.h, status 4004"),
    ("Not enough memory for workspace!", "torch aten/src/ATen/native/cudnn/Conv_v7.cpp"),
    ("cuFFT error: CUFFT_ALLOC_FAILED", "pytorch/pytorch#6511"),
    (
        "MAGMA error: cannot allocate memory on GPU device, info = -113, when calling magma_sgetrf_gpu",
        "torch checkMagmaInternalError, pytorch/pytorch#56248; MAGMA's magma_strerror",
    ),
    # NCCL's.
    (NCCL + "Cuda failure 2 'out of memory'", "NCCL 2.19 and later, as pytorch/pytorch#170045 has another number"),
    (NCCL + "Failed to CUDA calloc 6291456 bytes", "NCCL src/include/alloc.h"),
]

PERHAPS_OOM = [
    (
        "GET was unable to find an engine to execute this computation",
        "torch Conv_v8.cpp drops OutOfMemoryError; pytorch/pytorch#108645, ultralytics/ultralytics#24569",
    ),
    ("Unable to find an engine to execute this computation", "torch 1.x Conv_v8.cpp"),
    (
        "Unable to find a valid cuDNN algorithm to run convolution",
        "torch Conv_v7.cpp drops OutOfMemoryError; Lightning-AI/lightning#5897",
    ),
    (
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "EleutherAI/lm-evaluation-harness#1689: gone with more memory",
    ),
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "pytorch/pytorch#81620: no memory left to load its kernels"),
    ("cuFFT error: CUFFT_INTERNAL_ERROR", "pytorch/pytorch#119420: on low free memory"),
    (
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
        "JIA-Lab-research/UVTR#13",
    ),
    (
        "NCCL Error 1: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "torch/csrc/cuda/nccl.cpp: nn.DataParallel's own communicators",
    ),
    ("UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)", "intel/torch-xpu-ops#1170, #1324"),
    ("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)", "intel/ipex-llm#9467"),
]

KERNEL_LIMIT = [
    ("input tensor must fit into 32-bit index math", "hustvl/BoxTeacher#11; torch 2.13 libtorch_cuda"),
    (
        (
            "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.  (Could "
            "this error message be improved?  If so, please report an enhancement request to PyTorch.)"
        ),
        "pytorch/pytorch#80020",
    ),
    (
        "nonzero is not supported for tensors with more than INT_MAX elements,   file a support request",
        "pytorch/pytorch#51871",
    ),
    (
        (
            "Expected output.numel() <= std::numeric_limits<int32_t>::max() to be true, but got false.  (Could this "
            "error message be improved?  If so, please report an enhancement request to PyTorch.)"
        ),
        "kreshuklab/panseg#358; torch 2.13 libtorch_cuda",
    ),
    ("integer out of range", "torch aten/src/ATen/native/Pool.h; pytorch/pytorch#167253"),
    (
        "cuda_int_cast: The value of batch_size(4294967296) is too large to fit into a int (4 bytes)",
        "torch aten/src/ATen/native/cuda/MiscUtils.h",
    ),
    (
        "at::cuda::blas::gemm<double> argument lda must be positive and less than 2147483647 but got 4294967296",
        "torch 2.13 libtorch_cuda, aten/src/ATen/cuda/CUDABlas.cpp",
    ),
    ("Input tensor is too large.", "torch aten/src/ATen/native/cuda/DepthwiseConv3d.cu"),
    ("query.stride(0) overflows", "torch 2.13 libtorch_cuda, the memory-efficient attention"),
    (
        "CUDA error: invalid configuration argument" + CUDA_HINTS,
        "pytorch/pytorch#146704, facebookresearch/xformers#845",
    ),
    (
        "cuda runtime error (9) : invalid configuration argument at THCTensorCopy.cu:205",
        "pytorch/pytorch#13276",
    ),
    ("Can't schedule too many blocks on CUDA device", "torch aten/src/ATen/cuda/detail/KernelUtils.h"),
    ("Invalid buffer size: 20.00 GiB", "torch aten/src/ATen/mps/MPSAllocator.mm"),
]

NEITHER = [
    # The device is broken or misused, permanently.
    ("CUDA error: an illegal memory access was encountered" + CUDA_HINTS, "pytorch/pytorch#68418"),
    ("CUDA error: device-side assert triggered" + CUDA_HINTS, "torch c10/cuda/CUDAException.cpp"),
    ("CUDA error: too many resources requested for launch", "CUDA's cudaErrorLaunchOutOfResources"),
    ("CUDA error: peer mapping resources exhausted", "CUDA's cudaErrorTooManyPeers"),
    (
        (
            '!handles_.at(i) INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":487, please report a bug to '
            "PyTorch. "
        ),
        "pytorch/pytorch#188008",
    ),
    (NCCL + "Cuda failure 1 'invalid argument'", "NVIDIA/nccl#1410"),
    ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle)`", "torch CUDABlas.cpp, no handle"),
    # Memory of another kind.
    (
        (
            "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or "
            "`num_stages` may help."
        ),
        "triton-lang/triton#8182",
    ),
    (
        (
            "DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers "
            "are out of shared memory. Please try to raise your shared memory limit."
        ),
        "pytorch/pytorch#5040",
    ),
    # Sizes and shapes.
    (
        (
            "[enforce fail at alloc_cpu.cpp:98] ((ptrdiff_t)nbytes) >= 0. alloc_cpu() seems to have been called with "
            "negative number: 18446744073709551615"
        ),
        "torch c10/core/impl/alloc_cpu.cpp",
    ),
    (
        (
            "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
            "memory location. Please clone() the tensor before performing the operation."
        ),
        "torch aten/src/ATen/MemoryOverlap.cpp",
    ),
    ("Overflow when unpacking long", "torch torch/csrc/utils/python_numbers.h"),
    # Somebody's own words.
    ("the replay buffer is out of memory slots: raise its capacity", "a user's"),
    ("out of memory of this conversation", "a user's"),
    ("maximum sequence length exceeds INT_MAX tokens of the vocabulary", "a user's"),
]


def rows(table: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("message", [message for message, _ in table], ids=lambda text: text[:60])


def of_a_replica(error: Exception) -> Exception:
    """Return the error that nn.parallel.parallel_apply makes of an error in one of its threads."""
    try:
        raise error
    except Exception:  # noqa: BLE001  # as torch's own threads do
        wrapped = ExceptionWrapper(where="in replica 1 on device 1")
    with pytest.raises(Exception, match="Caught") as caught:
        wrapped.reraise()
    return caught.value


class TestMessages:
    @rows(OOM)
    def test_too_little_memory(self, message):
        error = RuntimeError(message)
        assert is_oom(error)
        assert is_oom(error, smaller_ran=False)
        assert is_oom(of_a_replica(error))
        assert not is_kernel_limit(error)

    @rows(PERHAPS_OOM)
    def test_too_little_memory_if_a_smaller_step_ran(self, message):
        error = RuntimeError(message)
        assert is_oom(error)
        assert not is_oom(error, smaller_ran=False)
        assert not is_kernel_limit(error)

    @rows(KERNEL_LIMIT)
    def test_a_kernels_own_limit(self, message):
        error = RuntimeError(message)
        assert is_kernel_limit(error)
        assert is_kernel_limit(of_a_replica(error))
        assert not is_oom(error)

    @rows(NEITHER)
    def test_neither(self, message):
        error = RuntimeError(message)
        assert not is_oom(error)
        assert not is_kernel_limit(error)


class TestClasses:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("said otherwise"),
            OutOfMemoryError("cpu:1 is full"),
            DoesNotFitError("not even one sample fits"),
            getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: out of memory"),
            torch.distributed.DistBackendError(NCCL + "Cuda failure 2 'out of memory'"),
            MemoryError(),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_too_little_memory(self, error):
        assert is_oom(error)
        assert is_oom(error, smaller_ran=False)

    @pytest.mark.parametrize("kind", [ValueError, KeyError, OSError, AssertionError, Exception, KeyboardInterrupt])
    def test_the_words_alone_are_not_enough(self, kind):
        """A test's assertion, a config key or a log line may quote any of them."""
        assert not is_oom(kind("CUDA out of memory. Tried to allocate 2.00 GiB"))
        assert not is_kernel_limit(kind("integer out of range"))

    def test_the_real_ones_of_this_machine(self):
        for ask in (lambda: torch.empty(2**45), lambda: bytearray(2**50), lambda: np.zeros(2**50)):
            with pytest.raises((RuntimeError, MemoryError)) as caught:
                ask()
            assert is_oom(caught.value)

    @pytest.mark.parametrize("ask", [lambda: torch.empty(-1), lambda: torch.UntypedStorage(-1)])
    def test_and_those_that_are_none(self, ask):
        with pytest.raises(RuntimeError) as caught:
            ask()
        assert not is_oom(caught.value)


class TestADeviceThatIsBroken:
    """A label out of range makes CUDA unusable. The next library then reports no memory for a handle."""

    MESSAGE = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"

    @pytest.mark.parametrize("is_broken", [True, False])
    def test_is_no_lack_of_memory(self, is_broken, monkeypatch):
        asked = []

        def synchronize(index):
            asked.append(index)
            if is_broken:
                raise getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: device-side assert triggered")

        held = {0: 0, 1: 2**20}
        cuda = SimpleNamespace(device_count=lambda: 2, memory_reserved=held.get, synchronize=synchronize)
        monkeypatch.setattr(oom, "accelerator_in_use", lambda: cuda)
        assert is_oom(RuntimeError(self.MESSAGE)) != is_broken
        assert asked == [1], "a device that holds nothing would get a context by being asked"


class TestChains:
    def test_the_users_code_ran_out_of_memory(self):
        assert is_oom(from_user_code(torch.OutOfMemoryError("CUDA out of memory."), "the model"))
        assert is_kernel_limit(from_user_code(RuntimeError("integer out of range"), "the model"))
        assert not is_oom(from_user_code(ValueError("bad"), "the model"))
        assert not is_oom(UserCodeError("no cause"))

    def test_raised_from_one_whatever_it_is(self):
        error = ValueError("step 3 failed")
        error.__cause__ = RuntimeError("wrapped once more")
        error.__cause__.__cause__ = torch.OutOfMemoryError("full")
        assert is_oom(error)

    def test_raised_while_one_was_being_handled(self):
        """An error in a user's own recovery is reported as that error."""
        try:
            try:
                raise torch.OutOfMemoryError("full")
            except torch.OutOfMemoryError:
                raise WorkloadError("the batch is empty")  # noqa: B904
        except WorkloadError as caught:
            error = caught
        assert error.__context__ is not None
        assert not is_oom(error)

    def test_a_circle_ends(self):
        first, second = ValueError("a"), ValueError("b")
        first.__cause__, second.__cause__ = second, first
        assert not is_oom(first)
        assert not is_kernel_limit(first)
