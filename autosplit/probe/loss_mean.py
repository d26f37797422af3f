"""Find what a loss is a mean or a sum over, by running it.

Two samples a and b of one batch count for n_a and n_b by a rule. Where the loss is a mean over those counts,

    loss(a, b) = (n_a loss(a) + n_b loss(b)) / (n_a + n_b)

and where it is a sum, loss(a, b) = loss(a) + loss(b). Rules are told apart by samples of unlike counts. A tool's own
bookkeeping is no guide: transformers 5.23 takes GPT-2's labels for unshifted, and its loss shifts them.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from autosplit.errors import WorkloadError
from autosplit.parallel.loss_weights import IGNORED_LABEL
from autosplit.text import printable
from autosplit.workload.batch import batch_size_of, map_tensors


class UnevenLossWarning(UserWarning):
    """A loss is no mean or sum over what a process can count of its own samples."""


MOST_SAMPLES = 8
"""Samples looked at, in search of two that the rules count differently."""

TOLERANCE = 1e-2
"""Relative tolerance: bf16 keeps eight bits, and a rule that is wrong is off by more, or does no harm."""

RULES: dict[str, str] = {
    "shifted labels": "labels but the first of each sequence, those left out by the loss apart",
    "labels": "labels, those left out by the loss apart",
    "samples": "samples",
}
"""The counts that a loss may be a mean over, the likeliest first."""

SUM = "sum"
"""The rule of a loss that adds up its samples': it counts nothing."""


def count_by(rule: str, batch: Any) -> int:
    """Return what a batch counts for by one of `RULES`."""
    labels = labels_of(batch)
    if rule == "samples" or labels is None:
        return batch_size_of(batch)
    if rule == "shifted labels" and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return int(labels.ne(IGNORED_LABEL).sum())


def labels_of(batch: Any) -> Any:
    """Return the labels of a batch; None where it has none."""
    labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
    return labels if hasattr(labels, "ne") else None


def fitting_rule(loss_of: Callable[[Any], float], batch: Any, *, otherwise: str) -> tuple[str, float]:
    """Find the rule by which a loss, the same every time, is a mean, or whether it is a sum.

    Returns:
        One of `RULES`, or `SUM` (`otherwise` where the samples don't tell), and by how much of itself the loss of two
        samples differs from their weighted mean or their sum; NaN where nothing could be told.
    """
    try:
        samples = min(batch_size_of(batch), MOST_SAMPLES)
        singles = [_rows(batch, [index]) for index in range(samples)]
    except WorkloadError:
        return otherwise, math.nan
    labels = labels_of(batch)
    # Of one label a sample, none is left to be shifted.
    rules = ["samples"] if labels is None else [rule for rule in RULES if rule != "shifted labels" or labels.dim() > 1]
    counts = {rule: [count_by(rule, single) for single in singles] for rule in rules}
    pair = max(itertools.combinations(range(samples), 2), key=lambda ab: _unlike(counts, *ab), default=None)
    if pair is None or any(min(numbers[i] for i in pair) < 1 for numbers in counts.values()):
        return otherwise, math.nan
    first, second = (loss_of(singles[index]) for index in pair)
    both = loss_of(_rows(batch, list(pair)))
    expected = {SUM: first + second}
    for rule, numbers in counts.items():
        a, b = (numbers[index] for index in pair)
        expected[rule] = (a * first + b * second) / (a + b)
    errors = {rule: abs(loss - both) / max(abs(both), 1e-12) for rule, loss in expected.items()}
    if errors[SUM] > TOLERANCE:
        del errors[SUM]  # what is no mean over samples either is warned of as that
    best = min(errors, key=lambda rule: (errors[rule], rule != otherwise))
    if not all(math.isfinite(error) for error in errors.values()):
        return otherwise, math.nan
    return best, errors[best]


def asked_rule(loss_of: Callable[[Any], float], batch: Any, *, otherwise: str) -> tuple[str, float]:
    """Find the rule of a loss as `fitting_rule` does; warn where other people's code makes it and fails."""
    try:
        return fitting_rule(loss_of, batch, otherwise=otherwise)
    except Exception as failure:  # noqa: BLE001 - whatever it is, training goes on without the answer
        taken = "a sum" if otherwise == SUM else f"a mean over {otherwise}"
        warnings.warn(
            f"the loss was asked for two samples alone and failed ({type(failure).__name__}: "
            f"{printable(failure, longest=200)}); it is taken for {taken}; pass count= where it is another",
            UnevenLossWarning,
            stacklevel=3,
        )
        return otherwise, math.nan


def tell_of_uneven_loss(error: float) -> None:
    """Warn that shares and accumulation change what is trained, by the error that `fitting_rule` found."""
    warnings.warn(
        f"the loss is a mean neither over labels nor over samples (two samples are {error:.1%} off), and no sum; "
        "shares and accumulation change what is trained; expected one of these; see autosplit check",
        UnevenLossWarning,
        stacklevel=3,
    )


def _unlike(counts: Mapping[str, list[int]], first: int, second: int) -> float:
    """Return how far apart the rules' weights of two samples are at least."""
    usable = all(min(numbers[first], numbers[second]) > 0 for numbers in counts.values())
    if not usable:
        return -1.0
    weights = [numbers[first] / (numbers[first] + numbers[second]) for numbers in counts.values()]
    return min((abs(a - b) for a, b in itertools.combinations(weights, 2)), default=0.0)


def _rows(batch: Any, indices: list[int]) -> Any:
    size = batch_size_of(batch)
    return map_tensors(lambda tensor: tensor[indices] if tensor.dim() and tensor.size(0) == size else tensor, batch)
