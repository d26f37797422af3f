"""Keep an op's call without its tensors, and tell what it would be with other samples.

A step that is followed at odd sizes, primes that nothing else in a model is a multiple of, shows which dimensions are
made of samples: those that the sizes divide. One trace tells so what two or three at other sizes would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosplit.runtime.kernel_time import Part
from autosplit.runtime.op_cost import OpCost, op_cost, running_part

ODD_SIZES = (1031, 1051)
"""Primes for the samples of up to two devices, of which no common model has a multiple, nor of their sum.

Above 1024, a batch that is often asked for, and the largest that the odd steps then stand for.
"""


def odd_split(split: Sequence[int]) -> tuple[int, ...]:
    """Return a split with odd sizes where a split has more than a sample.

    Raises:
        ValueError: It has them on more devices than there are odd sizes.
    """
    if sum(samples > 1 for samples in split) > len(ODD_SIZES):
        raise ValueError(f"the split {split} has samples on more than {len(ODD_SIZES)} devices")
    sizes = iter(ODD_SIZES)
    return tuple(next(sizes) if samples > 1 else samples for samples in split)


def resizer(before: tuple[int, ...], after: tuple[int, ...]) -> Callable[[int], int]:
    """Return what tells a dimension, or a number of bytes, of an odd split in another one."""
    pairs = [(b, a) for b, a in ((sum(before), sum(after)), *zip(before, after, strict=True)) if b > 1]

    @functools.cache
    def resized(size: int) -> int:
        times = 1
        for odd, other in pairs:
            while size and size % odd == 0:
                size, times = size // odd, times * other
        return size * times

    return resized


@dataclass(frozen=True)
class _Tensor:
    """A tensor's shape, all that an op's cost depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OpCall:
    """A call of an op, of whose tensors only shapes are kept; equal ones cost the same.

    Attributes:
        part: Where it was started from.
    """

    func: Any
    args: Any
    kwargs: Any
    outputs: Any
    part: Part

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> OpCall:
        """Return a call that was made.

        Raises:
            NotImplementedError: It took or made a sparse tensor, whose cost is not told by its shape.
        """
        named = tuple((name, _mapped(_shape_of, value)) for name, value in kwargs.items())
        return cls(func, _mapped(_shape_of, args), named, _mapped(_shape_of, outputs), running_part())

    def costs(self, resized: Callable[[int], int] = int) -> tuple[OpCost, ...]:
        """Return what the op costs, or would cost with dimensions of other sizes."""
        make = functools.partial(_made, resized=resized)
        kwargs = {name: _mapped(make, value) for name, value in self.kwargs}
        return op_cost(self.func, _mapped(make, self.args), kwargs, _mapped(make, self.outputs), self.part)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    return tuple(_mapped(change, one) for one in value) if isinstance(value, (tuple, list)) else change(value)


def _shape_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.layout is not torch.strided:
        raise NotImplementedError(f"what an op on a tensor of {value.layout} costs is not told by its shape")
    return _Tensor(tuple(value.shape), value.stride(), value.dtype)


def _made(value: Any, resized: Callable[[int], int]) -> Any:
    if not isinstance(value, _Tensor):
        return value
    return _meta(tuple(map(resized, value.shape)), tuple(map(resized, value.stride)), value.dtype)


@functools.lru_cache(maxsize=4096)
def _meta(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
