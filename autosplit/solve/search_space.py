"""Define the search space: the configurations that may be tried."""

from __future__ import annotations

from dataclasses import dataclass

from autosplit.solve.memory import Region
from autosplit.solve.split import accumulation_steps


@dataclass(frozen=True, order=True)
class Configuration:
    """A point of the search space: batch size, samples on device 0, and accumulation steps."""

    gpu0_bsz: int
    batch_size: int
    accumulation_steps: int = 1


@dataclass(frozen=True)
class Space:
    """The configurations that may be searched.

    Attributes:
        region: The splits that fit into memory.
        effective_batch_sizes: Minimum and maximum samples per optimizer step. None for one micro-step of any size.
        max_steps: Maximum accumulation steps to try.
        accumulating: The splits that fit in a step of several micro-steps, if they differ from `region`.
    """

    region: Region
    effective_batch_sizes: tuple[int, int] | None
    max_steps: int = 1
    accumulating: Region | None = None

    def region_of(self, steps: int) -> Region:
        """Return the splits that fit in an optimizer step of this many micro-steps."""
        return self.region if steps == 1 or self.accumulating is None else self.accumulating

    def effective_of(self, configuration: Configuration) -> int:
        """Return the samples per optimizer step. The last micro-step may be shorter than the others."""
        full = configuration.batch_size * configuration.accumulation_steps
        return full if self.effective_batch_sizes is None else min(full, self.effective_batch_sizes[1])

    def plainness(self, configuration: Configuration) -> tuple[int, bool, int]:
        """Return a sort key that prefers few micro-steps, then micro-steps of equal size, then small micro-steps."""
        uneven = self.effective_of(configuration) % configuration.batch_size != 0
        return configuration.accumulation_steps, uneven, 0 if uneven else configuration.batch_size

    def batch_bounds(self, steps: int) -> tuple[int, int] | None:
        """Return the smallest and the largest batch that fit and make an optimizer step in this many micro-steps."""
        most = self.region_of(steps).largest_batch
        if self.effective_batch_sizes is None:
            return (1, most) if most >= 1 else None
        fewest_samples, most_samples = self.effective_batch_sizes
        least = -(-fewest_samples // steps)
        # The last micro-step has at least one sample.
        upper = most_samples if steps == 1 else -(-most_samples // (steps - 1)) - 1
        return (least, min(upper, most)) if least <= min(upper, most) else None

    def steps_bounds(self) -> tuple[int, int]:
        """Return the minimum and maximum accumulation steps."""
        if self.effective_batch_sizes is None:
            return 1, 1
        fewest_samples, most_samples = self.effective_batch_sizes
        fewest = accumulation_steps(fewest_samples, max(1, self.region.largest_batch))
        if fewest > 1 and self.accumulating is not None:
            fewest = max(2, accumulation_steps(fewest_samples, max(1, self.accumulating.largest_batch)))
        return fewest, max(fewest, min(self.max_steps, most_samples))

    def holds(self, configuration: Configuration) -> bool:
        """Return whether a configuration is in the space."""
        fewest, most = self.steps_bounds()
        if not fewest <= configuration.accumulation_steps <= most:
            return False
        batches = self.batch_bounds(configuration.accumulation_steps)
        if batches is None or not batches[0] <= configuration.batch_size <= batches[1]:
            return False
        shares = self.region_of(configuration.accumulation_steps).gpu0_bounds(configuration.batch_size)
        return shares is not None and shares[0] <= configuration.gpu0_bsz <= shares[1]
