"""Find the largest batch that runs with few real steps.

The *wall* is the size at which memory runs out. Where bytes are counted, a prediction shows how memory depends on the
batch, and real steps confirm it. On accelerators, real steps come closer and closer to the wall. It is never known
exactly there (it is *blurred*), because the allocator reserves more memory than tensors use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autosplit.solve.memory import largest_fitting

LONGEST_LEAP = 16
"""Largest growth factor of the batch from one step to the next, without a prediction.

A line through two small steps is inaccurate. A larger factor is safe if the memory that grows with the batch, at most
the peak minus the bytes that each step holds, would fill half of the capacity.
"""

FIRST_SHARE = 8
"""Divisor of the predicted size for the first step. The prediction may be several times too large."""

AGREE = 0.97
"""Smallest ratio of two estimates of the wall at which they count as equal."""

LEAST_GAIN = 0.01
"""Smallest growth of the batch that justifies another step, as a fraction."""

LEAST_BLURRED_GAIN = 0.03
"""`LEAST_GAIN` if the wall is blurred. Then no step can show the exact size at which memory runs out."""

CAREFUL_GAIN = 0.1
"""Smallest growth, as a fraction, for a step that expects the allocator to waste as many bytes as at the last size.

Near the limit the allocator wastes fewer bytes. With a growth of 3%, the search for a CNN on an H200 ran out of steps
at 92% of its ceiling.
"""

STEP_DOWN = 0.02
"""Smallest reduction of the batch after an out-of-memory step, as a fraction. After a second failure it is 4x."""

COUNTED_STEP_DOWN = 0.05
"""`STEP_DOWN` if bytes are counted exactly. Then the next step that runs shows how many samples to add again."""

UNEVEN = 0.002
"""Smallest error of a prediction that was corrected by steps, as a fraction, at which memory counts as uneven.

