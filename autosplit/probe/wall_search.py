"""Find the largest batch that runs by running few.

A trace, where there is one, tells where the peak bends; real steps, each nearer to the wall than the last, tell what
it leaves out. On accelerators the wall is never known exactly, since an allocator takes more than it hands out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autosplit.solve.memory import largest_fitting

LONGEST_LEAP = 16
"""Factor on the samples that ran, at most, where nothing was traced: a line of two small steps leads no further."""

FIRST_SHARE = 8
"""Divisor of the samples that a trace promises, for the first step: a trace may be several times too good."""

AGREE = 0.97
"""Share of the other's samples that one of two ways to read a real step has to give for them to agree."""

LEAST_GAIN = 0.01
"""Least share of the samples that ran that another step is run for."""

LEAST_BLURRED_GAIN = 0.03
"""The same where the allocator holds more than it hands out: no step can tell where exactly it will hold too much."""

STEP_DOWN = 0.02
"""Least share of the samples that ran out of memory that the next step has less; after a second failure four times."""

COUNTED_STEP_DOWN = 0.05
"""The same where bytes are counted: a step that ran tells to the byte what to add again."""

MOST_STEPS = 8
STEPS_NEEDED = 3
"""Steps that a size takes near the wall; none is begun that could take more than `MOST_STEPS` in all."""

MOST_BLURRED_STEPS = 24
"""Most steps where the wall is blurred, or nothing was traced; most searches are content with half of them."""

MOST_FAILURES = 6


@dataclass
class WallSearch:
    """One search for the largest batch of one device.

    Attributes:
        traced: Bytes at n samples by traces; None where there are none.
        capacity_bytes: What the allocator may hold.
        start: A size to begin with where there is no trace.
        known: What an equal device ran; 0 for none.
        allocated: What tensors took at most, by samples.
        reserved: What the allocator held at most, by samples.
        failed: The fewest samples that did not run.
        counted: Bytes are counted and not an allocator's, so that one that failed needed more than there is.
        blind: Memory does not tell what fails: a kernel's limit, or a process that died.
    """

    traced: Callable[[int], float] | None
    capacity_bytes: int
    least: int
    most: int
    start: int
    known: int = 0
    allocated: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    failed: int | None = None
    steps: int = 0
    blind: bool = False
    counted: bool = False
    _failures: int = 0

    def ran(self, n: int, allocated_bytes: int, reserved_bytes: int, steps: int) -> None:
        """Take in a size that ran."""
        self.allocated[n] = allocated_bytes
        self.reserved[n] = reserved_bytes
        self.steps += steps
        self._failures = 0

    def ran_out(self, n: int) -> None:
        """Take in a size that did not run."""
        self.failed = n if self.failed is None else min(self.failed, n)
        self.steps += 1
        self._failures += 1

    @property
    def found(self) -> int:
        """The largest size that ran; 0 where none did."""
        return max((n for n in self.allocated if self.failed is None or n < self.failed), default=0)

    def next(self) -> int | None:
        """Return the size to run next; None where it is not worth another step."""
        if not self.allocated and self.failed is None:
            return self._first()
        low, high = self.found or self.least - 1, self.failed or self.most + 1
        if high - low <= 1 or self._failures >= MOST_FAILURES:
            return None
        if not self.found:
            if self.counted:  # far less, and then the least of all: most likely nothing fits
                return max(self.least, high // 2) if self._failures == 1 else self.least
            return max(self.least, min(self._below(high), high // 2 if self._failures > 1 else high - 1))
        most = MOST_STEPS if self._is_sharp and self.traced is not None else MOST_BLURRED_STEPS
        if self.steps + (1 if self.counted else STEPS_NEEDED) > most:
            return None
        full = self._fitting(self.corrected, low, high)
        aim = self._aim(low, high, full)
        # Where the wall is blurred, as long as there is so much room to look for it: half of that is gained by looking.
        least_gain = 0.0 if self._is_sharp else LEAST_BLURRED_GAIN if self.failed is not None else LEAST_GAIN
        return aim if aim > low and full - low >= least_gain * low else None

    @property
    def _is_sharp(self) -> bool:
        """Whether the allocator takes what it hands out, so that memory runs out where tensors fill it."""
        return self.reserved == self.allocated

    def _first(self) -> int:
        if self.known:
            return self.known
        if self.traced is None:
            return min(max(self.start, self.least), self.most)
        promised = self._fitting(self.traced, self.least - 1, self.most + 1)
        return max(self.least, promised // FIRST_SHARE if promised > 2 * FIRST_SHARE else promised)

    def _aim(self, low: int, high: int, full: int) -> int:
        is_far = full > 2 * low
        is_lost = not self.counted and self.failed is not None and (is_far or len(self.allocated) == 1)
        if self.blind or is_lost:
            return (low + high) // 2
        if len(self.allocated) == 1 and self.failed is None and not self.known:
            return self._second(low, full)
        if self.traced is None and is_far:  # a line so long is not to be followed to its end
            return min(int(AGREE * full), LONGEST_LEAP * low)
        if self._is_sharp:
            least = (low + high) // 2 if self.counted else 0
            return min(full, max(self._below(high), least)) if self._failures else full
        blur = self.reserved[low] / self.allocated[low]
        careful = self._fitting(lambda n: self.corrected(n) * blur, low, high)
        if careful == self.most and self.failed is None:
            return careful  # however blurred it is, the wall is beyond what is looked for
        return careful if low * (1 + LEAST_BLURRED_GAIN) <= careful <= high * (1 - STEP_DOWN) else (low + full + 1) // 2

    def _below(self, high: int) -> int:
        """Return a size far enough below one that ran out of memory: by how much it did, nothing says."""
        share = COUNTED_STEP_DOWN if self.counted else STEP_DOWN
        return max(1, high - max(1, int(high * share * self._failures**2)))

    def _second(self, low: int, full: int) -> int:
        """Choose the second size: the wall itself only where whatever the first step was off by hardly matters.

        What it held beyond its trace may be there at any size, or grow with the samples.
        """
        traced = self.traced
        if traced is None:
            return min(2 * low, self.most)
        beyond = max(0.0, self.reserved[low] - traced(low))
        careful = self._fitting(lambda n: traced(n) + beyond * n / low, low, self.most + 1)
        if careful >= AGREE * full:
            return full
        return careful // 2 if careful > 4 * low else careful if careful > low else (low + full + 1) // 2

    def corrected(self, n: int) -> float:
        """Return the bytes of n samples: as traced, and what the nearest real steps took beyond that."""
        traced = self.traced or (lambda _n: 0.0)
        known = [*self.allocated, *([self.failed] if self.counted and self.failed is not None else [])]
        if not known:
            return traced(n)
        n0, *others = sorted(known, key=lambda size: abs(size - n))[:2]
        beyond = self._beyond(n0, traced)
        slope = (self._beyond(others[0], traced) - beyond) / (others[0] - n0) if others else 0.0
        return traced(n) + beyond + slope * (n - n0)

    def _beyond(self, n: int, traced: Callable[[int], float]) -> float:
        """Return what n samples took beyond their trace; of some that failed, what they would at least have needed."""
        if n in self.allocated:
            return self.allocated[n] - traced(n)
        return max(0.0, self.capacity_bytes + 1 - traced(n), *(self._beyond(size, traced) for size in self.allocated))

    def _fitting(self, peak_bytes: Callable[[int], float], low: int, high: int) -> int:
        """Return the largest size between two whose peak fits."""
        start = min(max(self.start, low + 1), high - 1)
        return largest_fitting(peak_bytes, self.capacity_bytes, least=low, most=high - 1, start=start)
