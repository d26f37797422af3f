"""Weigh the scalar outputs of the replicas when they are combined into one.

A loss that is a mean over samples is weighted by samples, one that is a mean over tokens by the tokens of each share,
and a sum by nothing. A module does not say which it is: the gradient check finds it, or whoever wraps the module says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from autosplit.errors import InputError, WorkloadError
from autosplit.torch_versions import FakeTensor

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Reduce = Literal["samples", "tokens", "next tokens", "sum"] | Callable[[Any], float]
"""Way to combine scalar outputs; a callable returns what a replica's counts for from its ``(args, kwargs)``: an amount,
such as its tokens, of which all replicas' sum is the whole."""

_NAMED = ("samples", "tokens", "next tokens", "sum")

IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out by default."""

_DIVISOR = "num_items_in_batch"
"""What transformers passes to models that add their losses up and divide them by it."""


class ReduceWarning(UserWarning):
    """Nobody said how a module's losses are to be combined, and it could not be found out."""


class DoubtfulWeights(list["float | Tensor"]):
    """Weights that were guessed: whoever combines a loss with them calls `say`."""

    def __init__(self, weights: Sequence[float | Tensor], doubt: str) -> None:
        super().__init__(weights)
        self.doubt = doubt

    def say(self) -> None:
        """Warn of the doubt, once."""
        if self.doubt:
            warnings.warn(self.doubt, ReduceWarning, stacklevel=3)
            self.doubt = ""


_looked_at: set[type[nn.Module]] = set()
"""Classes whose labels were looked at: each once in a process."""


def checked_reduce(reduce: Reduce | None) -> Reduce | None:
    """Return a way to combine scalar outputs, checked."""
    if reduce is not None and reduce not in _NAMED and not callable(reduce):
        named = ", ".join(map(repr, _NAMED))
        raise InputError(
            f"reduce is {reduce!r}; expected {named} or a callable; pass one of them, or None", code="reduce"
        )
    return reduce


def weights_of(
    reduce: Reduce | None,
    module: nn.Module,
    chunks: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    sizes: Sequence[int],
) -> list[float | Tensor]:
    """Return what the scalar outputs of each replica count for.

    Args:
        reduce: As the user or the plan says it; None weights by samples. But a call with `num_items_in_batch`, by
            which the module divides a sum itself, is added up.
        chunks: The call of each replica, ``(args, kwargs)``, before anything runs.
        sizes: Samples in each.

    Returns:
        Plain numbers, or, where labels are counted, scalar tensors on the labels' device, so that nothing waits for it;
        `DoubtfulWeights` where they were guessed.
    """
    if callable(reduce):
        amounts = [float(reduce(call)) for call in chunks]
        total = sum(amounts)  # a callable sees one replica's call, and can't know the others'
        return [amount / total if total else amount for amount in amounts]
    if reduce == "sum" or any(kwargs.get(_DIVISOR) is not None for _, kwargs in chunks):
        return [1.0] * len(chunks)
    if reduce == "samples":
        return [*_by_samples(sizes)]
    if reduce is None:
        return [1.0] if len(chunks) == 1 else _by_samples_with_doubts(module, chunks, sizes)
    labels = (_labels_in(kwargs, reduce) for _, kwargs in chunks)
    # A number would wait for the device, and a fake tensor has none. In double precision: a weight in single precision
    # would be the least precise factor of a loss in double.
    return _shares([(one != IGNORED_LABEL).sum().double() for one in labels], sizes)


def _by_samples(sizes: Sequence[int]) -> list[float]:
    total = sum(sizes)
    return [size / total if total else 1.0 for size in sizes]  # an empty batch is one replica's


def _shares(counts: list[Tensor], sizes: Sequence[int]) -> list[float | Tensor]:
    total = torch.stack(counts).sum()
    # In a batch in which nothing counts, each replica gives what the module gives of nothing: weighted by samples,
    # that is what all of them give, be it NaN or 0.
    pairs = zip(counts, _by_samples(sizes), strict=True)
    return [torch.where(total == 0, by_samples, count / total) for count, by_samples in pairs]


def _labels_in(kwargs: Mapping[str, Any], reduce: str) -> Tensor:
    """Return the labels that the loss averages over: the first of a sequence has nothing to predict it from."""
    if reduce == "next tokens" and isinstance(kwargs.get("shift_labels"), Tensor):
        return cast("Tensor", kwargs["shift_labels"])
    labels = kwargs.get("labels")
    if not isinstance(labels, Tensor):
        raise WorkloadError(
            f"reduce={reduce!r} and the call has no tensor named labels among {sorted(kwargs)}; "
            "pass labels= to the module, or a callable as reduce=",
            code="reduce-labels",
        )
    return labels[..., 1:] if reduce == "next tokens" else labels


def is_integer(value: object) -> TypeIs[Tensor]:
    """Tell whether a value is a tensor of whole numbers, as class labels are."""
    own = value.dtype if isinstance(value, Tensor) else torch.bool
    return not (own.is_floating_point or own.is_complex or own == torch.bool)


def _by_samples_with_doubts(
    module: nn.Module, chunks: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]], sizes: Sequence[int]
) -> list[float | Tensor]:
    weights: list[float | Tensor] = [*_by_samples(sizes)]
    kind = type(module)
    if kind in _looked_at:
        return weights
    found = [labels for _, kwargs in chunks if is_integer(labels := kwargs.get("labels"))]
    if not found or torch.compiler.is_compiling() or any(isinstance(one, FakeTensor) or one.is_meta for one in found):
        return weights
    _looked_at.add(kind)  # this look waits for the labels' device, and is the only one
    if not any(bool((item == IGNORED_LABEL).any()) for item in found):
        return weights
    return DoubtfulWeights(
        weights,
        f"autosplit can't know whether {kind.__name__} leaves the labels of {IGNORED_LABEL} out of its loss, so the "
        "replicas' losses were weighted by their samples; pass reduce='tokens' if it does ('next tokens' if it shifts "
        "labels by one, as causal language models do), reduce='samples' if not",
    )


def require_one_number(loss: object) -> None:
    """Raise InputError if a loss is not a tensor of one number."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return
    got = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise InputError(
        f"loss is {got}; expected a tensor of one number; pass the micro-batch's mean, loss.mean()", code="loss-shape"
    )
