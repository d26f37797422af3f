"""Model the peak memory of a step as a linear function of the split, fitted to measurements.

A device's *share* is its number of samples. Peak bytes of device 0, which gathers the outputs of the whole batch::

    fixed + per_share * gpu0_bsz + per_batch * batch_size

Peak bytes of another device::

    fixed + per_share * share
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from autosplit.notes import Note

Role = Literal["primary", "replica", "rank", "eval", "resume", "save"]
"""The role of a device in a step.

- ``"primary"``: device 0 of BalancedDataParallel.
- ``"replica"``: another device of BalancedDataParallel.
- ``"rank"``: a DDP process.
- ``"eval"``: a forward without gradients.
- ``"resume"``: a DDP process with a loaded checkpoint's copies of the parameters and buffers. `load_state_dict` copies
  them, but uses the optimizer state without a copy.
- ``"save"``: a DDP process with copies of parameters, buffers and optimizer state, which are saved while training
  continues.
"""

Limit = Literal["memory", "max_batch_size", "kernel", "time"]
"""The limit that stopped the search for a ceiling."""


@dataclass(frozen=True)
class Ceiling:
    """The largest number of samples that a device runs in one training step, and how it was found.

    Attributes:
        device: The label of the device.
        role: The role of the device in the step.
        batch_size: The ceiling in samples. 0 if not even one sample fits.
        limited_by: ``"memory"``, or another limit. ``"max_batch_size"``: the search stopped at this bound.
            ``"kernel"``: a kernel accepts no larger tensors (2^31 elements). ``"time"``: a larger batch would not raise
            throughput or would take too long.
        fixed_bytes: Bytes at any batch size, from a line through the points near the ceiling.
        bytes_per_sample: Bytes per sample, from the same line.
        peak_bytes: Peak memory of a step at the ceiling.
        capacity_bytes: Memory that training may use on this device.
        steps: Number of real training steps that were run to find the ceiling.
        ooms: Number of these steps that ran out of memory.
        confirmed: Whether a real step ran at exactly this size. Always False for a simulated GPU.
        points: ``(samples, bytes, ran)`` for each size that was tried. ``ran`` is False for a prediction.
        notes: Notes about processes that died while they ran steps, one for each cause.
    """

    device: str
    role: Role
    batch_size: int
    limited_by: Limit
    fixed_bytes: int
    bytes_per_sample: int
    peak_bytes: int
    capacity_bytes: int
    steps: int = 0
    ooms: int = 0
    confirmed: bool = False
    # Ignored by `==`: two equal ceilings may have been found by different steps.
    points: tuple[tuple[int, int, bool], ...] = field(default=(), compare=False)
    notes: tuple[Note, ...] = field(default=(), compare=False)

    @property
    def headroom_bytes(self) -> int:
        """Free bytes of the capacity at the ceiling."""
        return self.capacity_bytes - self.peak_bytes

    def bytes_at(self, samples: int) -> int:
        """Predict the peak bytes for this many samples: the line, but at least the peak of any smaller batch tried."""
        known = (nbytes for size, nbytes, _ in self.points if size <= samples)
        return max(0, self.fixed_bytes + self.bytes_per_sample * samples, *known)

    def most_within(self, capacity_bytes: int, most: int) -> int:
        """Return the largest number of samples, up to `most`, that fits into this many bytes."""
        return largest_size(most, lambda samples: self.bytes_at(samples) <= capacity_bytes)

    def with_capacity(self, capacity_bytes: int, batch_size: int) -> Ceiling:
        """Return this ceiling for a different capacity, which has room for `batch_size` samples."""
        if batch_size == self.batch_size:
            return replace(self, capacity_bytes=capacity_bytes)
        return replace(
            self,
            batch_size=batch_size,
            limited_by="memory",
            peak_bytes=self.bytes_at(batch_size),
            capacity_bytes=capacity_bytes,
            confirmed=False,
        )


@dataclass(frozen=True)
class MemoryParts:
    """The parts of a device's peak memory, at the moment of a step with the highest use.

    Attributes:
        parameters_bytes: Parameters, buffers, a replica's copies of them, and all other memory that outlives a step.
        gradients_bytes: Gradients of the parameters, and the gradient buckets of a DDP rank.
        optimizer_bytes: Optimizer state.
        gathered_bytes: Outputs of all devices, gathered on device 0.
        activations_bytes: The batch, tensors saved for the backward, the loss, temporary tensors, cuBLAS workspaces.
        untraced_bytes: Memory beyond the other parts: free blocks that the allocator keeps, and cuDNN workspaces.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    activations_bytes: int
    untraced_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        held = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.gathered_bytes
        return held + self.activations_bytes + self.untraced_bytes

    def of_peak(self, peak_bytes: int, *, measured: bool) -> MemoryParts | None:
        """Return parts that add up to `peak_bytes`, or None if the parts without activations already exceed it.

        If a real step measured the peak, additional bytes are untraced memory. Otherwise they are activations.
        """
        more_bytes = peak_bytes - self.total_bytes
        if more_bytes >= 0 and measured:
            return replace(self, untraced_bytes=self.untraced_bytes + more_bytes)
        left_bytes = self.activations_bytes + more_bytes
        return replace(self, activations_bytes=left_bytes) if left_bytes >= 0 else None


