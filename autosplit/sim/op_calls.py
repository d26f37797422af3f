"""Record an op's call without its tensors, and compute its cost for a different batch size.

Note [Odd splits]
~~~~~~~~~~~~~~~~~
A step is traced once, with an odd batch size: a prime such as 1031 that divides no dimension of the model. So a
dimension comes from the batch exactly if 1031 divides it:

    traced with 1031        rule              with a batch of 8
    (12372, 64)             (12 * n, 64)      (96, 64)
    (64, 12)                fixed             (64, 12)

One trace then gives the shapes, bytes and work of every batch size. In a step of two devices, the sizes 1031 and 1051
distinguish their samples. The whole batch (for example, the gathered outputs) is 2082. With an ordinary size such as
32, a hidden size of 64 would look like two samples. A batch of 1 stays 1. See Note [A batch of one].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosplit.sim.kernel_time import Part
from autosplit.sim.op_cost import OpCost, op_cost

ODD_SIZES = (1031, 1051)
"""Odd sizes for up to two devices. No common model has a dimension that these primes or their sum divide.

They are above the common batch size 1024. Predictions up to an odd size need no check with a larger traced step.
"""


def odd_split(split: Sequence[int]) -> tuple[int, ...]:
    """Replace each batch of 2 or more in a split with an odd size. See Note [Odd splits].

    Raises:
        ValueError: More devices have 2 or more samples than there are odd sizes.
    """
    if sum(samples > 1 for samples in split) > len(ODD_SIZES):
        raise ValueError(f"the split {split} has samples on more than {len(ODD_SIZES)} devices")
    sizes = iter(ODD_SIZES)
    return tuple(next(sizes) if samples > 1 else samples for samples in split)


def resizer(before: tuple[int, ...], after: tuple[int, ...]) -> Callable[[int], int]:
    """Return a function that converts a dimension or a number of bytes to a different split. See Note [Odd splits]."""
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
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OpCall:
    """A call of an op, with shapes in place of tensors. Equal calls cost the same."""

    func: Any
    args: Any
    kwargs: Any
    outputs: Any
    part: Part

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # other processes hash otherwise

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.func, self.args, self.kwargs, self.outputs, self.part))

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any, part: Part) -> OpCall:
        """Record a call with the outputs that it returned.

        Raises:
            NotImplementedError: An argument or output is a sparse tensor, whose shape does not determine the cost.
        """
        named = tuple((name, _mapped(_shape_of, value)) for name, value in kwargs.items())
        return cls(func, _mapped(_shape_of, args), named, _mapped(_shape_of, outputs), part)

    def costs(self, resized: Callable[[int], int] = int) -> tuple[OpCost, ...]:
        """Return the costs of the op, with each dimension converted by `resized`."""
        make = functools.partial(_made, resized=resized)
        kwargs = {name: _mapped(make, value) for name, value in self.kwargs}
        return op_cost(self.func, _mapped(make, self.args), kwargs, _mapped(make, self.outputs), self.part)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    return tuple(_mapped(change, one) for one in value) if isinstance(value, (tuple, list)) else change(value)


def _shape_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.layout is not torch.strided:
        raise NotImplementedError(f"the cost of an op on a {value.layout} tensor can't be predicted from its shape")
    return _Tensor(tuple(value.shape), value.stride(), value.dtype)


def _made(value: Any, resized: Callable[[int], int]) -> Any:
    if not isinstance(value, _Tensor):
        return value
    return _meta(tuple(map(resized, value.shape)), tuple(map(resized, value.stride)), value.dtype)


@functools.lru_cache(maxsize=4096)
def _meta(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
