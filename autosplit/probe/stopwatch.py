"""Time several batch sizes on one device."""

from __future__ import annotations

from autosplit.oom import OutOfMemoryError
from autosplit.probe.prober import Prober
from autosplit.solve.memory import Role
from autosplit.solve.timed_sizes import TimedSize

MANY = 32
"""Smallest ceiling at which a single sample is not timed. One sample is 3% of this ceiling, so plans hardly use it."""


def timed_sizes(
    prober: Prober, index: int, ceiling: int, *, role: Role, budget_s: float, alone: bool = True
) -> list[TimedSize]:
    """Time a device at its ceiling, at the smallest batch (1 or 2), and at every power of two in between.

    A slow device next to fast ones may get 1% of its ceiling. Below its first point, a curve is constant. So a curve
    that began higher would make small batches look too slow, and the device would get almost no samples.

    Args:
        role: ``"rank"``, ``"primary"``, or ``"replica"``. A replica without device 0 is timed without an optimizer.
        budget_s: Time in seconds for repeating each step.
        alone: Time a replica without device 0, so that neither copies nor the gather count. Without device 0, the
            replica needs more memory at once than its part of a step.

    Raises:
        OutOfMemoryError: No size could be run.
    """
    # A simulated step of one sample needs its own trace, but larger steps are extrapolated. Skip it for a large
    # ceiling.
    least = min(max(prober.least_batch(), 2 if prober.runtime.simulated and ceiling >= MANY else 1), ceiling)
    apart = alone and role == "replica"
    shape_of = prober.forward_and_backward(index) if apart else prober.shapes(index, role, (), False)
    if prober.runtime.simulated:
        prober.foretold(shape_of(ceiling))  # one trace instead of one for each size
    # Use powers of two, so that devices share their traces.
    between = [2**power for power in reversed(range(ceiling.bit_length())) if least < 2**power < ceiling]
    timed: list[TimedSize] = []
    lacking: OutOfMemoryError | None = None
    for n in dict.fromkeys((ceiling, least, *between)):  # Both ends come first, because time may run out.
        if len(timed) > 1 and prober.out_of_time:
            break
        prober.report(f"timing {n} sample{'s' * (n > 1)} on {prober.runtime.devices[index].label}")
        try:
            seconds = prober.micro_seconds(shape_of(n), budget_s=budget_s)
        except OutOfMemoryError as error:
            lacking = error
            continue
        timed.append(TimedSize(n, seconds, prober.measured(shape_of(n), budget_s=budget_s).error_s))
    if not timed:
        assert lacking is not None, "there is at least one size"
        raise lacking
    return sorted(timed, key=lambda size: size.samples)
