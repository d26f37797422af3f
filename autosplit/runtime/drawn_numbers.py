"""Replace the few random numbers that decide a model's path, such as which layers to skip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autosplit.rng import ExtremeDraws
from autosplit.torch_versions import FakeTensor, unset_fake_temporarily

MOST_DECIDED_BY = 64
"""Size of the largest draw that may decide which layers run. Models do not branch on each element of a larger draw."""

_DRAWS = frozenset(
    getattr(packet, overload)
    for packet in (torch.ops.aten.rand, torch.ops.aten.uniform_, torch.ops.aten.bernoulli, torch.ops.aten.bernoulli_)
    for overload in packet.overloads()
    if "out" not in overload
)


def replace_drawn(draws: ExtremeDraws, func: Any, args: Sequence[Any], drawn: Any) -> None:
    """Replace the output of an operator that draws few random numbers. Other operators are unchanged.

    A fake tensor with one element gets the number as its constant, so that `item()` returns it.
    """
    number = draws.draw() if func in _DRAWS and drawn.numel() <= MOST_DECIDED_BY else None
    if number is None:
        return
    if "bernoulli" in func.name():
        number = float(round(number))
    elif func is torch.ops.aten.uniform_.default:
        low, high = args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0
        number = low + (high - low) * number
    if not isinstance(drawn, FakeTensor):
        drawn.fill_(number)
    elif drawn.numel() == 1:
        with unset_fake_temporarily():
            drawn.constant = torch.full(drawn.shape, number, dtype=drawn.dtype)
