"""Compare another split with a plan, using the plan's time and memory models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from autosplit.errors import InputError
from autosplit.plan.layout import Layout
from autosplit.plan.measured_step import checked_split
from autosplit.plan.solve_again import required_problem
from autosplit.solve.split import whole_number
from autosplit.text import rate_text

if TYPE_CHECKING:
    from autosplit.plan.record import PlanRecord


@dataclass(frozen=True)
class SplitComparison:
    """A configuration and a plan, both predicted with the plan's fits. `str()` returns the comparison as text.

    Predictions are more accurate for configurations that are similar to the trials.

    Attributes:
        split: Samples per device in one forward.
        accumulation_steps: Forwards per optimizer step, each with the whole split.
        samples_per_s: Predicted throughput of the configuration.
        plan_samples_per_s: Predicted throughput of the plan. `Plan.samples_per_s` is the measured value.
        gain: The plan's throughput over the configuration's.
        peak_bytes: Predicted peak memory of each device, from a line near its ceiling. Far below the ceiling, the line
            is less accurate.
        plan_peak_bytes: Peak memory of each device in the plan.
        capacity_bytes: Memory that training may use on each device.
        too_large: Labels of the devices on which the configuration is predicted not to fit.
    """

    split: tuple[int, ...]
    accumulation_steps: int
    effective_batch_size: int
    samples_per_s: float
    plan_samples_per_s: float
    gain: float
    peak_bytes: tuple[int, ...]
    plan_peak_bytes: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    too_large: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the configuration fits on every device."""
        return not self.too_large

    def __str__(self) -> str:
        unfit = f"; it does not fit {', '.join(self.too_large)}" if self.too_large else ""
        return (
            f"split {self.split} x {self.accumulation_steps}: {rate_text(self.samples_per_s)} (predicted), the plan "
            f"{rate_text(self.plan_samples_per_s)} (predicted), {self.gain:.2f} times as much{unfit}"
        )


def compared_split(plan: PlanRecord, split: int | Sequence[int], accumulation_steps: SupportsIndex) -> SplitComparison:
    """Return the comparison, see `Plan.compare_with`."""
    layout = plan.main
    shares = checked_split(split, [device.label for device in layout.devices])
    steps = whole_number("accumulation_steps", accumulation_steps, minimum=1)
    problem, least = required_problem(plan, layout), layout.least_batch
    if any(0 < share < least for share in shares) or (problem.ranks and 0 in shares):
        raise InputError(
            f"split={shares} gives a device too few samples to train on. Give each device at least {least}"
            f"{'' if problem.ranks else ', or none'}.",
        )
    samples = sum(shares) * steps
    rate = problem.rate(shares, samples)
    own = problem.rate(layout.split, layout.effective_batch_size)
    peaks = tuple(_peak_bytes(layout, index, shares, steps) for index in range(len(shares)))
    fitting = zip(layout.devices, peaks, strict=True)
    return SplitComparison(
        split=shares,
        accumulation_steps=steps,
        effective_batch_size=samples,
        samples_per_s=rate,
        plan_samples_per_s=own,
        gain=own / rate,
        peak_bytes=peaks,
        plan_peak_bytes=layout.peak_bytes,
        capacity_bytes=tuple(device.capacity_bytes for device in layout.devices),
        too_large=tuple(device.label for device, peak_bytes in fitting if peak_bytes > device.capacity_bytes),
    )


def _peak_bytes(layout: Layout, index: int, split: tuple[int, ...], steps: int) -> int:
    """Predict the peak memory of a device. On several devices, device 0 also needs memory for the whole batch."""
    seat, samples, region = layout.seats[index], split[index], layout.region
    gathers = region is not None and index == 0 and any(split[1:])
    if samples == 0 and not gathers:
        return 0
    known = seat.ceiling.bytes_at(samples)
    if gathers and region is not None:
        known = max(0, int(region.primary.peak_bytes(samples, sum(split))))
    # Gradients that stay in memory during the next forward need as much memory as the parameters. Ranks always keep
    # them.
    waits = steps > 1 and layout.accumulation_steps == 1 and layout.strategy == "balanced"
    return known + (seat.memory.parameters_bytes if waits and seat.memory is not None else 0)
