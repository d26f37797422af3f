"""Count the labels, or the class weights of the labels, that a cross entropy divides by.

The arguments of `torch.nn.functional.cross_entropy` and `nll_loss` are recorded when the loss runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autosplit.parallel.batch_counts import as_count
from autosplit.parallel.loss_weights import IGNORED_LABEL, is_integer
from autosplit.workload.tree import Node


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """The arguments of one call of a cross entropy.

    Attributes:
        weights: The class weights, in double precision on the CPU. None if all are equal.
        is_mean: Whether the call returned the mean.
    """

    target: Tensor
    weights: Tensor | None
    ignored: int
    is_mean: bool

    @classmethod
    def of_call(cls, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CrossEntropy | None:
        """Return the arguments of a call of a torch function. None for other functions, and for class probabilities."""
        if getattr(function, "__name__", "") not in ("cross_entropy", "nll_loss"):
            return None
        given = {**dict(zip(("input", "target", "weight"), args, strict=False)), **kwargs}
        weights = given.get("weight")
        if weights is not None:
            weights = weights.detach().double().cpu() if bool((weights != weights.flatten()[0]).any()) else None
        if not is_integer(given["target"]):
            return None
        ignored, reduction = given.get("ignore_index", IGNORED_LABEL), given.get("reduction", "mean")
        return cls(given["target"].detach(), weights, ignored, reduction == "mean")


class CrossEntropies(TorchFunctionMode):
    """Record the cross entropies that run in a `with` block, in `seen`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[CrossEntropy] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = CrossEntropy.of_call(func, args, kwargs or {})
        if found is not None:
            self.seen.append(found)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, eq=False)
class LabelMean:
    """Count the labels of a cross entropy that are not ignored, or add up their class weights.

    Attributes:
        position: The position of the labels among the batch's leaves.
        is_shifted: Whether the loss skips the first label of each sequence.
        weights: The class weights, in double precision on the CPU. None if all are equal.
        is_mean: Whether the cross entropy is known to divide by this count.
    """

    position: int
    is_shifted: bool
    ignored: int
    weights: Tensor | None
    is_mean: bool = True

    @property
    def is_special(self) -> bool:
        """Whether no named rule of `reduce` gives this count."""
        return self.weights is not None or self.ignored != IGNORED_LABEL

    def __call__(self, batch: Any) -> float:
        """Return the divisor of a batch's loss."""
        labels = Node.of(batch).leaves[self.position].value
        used = _counted_labels(labels, self.ignored, is_shifted=self.is_shifted)
        return used.numel() if self.weights is None else as_count(self.weights[used].sum(), "the class weights' sum")

    def __str__(self) -> str:
        labels = f"labels that are not {self.ignored}" + ", without the first label of each sequence" * self.is_shifted
        return labels if self.weights is None else f"the class weights of the {labels}"


def label_means(seen: Iterable[CrossEntropy], batch: Any) -> Iterator[LabelMean]:
    """Yield the ways to count the labels of each cross entropy, if the batch contains the labels."""
    for one in seen:
        used = one.target[one.target != one.ignored].cpu().long()
        for position, leaf in enumerate(node.value for node in Node.of(batch).leaves):
            if not is_integer(leaf):
                continue
            for is_shifted in (False, True) if leaf.dim() > 1 else (False,):
                if torch.equal(_counted_labels(leaf, one.ignored, is_shifted=is_shifted), used):
                    yield LabelMean(position, is_shifted, one.ignored, one.weights, one.is_mean)


def _counted_labels(labels: Tensor, ignored: int, *, is_shifted: bool) -> Tensor:
    labels = labels[..., 1:] if is_shifted else labels
    return labels[labels != ignored].cpu().long()
