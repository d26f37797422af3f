"""Model the memory of a step as a function of the split, fitted to measurements. Pure arithmetic.

Peak bytes of device 0::

    fixed + per_share * gpu0_bsz + per_batch * batch_size

Peak bytes of another one::

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
"""What a device does: device 0 of BalancedDataParallel, another of it, a DDP process, a forward without gradients, or a
DDP process beside copies on its device: of the parameters and buffers, as a loaded checkpoint leaves them there
(torch's `load_state_dict` copies them, and takes the tensors of the optimizer's state as they are), or of these and
the optimizer's state, as they are saved while training goes on."""

Limit = Literal["memory", "max_batch_size", "kernel", "time"]
"""What a ceiling was limited by."""


@dataclass(frozen=True)
class Ceiling:
    """The largest number of samples that a device runs in one training step, and how it was found.

    Attributes:
        device: The device's label.
        role: What it does in the step.
        batch_size: The ceiling; 0 where not even one sample fits.
        limited_by: ``"memory"``; ``"max_batch_size"``, where no more was looked for; ``"kernel"``, where a kernel takes
            no larger tensors (2^31 elements); ``"time"``, where a larger batch would bring no more throughput or
            take too long.
        fixed_bytes: Held at any batch, by the line through the points near the ceiling.
        bytes_per_sample: Added by each sample, by the same line.
        peak_bytes: The most it held at the ceiling.
        capacity_bytes: What it may hold.
        steps: Real training steps that were run to find it.
        ooms: How many of them ran out of memory.
        confirmed: A real step ran at this very size. Never for simulated cards.
        points: ``(samples, bytes, ran)`` for each size that was looked at: of a real step, or of a trace.
        notes: What became of processes that ran steps and died, a sentence for each cause.
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
    # How it came to be known is no part of what it is.
    points: tuple[tuple[int, int, bool], ...] = field(default=(), compare=False)
    notes: tuple[Note, ...] = field(default=(), compare=False)

    @property
    def headroom_bytes(self) -> int:
        """The bytes that are left of the capacity at the ceiling."""
        return self.capacity_bytes - self.peak_bytes

    def bytes_at(self, samples: int) -> int:
        """Return what so many samples hold: by the line, and no less than what fewer of them were seen to take."""
        known = (nbytes for size, nbytes, _ in self.points if size <= samples)
        return max(0, self.fixed_bytes + self.bytes_per_sample * samples, *known)

    def most_within(self, capacity_bytes: int, most: int) -> int:
        """Return the most samples that fit so much memory, up to `most`."""
        return largest_size(most, lambda samples: self.bytes_at(samples) <= capacity_bytes)

    def with_capacity(self, capacity_bytes: int, batch_size: int) -> Ceiling:
        """Return the ceiling of a device that may hold so many bytes, which is so many samples."""
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
class Fits:
    """The room that a plan leaves for other things than its training steps.

    Attributes:
        roles: ``"resume"``, ``"save"`` and ``"eval"``, those that were asked for.
        copies_bytes: What copies for the first two take all through a step, on device 0 or on each rank.
        evaluation: The largest forward without gradients of each device by itself, beside what a DDP rank keeps there
            from step to step; empty where ``"eval"`` was not asked for.
    """

    roles: tuple[str, ...]
    copies_bytes: int = 0
    evaluation: tuple[Ceiling, ...] = ()

    @property
    def eval_batch_size(self) -> int | None:
        """The largest batch that each device evaluates by itself; None where ``"eval"`` was not asked for."""
        return min((ceiling.batch_size for ceiling in self.evaluation), default=None)


@dataclass(frozen=True)
class MemoryParts:
    """The parts of a device's peak: its memory at the moment of a step at which it holds the most.

    Attributes:
        parameters_bytes: Parameters, buffers, a replica's copies of them, and whatever else outlives a step.
        gradients_bytes: Gradients of the parameters; a rank's buckets, too.
        optimizer_bytes: The optimizer's state.
        gathered_bytes: Outputs of all devices, put together on the first.
        activations_bytes: The batch, tensors kept for the backward, the loss, temporary blocks, cuBLAS's workspaces.
        untraced_bytes: Measured beyond all of these: workspaces of cuDNN, and blocks that an allocator keeps.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    activations_bytes: int
    untraced_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        held = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.gathered_bytes
        return held + self.activations_bytes + self.untraced_bytes

    def of_peak(self, peak_bytes: int, *, measured: bool) -> MemoryParts | None:
        """Return the same for another peak; None where that is less than what is there all through.

        Args:
            measured: The peak is that of a real step, so that what it has more was not traced; otherwise it is of a
                line through traces, and what it has more is more of the activations.
        """
        more_bytes = peak_bytes - self.total_bytes
        if more_bytes >= 0 and measured:
            return replace(self, untraced_bytes=self.untraced_bytes + more_bytes)
        left_bytes = self.activations_bytes + more_bytes
        return replace(self, activations_bytes=left_bytes) if left_bytes >= 0 else None


