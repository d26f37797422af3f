"""Watch a model run: find norms that use batch statistics, and the first module that mixes samples.

Hooks are registered only during a run. They store one number per sample of each activation.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autosplit.torch_versions import BATCH_NORMS
from autosplit.workload.tree import tensors_of


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


class Print(NamedTuple):
    """A fingerprint of a module's output: one number for each sample.

    `width` is the number of values that a sample has. It is 0 if the tensor has no sample dimension.
    """

    path: str
    width: int
    numbers: Tensor


@contextmanager
def printing(
    modules: list[tuple[str, nn.Module]], models: Sequence[nn.Module], sizes: tuple[int, ...]
) -> Iterator[list[list[Print]]]:
    """Yield one list per forward of a model, with fingerprints of its modules' outputs in the order of the calls.

    Args:
        models: The models that are called with the batch or its parts.
        sizes: Samples of each part. The forwards of all parts follow each other.
    """
    forwards: list[list[Print]] = [[]]
    roots = set(map(id, models))

    def take(path: str, module: nn.Module, _: Any, output: Any) -> None:
        samples = sizes[(len(forwards) - 1) % len(sizes)]
        forwards[-1] += [Print(path, *_numbers(tensor, samples)) for tensor in tensors_of(output)]
        if id(module) in roots:
            forwards.append([])

    with ExitStack() as hooks:
        for path, module in modules:
            hooks.enter_context(module.register_forward_hook(partial(take, path)))
        yield forwards


@torch.no_grad()
def _numbers(tensor: Tensor, samples: int) -> tuple[int, Tensor]:
    is_plain = tensor.is_floating_point() and tensor.layout == torch.strided and tensor.dim() > 0
    if is_plain and tensor.dim() > 1 and tensor.size(0) != samples == tensor.size(1):
        tensor = tensor.movedim(1, 0)  # The time dimension comes first.
    if not is_plain or not tensor.numel() or tensor.size(0) % samples:
        return 0, tensor.new_empty(0)
    parts = tensor.reshape(samples, -1).double()  # Samples and time may share one dimension.
    return parts.size(1), parts @ torch.cos(torch.arange(1, parts.size(1) + 1, dtype=torch.float64))


def first_difference(whole: list[list[Print]], cut: list[list[Print]], parts: int, tolerance: float) -> str | None:
    """Find the first module whose output for a sample differs between the whole batch and its parts.

    Args:
        whole: Fingerprints of the whole batch.
        cut: Fingerprints of a run that ran each forward of a model once for each part.
        tolerance: Relative difference that counts as equal.

    Returns:
        The module's path. None if nothing differs, or if the runs can't be compared.
    """
    for position, forward in enumerate(whole if len(cut) == parts * (len(whole) - 1) + 1 else ()):
        for seen, *pieces in zip(forward, *cut[position * parts : (position + 1) * parts], strict=False):
            if any(piece.path != seen.path for piece in pieces):
                return None
            # If the number of values per sample depends on the batch, the tensor is not per sample (such as a
            # similarity matrix).
            if not seen.width or any(piece.width != seen.width for piece in pieces):
                continue
            numbers = torch.cat([piece.numbers for piece in pieces])
            if not float((numbers - seen.numbers).norm()) <= tolerance * max(float(seen.numbers.norm()), 1e-300):
                return str(seen.path)
    return None
