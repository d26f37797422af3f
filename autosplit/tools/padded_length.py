"""Plan batches of samples with different lengths: the batch size for each length, and the batches of an epoch.

All samples of a batch are padded to its longest sample. So a batch needs the memory of its longest sample, times its
number of samples. The memory of a sample is measured at a few lengths, relative to the longest length, and interpolated
linearly. This never underestimates, because memory grows between linearly (activations) and quadratically (attention
scores) with the length.

A length's *times* is the number of samples of this length that need as much memory as one sample of the longest length.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from autosplit.errors import InputError, shown
from autosplit.files import read_bounded
from autosplit.solve.length_plan import LengthPlan, LengthPoint
from autosplit.solve.split import proportional_split

_MOST_BYTES_OF_LENGTHS = 2**30
"""Largest file of lengths in bytes: about 200 million samples."""

MOST_POINTS = 6
"""Maximum number of lengths to measure. Each is half of the previous length."""

WINDOW_BATCHES = 512
"""Number of full batches whose samples are sorted together if there is no effective batch size.

With 128, an epoch takes 7% to 11% longer. With 2,048, it takes up to 2% less time, but the order is less random
(benchmarks/lengths.py).
"""

SHORTER = 0.7
FULL_ENOUGH = 0.25
"""A batch that is at least 25% full ends if the next sample is shorter than 0.7 times the batch's longest sample.

In optimizer steps of one to four full batches this gains 20% to 130%, in steps of 64 up to 3% (benchmarks/lengths.py).
"""

MOST_TOKENS = 2**24
"""Maximum length of a sample. A greater number is probably not a number of tokens."""

MOST_FORETOLD = 100_000
"""Maximum number of samples for the prediction of an epoch."""

Batches = list[list[int]]


def lengths_in(path: str) -> list[int]:
    """Read the lengths of samples from a file with one number per line. Raise InputError for other contents."""
    try:
        words = read_bounded(path, _MOST_BYTES_OF_LENGTHS).decode("utf-8-sig").split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--lengths {path} can't be read ({reason}). Name a text file.",
        ) from error
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise InputError(
            f"--lengths {path} contains {shown(wrong)}, which is not a whole number. Write one length per line.",
        )
    return checked_lengths([*map(int, words)], f"the lengths in {path}")


def checked_lengths(lengths: Any, name: str = "lengths") -> list[int]:
    """Convert lengths from a list, an array or a tensor to a list.

    Raises:
        InputError: The lengths are empty, or not all are whole numbers from 1 to 2^24.
    """
    try:
        if isinstance(lengths, (bytes, Mapping, AbstractSet)):  # not one length per sample, or without order
            raise TypeError
        listed = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
        numbers = [operator.index(one) for one in listed if not isinstance(one, bool)]
    except TypeError:
        numbers, listed = [], [None]
    if len(numbers) < len(listed):
        raise InputError(
            f"{name} is {shown(lengths)}. Expected a whole number for each sample, such as [len(sample) for sample "
            "in dataset].",
        )
    if numbers and max(numbers) > MOST_TOKENS:
        raise InputError(
            f"{name} contain {max(numbers)}. Expected at most {MOST_TOKENS} each. Pass the tokens of each sample.",
        )
    if not numbers or min(numbers) < 1:
        found = "are empty" if not numbers else f"contain {min(numbers)} at position {numbers.index(min(numbers))}"
        raise InputError(
            f"{name} {found}. Expected a length of at least 1 for each sample. Leave samples without tokens out.",
        )
    return numbers


def lengths_to_tune(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths to measure: the greatest length, halved repeatedly down to the shortest sample."""
    longest, shortest = max(lengths), min(lengths)
    halves = (longest >> power for power in range(MOST_POINTS))
    return tuple(length for length in halves if length >= shortest)


def cut_epoch(
    plan: LengthPlan,
    lengths: Sequence[int],
    order: Sequence[int],
    split: Sequence[int],
    effective_batch_size: int | None,
) -> list[Batches]:
    """Cut an epoch into optimizer steps of batches with similar lengths.

    Args:
        order: Positions of the epoch's samples, in the order of the epoch.
        effective_batch_size: Number of consecutive samples of the order in each step. If None, every batch is a step
            with as many samples as fit.

    Returns:
        The steps. Each is a list of batches of sample positions, the longest sample first.

    Raises:
        InputError: A sample is longer than the plan's greatest length.
    """
    window = effective_batch_size or WINDOW_BATCHES * sum(split)
    steps: list[Batches] = []
    for begin in range(0, len(order), window):
        batches = [*_batches_of(plan, lengths, order[begin : begin + window], split)]
        steps += [batches] if effective_batch_size else [[batch] for batch in batches]
    return steps


def _batches_of(
    plan: LengthPlan, lengths: Sequence[int], samples: Sequence[int], split: Sequence[int]
) -> Iterator[list[int]]:
    batch: list[int] = []
    most = longest = 0
    for sample in sorted(samples, key=lengths.__getitem__, reverse=True):
        length = lengths[sample]
        if batch and (len(batch) >= most or (length < SHORTER * longest and len(batch) >= FULL_ENOUGH * most)):
            yield batch
            batch = []
        if not batch:
            longest, most = length, sum(plan.split_of(length, split))
        batch.append(sample)
    if batch:
        yield batch


def shares_of(plan: LengthPlan, num_samples: int, longest: int, split: Sequence[int]) -> tuple[int, ...]:
    """Split a batch over the devices in proportion to their ceilings for the length of its longest sample."""
    most = plan.split_of(longest, split)
    return most if num_samples == sum(most) else proportional_split(num_samples, most, most)


def predicted_lengths(
    points: tuple[LengthPoint, ...], lengths: Sequence[int], split: Sequence[int], effective_batch_size: int | None
) -> LengthPlan:
    """Predict the gain of batches with similar lengths over batches of one size, for an epoch in random order.

    If there are more than 100,000 lengths, draw 100,000 at random.
    """
    plan = LengthPlan(points, 1.0, 1.0, 0.0, 0.0)
    drawn = random.Random(0)  # noqa: S311  # not for a secret
    order = drawn.sample(range(len(lengths)), min(len(lengths), MOST_FORETOLD))
    fixed = [order[begin : begin + sum(split)] for begin in range(0, len(order), sum(split))]
    alike = [batch for step in cut_epoch(plan, lengths, order, split, effective_batch_size) for batch in step]
    tokens = sum(lengths[sample] for sample in order)

    def rate_and_padding(batches: Batches) -> tuple[float, float]:
        longest = [max(lengths[sample] for sample in batch) for batch in batches]
        sizes = zip(batches, longest, strict=True)
        seconds = sum(plan.batch_seconds(len(batch), length, sum(split)) for batch, length in sizes)
        padded = sum(len(batch) * length for batch, length in zip(batches, longest, strict=True))
        return len(order) / seconds, 1 - tokens / padded

    (rate, padding), (fixed_rate, fixed_padding) = rate_and_padding(alike), rate_and_padding(fixed)
    return LengthPlan(points, rate, fixed_rate, padding, fixed_padding)
