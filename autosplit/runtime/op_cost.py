"""The cost of an op on a device by the roofline: its floating-point operations and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import flop_counter

from autosplit.devices.catalog import GpuSpec

__all__ = ["Move", "Numbers", "OpCost", "Work", "op_cost", "peak_flops"]

Numbers = npt.NDArray[np.float64]

aten = torch.ops.aten


@dataclass(frozen=True)
class OpCost:
    """The cost of an op on any card.

    Attributes:
        flops: Floating-point operations, counted where torch has a formula for them; 0 for what only moves memory.
        nbytes: Bytes read and written.
        rate: Which of a card's peaks bounds it: a dtype's name, or ``"tf32"``.
    """

    flops: int
    nbytes: int
    rate: str

    def seconds(self, spec: GpuSpec) -> float:
        """Return the roofline time on a card: bound by launch, by arithmetic or by memory."""
        arithmetic_s = self.flops / peak_flops(spec, self.rate)
        return max(spec.launch_s, arithmetic_s, self.nbytes / spec.memory_bytes_per_s)


def peak_flops(spec: GpuSpec, rate: str) -> float:
    """Return a card's dense peak for a rate; what it has no units for runs at its float32 peak."""
    return spec.peak_flops.get(rate) or spec.peak_flops["float32"]


@dataclass(frozen=True, eq=False)
class Work:
    """Ops that a device runs between two transfers, in columns: a step has thousands.

    Attributes:
        flops: Floating-point operations of each.
        nbytes: Bytes that each reads and writes.
        rates: The peak that bounds each, see `OpCost.rate`.
    """

    device: int
    flops: Numbers
    nbytes: Numbers
    rates: tuple[str, ...]

    @classmethod
    def of(cls, device: int, costs: Sequence[OpCost]) -> Work:
        """Return the work of these ops."""
        flops = np.array([cost.flops for cost in costs], dtype=np.float64)
        nbytes = np.array([cost.nbytes for cost in costs], dtype=np.float64)
        return cls(device, flops, nbytes, tuple(cost.rate for cost in costs))

    def seconds(self, spec: GpuSpec) -> float:
        """Return the time on a card, see `OpCost.seconds`."""
        peaks = {rate: peak_flops(spec, rate) for rate in set(self.rates)}
        arithmetic_s = self.flops / np.array([peaks[rate] for rate in self.rates])
        return float(np.maximum(np.maximum(arithmetic_s, self.nbytes / spec.memory_bytes_per_s), spec.launch_s).sum())


@dataclass(frozen=True)
class Move:
    """A copy between two devices, or between a device and the host."""

    source: int
    destination: int
    nbytes: int
    purpose: str


# Ops that read a few rows of their first argument, not all of it.
_ROW_READERS = {aten.embedding, aten.index_select, aten.index, aten.gather}

# Ops that only reserve memory.
_ALLOCATIONS = {aten.empty_like, aten.new_empty, aten.empty, aten.empty_strided, aten.new_empty_strided}

_CONVOLUTIONS = {aten.convolution, aten._convolution, aten.convolution_backward}


def _attention_flops(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    query, key, value = args[:3]
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    grad, query, key, value = args[:4]
    return int(flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


# The fused attention of the CPU, which torch's table of formulas lacks: the arithmetic is that of any other.
_CPU_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def op_cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> OpCost | None:
    """Return what an op costs; None where it costs nothing: views, allocations, questions (``prim.device``)."""
    packet = getattr(func, "_overloadpacket", None)
    if packet in _ALLOCATIONS or getattr(func, "is_view", False) or getattr(func, "namespace", None) == "prim":
        return None
    tensors = [*_flat((*args, *kwargs.values())), *_flat((outputs,))]
    if packet in _ROW_READERS:
        tensors = [*_flat(args[1:]), *_flat((outputs,)), *_flat((outputs,))]
    flops = _flops(packet, args, kwargs, outputs)
    return OpCost(flops, sum(t.numel() * t.element_size() for t in tensors), _rate(packet, tensors))


def _flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    own = _CPU_FORMULAS.get(packet)
    if own is not None:
        return own(args, kwargs, outputs)
    formula = flop_counter.flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=outputs))


def _rate(packet: Any, tensors: list[Tensor]) -> str:
    floating = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    # cuDNN convolutions take TF32 by default, matrix products don't (torch.backends.cuda.matmul.allow_tf32).
    if floating == torch.float32 and packet in _CONVOLUTIONS:
        return "tf32"
    return str(floating).removeprefix("torch.")


def _flat(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _flat(value)
    return found
