"""Infer the divisor of a loss from its autograd graph. No code of the model runs.

cross_entropy(x, y, weight=w)       NllLossBackward0, with w, y and the ignored label    a mean over sum(w[y])
losses[mask].mean()                 MeanBackward0 of 13 elements, from 8 samples         a mean over the mask
mse_loss(x, y, reduction="sum")     MseLossBackward0, reduction 2                        a sum
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from autosplit.errors import warn_user
from autosplit.parallel.batch_counts import as_count
from autosplit.parallel.loss_weights import IGNORED_LABEL, is_integer
from autosplit.workload.tree import leaves_of


class UnevenLossWarning(UserWarning):
    """The loss is not a mean over samples, but its micro-batches are weighted by their samples."""


Kind = Literal["samples", "sum", "weights", "labels", "elements", "unknown"]


@dataclass(frozen=True)
class Reading:
    """Describe how a loss combines the samples.

    Attributes:
        kind: ``"sum"``, ``"unknown"``, or the divisor of a mean. ``"weights"`` is the sum of the labels' class weights.
            ``"labels"`` is the number of labels that are not ignored. ``"elements"`` is a number that is not a multiple
            of the samples.
    """

    kind: Kind
    text: str = ""


_SAMPLES = Reading("samples")
_MOST_NODES, _FEW_NODES = 64, 8
_TRANSPARENT = ("View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias")
_SUM, _MEAN = 2, 1
"""Values of `reduction` in torch's losses."""


def read_loss(loss: Tensor, samples: int) -> Reading:
    """Return how a loss combines its samples. This waits for the loss's device."""
    return _read(loss.grad_fn, samples, is_root=True)


def _read(node: Any, samples: int, *, is_root: bool) -> Reading:
    name = _name(node)
    inner = [child for child, _ in getattr(node, "next_functions", ()) if child is not None]
    if name in _TRANSPARENT and len(inner) == 1:
        return _read(inner[0], samples, is_root=is_root)
    if name in ("Mul", "Div") and len(inner) == 1:
        if _name(inner[0]) == "Sum":
            is_mean = name == "Div" and _saved(node, "other") is not None and _equals(_saved(node, "other"), samples)
            return _SAMPLES if is_mean else Reading("unknown", "a sum that is multiplied by a number")
        return _read(inner[0], samples, is_root=False)
    if name in ("Add", "Sub", "Stack") or (name == "Mean" and [_name(one) for one in inner] == ["Stack"]):
        parts = [_read(one, samples, is_root=False) for one in inner]
        return next((one for kind in _KINDS for one in parts if one.kind == kind), _SAMPLES)
    reading = _read_reduction(node, name, samples)
    # Added to another loss, a sum or a mean may be a penalty on parameters, which does not depend on the samples.
    if not is_root and reading.kind in ("sum", "elements"):
        return Reading("unknown", reading.text)
    return reading


_KINDS: tuple[Kind, ...] = ("weights", "labels", "unknown")
"""If several losses are added up, the total has the first of these kinds that occurs."""


def _read_reduction(node: Any, name: str, samples: int) -> Reading:
    reduction = _saved(node, "reduction")
    if name == "Sum" and not _sums_samples(node, samples):
        return Reading("unknown", "a sum")
    if name == "Sum" or reduction == _SUM:
        return Reading("sum", f"a sum ({name})")
    if name == "Mean":
        numel = _saved(node, "self_sym_numel")
        if numel is None or not samples or int(numel) % samples == 0:
            return _SAMPLES
        return Reading("elements", f"a mean over {int(numel)} elements of {samples} samples")
    if reduction != _MEAN:
        return Reading("unknown", f"the result of {name or 'no operation'}")
    if not name.startswith("NllLoss"):
        return _SAMPLES
    if _is_uneven(_saved(node, "weight")):
        return Reading("weights", "a cross entropy with class weights, which divides by the weights of its labels")
    target, ignored = _saved(node, "target"), _ignored(node)
    if target is not None and bool((target == ignored).any()):
        return Reading("labels", f"a mean over the labels that are not {ignored}")
    return _SAMPLES


def _sums_samples(node: Any, samples: int) -> bool:
    """Return whether a sum adds up the samples. `losses.mean(0).sum()` does not."""
    sizes = _saved(node, "self_sym_sizes")
    nearest = itertools.islice(graph_nodes(node), _FEW_NODES)
    return bool(sizes) and int(sizes[0]) == samples and all(_name(one) != "Mean" for one in nearest)


def outer_factor(loss: Tensor) -> float | None:
    """Return the number by which a loss was multiplied last. None if there is none, or if the loss adds up others."""
    node = loss.grad_fn
    inner = [child for child, _ in getattr(node, "next_functions", ()) if child is not None]
    other = _saved(node, "other")
    if _name(node) not in ("Mul", "Div") or len(inner) != 1 or _name(inner[0]) in ("Add", "Sum", "Stack"):
        return None
    if not isinstance(other, Tensor) or other.numel() != 1 or other.device.type != "cpu" or not float(other):
        return None
    return float(other) if _name(node) == "Mul" else 1 / float(other)


