"""Describe the kernels that an op runs on a GPU, with their arithmetic, bytes and shape."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import flop_counter

from autosplit.devices.catalog import GpuSpec
from autosplit.runtime.tensor_parts import tensors_among
from autosplit.sim.kernel_time import Codes, Numbers, Part, host_seconds, kernel_seconds, work_codes
from autosplit.sim.rms_norm import RMS_NORM, RMS_NORM_BACKWARD
from autosplit.torch_versions import aten_ops

aten = torch.ops.aten


@dataclass(frozen=True)
class OpCost:
    """The work of a kernel, independent of the GPU.

    Attributes:
        flops: Floating-point operations by torch's formula. 0 for kernels that only move memory.
        rate: The GPU peak that limits the kernel: a dtype's name, or ``"tf32"``.
        product: Shape of a matrix product: rows, columns, inner dimension and number of products. All 0 without a
            product. For other kernels, the first number is a size: tensors of an optimizer, row length of softmax,
            elements of pooling, channels of BatchNorm.
        part: The part of the step that started the op. ``"none"`` for all but the first kernel of an op, because the
            other kernels take no host time.
    """

    flops: int
    nbytes: int
    rate: str
    kind: str = "elementwise"
    product: tuple[int, int, int, int] = (0, 0, 0, 0)
    part: Part = "forward"

    def seconds(self, spec: GpuSpec) -> float:
        """Return the kernel's seconds on a GPU."""
        return Work.of(0, [self]).seconds(spec)


@dataclass(frozen=True, eq=False)
class Work:
    """Kernels that a device runs between two transfers, stored in columns because a step has thousands.

    Attributes:
        numbers: Rows for flops, bytes and the four numbers of the matrix product. All are affine in the samples.
    """

    device: int
    numbers: Numbers
    labels: tuple[tuple[str, str, Part], ...]
    codes: Codes

    @classmethod
    def of(cls, device: int, costs: Sequence[OpCost]) -> Work:
        """Make a `Work` from the costs of its kernels."""
        numbers = np.array([(cost.flops, cost.nbytes, *cost.product) for cost in costs], dtype=np.float64)
        labels = tuple((cost.kind, cost.rate, cost.part) for cost in costs)
        return cls(device, numbers.reshape(-1, 6).T, labels, work_codes(labels))

    def with_numbers(self, numbers: Numbers) -> Work:
        """Return the same kernels with other numbers, given as a flattened `numbers` array."""
        return replace(self, numbers=numbers.reshape(self.numbers.shape))

    def inner(self, first: int, last: int) -> Work:
        """Return these kernels without `first` kernels at the start and `last` kernels at the end."""
        own = slice(first, len(self.labels) - last)
        return Work(self.device, self.numbers[:, own], self.labels[own], self.codes[:, own])

    def seconds(self, spec: GpuSpec) -> float:
        """Return the time of all kernels on a GPU that never waits for the host, in seconds."""
        return float(kernel_seconds(self.numbers, self.codes, spec).sum())


@dataclass(frozen=True)
class Load:
    """The time of a list of kernels on a GPU whose host starts them one after another.

    Attributes:
        busy_s: Time that the GPU computes, in seconds.
        end_s: Time in seconds from the host's first start to the end of the last kernel, on an idle GPU.
    """

    busy_s: float
    host_s: float
    end_s: float


def loads_of(works: Sequence[Work], spec: GpuSpec, replicas: int = 1, fused_share: float = 1.0) -> list[Load]:
    """Return the loads of all works on a GPU, in one vectorised call because a step has thousands of small works."""
    begins = np.cumsum([0, *(work.numbers.shape[1] for work in works)])
    numbers = np.concatenate([np.zeros((6, 0)), *(work.numbers for work in works)], axis=1)
    codes = np.concatenate([np.zeros((3, 0), np.int64), *(work.codes for work in works)], axis=1)
    kernels_s = np.append(0.0, np.cumsum(kernel_seconds(numbers, codes, spec, fused_share=fused_share)))
    starts_s = host_seconds(numbers, codes, spec, replicas=replicas, fused_share=fused_share)
    started_s = np.append(0.0, np.cumsum(starts_s))
    # After a kernel that the host starts late, all later kernels still have to run.
    done_s = started_s[1:] - kernels_s[:-1]
    return [
        Load(
            float(kernels_s[end] - kernels_s[begin]),
            float(started_s[end] - started_s[begin]),
            float(done_s[begin:end].max() + kernels_s[end] - started_s[begin]) if begin < end else 0.0,
        )
        for begin, end in itertools.pairwise(begins)
    ]


