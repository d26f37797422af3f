"""What the scalar outputs of each replica count for when they are combined into one.

A loss that is a mean over samples is right when it is weighted by samples; one that is a mean over tokens needs
the tokens of each share, and one that is a sum needs nothing. Where nobody says which it is, the module decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autosplit.errors import InputError, WorkloadError
from autosplit.parallel.transformers_loss import HeadLoss, head_of, is_integer, loss_of, parameters_of

__all__ = [
    "IGNORED_LABEL",
    "DoubtfulWeights",
    "Reduce",
    "ReduceWarning",
    "checked_reduce",
    "weights_of",
]

Reduce = Literal["samples", "tokens", "sum"] | Callable[[Any], float]
"""How scalar outputs are combined; a callable returns what a replica's counts for from its ``(args, kwargs)``: an
amount, such as its tokens, of which all replicas' sum is the whole."""

IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out by default."""


class ReduceWarning(UserWarning):
    """Nobody said how a module's losses are to be combined, and it could not be found out."""


class DoubtfulWeights(list["float | Tensor"]):
    """Weights that were guessed: whoever combines a loss with them calls `say`.

    Args:
        weights: What each replica counts for.
        kind: The class of the module, of which it is said once.
        doubt: What is not known, what was done about it, and what settles it.
    """

    def __init__(self, weights: Sequence[float | Tensor], kind: type[nn.Module], doubt: str) -> None:
        super().__init__(weights)
        self.kind = kind
        self.doubt = doubt

    def say(self) -> None:
        """Warn of the doubt, once per module class in a process."""
        if self.kind not in _said:
            _said.add(self.kind)
            warnings.warn(self.doubt, ReduceWarning, stacklevel=3)


# Classes of modules: those whose labels were looked at, and those whose doubt was said.
_looked_at: set[type[nn.Module]] = set()
_said: set[type[nn.Module]] = set()


