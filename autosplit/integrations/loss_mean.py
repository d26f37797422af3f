"""Find the unit that a loss is a mean or a sum over, by running the loss on a few samples.

Let sample i count for n_i by a rule, and let the loss of sample i alone be l_i. For a mean over those counts,

    loss(samples) = sum_i n_i l_i / sum_i n_i

holds for every set of samples. For a sum, loss(samples) = sum_i l_i. Each rule is tried on several sets: all samples,
the pair that the rules count most differently, the pair with the most different losses, and pairs of neighbours. One
pair is not enough, because two samples of one class have the same class weight. Metadata is not reliable: transformers
5.23 declares GPT-2's labels as unshifted, but its loss shifts them.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from autosplit.errors import WorkloadError, warn_user
from autosplit.parallel.batch_counts import Count
from autosplit.parallel.loss_weights import IGNORED_LABEL, UnevenLossWarning
from autosplit.probe.label_counts import CrossEntropies, LabelMean, label_means
from autosplit.text import printable
from autosplit.workload.batch_layout import read_batch
from autosplit.workload.tree import Node

MOST_SAMPLES = 8
"""Largest number of samples that a loss is run on."""

TOLERANCE = 1e-2
"""Relative tolerance for a rule, which states what the mean divides by. The rounding of bf16 is below 1%. A wrong rule
within 1% hardly changes the gradient.
"""

NOISE = 1e-6
"""Largest difference between the errors of two rules that fit equally well."""

RULES: dict[str, str] = {
    "shifted labels": "labels, without the first of each sequence and those that the loss ignores",
    "labels": "labels, without those that the loss ignores",
    "samples": "samples",
}
"""The counts that a loss may be a mean over, the most likely first."""

SUM = "sum"
"""The rule of a loss that is a sum over samples, and divides by nothing."""

CROSS_ENTROPY = "cross entropy"
"""The rule of a cross entropy with class weights, or with an ignored label other than -100."""


def count_by(rule: str, batch: Any, samples: int | None = None) -> float:
    """Return the count of a batch according to one of `RULES`.

    Args:
        samples: Number of samples in the batch. Default: the first dimension of its tensors.
    """
    labels = labels_of(batch)
    if rule == "samples" or labels is None:
        return read_batch(batch).size if samples is None else samples
    if rule == "shifted labels" and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return int(labels.ne(IGNORED_LABEL).sum())


def labels_of(batch: Any) -> Any:
    """Return the labels of a batch, or None if it has none."""
    labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
    return labels if hasattr(labels, "ne") else None


class Finding(NamedTuple):
    """The unit over which a loss is a mean or a sum.

    Attributes:
        rule: One of `RULES`, `SUM` or `CROSS_ENTROPY`.
        error: Relative difference between the loss and the rule's prediction. NaN if the loss could not be examined.
        counter: Function that computes the divisor of a batch for the rule `CROSS_ENTROPY`. None for the other rules.
        reason: Why the loss could not be examined. Empty otherwise.
    """

    rule: str
    error: float
    counter: LabelMean | None = None
    reason: str = ""

    @property
    def counts(self) -> Count:
        """Function that computes the divisor of the loss of a batch. For a sum: the number of samples."""
        return self.counter or partial(count_by, "samples" if self.rule == SUM else self.rule)

    def __str__(self) -> str:
        over = str(self.counter) if self.counter is not None else RULES.get(self.rule, "")
        return "a sum" if self.rule == SUM else f"a mean over {over}"


@dataclass(frozen=True)
class Samples:
    """A few samples to make batches of.

    Attributes:
        batch_of: Function that makes a batch of the samples with these indices.
    """

    number: int
    batch_of: Callable[[Sequence[int]], Any]

    @classmethod
    def in_batch(cls, batch: Any) -> Samples:
        """Return the first samples of a batch."""
        layout = read_batch(batch)

        def rows(indices: Sequence[int]) -> Any:
            chosen = [*indices]
            return layout.map(lambda tensor: tensor[chosen], lambda items: [items[index] for index in chosen])

        return cls(min(layout.size, MOST_SAMPLES), rows)

    @classmethod
    def in_data_set(cls, dataset: Any, collate: Callable[[list[Any]], Any]) -> Samples:
        """Return samples from all over a dataset, which may be sorted by class.

        If possible, they are rows of one batch, so that all have the same padding. Ragged tensors can't be cut, so
        their batches are collated separately.
        """
        number = min(len(dataset), MOST_SAMPLES)
        drawn = [dataset[index * len(dataset) // number] for index in range(number)]

        def collated(indices: Sequence[int]) -> Any:
            return collate([copy.copy(drawn[index]) for index in indices])  # some collators pop items

        batch = collated(range(number))
        leaves = [leaf.value for leaf in Node.of(batch).leaves]
        if all(isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (number,) for leaf in leaves):
            return cls.in_batch(batch)
        return cls(number, collated)


class _UnexaminedError(Exception):
    """The rule of a loss can't be found with these samples. The message has the reason."""


def examine_others(loss_of: Callable[[Any], Any], samples: Samples | Any, *, otherwise: str) -> Finding:
    """Find out whether a loss is a sum, or which unit it is a mean over.

    Args:
        loss_of: Function that returns the loss of a batch as a number or a tensor. It must be deterministic. If it
            raises, the result has its error as the reason.
        otherwise: The rule to return if the samples do not determine a rule. If several rules fit, it is preferred.
    """
    try:
        samples = samples if isinstance(samples, Samples) else Samples.in_batch(samples)
        # A compiled model would be compiled again for each number of samples, with the recording of its functions.
        is_compiled = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            return _examined(loss_of, samples, otherwise)
    except (WorkloadError, _UnexaminedError) as error:
        return Finding(otherwise, math.nan, reason=str(error))
    except Exception as failure:  # noqa: BLE001 - training goes on, with a warning
        text = f"{type(failure).__name__}: {printable(failure, longest=200)}"
        return Finding(otherwise, math.nan, reason=f"a few samples alone raised {text}")


