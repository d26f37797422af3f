"""Predict the memory of a counted step at any batch size from steps of few samples.

A step allocates and frees the same storages in the same order at every batch size, and each storage has
``c + s * samples`` bytes. So steps of a few samples give ``c`` and ``s`` of every storage. Bytes are rounded to blocks
and added in order, which gives the exact peak of any other size, and its parts. If the steps have different storages,
for example because a kernel was chosen by the size, a line through their peaks predicts the peak.

A batch of 1 may need less memory than the line through larger batches. torch ignores the stride of a dimension of size
1, so ``x.transpose(0, 1).contiguous()`` of one sample returns the same memory. So the steps have 2 samples or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autosplit.runtime.memory_tracker import BLOCK_BYTES, Entry
from autosplit.solve.memory import MemoryParts

_KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "left")

_Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CountedStep:
    """The storages that a step allocated and freed, in order.

    Attributes:
        split: Samples of each device.
        nbytes: Bytes of each storage before rounding. Negative for a freed storage.
        order: Kind and device of each storage, equal for all steps of the same kind.
    """

    split: tuple[int, ...]
    nbytes: _Numbers
    order: tuple[tuple[str, int, bool], ...]

    @classmethod
    def of(cls, split: tuple[int, ...], entries: Sequence[Entry]) -> CountedStep:
        """Make a step from the entries of its tracker."""
        order = tuple((entry.kind, entry.device, entry.nbytes < 0) for entry in entries)
        return cls(split, np.array([float(entry.nbytes) for entry in entries]), order)

    def parts(self, nbytes: _Numbers | None = None) -> tuple[MemoryParts, ...]:
        """Return the parts of each device's peak, with other bytes if they are given."""
        exact = self.nbytes if nbytes is None else nbytes
        blocks = np.sign(exact) * np.ceil(np.abs(exact) / BLOCK_BYTES) * BLOCK_BYTES
        kinds = np.array([_KINDS.index(kind) for kind, *_ in self.order], dtype=np.int64)
        devices = np.array([device for _, device, _ in self.order], dtype=np.int64)
        return tuple(_parts(blocks[devices == index], kinds[devices == index]) for index in range(len(self.split)))


def predicted_parts(steps: Sequence[CountedStep], split: tuple[int, ...]) -> tuple[MemoryParts, ...]:
    """Predict the parts of each device's peak for a split.

    Args:
        steps: A first step, and a step with other samples on one device only, for each device with samples. One device
            may have a second such step, which shows whether a storage is quadratic in all samples: a loss over pairs.
    """
    first, *others = steps
    if all(other.order == first.order for other in others):
        return first.parts(np.rint(_evaluated(steps, [step.nbytes for step in steps], split)))
    known = [step.parts() for step in steps]
    peaks = _evaluated(steps, [np.array([part.total_bytes for part in parts], float) for parts in known], split)
    nearest = min(range(len(steps)), key=lambda index: abs(sum(steps[index].split) - sum(split)))
    found = zip(known[nearest], (max(0, int(peak)) for peak in peaks), strict=True)
    return tuple(part.of_peak(peak, measured=False) or MemoryParts(0, 0, 0, 0, peak) for part, peak in found)


def predicts(steps: Sequence[CountedStep], other: CountedStep) -> bool:
    """Return whether the storages of another step are exactly as predicted."""
    if any(step.order != other.order for step in steps):
        return False
    return np.array_equal(np.rint(_evaluated(steps, [step.nbytes for step in steps], other.split)), other.nbytes)


def _evaluated(steps: Sequence[CountedStep], values: Sequence[_Numbers], split: tuple[int, ...]) -> _Numbers:
    """Evaluate ``c + sum(s[i] * samples[i]) + q * sum(samples)**2``. The steps show c, s and q."""
    base, slopes = steps[0].split, dict[int, tuple[int, _Numbers]]()
    curvature = np.zeros_like(values[0])
    for step, value in zip(steps[1:], values[1:], strict=True):
        index = next(place for place, samples in enumerate(step.split) if samples != base[place])
        distance = step.split[index] - base[index]
        slope = (value - values[0]) / distance
        if index in slopes:
            curvature = (slope - slopes[index][1]) / (distance - slopes[index][0])
        else:
            slopes[index] = distance, slope
    total, moved, counted = values[0].copy(), 0, 0
    for index, (distance, slope) in slopes.items():
        move = split[index] - base[index]
        total += move * slope
        moved, counted = moved + move, counted + move * distance
    return total + curvature * (moved**2 - counted)  # each slope has a part of the curvature


def _parts(blocks: _Numbers, kinds: NDArray[np.int64]) -> MemoryParts:
    if not len(blocks):
        return MemoryParts(0, 0, 0, 0, 0)
    until = int(blocks.cumsum().argmax()) + 1
    parameters, *others, left = (int(blocks[:until][kinds[:until] == kind].sum()) for kind in range(len(_KINDS)))
    return MemoryParts(parameters + left, *others)
