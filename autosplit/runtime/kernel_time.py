"""The time of kernels on a card: peaks, what each class of kernels reaches of them, and what its shape loses.

    seconds = start + max(flops / (peak · reached · used(shape)), bytes · passes / bandwidth)

A product is cut into tiles, which fill the card's multiprocessors in waves: a tile over the edge and a wave that is
not full are time without arithmetic. The figures are in ``kernel_rates.json``: a few for each class of kernels, none
for a model, fitted by ``benchmarks/fit_cards.py`` to published step times.

A card of some 70 W lowers its clock in long products until it keeps its power limit, which holds on average: power that
kernels leave which only move memory lets the products beside them run faster, up to the full clock.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from autosplit.devices.catalog import GpuSpec

Numbers = npt.NDArray[np.float64]

Codes = npt.NDArray[np.int64]

Part = Literal["forward", "backward", "update", "none"]
"""Where the host starts a kernel from; ``none`` where it does nothing for it."""

_PARTS: tuple[Part, ...] = get_args(Part)
_RATES = ("float32", "float64", "float16", "bfloat16", "tf32")

_TILES: Numbers = np.array(
    [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32)],
    dtype=np.float64,
)[:, :, None]
"""Rows and columns that a block of threads takes on, of the kernels of cuBLAS and cuDNN."""

_WARP_ROW = 1024
"""Numbers of a row that a softmax keeps in the registers of a warp (ATen/native/cuda/SoftMax.cu)."""


class KindRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates of a class of kernels.

    Attributes:
        reached: Share of a card's peak in large products.
        passes: How often its bytes go over the card's nominal bandwidth.
    """

    reached: float
    passes: float


class HostRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of the host for an op, in times of a card's `launch_s`.

    Attributes:
        forward: For an op of the forward, with what Python does for it. 20 fit torch 1.4 (``fit_cards.json``), software
            of today takes half of that: a T5-base that no batch slows down takes 0.10 s a step on an RTX 3090
            (github.com/huggingface/transformers, issue 14608), some 1,100 ops forward, 1,500 back and 2,500 to update.
        tensor: For each tensor of an optimizer's op over lists.
        replicated: For each parameter of each replica that is made.
    """

    forward: float
    backward: float
    update: float
    tensor: float
    replicated: float


class KernelRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of all cards.

    Attributes:
        start_s: What a kernel takes that has nothing to do.
        tile_exponent: A tile of a quarter of the area reaches ``2 ** -tile_exponent`` as much.
        inner_half: The dimension summed over at which a product reaches half of what a long one does.
        split_inner: The dimension summed over from which on a product is cut there, too, where tiles are few.
        winograd: Times that a convolution over more than a point is faster on CUDA cores, by Winograd's algorithm.
        group_channels: Channels of a group from which on a grouped convolution is as good as it gets.
        group_exponent: By what power of its channels one of fewer reaches less.
        long_row: Times that softmax takes longer for rows that a warp's registers do not hold: it reads them again. The
            median of five cards' kernels at github.com/sitar-lab/NeuSight.
        fitted: What the figures were fitted to.
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
    host: HostRates
    fitted: str = ""


@functools.cache
def kernel_rates() -> KernelRates:
    """Return the figures of ``kernel_rates.json``; read once."""
    text = importlib.resources.files("autosplit").joinpath("runtime/kernel_rates.json").read_bytes()
    return msgspec.json.decode(text, type=KernelRates)


@functools.cache
def _kind_codes() -> dict[str, int]:
    return {kind: code for code, kind in enumerate(kernel_rates().kinds)}


def work_codes(labels: Sequence[tuple[str, str, Part]]) -> Codes:
    """Return a row each for the kind, the rate and the part of kernels, as numbers."""
    kinds = _kind_codes()
    rates = {rate: code for code, rate in enumerate(_RATES)}
    parts = {part: code for code, part in enumerate(_PARTS)}
    found = [(kinds[kind], rates.get(rate, 0), parts[part]) for kind, rate, part in labels]
    return np.array(found, dtype=np.int64).reshape(-1, 3).T


def kernel_seconds(numbers: Numbers, codes: Codes, spec: GpuSpec, rates: KernelRates | None = None) -> Numbers:
    """Return the time of each kernel on a card, in a step that is made of these."""
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
    by_channel = _masks()[3][codes[0]]  # a block of threads for each channel
    memory_s[by_channel] /= np.minimum(1.0, numbers[2, by_channel] / (spec.multiprocessors or 1))
    memory_s[_masks()[4][codes[0]] & (numbers[2] > _WARP_ROW)] *= rates.long_row
    seconds = np.asarray(rates.start_s + np.maximum(arithmetic_s, memory_s))
    limited = arithmetic_s > memory_s
    if spec.memory_power < 1.0 and limited.any():
        spared = (1.0 - spec.memory_power) * seconds[~limited].sum() / seconds[limited].sum()
        seconds[limited] *= np.maximum(sustained[limited], 1.0 - spared)
    return seconds


@functools.cache
def _masks() -> tuple[npt.NDArray[np.bool_], ...]:
    """Return which kinds are cut into tiles, are by groups of channels, dense windows, norms of planes, softmax."""
    kinds = list(kernel_rates().kinds)
    dense = ("pointwise", "convolution", "unaligned")
    tiled = ("matmul", "batched", *dense, *(f"{kind}_weight" for kind in dense))
    return (
        np.array([kind in tiled for kind in kinds]),
        np.array([kind.startswith("grouped") for kind in kinds]),
        np.array([kind.startswith("convolution") for kind in kinds]),
        np.array([kind in ("batch_norm", "batch_norm_backward") for kind in kinds]),
        np.array([kind == "softmax" for kind in kinds]),
    )


def _used(product: Numbers, multiprocessors: int, rates: KernelRates) -> Numbers:
    """Return the share of a card's arithmetic that products of these shapes can use, by the best of the tiles."""
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
) -> Numbers:
    """Return the time that the host takes to start each kernel.

    Args:
        replicas: How many are trained by this process: one interpreter starts the ops of their forwards in turn. Their
            backwards have a thread each, without it.
    """
    host = (rates or kernel_rates()).host
    times = np.array([host.forward * replicas, host.backward, host.update, 0.0])[codes[2]]
    tensors = np.where(codes[2] == _PARTS.index("update"), numbers[2], 0.0)
    return np.asarray(spec.launch_s * (times + host.tensor * tensors))
