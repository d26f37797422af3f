"""Batches of samples that differ in length: how many of a padded length fit, and an epoch cut into such batches.

A batch takes the memory of its longest sample, times its samples. What one sample takes is measured at a few lengths,
as a share of what one of the longest takes; between them it lies below the line through both, since memory grows at
least in proportion to length (activations) and at most with its square (attention's scores): it is convex.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from autosplit.errors import InputError, shown
from autosplit.solve.split import proportional_split

MOST_POINTS = 6
"""Lengths that are looked at: halves of the longest."""

WINDOW_BATCHES = 512
"""Full batches whose samples are sorted together where no effective batch was asked for. With 128 an epoch takes 7 to
11 % longer, with 2,048 up to 2 % less (benchmarks/lengths.py), but the order is mixed less."""

SHORTER = 0.7
FULL_ENOUGH = 0.25
"""A batch that is a quarter full ends where the next sample has less than 0.7 of its length. In optimizer steps of one
to four full batches that brings 20 to 130 %, in steps of 64 up to 3 % (benchmarks/lengths.py)."""

MOST_TOKENS = 2**24
"""The longest sample: whoever gives more counts something else."""

MOST_FORETOLD = 100_000
"""Samples by which an epoch is foretold."""

Batches = list[list[int]]


@dataclass(frozen=True)
class LengthPoint:
    """A length that was looked at.

    Attributes:
        length: In tokens, or whatever lengths are counted in.
        times: How many samples of it take the memory of one of the longest.
        samples_per_s: The plan's throughput with as many more samples of this length.
        own_samples_per_s: Its throughput with as many samples of this length as of the longest.
    """

    length: Annotated[int, Meta(ge=1)]
    times: Annotated[float, Meta(ge=1)]
    samples_per_s: Annotated[float, Meta(gt=0)]
    own_samples_per_s: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class LengthPlan:
    """A plan for samples that differ in length.

    Attributes:
        points: The lengths that were looked at, the longest first, which is that of the plan's own batch.
        samples_per_s: Predicted of an epoch in batches of like length, as `Plan.token_sampler` makes them.
        fixed_samples_per_s: Predicted of one in batches of the plan's own size, in any order, each padded to its
            longest sample.
        padding_share: Padding among all tokens of the first; 0 to 1.
        fixed_padding_share: Padding among all tokens of the second.
    """

    points: Annotated[tuple[LengthPoint, ...], Meta(min_length=1, max_length=64)]
    samples_per_s: Annotated[float, Meta(gt=0)]
    fixed_samples_per_s: Annotated[float, Meta(gt=0)]
    padding_share: Annotated[float, Meta(ge=0, lt=1)]
    fixed_padding_share: Annotated[float, Meta(ge=0, lt=1)]

    @property
    def is_sound(self) -> bool:
        """Whether lengths fall, and shorter samples take no more memory, as everything here takes for granted."""
        return self.points[0].times == 1 and all(
            a.length > b.length and a.times <= b.times for a, b in itertools.pairwise(self.points)
        )

    def times_at(self, length: int) -> float:
        """Return how many samples of a length take the memory of one of the longest.

        Raises:
            InputError: The length is above those that were looked at.
        """
        return 1 / self._at(length, lambda point: 1 / point.times)

    def batch_seconds(self, num_samples: int, length: int, batch_size: int) -> float:
        """Return the time of a batch, on the line through the two sizes of its length that were timed."""
        own_s = batch_size * self._at(length, lambda point: 1 / point.own_samples_per_s)
        least_s, most = own_s * num_samples / batch_size, self.times_at(length) * batch_size
        if most <= batch_size:
            return least_s
        full_s = most * self._at(length, lambda point: 1 / point.samples_per_s)
        line_s = own_s + (full_s - own_s) * (num_samples - batch_size) / (most - batch_size)
        return max(line_s, least_s) if num_samples < batch_size else line_s

    def split_of(self, length: int, split: Sequence[int]) -> tuple[int, ...]:
        """Return the most samples of a length that each device gets, of which `split` has those of the longest."""
        return scaled(split, self.times_at(length))

    def tokens_of(self, share: int) -> int:
        """Return the most tokens, padding included, of a device that gets `share` samples of the longest.

        It holds for samples that are as long as the last point or longer: the tokens that fit fall with length where
        attention's scores are kept, and rise with it where they are not, so that one of the points has the fewest.
        """
        return min(scaled((share,), point.times)[0] * point.length for point in self.points)

    def _at(self, length: int, value: Callable[[LengthPoint], float]) -> float:
        """Return a value on the lines between the points; below the shortest it is that of the shortest."""
        if length > self.points[0].length:
            raise InputError(
                f"a sample has length {length}, and the longest of the plan has {self.points[0].length}; expected none "
                "above that, or it may run out of memory; tune with the lengths of all samples, or cut the sample",
                code="length-above-plan",
            )
        before = self.points[0]
        for point in self.points:
            if length >= point.length:
                share = (length - point.length) / max(1, before.length - point.length)
                return value(point) + share * (value(before) - value(point))
            before = point
        return value(before)


def scaled(shares: Sequence[int], times: float) -> tuple[int, ...]:
    """Return shares so many times as large, in whole samples; a quotient of two of them is met for all its rounding."""
    return tuple(int(times * share + 1e-6) for share in shares)


def checked_lengths(lengths: Any, name: str = "lengths") -> list[int]:
    """Return lengths as a list, whether they came in a list, an array or a tensor.

    Raises:
        InputError: They are empty, or one is no whole number from 1 to 2^24.
    """
    try:
        if isinstance(lengths, (bytes, Mapping, AbstractSet)):  # which have not an item for each sample
            raise TypeError
        listed = lengths.tolist() if hasattr(lengths, "tolist") else list(lengths)
        numbers = [operator.index(one) for one in listed if not isinstance(one, bool)]
    except TypeError:
        numbers, listed = [], [None]
    if len(numbers) < len(listed):
        raise InputError(
            f"{name} is {shown(lengths)}; expected a whole number for each sample; pass "
            "[len(sample) for sample in dataset], or the like",
            code="lengths-type",
        )
    if numbers and max(numbers) > MOST_TOKENS:
        raise InputError(
            f"{name} hold {max(numbers)}; expected at most {MOST_TOKENS} each; pass the tokens of each sample",
            code="lengths-too-large",
        )
    if not numbers or min(numbers) < 1:
        found = "are empty" if not numbers else f"hold {min(numbers)} at position {numbers.index(min(numbers))}"
        raise InputError(
            f"{name} {found}; expected a length of 1 or more for each sample; leave samples without tokens out",
            code="lengths-value",
        )
    return numbers


def lengths_to_tune(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths that are looked at: the longest, and its halves as far as the shortest sample reaches."""
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
    """Cut an epoch into optimizer steps of batches of like length.

    Args:
        effective_batch_size: As many samples of the order are a step each. None: every batch is a step, made of as
            many samples as fit; they come in the order in which they are made.

    Returns:
        The steps, each of batches with their samples' positions, the longest sample first.

    Raises:
        InputError: A sample is longer than those that the plan was made for.
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
    """Split a batch over the devices, in the proportions of what each holds of its longest sample's length."""
    most = plan.split_of(longest, split)
    return most if num_samples == sum(most) else proportional_split(num_samples, most, most)


