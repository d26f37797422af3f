"""Watch a model run: find norms that use batch statistics, and the first module that mixes samples.

Hooks are registered only during a run. They store one number per sample of each activation.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from autosplit.torch_versions import BATCH_NORMS
from autosplit.workload.batch import tensors_of


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
    """Return the error of normalising an input in two parts. A part with one value per channel counts as no error."""
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
    """Switch BatchNorm layers of a copy to running statistics. Layers without any get zeros and ones."""
    for seen in norms:
        norm = seen.norm
        norm.training = False
        if norm.running_mean is None or norm.running_var is None:
            like = next(iter(norm.parameters()), torch.empty(0))
            norm.running_mean = torch.zeros(norm.num_features, dtype=like.dtype)
            norm.running_var = torch.ones(norm.num_features, dtype=like.dtype)


@contextmanager
def watching_draws(models: Sequence[nn.Module]) -> Iterator[list[bool]]:
    """Yield a list with one entry for each forward of a model: whether it drew random numbers itself."""
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


@dataclass(frozen=True)
class _Print:
    """One number for each sample of a module's input or output, in order.

    Attributes:
        place: ``(path, "input" or "output", number of the call in this forward, index of the tensor)``.
        shape: Rows of the tensor for each sample, and values in each row.
        numbers: The numbers.
    """

    place: tuple[str, str, int, int]
    shape: tuple[int, int]
    numbers: Tensor


class Prints:
    """Fingerprints of all modules in a run, as one list per forward of a model, in the order of time.

    Args:
        models: The models that are called with the batch or its parts.
        sizes: Samples of each part.
    """

    def __init__(self, models: Sequence[nn.Module], sizes: tuple[int, ...]) -> None:
        self.forwards: list[list[_Print]] = []
        self._sizes, self._samples = sizes, 0
        self._calls = dict.fromkeys(map(id, models), 0)
        self._counts: Counter[tuple[str, str]] = Counter()

    def watch(self, path: str, module: nn.Module) -> list[RemovableHandle]:
        """Register hooks that take the fingerprints of one module."""

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if id(module) in self._calls:
                self._samples = self._sizes[self._calls[id(module)] % len(self._sizes)]
                self._calls[id(module)] += 1
                self._counts.clear()
                self.forwards.append([])
            self._take(path, "input", (args, kwargs))

        after = module.register_forward_hook(lambda _, __, output: self._take(path, "output", output))
        return [module.register_forward_pre_hook(before, with_kwargs=True), after]

    def _take(self, path: str, kind: str, values: Any) -> None:
        if not self.forwards:  # a module was called outside its model
            return
        self._counts[path, kind] += 1
        for index, tensor in enumerate(tensors_of(values)):
            taken = _numbers(tensor, self._samples)
            if taken is not None:
                self.forwards[-1].append(_Print((path, kind, self._counts[path, kind], index), *taken))


@contextmanager
def printing(
    modules: list[tuple[str, nn.Module]], models: Sequence[nn.Module], sizes: tuple[int, ...]
) -> Iterator[Prints]:
    """Yield fingerprints of all inputs and outputs of all modules, filled while the models run. See `Prints`."""
    prints = Prints(models, sizes)
    with ExitStack() as hooks:
        for path, module in modules:
            for handle in prints.watch(path, module):
                hooks.enter_context(handle)
        yield prints


@torch.no_grad()
def _numbers(tensor: Tensor, samples: int) -> tuple[tuple[int, int], Tensor] | None:
    """Project each sample's part of a tensor onto a fixed direction.

    Return None if the tensor has no sample dimension.
    """
    if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.dim() == 0 or not tensor.numel():
        return None
    rows = 1
    if tensor.size(0) == samples:
        parts = tensor.reshape(samples, -1)
    elif tensor.dim() > 1 and tensor.size(1) == samples:  # the time dimension comes first
        parts = tensor.movedim(1, 0).reshape(samples, -1)
    elif tensor.size(0) % samples == 0:  # samples and time in one dimension
        rows = tensor.size(0) // samples
        parts = tensor.reshape(samples, -1)
    else:
        return None
    direction = torch.cos(torch.arange(1, parts.size(1) + 1, dtype=torch.float64))
    return (rows, parts.size(1)), parts.double() @ direction


def first_difference(whole: Prints, cut: Prints, parts: int, tolerance: float) -> tuple[str, str] | None:
    """Find the module at which a sample first differs between the whole batch and its parts.

    Args:
        whole: Fingerprints of the whole batch.
        cut: Fingerprints of a run in which each forward of a model was run once for each part.
        parts: Number of parts.
        tolerance: Relative difference that counts as equal.

    Returns:
        The module's path and ``"input"`` or ``"output"``; None if nothing differs, or if the runs can't be compared.
    """
    if len(cut.forwards) != parts * len(whole.forwards):
        return None
    for position, taken in enumerate(whole.forwards):
        pieces = [
            {seen.place: seen for seen in prints} for prints in cut.forwards[position * parts : (position + 1) * parts]
        ]
        for seen in taken:
            others = [piece.get(seen.place) for piece in pieces]
            # A tensor whose size per sample depends on the batch is not per sample, such as a similarity matrix. Skip
            # it.
            if any(other is None or other.shape != seen.shape for other in others):
                continue
            numbers = torch.cat([other.numbers for other in others if other is not None])
            if numbers.shape != seen.numbers.shape:
                continue
            size = max(float(seen.numbers.norm()), 1e-300)
            if not float((numbers - seen.numbers).norm()) / size <= tolerance:
                return seen.place[0], seen.place[1]
    return None
