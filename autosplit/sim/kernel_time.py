"""Estimate the time of kernels on a GPU from its peak rates, the kernel class and the shape.

    seconds = start + max(flops / (peak · reached · used(shape)), bytes · passes / bandwidth)

Matrix products are cut into tiles, and waves of tiles run on the GPU's multiprocessors. A tile beyond the edge or a
wave that is not full wastes time. The rates in ``kernel_rates.json`` depend on the class of kernels, not on the model.
``benchmarks/fit_cards.py`` fits them to published step times.

A GPU of about 70 W lowers its clock in long products to keep its average power limit. Kernels that only move memory use
less power, so the other kernels run faster, up to the full clock.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from autosplit.devices.catalog import GpuSpec

Numbers = npt.NDArray[np.float64]

Codes = npt.NDArray[np.int64]

Part = Literal["forward", "backward", "recomputed", "update", "none"]
"""The part of a step that starts a kernel.

``recomputed`` is a forward that checkpointing runs again inside the backward. ``none`` means that the host spends no
time on the kernel.
"""

_PARTS: tuple[Part, ...] = get_args(Part)
_RATES = ("float32", "float64", "float16", "bfloat16", "tf32")

_TILES: Numbers = np.array(
    [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32)],
    dtype=np.float64,
)[:, :, None]
"""Rows and columns of the tile that one thread block computes, for kernels of cuBLAS and cuDNN."""

_WARP_ROW = 1024
"""Maximum elements of a row that softmax keeps in a warp's registers (ATen/native/cuda/SoftMax.cu)."""


class KindRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates of a class of kernels.

    Attributes:
        reached: Fraction of a GPU's peak that large products reach.
        passes: Number of times that a kernel's bytes cross the bus, at nominal bandwidth.
    """

    reached: float
    passes: float


class HostRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Host time per op, as multiples of a GPU's `launch_s`.

    Attributes:
        forward: For a forward op, with its Python code. 20 fits torch 1.4 (``fit_cards.json``). Current software takes
            half of that. A launch-bound T5-base takes 0.10 s per step on an RTX 3090
            (github.com/huggingface/transformers, issue 14608), with 1,100 forward ops, 1,500 backward ops and 2,500
            optimizer ops.
        recomputed: For an op of a checkpointed forward. It includes the hooks of torch.utils.checkpoint for each saved
            tensor, in both forwards, and the copies of random states. Fitted to one GPT on an H200
            (benchmarks/results/gpu). The same GPT on an H100 was not used.
        tensor: For each tensor of an optimizer op over a list of tensors.
        replicated: For each parameter of each replica.
    """

    forward: float
    backward: float
    recomputed: float
    update: float
    tensor: float
    replicated: float


class KernelRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates of all GPUs.

    Attributes:
        start_s: Time of an empty kernel.
        tile_exponent: A tile with a quarter of the area reaches ``2 ** -tile_exponent`` of the rate.
        inner_half: Inner dimension at which a matrix product reaches half of the rate of a long product.
        split_inner: Inner dimension above which a product with few tiles is also split along it (split-K).
        winograd: Speed-up of Winograd's algorithm for convolutions larger than 1x1 on CUDA cores.
        group_channels: Channels per group above which a grouped convolution reaches its full rate.
        group_exponent: With fewer channels per group, the rate falls with this power of their number.
        long_row: Slowdown of softmax for rows that do not fit in a warp's registers, because it reads them again. The
            median of five GPUs' kernels at github.com/sitar-lab/NeuSight.
        pooled_element_s: Time of one element of a pooling kernel on one multiprocessor. The kernels compute indices in
            64 bits, so their time does not fall with the bytes of the data type. The fitted bytes of the RTX 3090 give
            1.9e-9, and a step in float32 on an H100 gives 1.7e-9 (``benchmarks/results/gpu/h100.json``).
        pooled_channels: The time of a pooling element in channels-last order, as a fraction of `pooled_element_s`.
    """

    kinds: Mapping[str, KindRates]
    start_s: float
    tile_exponent: float
    inner_half: float
    split_inner: float
    winograd: float
    group_channels: float
    group_exponent: float
    long_row: float
    pooled_element_s: float
    pooled_channels: float
    host: HostRates
    fitted: str = ""


@functools.cache
def kernel_rates() -> KernelRates:
    """Return the rates of ``kernel_rates.json``, which is read once."""
    text = importlib.resources.files("autosplit").joinpath("sim/kernel_rates.json").read_bytes()
    return msgspec.json.decode(text, type=KernelRates)


@functools.cache
def _kind_codes() -> dict[str, int]:
    return {kind: code for code, kind in enumerate(kernel_rates().kinds)}


def work_codes(labels: Sequence[tuple[str, str, Part]]) -> Codes:
    """Return three rows of integer codes: the kind, the data type and the part of each kernel."""
    kinds = _kind_codes()
    rates = {rate: code for code, rate in enumerate(_RATES)}
    parts = {part: code for code, part in enumerate(_PARTS)}
    found = [(kinds[kind], rates.get(rate, 0), parts[part]) for kind, rate, part in labels]
    return np.array(found, dtype=np.int64).reshape(-1, 3).T


def kernel_seconds(
    numbers: Numbers, codes: Codes, spec: GpuSpec, rates: KernelRates | None = None, *, fused_share: float = 1.0
) -> Numbers:
    """Return the time of each kernel on a GPU in seconds. All kernels belong to one step, as they share a power limit.

    Args:
        fused_share: For a compiled model, the time of kernels without products as a fraction of their eager time. See
            `autosplit.workload.compiled.FUSED_SHARE`.
    """
    rates = rates or kernel_rates()
    reached = np.array([kind.reached for kind in rates.kinds.values()])[codes[0]]
    passes = np.array([kind.passes for kind in rates.kinds.values()])[codes[0]]
    sustained = np.array([spec.sustained_share(rate) for rate in _RATES])[codes[1]]
    peaks = np.array([spec.sustained_flops(rate) for rate in _RATES])[codes[1]]
    if "tf32" not in spec.peak_flops:
        peaks[_masks()[2][codes[0]] & (codes[1] == _RATES.index("tf32"))] *= rates.winograd
    used = np.ones(numbers.shape[1])
    tiled = _masks()[0][codes[0]]
    if tiled.any():
        used[tiled] = _used(numbers[2:, tiled], spec.multiprocessors or 1, rates)
    grouped = _masks()[1][codes[0]]
    used[grouped] = np.minimum(1.0, numbers[3, grouped] / rates.group_channels) ** rates.group_exponent
    arithmetic_s = numbers[0] / (peaks * reached * used)
    memory_s = numbers[1] * passes / spec.memory_bytes_per_s
    by_channel = _masks()[3][codes[0]]  # one thread block per channel
    memory_s[by_channel] /= np.minimum(1.0, numbers[2, by_channel] / (spec.multiprocessors or 1))
    memory_s[_masks()[4][codes[0]] & (numbers[2] > _WARP_ROW)] *= rates.long_row
    pooled_s = rates.pooled_element_s / (spec.multiprocessors or 1) * np.array([0.0, 1.0, rates.pooled_channels])
    memory_s = np.maximum(memory_s, numbers[2] * pooled_s[_masks()[5][codes[0]]])
    seconds = np.asarray(rates.start_s + np.maximum(arithmetic_s, memory_s))
    limited = arithmetic_s > memory_s
    if spec.memory_power < 1.0 and limited.any():
        spared = (1.0 - spec.memory_power) * seconds[~limited].sum() / seconds[limited].sum()
        seconds[limited] *= np.maximum(sustained[limited], 1.0 - spared)
    return seconds * _fusion(codes, fused_share)


def _fusion(codes: Codes, fused_share: float) -> Numbers:
    fused = ~_masks()[6][codes[0]] & (codes[2] != _PARTS.index("update"))
    return np.where(fused, fused_share, 1.0)


@functools.cache
def _masks() -> tuple[npt.NDArray[Any], ...]:
    """Return masks of kinds: tiled, grouped, dense convolutions, batch norms (by channel), softmax and pooling.

    The pooling entries are 1 for contiguous images, 2 for channels-last order, and 0 for other kinds. The last mask is
    for kinds that torch.compile does not fuse.
    """
    kinds = list(kernel_rates().kinds)
    dense = ("pointwise", "convolution", "unaligned")
    tiled = ("matmul", "batched", *dense, *(f"{kind}_weight" for kind in dense))
    return (
        np.array([kind in tiled for kind in kinds]),
        np.array([kind.startswith("grouped") for kind in kinds]),
        np.array([kind.startswith("convolution") for kind in kinds]),
        np.array([kind in ("batch_norm", "batch_norm_backward") for kind in kinds]),
        np.array([kind == "softmax" for kind in kinds]),
        np.array([{"pooling": 1, "pooling_channels": 2}.get(kind, 0) for kind in kinds]),
        np.array([kind in (*tiled, "packed", "optimizer") for kind in kinds])
        | np.array([kind.startswith(("attention", "grouped", "depthwise")) for kind in kinds]),
    )


def _used(product: Numbers, multiprocessors: int, rates: KernelRates) -> Numbers:
    """Return the fraction of a GPU's peak that matrix products of these shapes can use with the best tile size."""
    rows, columns, inner, count = product
    tiles = np.ceil(rows / _TILES[:, 0]) * np.ceil(columns / _TILES[:, 1]) * count
    parts = np.clip(np.floor(multiprocessors / np.maximum(tiles, 1.0)), 1.0, np.maximum(1.0, inner / rates.split_inner))
    waves = np.ceil(tiles * parts / multiprocessors) / parts
    side = 2.0 / (1.0 / _TILES[:, 0] + 1.0 / _TILES[:, 1]) / 128.0
    needed = waves * _TILES[:, 0] * _TILES[:, 1] / np.minimum(side, 1.0) ** rates.tile_exponent
    ideal = np.maximum(rows * columns * count, 1.0) / multiprocessors
    return np.asarray(ideal / np.maximum(needed.min(axis=0), 1.0) * inner / (inner + rates.inner_half))


def host_seconds(
    numbers: Numbers,
    codes: Codes,
    spec: GpuSpec,
    *,
    replicas: int = 1,
    rates: KernelRates | None = None,
    fused_share: float = 1.0,
) -> Numbers:
    """Return the time in seconds that the host takes to start each kernel.

    Args:
        replicas: Number of replicas that this process trains. One interpreter starts their forward ops in turn. Each
            backward has its own thread and does not need the interpreter.
        fused_share: See `kernel_seconds`.
    """
    host = (rates or kernel_rates()).host
    times = np.array([host.forward * replicas, host.backward, host.recomputed * replicas, host.update, 0.0])[codes[2]]
    tensors = np.where(codes[2] == _PARTS.index("update"), numbers[2], 0.0)
    return np.asarray(spec.launch_s * (times + host.tensor * tensors)) * _fusion(codes, fused_share)
