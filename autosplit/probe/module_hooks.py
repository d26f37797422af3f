"""Watch a model run: find norms that use batch statistics, and forwards that draw random numbers.

Hooks are registered only during a run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.torch_versions import BATCH_NORMS


@dataclass
class NormSeen:
    """A BatchNorm layer that normalised by batch statistics.

    The errors compare its output for the whole input with its output for the split input: over two devices, or in two
    micro-batches.
    """

    path: str
    norm: Any
    split_error: float = 0.0
    accumulation_error: float = 0.0


@contextmanager
def watching_norms(
    modules: list[tuple[str, nn.Module]], shares: tuple[int, int], micro_sizes: tuple[int, int]
) -> Iterator[dict[str, NormSeen]]:
    """Yield the BatchNorm layers that use batch statistics, by path. The dict is filled while the model runs.

    The output of each layer is compared with its outputs for the input split over devices and in micro-batches.
    """
    found: dict[str, NormSeen] = {}

    def look(path: str, norm: Any, args: tuple[Any, ...], _: Any) -> None:
        looks_at_the_batch = norm.training or (norm.running_mean is None and norm.running_var is None)
        if not (args and isinstance(args[0], Tensor) and looks_at_the_batch):
            return
        seen = found.setdefault(path, NormSeen(path, norm))
        seen.split_error = max(seen.split_error, _cut_error(norm, args[0].detach(), shares))
        seen.accumulation_error = max(seen.accumulation_error, _cut_error(norm, args[0].detach(), micro_sizes))

    with ExitStack() as hooks:
        for path, module in modules:
            if isinstance(module, BATCH_NORMS):
                hooks.enter_context(module.register_forward_hook(partial(look, path)))
        yield found


@torch.no_grad()
def _cut_error(norm: Any, given: Tensor, sizes: tuple[int, int]) -> float:
    """Return the error of normalising an input in two parts. Return 0 if a part has one value per channel."""
    cut = round(given.size(0) * sizes[0] / sum(sizes))
    parts = [part for part in (given[:cut], given[cut:]) if part.numel() > part.size(1)]
    if len(parts) < 2:
        return 0.0
    weight, bias = norm.weight, norm.bias
    whole, *halves = (
        F.batch_norm(part, None, None, weight, bias, training=True, eps=norm.eps) for part in (given, *parts)
    )
    size = whole.double().norm()
    return float((torch.cat(halves) - whole).double().norm() / size) if size else 0.0


def freeze(norms: list[NormSeen]) -> None:
    """Switch BatchNorm layers of a copy to running statistics. Missing statistics become zeros and ones."""
    for seen in norms:
        norm = seen.norm
        norm.training = False
        if norm.running_mean is None or norm.running_var is None:
            like = next(iter(norm.parameters()), torch.empty(0))
            norm.running_mean = torch.zeros(norm.num_features, dtype=like.dtype)
            norm.running_var = torch.ones(norm.num_features, dtype=like.dtype)


@contextmanager
def watching_draws(models: Sequence[nn.Module]) -> Iterator[list[bool]]:
    """Yield a list with one entry for each forward of a model: whether the forward drew random numbers."""
    draws: list[bool] = []
    begun = [_random_state()]

    def before(*_: Any) -> None:
        begun[0] = _random_state()

    def after(*_: Any) -> None:
        draws.append(begun[0] != _random_state())

    with ExitStack() as hooks:
        for model in models:
            hooks.enter_context(model.register_forward_pre_hook(before))
            hooks.enter_context(model.register_forward_hook(after))
        yield draws


def _random_state() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    of_numpy = "" if numpy is None else repr(numpy.random.get_state())
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), of_numpy