oneDNN rounds the blocks of an LSTM, so its memory is not a line.
"""

MOST_STEPS = 8
STEPS_NEEDED = 3
"""Number of steps that a size near the wall may take. No size is begun that could exceed `MOST_STEPS` in total."""

MOST_BLURRED_STEPS = 24
"""Largest number of steps if the wall is blurred. Most searches need half of them."""

MOST_FAILURES = 6

UNUSED_BYTES = 40 * 2**20
"""Memory that a larger step may reserve without using it: up to two partly used segments of 20 MiB (torch's allocator).
"""


@dataclass
class WallSearch:
    """A search for the largest batch of one device.

    Attributes:
        predict: Function that predicts the bytes of n samples. None on accelerators.
        capacity_bytes: Bytes that the allocator may reserve.
        start: The first size to try without a prediction.
        known: A size that is known to run on an equal device. 0 if there is none.
        held_bytes: Bytes that a step of any size holds during its peak.
        allocated: Peak bytes of tensors, by number of samples.
        reserved: Peak bytes that the allocator reserved, by number of samples.
        counted: Whether bytes are counted exactly rather than by an allocator. Then a step that failed needed more
            bytes than the capacity.
        is_uneven: Whether a step needed other bytes than the steps before it predicted.
        blind: Whether steps fail for a reason other than memory, such as a kernel's limit or a process that died.
    """

    predict: Callable[[int], float] | None
    capacity_bytes: int
    least: int
    most: int
    start: int
    known: int = 0
    held_bytes: int = 0
    allocated: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    failed: int | None = None
    steps: int = 0
    is_uneven: bool = False
    blind: bool = False
    counted: bool = False
    _failures: int = 0

    def ran(self, n: int, allocated_bytes: int, reserved_bytes: int, steps: int) -> None:
        """Record a size that ran."""
        if len(self.allocated) > 1:
            self.is_uneven |= abs(self.corrected(n) - allocated_bytes) > UNEVEN * allocated_bytes
        self.allocated[n] = allocated_bytes
        self.reserved[n] = reserved_bytes
        self.steps += steps
        self._failures = 0

    def ran_out(self, n: int, *, blind: bool = False) -> None:
        """Record a size that did not run."""
        self.blind |= blind
        self.failed = n if self.failed is None else min(self.failed, n)
        self.steps += 1
        self._failures += 1

    @property
    def found(self) -> int:
        """The largest size that ran, or 0."""
        return max((n for n in self.allocated if self.failed is None or n < self.failed), default=0)

    @property
    def has_neighbour(self) -> bool:
        """Whether a batch of one more sample than `found` has not been run."""
        return 0 < self.found < self.most and self.failed != self.found + 1

    def next(self) -> int | None:
        """Return the size to run next, or None if no further step is worth its cost."""
        if not self.allocated and self.failed is None:
            return self._first()
        low, high = self.found or self.least - 1, self.failed or self.most + 1
        if high - low <= 1 or self._failures >= MOST_FAILURES:
            return None
        if not self.found:
            if self.counted:  # Try half, and then the smallest batch. Probably no batch fits.
                return max(self.least, high // 2) if self._failures == 1 else self.least
            return max(self.least, min(self._below(high), high // 2 if self._failures > 1 else high - 1))
        most = MOST_STEPS if self._is_sharp and self.predict is not None else MOST_BLURRED_STEPS
        if self.steps + (1 if self.counted else STEPS_NEEDED) > most:
            return None
        full = self._fitting(self.corrected, low, high)
        aim = self._aim(low, high, full)
        # If the wall is blurred, search only while the possible gain is large. On average half of it is gained.
        least_gain = 0.0 if self._is_sharp else LEAST_BLURRED_GAIN if self.failed is not None else LEAST_GAIN
        return aim if aim > low and full - low >= least_gain * low else None

    @property
    def _is_sharp(self) -> bool:
        """Whether the allocator reserves only the memory that tensors use, so that the wall is exact."""
        return self.reserved == self.allocated

    def _first(self) -> int:
        if self.known:
            return self.known
        if self.predict is None:
            return min(max(self.start, self.least), self.most)
        promised = self._fitting(self.predict, self.least - 1, self.most + 1)
        return max(self.least, promised // FIRST_SHARE if promised > 2 * FIRST_SHARE else promised)

    def _aim(self, low: int, high: int, full: int) -> int:
        is_far = full > 2 * low
        is_lost = not self.counted and self.failed is not None and (is_far or len(self.allocated) == 1)
        if self.blind or is_lost:
            return (low + high) // 2
        if len(self.allocated) == 1 and self.failed is None and not self.known:
            return self._second(low, full)
        if self.predict is None and is_far:  # A long extrapolation is inaccurate.
            return min(int(AGREE * full), max(LONGEST_LEAP * low, self.safe(low) // 2))
        if self._is_sharp:
            least = (low + high) // 2 if self.counted else 0
            return min(full, max(self._below(high), least)) if self._failures else full
        blur = self.reserved[low] / self.allocated[low]
        careful = self._fitting(lambda n: self.corrected(n) * blur, low, high)
        if careful == self.most and self.failed is None:
            return careful  # The wall is above the largest size to try.
        return careful if low * (1 + CAREFUL_GAIN) <= careful <= high * (1 - STEP_DOWN) else (low + full + 1) // 2

    def safe(self, low: int) -> int:
        """Return a size whose tensors fit: the peak grows at most in proportion to the samples, beyond `held_bytes`."""
        grown_bytes = max(1, self.allocated[low] - self.held_bytes)
        return low * max(0, self.capacity_bytes - self.held_bytes) // grown_bytes

    def _below(self, high: int) -> int:
        """Return a size well below a size that ran out of memory.

        The failure does not show how many bytes were missing.
        """
        share = COUNTED_STEP_DOWN if self.counted else STEP_DOWN
        return max(1, high - max(1, int(high * share * self._failures**2)))

    def _second(self, low: int, full: int) -> int:
        """Choose the second size: the wall itself only if the error of the first prediction hardly matters there.

        The memory beyond the prediction may be constant, or grow with the samples. So compute the wall for both cases.
        """
        predict = self.predict
        if predict is None:
            return min(max(2 * low, self.safe(low) // 2), self.most)
        beyond = max(0.0, self.reserved[low] - predict(low))
        careful = self._fitting(lambda n: predict(n) + beyond * n / low, low, self.most + 1)
        if careful >= AGREE * full:
            return full
        return careful // 2 if careful > 4 * low else careful if careful > low else (low + full + 1) // 2

    def predicted(self, capacity_bytes: int) -> int:
        """Predict the largest size that fits into `capacity_bytes`, which is more than the search could use."""
        low, high = self.found, self.failed or self.most + 1
        if not low:
            return 0
        blur = self.reserved[low] / self.allocated[low]
        usable_bytes = AGREE * capacity_bytes - (0 if self._is_sharp else UNUSED_BYTES)
        return largest_fitting(
            lambda n: self.corrected(n) * blur, usable_bytes, least=low, most=high - 1, start=low + 1
        )

    def corrected(self, n: int) -> float:
        """Predict the bytes of n samples: the prediction, plus the difference of the nearest real steps."""
        predict = self.predict or (lambda _n: 0.0)
        known = [*self.allocated, *([self.failed] if self.counted and self.failed is not None else [])]
        if not known:
            return predict(n)
        n0, *others = sorted(known, key=lambda size: abs(size - n))[:2]
        beyond = self._beyond(n0, predict)
        slope = (self._beyond(others[0], predict) - beyond) / (others[0] - n0) if others else 0.0
        return predict(n) + beyond + slope * (n - n0)

    def _beyond(self, n: int, predict: Callable[[int], float]) -> float:
        """Return the bytes of n samples beyond their prediction. For a size that failed, return a lower bound."""
        if n in self.allocated:
            return self.allocated[n] - predict(n)
        return max(0.0, self.capacity_bytes + 1 - predict(n), *(self._beyond(size, predict) for size in self.allocated))

    def _fitting(self, peak_bytes: Callable[[int], float], low: int, high: int) -> int:
        start = min(max(self.start, low + 1), high - 1)
        return largest_fitting(peak_bytes, self.capacity_bytes, least=low, most=high - 1, start=start)
