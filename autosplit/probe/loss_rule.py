"""Find the unit that a loss is a mean or a sum over: find weights of two micro-batches that give the whole gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from autosplit.parallel.loss_graph import LabelMean
from autosplit.parallel.loss_weights import IGNORED_LABEL, is_integer
from autosplit.probe.gradient_runs import GRADIENT, Gradients, QuietCopy, relative
from autosplit.workload.tree import named_leaves


@dataclass(frozen=True)
class Rule:
    """The unit over which a loss averages.

    Attributes:
        over: The unit in words.
        reduction: The `loss_reduction` that makes accumulation exact. None if neither does.
        count: A Python expression that counts the unit in a `batch`, for `plan.steps`. None if the unit is unknown.
    """

    over: str
    reduction: str | None = None
    count: str | None = None


def rule_of(copy: QuietCopy, whole: Gradients, parts: Sequence[Gradients], tolerance: float) -> Rule | None:
    """Find the unit that a loss averages over. Call it only if the workload's `loss_reduction` is known to be wrong.

    Returns:
        The rule. None if no weights of the micro-batches are exact, so the loss depends on the whole batch.
    """

    def fits(first: float, second: float) -> bool:
        return relative(mixed(parts, (first, second)), whole)[GRADIENT] <= tolerance

    total = sum(copy.shares)
    # A part without a gradient (all of its labels are ignored) would fit any weight.
    if all(bool(part[GRADIENT].any()) for part in parts):
        if copy.workload.loss_reduction == "sum" and fits(*(size / total for size in copy.micro_sizes)):
            return Rule("samples", reduction="mean")
        if copy.workload.loss_reduction == "mean" and fits(1.0, 1.0):
            return Rule("samples", reduction="sum")
    for over, expression, (first, second) in _countable(copy):
        if first + second > 0 and fits(first / (first + second), second / (first + second)):
            return Rule(over, count=expression)
    columns = torch.stack([part[GRADIENT] for part in parts], 1)
    if not columns.isfinite().all():
        return None
    weights = torch.linalg.lstsq(columns, whole[GRADIENT].unsqueeze(1)).solution.flatten().tolist()
    is_mean = min(weights) > 0 and abs(sum(weights) - 1) <= 100 * tolerance
    return Rule("something else") if is_mean and fits(*weights) else None


def mixed(parts: Sequence[Gradients], weights: tuple[float, float]) -> Gradients:
    """Add the weighted gradients of two micro-batches, as accumulation does."""
    first, second = (part[GRADIENT] for part in parts)
    return {GRADIENT: (first * weights[0]).add_(second, alpha=weights[1])}


def reduction_of(copy: QuietCopy, tolerance: float) -> Literal["samples", "tokens", "next tokens"] | None:
    """Find the unit over which to average the losses that replicas compute, by ignoring some labels.

    If all samples had the same number of labels, a mean over samples and one over tokens would be equal. But the next
    batch may have other lengths.

    Returns:
        The unit that makes the gradient exact. None if none does, or if the batch has no labels to ignore.
    """
    given = copy.batch
    batch = _with_fewer_labels(given) if copy.workload.batch_dim == 0 else None
    if batch is None:
        return None
    try:
        copy.batch = batch
        whole = copy.whole()
        for reduce in ("samples", "tokens", "next tokens"):
            if max(relative(copy.split(reduce), whole).values()) <= tolerance:
                return reduce
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  # the model may not accept the label -100, or labels by name
        return None
    finally:
        copy.batch = given
    return None


def _with_fewer_labels(batch: Any) -> dict[str, Any] | None:
    """Return a batch that ignores half of the labels of the sample with the most labels, but not its first label."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not is_integer(labels) or labels.dim() == 0:
        return None
    labels = labels.clone()
    counts = (labels != IGNORED_LABEL).flatten(1).sum(1) if labels.dim() > 1 else labels != IGNORED_LABEL
    fullest = labels[int(counts.int().argmax())]
    if labels.dim() > 1 and len(fullest) > 2:
        fullest[1 : 1 + len(fullest) // 2] = IGNORED_LABEL
    else:
        fullest.fill_(IGNORED_LABEL)
    return {**batch, "labels": labels}


def _countable(copy: QuietCopy) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """Yield the labels of the loss's cross entropies, then all labels and masks of the batch, the last tensor first.

    Each item has a description, a Python expression that counts it in `batch`, and its counts in the two micro-batches.
    """
    first, second = copy.micro_batches
    leaves = [*named_leaves(first, "batch")]
    for mean in copy.label_means:
        yield str(mean), _expression(copy, mean), (mean(first), mean(second))
    for (place, one), (_, other) in reversed([*zip(leaves, named_leaves(second, "batch"), strict=True)]):
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
    place, _ = [*named_leaves(copy.batch, "batch")][mean.position]
    labels = f"{place}{'[:, 1:]' * mean.is_shifted}"
    kept = f"{labels} != {mean.ignored}"
    if mean.weights is None:
        return f"int(({kept}).sum())"
    is_given = isinstance(getattr(copy.workload.loss_fn, "weight", None), Tensor)
    return f"float({'loss_fn.weight' if is_given else 'class_weights'}[{labels}[{kept}]].sum())"


def unseen_rule(copy: QuietCopy) -> Rule | None:
    """Return the unit of a cross entropy with class weights or with its own `ignore_index`. None for other losses.

    The micro-batches of the sample batch may have equal counts by chance. Other batches have other labels.
    """
    if copy.workload.loss_reduction != "mean":
        return None
    special = [mean for mean in copy.label_means if mean.is_special]
    if not special:
        return None
    mean = max(special, key=lambda mean: (mean.position, not mean.is_shifted))  # labels follow inputs
    return Rule(str(mean), count=_expression(copy, mean))


def _sums(first: Tensor, second: Tensor) -> tuple[float, float]:
    return float(first.double().sum()), float(second.double().sum())
