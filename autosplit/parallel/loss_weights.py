"""Compute the weights that combine the replicas' scalar losses into one loss.

If the loss is a mean over samples, the weights are the samples of each replica. If the loss is a mean over tokens, they
are the tokens. Sums are added without weights. A module does not show which kind its loss is, so the gradient check
infers the kind, or the user passes `reduce=`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from autosplit.errors import InputError, WorkloadError, warn_user
from autosplit.torch_versions import FakeTensor

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Reduce = Literal["samples", "tokens", "next tokens", "sum"] | Callable[[Any], float]
"""The rule to combine scalar outputs. A callable gets a replica's ``(args, kwargs)`` and returns an amount, for example
its number of tokens. The weight is that amount divided by the sum over all replicas."""

_NAMED = ("samples", "tokens", "next tokens", "sum")

IGNORED_LABEL = -100
"""The label that torch's cross entropy ignores by default."""

_DIVISOR = "num_items_in_batch"
"""The argument by which models of transformers divide their summed losses."""


class ReduceWarning(UserWarning):
    """The rule to combine a module's losses was not given and could not be inferred."""


class UnevenLossWarning(UserWarning):
    """The loss is not a mean over samples, but its micro-batches are weighted by their samples."""


class DoubtfulWeights(list["float | Tensor"]):
    """Guessed weights. Call `say` to warn the user when a loss is combined with them."""

    def __init__(self, weights: Sequence[float | Tensor], doubt: str) -> None:
        super().__init__(weights)
        self.doubt = doubt

    def say(self) -> None:
        """Warn once that the weights are a guess."""
        if self.doubt:
            warn_user(self.doubt, ReduceWarning)
            self.doubt = ""


_MOST_EXAMINED = 8
"""Batches of a class of modules whose labels are examined. Some batches have no padding."""

_examined: Counter[type[nn.Module]] = Counter()
"""Batches that were examined in this process, by class."""


def checked_reduce(reduce: Reduce | None) -> Reduce | None:
    """Return `reduce`, or raise InputError if it is neither a known name, nor a callable, nor None."""
    if reduce is not None and reduce not in _NAMED and not callable(reduce):
        named = ", ".join(map(repr, _NAMED))
        raise InputError(f"reduce is {reduce!r}. Expected {named} or a callable. Pass one of them, or None.")
    return reduce


def weights_of(
    reduce: Reduce | None,
    module: nn.Module,
    chunks: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    sizes: Sequence[int],
) -> list[float | Tensor]:
    """Return the weight of each replica's scalar outputs.

    Args:
        reduce: The rule of the user or the plan. None weights by samples. If a call has `num_items_in_batch`, the
            module divides its sum by that number, so the outputs are added without weights.
        chunks: The call of each replica, ``(args, kwargs)``.

    Returns:
        Plain numbers. If labels are counted, scalar tensors on the labels' device, to avoid a synchronisation. If the
        weights are a guess, `DoubtfulWeights`.
    """
    if callable(reduce):
        amounts = [float(reduce(call)) for call in chunks]
        total = sum(amounts)  # a callable gets the call of only one replica, so it cannot divide by the total
        return [amount / total if total else amount for amount in amounts]
    if reduce == "sum" or any(kwargs.get(_DIVISOR) is not None for _, kwargs in chunks):
        return [1.0] * len(chunks)
    if reduce == "samples":
        return [*by_samples(sizes)]
    if reduce is None:
        return [1.0] if len(chunks) == 1 else _by_samples_with_doubts(module, chunks, sizes)
    labels = (_labels_in(kwargs, reduce) for _, kwargs in chunks)
    # Keep tensors, because `.item()` would wait for the device, and fails on fake tensors. Use float64, because the
    # loss may be float64.
    return _shares([(one != IGNORED_LABEL).sum().double() for one in labels], sizes)


def by_samples(sizes: Sequence[int]) -> list[float]:
    """Return the weight of each replica's loss, if the loss is a mean over samples."""
    total = sum(sizes)
    return [size / total if total else 1.0 for size in sizes]  # an empty batch runs on a single replica


def _shares(counts: list[Tensor], sizes: Sequence[int]) -> list[float | Tensor]:
    total = torch.stack(counts).sum()
    # If every label is ignored, all replicas return the same value, NaN or 0. Weights by samples keep that value.
    pairs = zip(counts, by_samples(sizes), strict=True)
    return [torch.where(total == 0, by_samples, count / total) for count, by_samples in pairs]


def _labels_in(kwargs: Mapping[str, Any], reduce: str) -> Tensor:
    """Return the labels that the loss averages over.

    For "next tokens", leave out the first label of each sequence, because no earlier token predicts it.
    """
    if reduce == "next tokens" and isinstance(kwargs.get("shift_labels"), Tensor):
        return cast("Tensor", kwargs["shift_labels"])
    labels = kwargs.get("labels")
    if not isinstance(labels, Tensor):
        raise WorkloadError(
            f"reduce={reduce!r}, but the call has no tensor named labels. It has {sorted(kwargs)}. Pass labels= to "
            "the module, or a callable as reduce=.",
        )
    return labels[..., 1:] if reduce == "next tokens" else labels


def is_integer(value: object) -> TypeIs[Tensor]:
    """Return whether a value is a tensor of integers, such as class labels."""
    own = value.dtype if isinstance(value, Tensor) else torch.bool
    return not (own.is_floating_point or own.is_complex or own == torch.bool)


def _by_samples_with_doubts(
    module: nn.Module, chunks: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]], sizes: Sequence[int]
) -> list[float | Tensor]:
    weights: list[float | Tensor] = [*by_samples(sizes)]
    kind = type(module)
    if _examined[kind] >= _MOST_EXAMINED:
        return weights
    found = [value for args, kwargs in chunks for value in (*args, *kwargs.values()) if is_integer(value)]
    if not found or torch.compiler.is_compiling() or any(isinstance(one, FakeTensor) or one.is_meta for one in found):
        return weights
    _examined[kind] += 1  # not always, because `bool()` below waits for the labels' device
    if not any(bool((item == IGNORED_LABEL).any()) for item in found):
        return weights
    _examined[kind] = _MOST_EXAMINED
    return DoubtfulWeights(
        weights,
        f"autosplit does not know whether the loss of {kind.__name__} ignores labels of {IGNORED_LABEL}. It "
        "weighted the replicas' losses by their samples. If the loss ignores them, pass reduce='tokens', or 'next "
        "tokens' for causal language models, which shift the labels by one. If not, pass reduce='samples'.",
    )