def foretold(
    points: tuple[LengthPoint, ...], lengths: Sequence[int], split: Sequence[int], effective_batch_size: int | None
) -> LengthPlan:
    """Predict what batches of like length bring over batches of one size, for an epoch of samples in random order.

    Args:
        points: As of `LengthPlan`.
        lengths: Of each sample; of more than 100,000 as many drawn at random.
    """
    plan = LengthPlan(points, 1.0, 1.0, 0.0, 0.0)
    drawn = random.Random(0)  # noqa: S311  # of no secret
    order = drawn.sample(range(len(lengths)), min(len(lengths), MOST_FORETOLD))
    fixed = [order[begin : begin + sum(split)] for begin in range(0, len(order), sum(split))]
    alike = [batch for step in cut_epoch(plan, lengths, order, split, effective_batch_size) for batch in step]
    tokens = sum(lengths[sample] for sample in order)

    def told(batches: Batches) -> tuple[float, float]:
        longest = [max(lengths[sample] for sample in batch) for batch in batches]
        sizes = zip(batches, longest, strict=True)
        seconds = sum(plan.batch_seconds(len(batch), length, sum(split)) for batch, length in sizes)
        padded = sum(len(batch) * length for batch, length in zip(batches, longest, strict=True))
        return len(order) / seconds, 1 - tokens / padded

    (rate, padding), (fixed_rate, fixed_padding) = told(alike), told(fixed)
    return LengthPlan(points, rate, fixed_rate, padding, fixed_padding)
