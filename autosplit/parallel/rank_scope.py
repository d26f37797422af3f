"""Weight micro-batches whose losses divide by a sum over all ranks, such as the losses of DETR and RetinaNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from autosplit.errors import InputError
from autosplit.parallel.batch_counts import Count

LossScope = Literal["sample", "ranks"]
"""The divisor of a micro-batch's loss: the rank's samples, or a sum over all ranks."""

OverRanks = Callable[[Sequence[float]], list[float]]
"""A function that sums each number of a list over the ranks. All ranks must call it with lists of equal length."""


def checked_scope(scope: LossScope | None) -> bool:
    """Return whether losses are normalised over the ranks. Raise InputError if the scope is unknown."""
    if scope not in (None, "sample", "ranks"):
        raise InputError(
            f"loss_scope is {scope!r}. Expected 'sample', or 'ranks' if the loss divides by a sum over all ranks.",
        )
    return scope == "ranks"


def refuse_combined_scope(*, on_oom: str = "raise", noise_scale: bool = False, sums: bool = False) -> None:
    """Raise InputError if an option cannot be combined with a loss that is normalised over the ranks."""
    for given, why in (
        ("on_oom='cut'" if on_oom == "cut" else "", "the ranks would run unequal numbers of collectives"),
        ("noise_scale" if noise_scale else "", "no rank has the mean gradient of its own samples"),
        ("loss_reduction='sum'" if sums else "", "a sum is not divided by a number of all ranks"),
    ):
        if given:
            raise InputError(f"loss_scope is 'ranks' and {given}: {why}. Leave one of them out.")


def normalised_over_ranks(counts: Sequence[float], num_ranks: int) -> tuple[list[float], float]:
    """Return the sizes of micro-batches, and their total, for losses that are normalised over the ranks.

    DETR's loss of rank r in micro-batch m divides a sum S(r, m) by the boxes of all W ranks over W:

        loss(r, m) = S(r, m) / (K(m) / W)    with K(m) = boxes of micro-batch m, over all ranks

    DDP averages the ranks' gradients, so a weight w(m) gives w(m) * sum_r S(r, m) / K(m). The loss of the whole step is
    the sum of all S divided by the sum of all K. So w(m) = K(m) / sum of all K. An `OptimizerStep` weights by size * W
    / total, so each size is K(m) / W.

    Args:
        counts: K(m) of each micro-batch, over all ranks.
    """
    return [count / num_ranks for count in counts], sum(counts)


def refuse_ranks_without_samples(without: float) -> None:
    """Raise InputError if a rank has no sample in some micro-batch.

    Args:
        without: Number of micro-batches that leave a rank without samples.
    """
    if without:
        raise InputError(
            "loss_scope is 'ranks', but a rank has no samples in a micro-batch. It runs a stand-in sample, which "
            "would count in the other ranks' losses. Pass drop_last=True, or tune for a larger batch.",
        )


def refuse_uncounted_scope(micro_steps: int, count: Count | None) -> None:
    """Raise InputError if a step has several micro-batches and `count` is missing."""
    if micro_steps > 1 and count is None:
        raise InputError(
            f"loss_scope is 'ranks', and a step has {micro_steps} micro-batches. autosplit needs the divisor "
            "of each loss. Pass count=, a function that returns this number for a batch, such as its boxes.",
        )
