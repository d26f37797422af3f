"""Time several batch sizes on one device."""

from __future__ import annotations

from autosplit.oom import OutOfMemoryError
from autosplit.probe.prober import Prober
from autosplit.solve.memory import Role
from autosplit.solve.timed_sizes import TimedSize

MANY = 32
"""Least ceiling at which a single sample is not timed. One sample is 3% of it, so a plan hardly uses it."""


def timed_sizes(
    prober: Prober, index: int, ceiling: int, *, role: Role, budget_s: float, alone: bool = True
) -> list[TimedSize]:
    """Time a device alone at its ceiling, at the least batch (1 or 2), and at every power of two between.

    A slow device next to fast ones may get 1% of its ceiling. Below its first point, a curve is constant. So a
    curve that began higher would make small batches look too slow, and the device would get almost no samples.

    Args:
        prober: Runs the steps.
        index: Position of the device.
        role: ``"rank"``, ``"primary"``, or ``"replica"``. A replica that holds nothing else is timed without an
            optimizer.
        budget_s: Seconds for repeating each step.
        alone: Time a replica without device 0, so that neither copies nor the gather count. Alone, it needs more
            memory at once than its part of a step.

    Raises:
        OutOfMemoryError: No size could be run.
    """
    # A simulated step of one sample needs its own trace, but larger ones are extrapolated. For a large ceiling,
    # skip it.
    least = min(max(prober.least_batch(), 2 if prober.runtime.simulated and ceiling >= MANY else 1), ceiling)
    apart = alone and role == "replica"
    shape_of = prober.forward_and_backward(index) if apart else prober.shapes(index, role, (), False)
    if prober.runtime.simulated:
        prober.foretold(shape_of(ceiling))  # one trace instead of one for each size
    # Use powers of two, so that devices share their traces.
    between = [2**power for power in reversed(range(ceiling.bit_length())) if least < 2**power < ceiling]
    timed: list[TimedSize] = []
    lacking: OutOfMemoryError | None = None
    for n in dict.fromkeys((ceiling, least, *between)):  # both ends first: time may run out
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