def warn_of_reading(reading: Reading, *, is_weighted: bool, is_combined: bool) -> None:
    """Warn if a loss is not a mean over samples, but losses are weighted by their samples.

    Args:
        is_weighted: Whether the step weights micro-batches or ranks.
        is_combined: Whether BalancedDataParallel weights the losses of its devices.
    """
    if reading.kind in ("samples", "unknown"):
        return
    if reading.kind == "sum":
        cures = ["Tune with loss_reduction='sum', and pass step.backward(loss * step.num_ranks / step.weight)."]
    else:
        cures = [f"Pass count= to plan.steps or ctx.steps: {COUNTS[reading.kind]}."] * is_weighted
        cures += [
            "Set model.reduce to a function of a device's (args, kwargs) that returns the divisor of its loss."
        ] * is_combined
    weighted = " and ".join(["micro-batches"] * is_weighted + ["devices"] * is_combined)
    warn_user(
        f"The loss is {reading.text}, but autosplit weights {weighted} by their samples. So the gradient "
        f"depends on the split. {' '.join(cures)}",
        UnevenLossWarning,
    )


COUNTS: dict[str, str] = {
    "weights": "count=lambda batch: float(class_weights[labels].sum()), with the labels of the batch",
    "labels": "a function that counts those labels in a batch",
    "elements": "a function that counts those elements in a batch",
}
"""Advice on the `count=` argument, for each kind of loss that needs it."""


@dataclass(frozen=True, eq=False)
class LabelMean:
    """Count the labels of a cross entropy that are not ignored, or add up their class weights.

    Attributes:
        position: The position of the labels among the batch's leaves.
        is_shifted: Whether the loss skips the first label of each sequence.
        weights: The class weights, in double precision on the CPU. None if all are equal.
    """

    position: int
    is_shifted: bool
    ignored: int
    weights: Tensor | None

    @property
    def is_special(self) -> bool:
        """Whether no named rule of `reduce` gives this count."""
        return self.weights is not None or self.ignored != IGNORED_LABEL

    def __call__(self, batch: Any) -> float:
        """Return the divisor of a batch's loss."""
        labels = next(itertools.islice(leaves_of(batch), self.position, None))
        kept = _kept(labels, self.ignored, is_shifted=self.is_shifted)
        return kept.numel() if self.weights is None else as_count(self.weights[kept].sum(), "the class weights' sum")

    def __str__(self) -> str:
        labels = f"labels that are not {self.ignored}" + ", without the first label of each sequence" * self.is_shifted
        return labels if self.weights is None else f"the class weights of the {labels}"


def label_means(loss: Tensor, batch: Any) -> Iterator[LabelMean]:
    """Yield the ways to count the labels of each cross entropy in a loss's graph, if the batch contains the labels."""
    for node in itertools.islice(graph_nodes(loss.grad_fn), _MOST_NODES):
        target = _saved(node, "target")
        if not _name(node).startswith("NllLoss") or target is None:
            continue
        ignored, weights = _ignored(node), _saved(node, "weight")
        weights = weights.detach().double().cpu() if _is_uneven(weights) else None
        kept = target[target != ignored].cpu()
        for position, leaf in enumerate(leaves_of(batch)):
            if not is_integer(leaf):
                continue
            for is_shifted in (False, True) if leaf.dim() > 1 else (False,):
                if torch.equal(_kept(leaf, ignored, is_shifted=is_shifted), kept):
                    yield LabelMean(position, is_shifted, ignored, weights)


def _kept(labels: Tensor, ignored: int, *, is_shifted: bool) -> Tensor:
    labels = labels[..., 1:] if is_shifted else labels
    return labels[labels != ignored].cpu().long()


def graph_nodes(*roots: Any) -> Iterator[Any]:
    """Yield the nodes of an autograd graph, each once and the nearest first.

    Args:
        roots: The `grad_fn` of tensors.
    """
    nodes = [node for node in dict.fromkeys(roots) if node is not None]
    seen = {None, *nodes}
    for node in nodes:  # the list grows in the loop, which gives breadth-first order
        yield node
        below = dict.fromkeys(other for other, _ in node.next_functions if other not in seen)
        seen.update(below)
        nodes += below


def _name(node: Any) -> str:
    return type(node).__name__.partition("Backward")[0]


def _saved(node: Any, name: str) -> Any:
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # the backward has run
        return None


def _ignored(node: Any) -> int:
    value = int(_saved(node, "ignore_index"))
    return value - 2**64 if value >= 2**63 else value  # torch returns a negative index as an unsigned number


def _is_uneven(weights: Any) -> bool:
    return isinstance(weights, Tensor) and bool((weights != weights.flatten()[0]).any())


def _equals(value: Any, number: int) -> bool:
    return getattr(value, "numel", lambda: 1)() == 1 and float(value) == number
