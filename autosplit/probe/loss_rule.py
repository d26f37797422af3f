"""Find what a loss is a mean or a sum over: find weights of two parts' gradients that give the whole gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from autosplit.parallel.loss_graph import LabelMean
from autosplit.parallel.loss_weights import IGNORED_LABEL, is_integer
from autosplit.probe.gradient_runs import GRADIENT, Gradients, QuietCopy, relative
from autosplit.workload.batch import named_leaves
from autosplit.workload.workload import Workload


@dataclass(frozen=True)
class Rule:
    """The unit over which a loss averages.

    Attributes:
        over: The unit over which the loss is a mean, as a text.
        reduction: The `loss_reduction` that makes accumulation exact; None if neither does.
        count: A Python expression that counts the unit in a batch, for `plan.steps`.
        ratio: Weight of the first micro-batch relative to the second, if the unit is unknown.
    """

    over: str
    reduction: str | None = None
    count: str | None = None
    ratio: float = 0.0


def rule_of(
    whole: Gradients,
    parts: Sequence[Gradients],
    sizes: tuple[int, int],
    micro_batches: Sequence[Any],
    workload: Workload,
    tolerance: float,
    read: Callable[[], Sequence[LabelMean]] = tuple,
) -> Rule | None:
    """Find what a loss is a mean or a sum over: find weights of the parts' gradients that give the whole gradient.

    Args:
        whole: Gradient of the whole batch.
        parts: Gradients of the two micro-batches, without weights.
        sizes: Samples of the two micro-batches.
        micro_batches: The two micro-batches.
        workload: The workload. Its `loss_reduction` was found to be wrong.
        tolerance: Largest relative difference of equal gradients.
        read: Return the means of the cross entropies in the loss's graph.

    Returns:
        The rule; None if no weights make it exact, so the loss depends on the whole batch.
    """
    mixing = Mixing.of(whole, parts)

    def fits(counts: tuple[float, float], *, normed: bool = True) -> bool:
        total = sum(counts) if normed else 1.0
        # The error is the root of a sum of squares, which is rounded to 1e-16. So it can't be smaller than about 1e-8.
        return total > 0 and mixing.error((counts[0] / total, counts[1] / total)) <= max(tolerance, 1e-7)

    # A part without a gradient (all of its labels are ignored) would fit any weight.
    if min(mixing.aa, mixing.bb) > 0:
        if workload.loss_reduction == "sum" and fits((float(sizes[0]), float(sizes[1]))):
            return Rule("samples", reduction="mean")
        if workload.loss_reduction == "mean" and fits((1.0, 1.0), normed=False):
            return Rule("samples", reduction="sum")
    for over, expression, counts in itertools.chain(
        _countable(micro_batches, workload), _by_class_weights(micro_batches, workload, read)
    ):
        if fits(counts):
            return Rule(over, count=expression)
    weights = mixing.solution()
    if weights is None or min(weights) <= 0 or abs(sum(weights) - 1) > 100 * tolerance:
        return None
    return Rule("something else", ratio=weights[0] / weights[1]) if fits(weights, normed=False) else None


@dataclass(frozen=True)
class Mixing:
    """Inner products of the whole batch's gradient g and its two parts' gradients a and b, divided by |g|²."""

    ga: float
    gb: float
    aa: float
    ab: float
    bb: float

    @classmethod
    def of(cls, whole: Gradients, parts: Sequence[Gradients]) -> Mixing:
        """Compute the inner products."""
        g, (a, b) = whole[GRADIENT], [part[GRADIENT] for part in parts]
        size = float(g @ g) or 1.0
        ga, gb, aa, ab, bb = (float(x @ y) / size for x, y in ((g, a), (g, b), (a, a), (a, b), (b, b)))
        return cls(ga, gb, aa, ab, bb)

    def error(self, weights: tuple[float, float]) -> float:
        """Return ``|g - u a - v b| / |g|``."""
        u, v = weights
        square = 1 - 2 * (u * self.ga + v * self.gb) + u * u * self.aa + 2 * u * v * self.ab + v * v * self.bb
        return math.sqrt(max(0.0, square)) if math.isfinite(square) else math.inf

    def solution(self) -> tuple[float, float] | None:
        """Return the weights with the least error, or None if the parts' gradients are parallel."""
        determinant = self.aa * self.bb - self.ab * self.ab
        if not determinant > 1e-9 * self.aa * self.bb:
            return None
        return (
            (self.ga * self.bb - self.gb * self.ab) / determinant,
            (self.gb * self.aa - self.ga * self.ab) / determinant,
        )


