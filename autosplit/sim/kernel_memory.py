"""Compute the memory that CUDA kernels and libraries allocate in addition to the tensors of a trace.

# Note [Temporary blocks]
A kernel may allocate blocks, use them and free them before it returns. A trace contains only the operator's outputs, so
this module computes the blocks from the operator's arguments. Because one trace predicts every batch size (`op_calls`),
a block must be one of these:

* a constant,
* exactly proportional to the batch,
* proportional to the batch between two limits (`Block.limits`): absent below the first, constant above the second.

Example: the gradient of a bias of 1,024 numbers in float32. From 1,021 rows on, `sum` adds rows in groups and stores
each group's result. The results take 8,192 bytes per row, up to 16,896 rows. Above that, an H100 cannot run more groups
at once, and the results stay at 132 MiB.

The formulas are from torch 2.11's sources, which are named at each function. They are compared with GPU measurements in
benchmarks/results/gpu (tests/runtime/test_kernel_memory.py). cuDNN is closed source, and no bound of its workspaces is
published. So those of recurrent layers are missing, and those of convolutions are the copies that profiles show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.torch_versions import aten_ops, cublas_workspace_bytes, cublaslt_workspace_bytes

aten = torch.ops.aten

LEAST_BYTES = 2**20
"""Minimum size that counts: a `sum` whose group results never exceed 1 MiB adds no block."""

NO_LIMITS = (0.0, math.inf)
"""The limits of a block that exists at every batch size."""

_GPUS = {70: (80, 2048), 75: (72, 1024), 80: (108, 2048), 86: (84, 1536), 89: (142, 1536), 90: (132, 2048)}
_GPUS |= {100: (152, 2048), 120: (188, 1536)}
"""The largest GPU of each compute capability: number of multiprocessors, and resident threads on each."""

_LARGE_SHARED_MEMORY = (80, 90, 100)
"""Compute capabilities whose thread blocks may use more than 100 KiB of shared memory."""


@dataclass(frozen=True)
class Block:
    """A block of GPU memory.

    Attributes:
        nbytes: Size before rounding and limits. A constant, or exactly proportional to the batch.
        limits: If `nbytes` is below the first limit, the block does not exist. It never exceeds the second limit.
        is_alone: Whether the operator frees the block before it allocates the next block.
    """

    nbytes: int
    limits: tuple[float, float] = NO_LIMITS
    is_alone: bool = False

    @property
    def limited_bytes(self) -> int:
        """Size within the limits, in bytes."""
        least_bytes, most_bytes = self.limits
        return int(min(self.nbytes, most_bytes)) if self.nbytes >= least_bytes else 0


Blocks = tuple[Block, ...]


def temporary_blocks(func: Any, args: Sequence[Any], outputs: Any, kernels: GpuKernels) -> Blocks:
    """Return the blocks that an operator allocates and frees before it returns, in order."""
    inside = _INSIDE.get(getattr(func, "overloadpacket", None))
    return () if inside is None else inside(args, outputs, kernels)


def workspaces(func: Any, args: Sequence[Any], kernels: GpuKernels) -> dict[str, int]:
    """Return the library workspaces that an operator needs: bytes by library.

    torch allocates a workspace when a thread first calls the library on a stream, and keeps it (CublasHandlePool.cpp).
    """
    packet = getattr(func, "overloadpacket", None)
    if packet not in _PRODUCTS:
        return {}
    found = {"cublas": cublas_workspace_bytes(kernels.capability)}
    # A product with a bias vector runs in cuBLASLt (addmm_out_cuda_impl in Blas.cpp).
    if packet is aten.addmm and args[0].dim() == 1 and (own_bytes := cublaslt_workspace_bytes()):
        found["cublasLt"] = own_bytes
    return found


_PRODUCTS = aten_ops("mm addmm bmm baddbmm addbmm mv addmv dot _scaled_mm")


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --------------------------------------------------------------------------------------------------------- attention


def _copies(*tensors: Tensor) -> Blocks:
    """Return the copies that kernels make of tensors of shape (batch, heads, length, width).

    The kernels need (batch, length, heads, width) in memory.
    """
    return tuple(Block(_nbytes(tensor)) for tensor in tensors if not _is_length_first(tensor))


def _is_length_first(tensor: Tensor) -> bool:
    _, heads, length, width = tensor.shape
    wanted = (length * heads * width, width, heads * width, 1)
    return all(
        size == 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), wanted, strict=True)
    )


def _flash_backward(args: Sequence[Any], _outputs: Any, _kernels: GpuKernels) -> Blocks:
    """See `mha_bwd` in transformers/cuda/flash_attn/flash_api.cpp: `dq_accum`, `softmax_d`, `dk_expanded`."""
    grad, query, key, _, out = args[:5]
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    blocks: Blocks = (Block(rows * _up(width, 32 if width <= 128 else 64) * 4), Block(rows * 4))
    if key.shape[1] != heads:  # grouped queries: key and value gradients per query head, added up later
        expanded = Block(batch * heads * key.shape[2] * width * key.element_size())
        blocks += (expanded, expanded)
    return blocks + _copies(grad, out)


@dataclass(frozen=True)
class _Tile:
    """The queries and keys of a thread block, and whether it keeps the gradients of keys in registers."""

    queries: int
    keys: int
    in_registers: bool


def _tile(dtype: torch.dtype, width: int, kernels: GpuKernels, *, drops: bool) -> _Tile:
    """Return the tile of the memory-efficient backward. See `dispatch_cutlassB` in kernels/cutlassB.h.

    torch uses the first kernel that fits the GPU's shared memory. For GPUs with little shared memory, the choice is an
    assumption. It matters only for widths above 64, whose smaller tile needs more memory in half precision.
    """
    is_half, large = dtype is not torch.float32, kernels.capability in _LARGE_SHARED_MEMORY
    if width <= 64:
        return _Tile(64, 64, is_half)
    if is_half and width <= 96 and kernels.capability in (86, 89) and not drops:
        return _Tile(128, 64, in_registers=True)
    if is_half and width <= 128 and large:
        return _Tile(128, 128, in_registers=True)
    return _Tile(128 if large else 64, 64, in_registers=False)


def _efficient_backward(args: Sequence[Any], _outputs: Any, kernels: GpuKernels) -> Blocks:
    """See `_efficient_attention_backward` in attention_backward.cu, and `workspace_size` in kernel_backward.h.

    Below 200 heads in the batch, the kernel may split the keys. Widths that do not fit its registers then take more
    memory. This function returns the size without splitting.
    """
    grad, query, _, value = args[:4]
    batch, heads, length, width = query.shape
    own_width = value.shape[3]
    tile = _tile(query.dtype, max(width, own_width), kernels, drops=args[9] > 0)
    # `GradQTempStorage`: 16 bytes for a lock, a counter and padding, then a tile of float32 numbers.
    per_head = -(-length // tile.queries) * -(-width // tile.keys) * (16 + tile.queries * tile.keys * 4)
    if query.dtype is not torch.float32 and not tile.in_registers:
        per_head += tile.keys * (_up(width, tile.queries) + _up(own_width, tile.queries)) * 4
    delta = Block(batch * heads * length * 4)
    workspace = Block(batch * heads * _up(per_head, 16))
    if query.dtype is torch.float32:  # torch sums the product of output and gradient, then copies the sum transposed
        product = Block(_nbytes(grad))
        if product.nbytes + delta.nbytes > workspace.nbytes:
            return (product, delta, delta, *_copies(grad))
    return (workspace, delta, *_copies(grad))


def _efficient_forward(args: Sequence[Any], _outputs: Any, _kernels: GpuKernels) -> Blocks:
    """Return the float32 accumulator of the output, for half precision and value heads wider than 128.

    See `output_accum` in attention.cu, and `kNeedsOutputAccumulatorBuffer` in mem_eff_attention/kernel_forward.h.
    """
    query, _, value = args[:3]
    if query.dtype is torch.float32 or value.shape[3] <= 128:
        return ()
    return (Block(query.shape[0] * query.shape[1] * query.shape[2] * value.shape[3] * 4),)


def _cudnn_backward(args: Sequence[Any], _outputs: Any, _kernels: GpuKernels) -> Blocks:
    """Return cuDNN's workspace: the gradient of the queries in float32, one number for each row, and 512 bytes.

    cuDNN is closed source. The formula fits an H100 with cuDNN of torch 2.11, for head widths of 64, 80 and 256.
    """
    batch, heads, length, width = args[1].shape
    return Block(batch * heads * length * (width + 1) * 4), Block(512)


# ---------------------------------------------------------------------------------------------------------- softmax


def _softmax_backward(args: Sequence[Any], _outputs: Any, _kernels: GpuKernels) -> Blocks:
    """See `softmax_backward_cuda_out` in SoftMax.cu: the product of the gradient and the output."""
    return (Block(_nbytes(args[0])),)


def _safe_softmax(args: Sequence[Any], outputs: Tensor, _kernels: GpuKernels) -> Blocks:
    """See `_safe_softmax` in transformers/attention.cpp: masks of minus infinity, per element and per row."""
    return Block(outputs.numel()), Block(outputs.numel() // max(1, outputs.shape[args[1]]))


# ------------------------------------------------------------------------------------------------------ sums of rows


def _sum(args: Sequence[Any], _outputs: Any, kernels: GpuKernels) -> Blocks:
    if len(args) < 2 or not isinstance(args[1], (tuple, list)):
        return ()
    return _group_results(args[0], args[1], kernels)


def _group_results(values: Tensor, over: Sequence[int], kernels: GpuKernels) -> Blocks:
    """Return the group results of a sum over all dimensions except the last in memory.

    See `setReduceConfig` and `global_memory_size` in native/cuda/Reduce.cuh. Groups of threads store partial results,
    and the last group adds them. With a different memory order, or more than one remaining dimension, such a sum needs
    little or no memory. Above about 280 million numbers it needs more than the limit: half a byte per number.
    """
    summed = {dim % values.dim() for dim in over}
    remaining = [dim for dim, size in enumerate(values.shape) if size > 1 and dim not in summed]
    strides = [values.stride(dim) for dim in summed if values.shape[dim] > 1]
    if len(remaining) != 1 or values.stride(remaining[0]) > min(strides, default=1):
        return ()
    columns = values.shape[remaining[0]]
    vector = math.gcd(4, columns, *strides) if values.stride(remaining[0]) == 1 else 1
    threads = 512 // vector
    across = min(32, 2 ** int(math.log2(min(columns // vector, threads))))
    down = threads // across
    multiprocessors, threads_per_multiprocessor = _GPUS[max(c for c in _GPUS if c <= max(70, kernels.capability))]
    most_groups = multiprocessors * (threads_per_multiprocessor // threads)
    groups_across = -(-columns // vector // across)
    group_bytes = columns * across * vector * (8 if values.element_size() == 8 else 4)
    most_bytes = group_bytes * -(-most_groups // groups_across)
    if groups_across > most_groups or most_bytes < LEAST_BYTES:
        return ()
    rows = math.prod(values.shape[dim] for dim in summed)
    row_bytes = -(-group_bytes // (16 * down))  # each thread of a group adds at least 16 numbers
    return (Block(rows * row_bytes, ((255 * down + 1) * row_bytes, most_bytes)),)


# ------------------------------------------------------------------------------------------------------ convolutions

_LEAST_CHANNELS = 8
"""Input channels from which on a forward runs on tensor cores: a whole vector of numbers in half precision."""


def _transposed(*images: Tensor, kernels: GpuKernels) -> Blocks:
    """Return cuDNN's copies of images of shape (batch, channels, ...) whose channels are not last in memory.

    Tensor cores need the channels last. Profiles of an H200 show the copies of the input, of the output and of the
    weights (nchwToNhwcKernel in benchmarks/results/gpu/h200_kernels.json). Those of the weights are small and left out.
    """
    least = 80 if images[0].dtype is torch.float32 else 70  # cuDNN may use TF32 by default, matrix products may not
    if kernels.capability < least or any(image.stride(1) == 1 for image in images if image.shape[1] > 1):
        return ()
    return (Block(sum(_nbytes(image) for image in images), is_alone=True),)


def _convolution(args: Sequence[Any], output: Tensor, kernels: GpuKernels) -> Blocks:
    image, groups = args[0], args[8]
    if groups > 1 or image.shape[1] < _LEAST_CHANNELS:
        return ()
    return _transposed(image, output, kernels=kernels)


def _convolution_backward(args: Sequence[Any], outputs: Any, kernels: GpuKernels) -> Blocks:
    """See `convolution_backward` in Convolution.cpp: the gradient of the bias is a sum."""
    grad, image, groups = args[0], args[1], args[9]
    copies = _transposed(image, grad, kernels=kernels) if groups == 1 else ()
    blocks = copies * sum(output is not None for output in outputs[:2])
    if outputs[2] is not None:
        blocks += _group_results(grad, (0, *range(2, grad.dim())), kernels)
    return blocks


# ------------------------------------------------------------------------------------------------------- embeddings


def _embedding_backward(args: Sequence[Any], _outputs: Any, _kernels: GpuKernels) -> Blocks:
    """Return the temporary blocks of Embedding.cu and EmbeddingBackwardKernel.cu. They were not measured.

    The blocks are the sorted indices, one row of sums for every ten indices, and one row of sums per index. Up to 3,072
    indices need no block.
    """
    grad, indices, num_weights = args[:3]
    row_bytes = grad.shape[-1] * max(4, grad.element_size())
    sizes = (2 * indices.element_size(), -(-row_bytes // 10), row_bytes)
    most = (math.inf, math.inf, num_weights * row_bytes)
    count = indices.numel()
    return tuple(Block(count * size, (3073 * size, most_bytes)) for size, most_bytes in zip(sizes, most, strict=True))


_FORMULAS: dict[str, Callable[[Sequence[Any], Any, GpuKernels], Blocks]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_softmax_backward_data": _softmax_backward,
    "_safe_softmax": _safe_softmax,
    "sum": _sum,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding_dense_backward": _embedding_backward,
}
_INSIDE = {op: formula for name, formula in _FORMULAS.items() for op in aten_ops(name)}

WITH_INNER_MEMORY = frozenset(
    getattr(packet, overload) for packet in (*_INSIDE, *_PRODUCTS) for overload in packet.overloads()
)
"""Operators that may need a block (`temporary_blocks`, `workspaces`)."""
