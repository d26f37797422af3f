"""Hold another split against a plan, by the model that the plan holds. Nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from autosplit.errors import InputError
from autosplit.plan.explain import required_problem
from autosplit.plan.measured_step import checked_split
from autosplit.solve.split import whole_number
from autosplit.text import rate_text

if TYPE_CHECKING:
    from autosplit.plan.record import PlanRecord


@dataclass(frozen=True)
class SplitComparison:
    """A configuration beside a plan, both predicted by the plan's own fits. `str()` is the text for people.

    The nearer it is to what the search tried, the surer.

    Attributes:
        split: Samples per device in one forward.
        accumulation_steps: Forwards per optimizer step, each of the whole split.
        effective_batch_size: Samples per optimizer step.
        samples_per_s: Of the configuration.
        plan_samples_per_s: Of the plan, by the same model; `Plan.samples_per_s` is what was measured of it.
        gain: The plan's rate over the configuration's.
        peak_bytes: The most that each device would hold, by its memory's line near its ceiling: the further below that,
            the less sure.
        plan_peak_bytes: The plan's own.
        capacity_bytes: What each may hold.
        too_large: Labels of the devices whose share does not fit, by what the plan knows.
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
        """Whether every device holds its share."""
        return not self.too_large

    def __str__(self) -> str:
        """Return what there is to say in one line, marked as predicted."""
        unfit = f"; it does not fit {', '.join(self.too_large)}" if self.too_large else ""
        return (
            f"split {self.split} x {self.accumulation_steps}: {rate_text(self.samples_per_s)} (predicted), the plan "
            f"{rate_text(self.plan_samples_per_s)} (predicted), {self.gain:.2f} times as much{unfit}"
        )


def compared_split(plan: PlanRecord, split: int | Sequence[int], accumulation_steps: SupportsIndex) -> SplitComparison:
    """Compare; see `Plan.compare_with`."""
    shares = checked_split(split, [device.label for device in plan.devices])
    steps = whole_number("accumulation_steps", accumulation_steps, minimum=1)
    problem = required_problem(plan)
    least = plan.ddp.least_batch if problem.ranks else problem.region.least_share
    if any(0 < share < least for share in shares) or (problem.ranks and 0 in shares):
        raise InputError(
            f"split is {shares}; expected shares of at least {least}{'' if problem.ranks else ' or of 0'}: on fewer "
            "the model does not train; move samples, or add some",
            code="split-too-small",
        )
    samples = sum(shares) * steps
    rate = problem.rate(shares, samples)
    own = problem.rate(plan.split, plan.effective_batch_size)
    peaks = tuple(_peak_bytes(plan, index, shares, steps) for index in range(len(shares)))
    fitting = zip(plan.devices, peaks, strict=True)
    return SplitComparison(
        split=shares,
        accumulation_steps=steps,
        effective_batch_size=samples,
        samples_per_s=rate,
        plan_samples_per_s=own,
        gain=own / rate,
        peak_bytes=peaks,
        plan_peak_bytes=tuple(device.peak_bytes for device in plan.devices),
        capacity_bytes=tuple(device.capacity_bytes for device in plan.devices),
        too_large=tuple(device.label for device, peak_bytes in fitting if peak_bytes > device.capacity_bytes),
    )


def _peak_bytes(plan: PlanRecord, index: int, split: tuple[int, ...], steps: int) -> int:
    """Predict what a device holds, by the plane of device 0 beside others, or by its line."""
    device, share = plan.devices[index], split[index]
    beside = plan.region is not None and any(split[1:])
    if share == 0 and not (index == 0 and beside):
        return 0
    known = device.ceiling.bytes_at(share)
    if index == 0 and beside and plan.region is not None:
        known = max(0, int(plan.region.primary.peak_bytes(share, sum(split))))
    # Gradients that wait for another forward take what the parameters take; ranks hold theirs in any case.
    waits = steps > 1 and plan.accumulation_steps == 1 and plan.region is not None and device.memory is not None
    return known + (device.memory.parameters_bytes if waits and device.memory is not None else 0)
