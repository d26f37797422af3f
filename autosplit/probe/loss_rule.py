"""Find the unit that a loss is a mean or a sum over: find weights of two micro-batches that give the whole gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from autosplit.parallel.loss_weights import IGNORED_LABEL, is_integer
from autosplit.probe.gradient_runs import GRADIENT, Gradients, QuietCopy, relative
from autosplit.probe.label_counts import LabelMean
from autosplit.workload.tree import Node


@dataclass(frozen=True)
class Rule:
    """The unit over which a loss averages.

    Attributes:
        over: The unit in words.
        reduction: The `loss_reduction` that makes accumulation exact. None if neither does.
        count: A Python expression that counts the unit in a `batch`, for `plan.steps`. None for samples.
    """

    over: str
    reduction: Literal["mean", "sum"] | None = None
    count: str | None = None


def rule_of(copy: QuietCopy, whole: Gradients, parts: Sequence[Gradients], tolerance: float) -> Rule | None:
    """Find the unit that a loss averages over. Call it only if the workload's `loss_reduction` is known to be wrong.

    Returns:
        The rule. None if the loss depends on the whole batch, or is a mean over a unit that is not in the batch.
    """

    def fits(first: float, second: float) -> bool:
        return relative(mixed(parts, (first, second)), whole)[GRADIENT] <= tolerance

    # A part without a gradient (all of its labels are ignored) would fit any weight.
    if all(bool(part[GRADIENT].any()) for part in parts):
        if copy.workload.loss_reduction == "sum" and fits(*by_samples(copy)):
            return Rule("samples", reduction="mean")
        if copy.workload.loss_reduction == "mean" and fits(1.0, 1.0):
            return Rule("samples", reduction="sum")
    for over, expression, (first, second) in _countable(copy):
        if first + second > 0 and fits(first / (first + second), second / (first + second)):
            return Rule(over, count=expression)
    return None


def by_samples(copy: QuietCopy) -> tuple[float, float]:
    """Return the weights of the micro-batches if the loss is a mean over samples."""
    first, second = copy.micro_sizes
    return first / (first + second), second / (first + second)


def mixed(parts: Sequence[Gradients], weights: tuple[float, float]) -> Gradients:
    """Add the weighted gradients of two micro-batches, as accumulation does."""
    first, second = (part[GRADIENT] for part in parts)
    return {GRADIENT: (first * weights[0]).add_(second, alpha=weights[1])}


def reduction_of(copy: QuietCopy) -> Literal["tokens", "next tokens"] | None:
    """Return the labels over which to average the losses that replicas compute. None if no cross entropy uses them.

    The labels of the sample batch may all count. But those of the next batch may not.
    """
    places = [leaf.place for leaf in Node.of(copy.batch).leaves]
    for mean in copy.label_means if copy.workload.batch_dim == 0 else ():
        if mean.is_mean and not mean.is_special and places[mean.position] == "['labels']":
            return "next tokens" if mean.is_shifted else "tokens"
    return None


def _countable(copy: QuietCopy) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """Yield the labels of the loss's cross entropies, then all labels and masks of the batch, the last tensor first.

    Each item has a description, a Python expression that counts it in `batch`, and its counts in the two micro-batches.
    """
    first, second = copy.micro_batches
    for mean in copy.label_means:
        yield str(mean), _expression(copy, mean), (mean(first), mean(second))
    leaves = zip(Node.of(first, "batch").leaves, Node.of(second).leaves, strict=True)
    for place, one, other in reversed([(leaf.place, leaf.value, twin.value) for leaf, twin in leaves]):
        if not isinstance(one, Tensor) or one.dim() == 0 or one.is_complex():
            continue
        if is_integer(one):
            for columns in ("", "[:, 1:]") if one.dim() > 1 else ("",):
                counted = [(tensor[:, 1:] if columns else tensor) != IGNORED_LABEL for tensor in (one, other)]
                over = f"the labels that are not {IGNORED_LABEL}{', without the first of each sample' * bool(columns)}"
                yield over, f"int(({place}{columns} != {IGNORED_LABEL}).sum())", _sums(*counted)
        elif min(sums := _sums(one, other)) >= 0:
            is_mask = all(count.is_integer() for count in sums)
            over = f"what {place} marks" if is_mask else f"the weights in {place}"
            yield over, f"{'int' if is_mask else 'float'}({place}.sum())", sums


def _expression(copy: QuietCopy, mean: LabelMean) -> str:
    place = Node.of(copy.batch, "batch").leaves[mean.position].place
    labels = f"{place}{'[:, 1:]' * mean.is_shifted}"
    condition = f"{labels} != {mean.ignored}"
    if mean.weights is None:
        return f"int(({condition}).sum())"
    is_given = isinstance(getattr(copy.workload.loss_fn, "weight", None), Tensor)
    return f"float({'loss_fn.weight' if is_given else 'class_weights'}[{labels}[{condition}]].sum())"


def rule_for_other_batches(copy: QuietCopy) -> Rule | None:
    """Return the rule of a mean cross entropy with class weights or its own `ignore_index`. None for other losses.

    In the sample batch, both micro-batches may have the same divisor by chance. Their gradients then show no error, but
    other batches need the rule.
    """
    special = [mean for mean in copy.label_means if mean.is_special and mean.is_mean]
    if copy.workload.loss_reduction != "mean" or not special:
        return None
    mean = max(special, key=lambda mean: (mean.position, not mean.is_shifted))  # labels follow inputs
    return Rule(str(mean), count=_expression(copy, mean))


def _sums(first: Tensor, second: Tensor) -> tuple[float, float]:
    return float(first.double().sum()), float(second.double().sum())