def _examined(loss_of: Callable[[Any], Any], samples: Samples, otherwise: str) -> Finding:
    number = min(samples.number, MOST_SAMPLES)
    if number < 2:
        raise _UnexaminedError("there is only one sample")
    everything = samples.batch_of(range(number))
    with torch.no_grad(), CrossEntropies() as recorded:
        whole = float(loss_of(everything))
    cross_entropies = [*label_means(recorded.seen, everything)]
    singles = [samples.batch_of([index]) for index in range(number)]
    with torch.no_grad():
        losses = [float(loss_of(single)) for single in singles]
        again = float(loss_of(samples.batch_of([0])))
    if math.isfinite(again) and abs(again - losses[0]) > TOLERANCE * abs(again):
        raise _UnexaminedError("the loss of one sample is not the same twice")
    counts = _counts_of(singles, everything, cross_entropies)
    usable = [i for i in range(number) if math.isfinite(losses[i]) and min(n[i] for n in counts.values()) > 0]
    if len(usable) < 2:
        raise _UnexaminedError("fewer than two samples have a finite loss and a label that is not ignored")
    if any(not math.isfinite(losses[i]) and min(n[i] for n in counts.values()) > 0 for i in range(number)):
        raise _UnexaminedError(
            "one sample alone has no finite loss, perhaps because the loss divides by a count that is 0 for this sample"
        )
    errors: dict[Any, float] = dict.fromkeys([SUM, *counts], 0.0)
    for group in _groups(usable, losses, counts):
        with torch.no_grad():
            found = whole if len(group) == number else float(loss_of(samples.batch_of(group)))
        if not math.isfinite(found):
            raise _UnexaminedError("the loss of several samples is not finite")
        expected = {SUM: sum(losses[i] for i in group)}
        for rule, numbers in counts.items():
            expected[rule] = sum(numbers[i] * losses[i] for i in group) / sum(numbers[i] for i in group)
        for rule, value in expected.items():
            errors[rule] = max(errors[rule], abs(value - found) / max(abs(found), 1e-12))
    return _best(errors, otherwise)


def _counts_of(singles: list[Any], everything: Any, cross_entropies: list[LabelMean]) -> dict[Any, list[float]]:
    labels = labels_of(everything)
    # A sequence of one label has no next label to predict.
    rules = ["samples"] if labels is None else [rule for rule in RULES if rule != "shifted labels" or labels.dim() > 1]
    counts: dict[Any, list[float]] = {rule: [count_by(rule, single, 1) for single in singles] for rule in rules}
    return counts | {one: [one(single) for single in singles] for one in cross_entropies}


def _groups(usable: list[int], losses: list[float], counts: Mapping[Any, list[float]]) -> list[list[int]]:
    """Return the batches to join: all, the pairs that differ most in their counts and losses, and neighbours."""
    pairs = [*itertools.combinations(usable, 2)]
    unlike = max(pairs, key=lambda pair: _unlike(counts, *pair))
    far = max(pairs, key=lambda pair: abs(losses[pair[0]] - losses[pair[1]]))
    neighbours = zip(usable[::2], usable[1::2], strict=False)
    return [*map(list, dict.fromkeys([tuple(usable), unlike, far, *neighbours]))]


def _unlike(counts: Mapping[Any, list[float]], first: int, second: int) -> float:
    weights = [numbers[first] / (numbers[first] + numbers[second]) for numbers in counts.values()]
    return min((abs(a - b) for a, b in itertools.combinations(weights, 2)), default=0.0)


def _best(errors: dict[Any, float], otherwise: str) -> Finding:
    """Return the rule that fits best.

    If several rules fit equally well, the samples do not distinguish them. The rule of a cross entropy comes first if
    it has class weights or ignored labels, even if none of the samples has them.
    """
    if errors[SUM] > TOLERANCE:
        del errors[SUM]  # Then a loss that fits no rule is compared with means only.

    def rank(rule: Any) -> tuple[float, int]:
        is_cross_entropy = isinstance(rule, LabelMean)
        known = 0 if is_cross_entropy and rule.is_special else 1 if rule == otherwise else 3 if is_cross_entropy else 2
        return (errors[rule] if errors[rule] > NOISE else 0.0, known)

    best = min(errors, key=rank)
    is_rule = not isinstance(best, LabelMean)
    return Finding(best if is_rule else CROSS_ENTROPY, errors[best], None if is_rule else best)


def warn_of_finding(finding: Finding, *, where: str) -> None:
    """Warn if a loss fits no rule, or if it could not be examined.

    Args:
        where: Name of the object that has the argument `count=`, such as ``"the Trainer"``.
    """
    cure = f"Pass count= to {where}: a function that returns the number that the loss of a batch is divided by."
    if math.isnan(finding.error):
        text = (
            f"autosplit could not examine what the loss is a mean over: {finding.reason.rstrip('.')}. It assumes "
            f"{finding}. If this is wrong, the gradient depends on the split. {cure}"
        )
    elif finding.error > TOLERANCE:
        text = (
            f"The loss is not a mean over labels or samples, and not a sum (a few samples are "
            f"{finding.error:.1%} off). The gradient depends on the split. {cure} See also autosplit check."
        )
    else:
        return
    warn_user(text, UnevenLossWarning)