def mixed(parts: Sequence[Gradients], weights: tuple[float, float]) -> Gradients:
    """Add the weighted gradients of two micro-batches, as accumulation does."""
    first, second = (part[GRADIENT] for part in parts)
    return {GRADIENT: (first * weights[0]).add_(second, alpha=weights[1])}


def reduction_of(copy: QuietCopy, tolerance: float) -> Literal["samples", "tokens", "next tokens"] | None:
    """Find the unit over which to average the losses that replicas compute. Ignore some labels to find it.

    Samples of equal length would not distinguish samples from tokens, but the next batch may have other lengths.

    Returns:
        The unit that makes the gradient exact; None if none does, or if the batch has no labels to ignore.
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
    """Ignore half of the labels of the sample that has the most labels, but not its first label."""
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


def _countable(micro_batches: Sequence[Any], workload: Workload) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """Yield everything that can be counted in a batch: labels that are not ignored (also without the first), masks.

    Each item has a text, a Python expression that counts it in `batch`, and its counts in the two micro-batches.
    """
    loss_fn: Any = workload.loss_fn
    own = getattr(loss_fn, "ignore_index", getattr(loss_fn, "keywords", {}).get("ignore_index"))
    ignored = [*([own] if isinstance(own, int) else []), IGNORED_LABEL, 0, -1]
    first, second = map(_leaves, micro_batches)
    for path, tensor in first.items():
        other = second.get(path)
        if other is None or tensor.dim() == 0:
            continue
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            counts = float(tensor.double().sum()), float(other.double().sum())
            kind = "int" if all(count.is_integer() for count in counts) else "float"
            if min(counts) >= 0:
                what = "what batch{} marks" if kind == "int" else "the weights in batch{}"
                yield what.format(path), f"{kind}(batch{path}.sum())", counts
            continue
        for value in dict.fromkeys([*ignored, int(tensor.flatten().mode().values)]):  # padding is common
            over = f"the labels that are not {value}"
            counts = float((tensor != value).sum()), float((other != value).sum())
            yield over, f"int((batch{path} != {value}).sum())", counts
            if tensor.dim() > 1:
                less = f"{over}, without the first of each sample"
                counts = float((tensor[:, 1:] != value).sum()), float((other[:, 1:] != value).sum())
                yield less, f"int((batch{path}[:, 1:] != {value}).sum())", counts


def _by_class_weights(
    micro_batches: Sequence[Any], workload: Workload, read: Callable[[], Sequence[LabelMean]]
) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """Yield the sums of class weights that a cross entropy divides by, in the form of `_countable`."""
    places = [place for place, _ in named_leaves(micro_batches[0], "batch")]
    weights = "loss_fn.weight" if isinstance(getattr(workload.loss_fn, "weight", None), Tensor) else "class_weights"
    for mean in read():
        labels = f"{places[mean.position]}{'[:, 1:]' if mean.is_shifted else ''}"
        counts = mean(micro_batches[0]), mean(micro_batches[1])
        if mean.weights is not None:
            yield str(mean), f"float({weights}[{labels}[{labels} != {mean.ignored}]].sum())", counts


def _leaves(batch: Any) -> dict[str, Tensor]:
    """Return a batch's tensors by the Python expression for their place, labels first. In a pair, labels come last."""
    leaves = [(place, leaf) for place, leaf in named_leaves(batch, "") if isinstance(leaf, Tensor)]
    if isinstance(batch, (tuple, list)):
        leaves.reverse()
    return dict(sorted(leaves, key=lambda leaf: "label" not in leaf[0]))