@dataclass(frozen=True)
class MemoryFit:
    """A device's peak as a linear function of its samples (its share) and of the whole batch.

    Attributes:
        fixed_bytes: Bytes at any batch size: parameters, gradients, optimizer state.
        bytes_per_share: Bytes per sample on the device.
        bytes_per_batch: Bytes per sample of the whole batch: the outputs that device 0 gathers.
    """

    fixed_bytes: float
    bytes_per_share: float
    bytes_per_batch: float = 0.0

    def peak_bytes(self, share: int, batch_size: int) -> float:
        """Predict the peak: ``fixed + per_share * share + per_batch * batch_size``."""
        return self.fixed_bytes + self.bytes_per_share * share + self.bytes_per_batch * batch_size

    @classmethod
    def through(
        cls, base: tuple[int, int, int], more_share: tuple[int, int, int], more_batch: tuple[int, int, int]
    ) -> MemoryFit:
        """Fit three points ``(share, batch_size, peak_bytes)``, with more samples on the device and in the batch."""
        (s0, n0, y0), (s1, n1, y1), (s2, n2, y2) = base, more_share, more_batch
        assert n1 - n0 == s1 - s0 > 0, (base, more_share)
        assert n2 - n0 > s2 - s0 == 0, (base, more_batch)
        per_batch = max(0.0, (y2 - y0) / (n2 - n0))
        per_share = max(0.0, (y1 - y0) / (s1 - s0) - per_batch)
        return cls(y0 - per_share * s0 - per_batch * n0, per_share, per_batch)


@dataclass(frozen=True)
class Region:
    """The bounds of the search: which splits fit into memory.

    Attributes:
        primary: Memory model of device 0.
        primary_capacity_bytes: Bytes that training may use on device 0.
        primary_ceiling: The ceiling of device 0 if it runs the whole batch.
        replica_ceilings: Ceilings of the other devices. Empty for a single device.
        max_batch_size: The largest batch that is allowed.
        least_share: Minimum samples of a device that has any. BatchNorm needs two samples to train.
    """

    primary: MemoryFit
    primary_capacity_bytes: int
    primary_ceiling: int
    replica_ceilings: tuple[int, ...]
    max_batch_size: int
    least_share: int = 1

    @classmethod
    def apart(cls, ceilings: Sequence[int], max_batch_size: int, least_share: int = 1) -> Region:
        """Return the region of devices with independent memory, such as DDP ranks."""
        return cls(MemoryFit(0.0, 0.0), 0, ceilings[0], tuple(ceilings[1:]), max_batch_size, least_share)

    @property
    def ceilings(self) -> tuple[int, ...]:
        """Ceilings of all devices, device 0 first."""
        return (self.primary_ceiling, *self.replica_ceilings)

    @property
    def largest_batch(self) -> int:
        """The largest batch with a split that fits."""
        return _largest_batch(self)

    def gpu0_bounds(self, batch_size: int) -> tuple[int, int] | None:
        """Return the minimum and maximum samples of a batch on device 0, or None if no split fits."""
        if batch_size > self.max_batch_size:
            return None
        least = max(0, batch_size - sum(self.replica_ceilings))
        most = min(batch_size, self.primary_most(batch_size))
        if least <= most:
            return least, most
        # The linear model assumes replicas, so it does not apply if device 0 runs the whole batch.
        return (batch_size, batch_size) if batch_size <= self.primary_ceiling else None

    def primary_most(self, batch_size: int) -> int:
        """Return the largest number of samples that fit on device 0 in such a batch. -1 if the outputs don't fit."""
        if not self.replica_ceilings:
            return self.primary_ceiling
        left = self.primary_capacity_bytes - self.primary.peak_bytes(0, batch_size)
        if left < 0:
            return -1
        if self.primary.bytes_per_share <= 0:
            return self.primary_ceiling
        return int(min(self.primary_ceiling, left / self.primary.bytes_per_share))


@functools.lru_cache(maxsize=256)  # called thousands of times to solve a plan
def _largest_batch(region: Region) -> int:
    most = min(region.max_batch_size, sum(region.ceilings))
    return largest_size(most, lambda batch_size: region.gpu0_bounds(batch_size) is not None)


def largest_size(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest size up to `most` that fits, or 0, by bisection. All smaller sizes must fit."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def samples_within(nbytes: float, bytes_per_sample: float, most: int) -> int:
    """Return the number of samples, up to `most`, that fit into this many bytes."""
    if nbytes < 0:
        return 0
    return most if bytes_per_sample <= 0 else math.floor(min(most, nbytes / bytes_per_sample))


def largest_fitting(
    peak_bytes: Callable[[int], float], capacity_bytes: float, *, least: int, most: int, start: int
) -> int:
    """Find the largest n in ``least..most`` whose peak fits. The peak must grow with n, and `least` must fit.

    Double from `start` until a size does not fit. Then draw a line from the largest size that fits to the smallest that
    does not, and try where it reaches the capacity. Because the peak may not be linear, every third try bisects. No
    size is tried twice.
    """
    low, high = least, most + 1  # low fits, high does not
    known: dict[int, float] = {}
    n = min(max(start, low + 1), most)
    while high - low > 1:
        known[n] = peak_bytes(n)
        low, high = (n, high) if known[n] <= capacity_bytes else (low, n)
        if high not in known:
            n = min(2 * low, most)
        elif low not in known or len(known) % 3 == 0:
            n = (low + high) // 2
        else:
            aim = low + (capacity_bytes - known[low]) / (known[high] - known[low]) * (high - low)
            n = min(max(low + 1, int(aim)), high - 1)
    return low