@dataclass(frozen=True)
class MemoryFit:
    """A device's peak as a plane over its share and the whole batch.

    Attributes:
        fixed_bytes: Held at any batch: parameters, gradients, optimizer state.
        bytes_per_share: Added by each sample of the device's own share.
        bytes_per_batch: Added by each sample of the whole batch: the outputs that device 0 gathers.
    """

    fixed_bytes: float
    bytes_per_share: float
    bytes_per_batch: float = 0.0

    def peak_bytes(self, share: int, batch_size: int) -> float:
        """Return the predicted peak: ``fixed + per_share * share + per_batch * batch_size``."""
        return self.fixed_bytes + self.bytes_per_share * share + self.bytes_per_batch * batch_size

    @classmethod
    def through(
        cls, base: tuple[int, int, int], more_share: tuple[int, int, int], more_batch: tuple[int, int, int]
    ) -> MemoryFit:
        """Fit three points ``(share, batch_size, peak_bytes)``."""
        (s0, n0, y0), (s1, n1, y1), (s2, n2, y2) = base, more_share, more_batch
        assert n1 - n0 == s1 - s0 > 0, (base, more_share)
        assert n2 - n0 > s2 - s0 == 0, (base, more_batch)
        per_batch = max(0.0, (y2 - y0) / (n2 - n0))
        per_share = max(0.0, (y1 - y0) / (s1 - s0) - per_batch)
        return cls(y0 - per_share * s0 - per_batch * n0, per_share, per_batch)


@dataclass(frozen=True)
class Region:
    """Which splits fit: the bounds of the search.

    Attributes:
        primary: Memory of device 0.
        primary_capacity_bytes: What device 0 may hold.
        primary_ceiling: Its ceiling when it is alone, with a batch of its own share only.
        replica_ceilings: Ceilings of the other devices; none for a single device.
        max_batch_size: No batch may be larger.
        least_share: No share but 0 may be smaller: a BatchNorm trains on no fewer than two samples.
    """

    primary: MemoryFit
    primary_capacity_bytes: int
    primary_ceiling: int
    replica_ceilings: tuple[int, ...]
    max_batch_size: int
    least_share: int = 1

    @classmethod
    def apart(cls, ceilings: Sequence[int], max_batch_size: int, least_share: int = 1) -> Region:
        """Return the region of devices with a memory of their own, as ranks have: their ceilings say it all."""
        return cls(MemoryFit(0.0, 0.0), 0, ceilings[0], tuple(ceilings[1:]), max_batch_size, least_share)

    @property
    def ceilings(self) -> tuple[int, ...]:
        """The most samples that each device runs, whatever the others do."""
        return (self.primary_ceiling, *self.replica_ceilings)

    @property
    def largest_batch(self) -> int:
        """The largest batch that some split of it fits."""
        return _largest_batch(self)

    def gpu0_bounds(self, batch_size: int) -> tuple[int, int] | None:
        """Return the least and the most that device 0 may take of a batch; None where no split of it fits."""
        if batch_size > self.max_batch_size:
            return None
        least = max(0, batch_size - sum(self.replica_ceilings))
        most = min(batch_size, self.primary_most(batch_size))
        if least <= most:
            return least, most
        # The plane has no say about a batch that device 0 runs by itself, without replicas.
        return (batch_size, batch_size) if batch_size <= self.primary_ceiling else None

    def primary_most(self, batch_size: int) -> int:
        """Return the most that device 0 may take of a batch beside others; -1 where it can't even gather it."""
        if not self.replica_ceilings:
            return self.primary_ceiling
        left = self.primary_capacity_bytes - self.primary.peak_bytes(0, batch_size)
        if left < 0:
            return -1
        if self.primary.bytes_per_share <= 0:
            return self.primary_ceiling
        return int(min(self.primary_ceiling, left / self.primary.bytes_per_share))


@functools.lru_cache(maxsize=256)  # asked for thousands of times while a plan is solved
def _largest_batch(region: Region) -> int:
    most = min(region.max_batch_size, sum(region.ceilings))
    return largest_size(most, lambda batch_size: region.gpu0_bounds(batch_size) is not None)


def largest_size(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest size up to `most` that fits, by halving, if all that is smaller fits; 0 where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def samples_within(nbytes: float, bytes_per_sample: float, most: int) -> int:
    """Return the number of samples that fit so many bytes, up to `most`."""
    if nbytes < 0:
        return 0
    return most if bytes_per_sample <= 0 else math.floor(min(most, nbytes / bytes_per_sample))


def largest_fitting(
    peak_bytes: Callable[[int], float], capacity_bytes: float, *, least: int, most: int, start: int
) -> int:
    """Find the largest n in ``least..most`` whose peak fits, for a peak that grows with n; `least` is taken to fit.

    It doubles from `start` until that is too much, and then looks where the line between what fits and what does not
    leads; every third look halves what is left, since a peak may bend. No size is looked at twice.
    """
    low, high = least, most + 1  # low fits; high does not
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
