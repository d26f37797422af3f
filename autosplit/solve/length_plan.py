"""Define a plan for samples of different lengths: the measured lengths, and the batch size and time at each length.

A length's *times* is the number of samples of this length that need as much memory as one sample of the longest length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from autosplit.errors import InputError


@dataclass(frozen=True)
class LengthPoint:
    """A measured length.

    Attributes:
        length: Length in tokens, or in the unit of the caller's lengths.
        times: Number of samples of this length that need as much memory as one sample of the greatest length.
        samples_per_s: Throughput with as many samples of this length as fit (`times` times the plan's batch size).
        own_samples_per_s: Throughput with the plan's batch size.
    """

    length: Annotated[int, Meta(ge=1)]
    times: Annotated[float, Meta(ge=1)]
    samples_per_s: Annotated[float, Meta(gt=0)]
    own_samples_per_s: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class LengthPlan:
    """A plan for samples of different lengths.

    Attributes:
        points: The measured lengths, the greatest first. The plan's batch size is for the greatest length.
        samples_per_s: Predicted throughput of an epoch in batches of similar length (`Plan.token_sampler`).
        fixed_samples_per_s: Predicted throughput of an epoch in random batches of the plan's size, each padded to its
            longest sample.
        padding_share: Fraction of padding among all tokens in batches of similar length.
        fixed_padding_share: Fraction of padding among all tokens in random batches of the plan's size.
    """

    points: Annotated[tuple[LengthPoint, ...], Meta(min_length=1, max_length=64)]
    samples_per_s: Annotated[float, Meta(gt=0)]
    fixed_samples_per_s: Annotated[float, Meta(gt=0)]
    padding_share: Annotated[float, Meta(ge=0, lt=1)]
    fixed_padding_share: Annotated[float, Meta(ge=0, lt=1)]

    @property
    def is_sound(self) -> bool:
        """Whether the lengths decrease, and shorter samples need no more memory than longer samples."""
        return self.points[0].times == 1 and all(
            a.length > b.length and a.times <= b.times for a, b in itertools.pairwise(self.points)
        )

    def times_at(self, length: int) -> float:
        """Return how many samples of this length need as much memory as one sample of the greatest length.

        Raises:
            InputError: The length is above the greatest measured length.
        """
        return 1 / self._at(length, lambda point: 1 / point.times)

    def batch_seconds(self, num_samples: int, length: int, batch_size: int) -> float:
        """Predict the time of a batch in seconds, from a line through the two batch sizes timed at its length."""
        own_s = batch_size * self._at(length, lambda point: 1 / point.own_samples_per_s)
        least_s, most = own_s * num_samples / batch_size, self.times_at(length) * batch_size
        if most <= batch_size:
            return least_s
        full_s = most * self._at(length, lambda point: 1 / point.samples_per_s)
        line_s = own_s + (full_s - own_s) * (num_samples - batch_size) / (most - batch_size)
        return max(line_s, least_s) if num_samples < batch_size else line_s

    def split_of(self, length: int, split: Sequence[int]) -> tuple[int, ...]:
        """Return the largest number of samples of this length for each device.

        `split` has the numbers for the greatest length.
        """
        return scaled(split, self.times_at(length))

    def tokens_of(self, share: int) -> int:
        """Return the largest number of tokens, with padding, on a device with `share` samples of the greatest length.

        The result holds for samples at least as long as the shortest measured length. With attention scores in memory,
        fewer tokens fit at a greater length. Without them, more tokens fit. So the minimum is at one of the measured
        lengths.
        """
        return min(scaled((share,), point.times)[0] * point.length for point in self.points)

    def _at(self, length: int, value: Callable[[LengthPoint], float]) -> float:
        if length > self.points[0].length:
            raise InputError(
                f"A sample has length {length}, but the longest length of the plan is {self.points[0].length}. A "
                "longer sample may run out of memory. Tune with the lengths of all samples, or shorten this sample.",
            )
        before = self.points[0]
        for point in self.points:
            if length >= point.length:
                share = (length - point.length) / max(1, before.length - point.length)
                return value(point) + share * (value(before) - value(point))
            before = point
        return value(before)


def scaled(shares: Sequence[int], times: float) -> tuple[int, ...]:
    """Return `shares` times a factor, rounded down. The small term corrects rounding errors of whole products."""
    return tuple(int(times * share + 1e-6) for share in shares)