@dataclass(frozen=True)
class Move:
    """A copy between two devices, or between a device and the host."""

    source: int
    destination: int
    nbytes: int
    purpose: str


# Ops that read only a few rows of their first argument.
_ROW_READERS = {aten.embedding, aten.index_select, aten.index, aten.gather}

# Ops that only reserve memory.
_ALLOCATIONS = {aten.empty_like, aten.new_empty, aten.empty, aten.empty_strided, aten.new_empty_strided}

_CONVOLUTIONS = aten_ops("convolution _convolution")

_ATTENTION = aten_ops(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
_ATTENTION_BACKWARD = aten_ops(
    "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward"
)

_CAUSAL_AT = {
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention_backward": 14,
}
"""Position of the argument ``is_causal`` (ATen/native/native_functions.yaml)."""

_GROUPED = aten_ops("_grouped_mm")

_KINDS = {
    "batch_norm": (
        "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_functional _batch_norm_with_update"
    ),
    "batch_norm_backward": "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward",
    "layer_norm": "native_layer_norm native_group_norm _fused_rms_norm",
    "layer_norm_backward": "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward",
    "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
    "pooling": (
        "max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward "
        "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward max_pool3d_with_indices avg_pool3d "
        "upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward "
        "upsample_bicubic2d upsample_bicubic2d_backward"
    ),
    "reduction": (
        "sum mean amax amin max min argmax norm linalg_vector_norm var std var_mean prod any all cumsum "
        "nll_loss_forward nll_loss_backward mse_loss"
    ),
    "index": (
        "embedding index_select index gather embedding_dense_backward index_put index_put_ _index_put_impl_ "
        "_unsafe_index scatter scatter_ scatter_add scatter_add_ index_add index_add_ roll"
    ),
    "copy": "clone copy_ _to_copy cat stack constant_pad_nd fill_ zero_ fill zeros zeros_like new_zeros ones_like",
}
_KIND_OF = {op: kind for kind, names in _KINDS.items() for op in aten_ops(names)}
_KIND_OF |= {RMS_NORM: "layer_norm", RMS_NORM_BACKWARD: "layer_norm_backward"}

_BY_LAYOUT = {"batch_norm", "batch_norm_backward", "pooling"}
"""Kinds with separate kernels for channels-last tensors."""


@functools.cache
def is_free(func: Any) -> bool:
    """Return whether an op costs nothing: a view, an allocation, or a query such as ``prim.device``."""
    packet = getattr(func, "overloadpacket", None)
    return packet in _ALLOCATIONS or getattr(func, "is_view", False) or getattr(func, "namespace", None) == "prim"


def running_part() -> Part:
    """Return the part of the step that runs. Checkpointing runs the model inside the backward, with gradients."""
    if torch._C._current_graph_task_id() < 0:
        return "forward"
    return "recomputed" if torch.is_grad_enabled() else "backward"


def op_cost(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any, part: Part = "forward"
) -> tuple[OpCost, ...]:
    """Return the kernels of an op. A free op has no kernels, and the part of optimizer ops is always "update"."""
    if is_free(func):
        return ()
    kernels = list(_kernels(getattr(func, "overloadpacket", None), args, kwargs, outputs))
    if kernels and kernels[0].kind == "optimizer":
        part = "update"
    return tuple(replace(kernel, part="none" if at else part) for at, kernel in enumerate(kernels))


def _kernels(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> Iterator[OpCost]:
    if packet in _CONVOLUTIONS:
        yield from _convolution(args, outputs)
        yield from _made_dense(args[:2])
    elif packet is aten.convolution_backward:
        yield from _convolution_backward(args, outputs)
        yield from _made_dense(args[1:3], args[0])
    else:
        yield _kernel(packet, args, kwargs, outputs)
        if _KIND_OF.get(packet) == "batch_norm":
            yield from _made_dense(args[:1])
        elif _KIND_OF.get(packet) == "batch_norm_backward":
            yield from _made_dense(args[1:2], args[0])


def _made_dense(ordering: Sequence[Tensor], *others: Tensor) -> Iterator[OpCost]:
    """Yield copies of images that are slices or whose memory order differs from `ordering`. cuDNN accepts neither."""
    wanted = torch.channels_last if any(map(_in_channels, ordering)) else torch.contiguous_format
    for tensor in (*ordering, *others):
        if tensor.dim() == 4 and not tensor.is_contiguous(memory_format=wanted):
            yield OpCost(0, 2 * _nbytes(tensor), _rate([tensor]), "copy")


def _kernel(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> OpCost:
    written = [*tensors_among((outputs,))]
    tensors = [*tensors_among((*args, *kwargs.values())), *written]
    if packet in _ROW_READERS:
        tensors = [*tensors_among(args[1:]), *written, *written]
    rate = _rate(tensors)
    nbytes = sum(_nbytes(tensor) for tensor in tensors)
    flops = _flops(packet, args, kwargs, outputs)
    name = getattr(packet, "__name__", "")
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")):
        count = max((len(value) for value in args if isinstance(value, (tuple, list))), default=1)
        return OpCost(0, nbytes, rate, "optimizer", (count, 0, 0, 0))
    if packet in _ATTENTION or packet in _ATTENTION_BACKWARD:
        kind = "attention" if packet in _ATTENTION else "attention_backward"
        return OpCost(flops, nbytes, rate, kind)
    if flops and len(written) == 1 and written[0].dim() in (2, 3):
        *batch, rows, columns = written[0].shape
        count = math.prod(batch)
        inner = flops // max(1, 2 * count * rows * columns)
        kind = "batched" if batch else "matmul"
        return OpCost(flops, nbytes, rate, kind, (rows, columns, inner, count))
    kind = _KIND_OF.get(packet, "elementwise")
    if kind == "copy" and len({tensor.stride() for tensor in tensors}) == 1:
        kind = "elementwise"  # all strides are equal, so no element moves
    elif kind == "copy" and all(_has_long_rows(tensor) for tensor in tensors):
        kind = "row_copy"
    if kind in _BY_LAYOUT and any(_in_channels(tensor) for tensor in tensors):
        kind += "_channels"
    if kind.startswith("batch_norm") and rate == "bfloat16":
        # torch uses cuDNN's BatchNorm for all types but bfloat16 (ATen/native/Normalization.cpp). Its own kernels
        # compute in float32. Two steps on an H100 fit the time of float32 (benchmarks/results/gpu/h100.json).
        nbytes *= 2
    return OpCost(flops, nbytes, rate, kind, (_extent(kind, args, tensors), 0, 0, 0))


def _extent(kind: str, args: Sequence[Any], tensors: Sequence[Tensor]) -> int:
    """Return the size that the time of some kernels depends on (`OpCost.product`), and 0 for other kernels.

    BatchNorm of contiguous images runs one thread block per channel, so its size is the number of channels.
    """
    if kind == "softmax":
        return int(tensors[-1].shape[next(arg for arg in args if isinstance(arg, int))])
    if kind in ("batch_norm", "batch_norm_backward"):
        return int(args[kind == "batch_norm_backward"].shape[1])
    return max(tensor.numel() for tensor in tensors) if kind.startswith("pooling") else 0


def _convolution(args: Sequence[Any], outputs: Any) -> Iterator[OpCost]:
    values, weight, transposed, groups = args[0], args[1], args[6], args[8]
    outer = values if transposed else outputs
    product = _product(outer, weight, groups)
    if transposed:  # same arithmetic as an input gradient
        product = _input_product(outputs, weight, groups)
    macs = _positions(outer) * weight.numel()
    yield _one_convolution("", (values, weight, outputs), weight, groups, product, macs)
    yield from _layout(values, outputs)


def _convolution_backward(args: Sequence[Any], outputs: Any) -> Iterator[OpCost]:
    grad, values, weight, transposed, groups = args[0], args[1], args[2], args[7], args[9]
    outer, inputs = (values, grad) if transposed else (grad, values)
    product = _product(outer, weight, groups)
    macs = _positions(outer) * weight.numel()
    grad_values, grad_weight, grad_bias = outputs
    if grad_values is not None:
        shape = product if transposed else _input_product(inputs, weight, groups)
        yield _one_convolution("", (grad, weight, grad_values), weight, groups, shape, macs)
        yield from _layout(grad, grad_values)
    if grad_weight is not None:
        rows, columns, inner, _ = product
        shape = (inner, columns, rows, groups)
        yield _one_convolution("_weight", (grad, values, grad_weight), weight, groups, shape, macs)
    if grad_bias is not None:
        yield OpCost(0, _nbytes(grad), _rate([grad]), "reduction")


def _product(outer: Tensor, weight: Tensor, groups: int) -> tuple[int, int, int, int]:
    return _positions(outer), weight.shape[0] // groups, math.prod(weight.shape[1:]), groups


def _positions(values: Tensor) -> int:
    return values.shape[0] * math.prod(values.shape[2:])


def _input_product(inputs: Tensor, weight: Tensor, groups: int) -> tuple[int, int, int, int]:
    window = math.prod(weight.shape[2:])
    return _positions(inputs), weight.shape[1], weight.shape[0] // groups * window, groups


def _one_convolution(
    suffix: str, tensors: Sequence[Tensor], weight: Tensor, groups: int, product: tuple[int, int, int, int], macs: int
) -> OpCost:
    rate = _rate([weight])
    nbytes = sum(_nbytes(tensor) for tensor in tensors)
    layout = "_channels" if any(_in_channels(tensor) for tensor in tensors) else ""
    if groups > 1 and weight.shape[1] == 1:
        kind = f"depthwise{suffix}{layout}"
        return OpCost(2 * macs, nbytes, "float64" if rate == "float64" else "float32", kind, product)
    # cuDNN convolutions use TF32 by default. Matrix products do not (torch.backends.cuda.matmul.allow_tf32).
    rate = "tf32" if rate == "float32" else rate
    if groups > 1:
        width = weight.shape[1]
        # cuDNN packs narrow groups into its tiles if there are enough of them.
        packed = layout and not suffix and width in (4, 8, 16, 32) and groups % 32 == 0
        return OpCost(2 * macs, nbytes, rate, "packed" if packed else f"grouped{suffix}{layout}", product)
    size = "pointwise" if math.prod(weight.shape[2:]) == 1 else "convolution"
    # Tensor cores need multiples of eight channels. Images with up to four channels have separate kernels.
    if rate in ("float16", "bfloat16") and weight.shape[1] > 4 and (weight.shape[0] % 8 or weight.shape[1] % 8):
        size = "unaligned"
    return OpCost(2 * macs, nbytes, rate, size + suffix, product)


def _in_channels(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.stride(1) == 1 < tensor.stride(3)


def _layout(*tensors: Tensor) -> Iterator[OpCost]:
    """Yield the conversion to channels-last order, which tensor cores need for contiguous tensors."""
    rate = _rate(tensors)
    if rate in ("float16", "bfloat16") and all(t.dim() == 4 and t.is_contiguous() for t in tensors):
        yield OpCost(0, 2 * sum(_nbytes(tensor) for tensor in tensors), rate, "layout")


def _flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    if packet in _ATTENTION:
        return _attention_flops(*args[:3]) // (2 if _is_causal(packet, args, kwargs) else 1)
    if packet in _ATTENTION_BACKWARD:
        return _attention_flops(*args[1:4], backward=True) // (2 if _is_causal(packet, args, kwargs) else 1)
    if packet in _GROUPED:
        # Each row is multiplied by the matrix of one group. torch 2.13 has no formula for this operator.
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    formula = flop_counter.flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=outputs))


def _is_causal(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether fused attention skips the blocks above the diagonal, which is half of its arithmetic."""
    at = _CAUSAL_AT[packet.__name__]
    return bool(args[at] if len(args) > at else kwargs.get("is_causal", False))


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *, backward: bool = False) -> int:
    """Return the operations of fused attention over tensors of shape (batch, heads, length, width).

    The forward has two matrix products: scores = query @ key, then scores @ value. The backward has five: the scores
    again, and one for each gradient of scores, values, queries and keys. torch's own formula rejects grouped queries
    (several query heads share a head of keys and values) before 2.13, and lacks the CPU's operator.
    """
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    if backward:
        return 2 * scores * (3 * query.shape[3] + 2 * value.shape[3])
    return 2 * scores * (query.shape[3] + value.shape[3])


def _has_long_rows(tensor: Tensor) -> bool:
    """Return whether the last dimension is contiguous and fills a 128-byte transaction of GPU memory."""
    return tensor.dim() > 0 and tensor.stride(-1) == 1 and tensor.shape[-1] * tensor.element_size() >= 128


def _rate(tensors: Sequence[Tensor]) -> str:
    floating = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    return str(floating).removeprefix("torch.")


def _nbytes(tensor: Tensor) -> int:
    shape = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    repeated = math.prod(size for size, stride in shape if stride == 0) or 1
    return tensor.numel() * tensor.element_size() // repeated