def checked_reduce(reduce: Reduce | None) -> Reduce | None:
    """Check how scalar outputs are to be combined.

    Args:
        reduce: ``"samples"``, ``"tokens"``, ``"sum"``, a callable, or None where the module decides.

    Returns:
        The very same.

    Raises:
        InputError: It is none of them.
    """
    if reduce is not None and reduce not in ("samples", "tokens", "sum") and not callable(reduce):
        raise InputError(
            f"reduce is {reduce!r}; expected 'samples', 'tokens', 'sum' or a callable; pass one of them, or None"
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
        reduce: As the user said it; None lets the module decide: a transformers model by the code of its head,
            any other one by samples.
        module: The module whose replicas get the chunks.
        chunks: The call of each replica, ``(args, kwargs)``, before anything runs.
        sizes: Samples in each.

    Returns:
        Weights: plain numbers, or, where labels are counted, scalar tensors on the device of the labels, so that
        nothing waits for it; `DoubtfulWeights` where they were guessed.

    Raises:
        WorkloadError: ``reduce="tokens"``, and a call without a tensor named `labels`.
    """
    if reduce == "sum":
        return [1.0] * len(chunks)
    if reduce == "samples":
        return [*_by_samples(sizes)]
    if reduce == "tokens":
        return _shares([_count(_labels_in(kwargs), IGNORED_LABEL) for _, kwargs in chunks], sizes)
    if reduce is not None:
        return _normalised([float(reduce(call)) for call in chunks])
    if len(chunks) == 1:  # nothing to combine
        return [1.0]
    head = head_of(module)
    if head is None:
        return _by_any_module(module, chunks, sizes)
    names = parameters_of(module)
    calls = [{**dict(zip(names, args, strict=False)), **kwargs} for args, kwargs in chunks]
    return _by_head(head, calls, sizes)


def _normalised(amounts: list[float]) -> list[float | Tensor]:
    """Return amounts as shares of their sum; a callable sees one replica's call, and can't know the others'."""
    total = sum(amounts)
    return [amount / total if total else amount for amount in amounts]


def _by_samples(sizes: Sequence[int]) -> list[float]:
    total = sum(sizes)
    return [size / total if total else 1.0 for size in sizes]  # an empty batch is one replica's


def _shares(counts: list[Tensor], sizes: Sequence[int]) -> list[float | Tensor]:
    total = torch.stack(counts).sum()
    # In a batch in which nothing counts, each replica gives what the module gives of nothing: weighted by samples,
    # that is what all of them give, be it NaN or 0.
    return [
        torch.where(total == 0, by_samples, count / total)
        for count, by_samples in zip(counts, _by_samples(sizes), strict=True)
    ]


def _count(labels: Tensor, ignored: int) -> Tensor:
    # Stays a tensor: a number would wait for the device, and a fake tensor has none. In double precision, since a
    # weight in single precision would be the least precise factor of a loss in double.
    return (labels != ignored).sum().double()


def _labels_in(kwargs: Mapping[str, Any]) -> Tensor:
    labels = kwargs.get("labels")
    if not isinstance(labels, Tensor):
        raise WorkloadError(
            f"reduce='tokens' and the call has no tensor named labels among {sorted(kwargs)}; "
            "pass labels= to the module, or a callable as reduce="
        )
    return labels


# Models of transformers


def _by_head(head: nn.Module, calls: list[dict[str, Any]], sizes: Sequence[int]) -> list[float | Tensor]:
    loss = loss_of(head, calls[0])
    name = type(head).__name__
    if loss is None:
        return DoubtfulWeights(
            _by_samples(sizes),
            type(head),
            f"autosplit can't tell from its code what the loss of {name} is a mean over, so the replicas' losses "
            "were weighted by their samples; pass reduce='samples', 'tokens', 'sum' or a callable to say what is right",
        )
    weights = _by_loss(loss, calls, sizes)
    if loss.adds_router_loss:
        return DoubtfulWeights(
            weights,
            type(head),
            f"the loss of {name} holds a loss of its routers, which is no mean over anything, so the replicas' losses "
            "were combined as the rest of it needs; pass reduce= to have it another way, or output_router_logits=False",
        )
    return weights


def _by_loss(loss: HeadLoss, calls: list[dict[str, Any]], sizes: Sequence[int]) -> list[float | Tensor]:
    if loss.over == "sum" or (loss.divides and calls[0].get("num_items_in_batch") is not None):
        return [1.0] * len(calls)
    if loss.over == "samples":
        return [*_by_samples(sizes)]
    if loss.over == "spans":
        lengths = [_length_of(call) for call in calls]
        if None in lengths:
            return [*_by_samples(sizes)]
        return _shares([_count_spans(call, length) for call, length in zip(calls, lengths, strict=True)], sizes)
    if loss.over == "next labels" and not isinstance(calls[0].get("shift_labels"), Tensor):
        return _shares([_count(call["labels"][..., 1:], loss.ignored) for call in calls], sizes)
    name = "shift_labels" if loss.over == "next labels" else "labels"
    return _shares([_count(call[name], loss.ignored) for call in calls], sizes)


def _length_of(call: Mapping[str, Any]) -> int | None:
    for name in ("input_ids", "inputs_embeds"):
        value = call.get(name)
        if isinstance(value, Tensor) and value.dim() > 1:
            return value.size(1)
    return None


def _count_spans(call: Mapping[str, Any], length: int | None) -> Tensor:
    # A position behind the end of the input is the one that the loss ignores.
    assert length is not None
    return torch.stack([(call[name] < length).sum().double() for name in ("start_positions", "end_positions")]).sum()


# Any other module


def _by_any_module(
    module: nn.Module, chunks: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]], sizes: Sequence[int]
) -> list[float | Tensor]:
    weights: list[float | Tensor] = [*_by_samples(sizes)]
    kind = type(module)
    if kind in _looked_at:
        return weights
    labels = [kwargs.get("labels") for _, kwargs in chunks]
    found = [item for item in labels if isinstance(item, Tensor) and is_integer(item)]
    if not found or not all(_can_be_looked_at(item) for item in found):
        return weights
    _looked_at.add(kind)  # this look waits for the labels' device, and is the only one
    if not any(bool((item == IGNORED_LABEL).any()) for item in found):
        return weights
    return DoubtfulWeights(
        weights,
        kind,
        f"autosplit can't know whether {kind.__name__} leaves the labels of {IGNORED_LABEL} out of its loss, so the "
        "replicas' losses were weighted by their samples; pass reduce='tokens' if it does, reduce='samples' if not",
    )


def _can_be_looked_at(tensor: Tensor) -> bool:
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta or torch.compiler.is_compiling())
