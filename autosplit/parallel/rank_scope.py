"""Weigh micro-batches whose losses divide by a number that was summed over the ranks, as DETR's and RetinaNet's do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from autosplit.errors import InputError
from autosplit.parallel.batch_counts import Count

LossScope = Literal["sample", "ranks"]
"""What a micro-batch's loss is normalised over: its own samples, or the samples of all ranks."""

OverRanks = Callable[[Sequence[float]], list[float]]
"""Add each number of a list up over the ranks; every rank calls it with equally many."""


def checked_scope(scope: LossScope | None) -> bool:
    """Return whether losses are normalised over the ranks; raise InputError for an unknown scope."""
    if scope not in (None, "sample", "ranks"):
        raise InputError(
            f"loss_scope is {scope!r}. Expected 'sample', or 'ranks' if the loss divides by a sum over all ranks.",
            code="loss-scope",
        )
    return scope == "ranks"


def refuse_combined_scope(*, on_oom: str = "raise", noise_scale: bool = False, sums: bool = False) -> None:
    """Raise InputError for options that exclude a loss that is normalised over the ranks."""
    for given, why in (
        ("on_oom='cut'" if on_oom == "cut" else "", "the ranks would run unequal numbers of collectives"),
        ("noise_scale" if noise_scale else "", "no rank has the mean gradient of its own samples"),
        ("loss_reduction='sum'" if sums else "", "a loss that is divided by a number is no sum"),
    ):
        if given:
            raise InputError(
                f"loss_scope is 'ranks' and {given}: {why}. Leave one of them out.", code="loss-scope-combined"
            )


def normalised_over_ranks(counts: Sequence[float], num_ranks: int) -> tuple[list[float], float]:
    """Return the counts of micro-batches, and their total, for losses that are normalised over the ranks.

    DETR's loss of rank r in micro-batch m divides a sum S(r, m) by the boxes of all W ranks over W:

        loss(r, m) = S(r, m) / (K(m) / W)    with K(m) = boxes of micro-batch m, over all ranks

    DDP averages the ranks' gradients, so a weight w(m) gives w(m) * sum_r S(r, m) / K(m). The whole step's loss is the
    sum of all S over the sum of all K, so w(m) = K(m) / sum of all K. It is 1 in a step of one micro-batch. An
    `OptimizerStep` weights by size * W / total, so each size is K(m) / W.

    Args:
        counts: K(m) of each micro-batch, over all ranks.
    """
    return [count / num_ranks for count in counts], sum(counts)


def refuse_ranks_without_samples(without: float) -> None:
    """Refuse micro-batches of which a rank has no sample, for a loss that is normalised over the ranks."""
    if without:
        raise InputError(
            "loss_scope is 'ranks', and some rank has no samples in a micro-batch. The sample that it runs instead "
            "would be counted in the loss of the others. Pass drop_last=True, or tune for a larger batch.",
            code="loss-scope-rank-without-samples",
        )


def refuse_uncounted_scope(micro_steps: int, count: Count | None) -> None:
    """Refuse to accumulate losses that are normalised over the ranks without a count of their divisor."""
    if micro_steps > 1 and count is None:
        raise InputError(
            f"loss_scope is 'ranks' in a step of {micro_steps} micro-batches. Each must be weighted by what its loss "
            "divides by. Pass count=, which returns that number for a batch, such as its boxes.",
            code="loss-scope-needs-count",
        )
