"""Time training steps: several batch sizes on one device, and growing batches on a CPU until they stop paying off."""

from __future__ import annotations

import logging

from autosplit.errors import UserCodeError
from autosplit.oom import OutOfMemoryError
from autosplit.probe.does_not_fit import does_not_fit
from autosplit.probe.step_runner import StepRunner
from autosplit.solve.memory import Ceiling, Limit, Role
from autosplit.solve.step_time import TimeCurve
from autosplit.solve.timed_sizes import TimedSize
from autosplit.text import size_text

_log = logging.getLogger(__name__)

MANY = 32
"""Least ceiling at which a single sample is not timed. One sample is 3% of it, so a plan hardly uses it."""

KNEE_GAIN = 0.03
"""Least gain in throughput by doubling the batch on a plain CPU. The search ends after two smaller gains in a row."""

LONGEST_STEP_S = 2.0
"""Longest step on a plain CPU. After a longer step, no larger batch is tried."""

DOUBLING_BUDGET_S = 0.5
"""Seconds after which a batch on a plain CPU is not repeated again."""


class Stopwatch(StepRunner):
    """Times steps of one workload on one runtime."""

    def timed_sizes(
        self, index: int, ceiling: int, *, role: Role, budget_s: float, alone: bool = True
    ) -> list[TimedSize]:
        """Time a device alone at its ceiling, at the least batch (1 or 2), and at every power of two between.

        A slow device next to fast ones may get 1% of its ceiling. Below its first point, a curve is constant. So a
        curve that began higher would make small batches look too slow, and the device would get almost no samples.

        Args:
            index: Position of the device.
            ceiling: Its ceiling.
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
        least = min(max(self.least_batch(), 2 if self.runtime.simulated and ceiling >= MANY else 1), ceiling)
        apart = alone and role == "replica"
        shape_of = self.forward_and_backward(index) if apart else self.shapes(index, role, (), False)
        if self.runtime.simulated:
            self.foretold(shape_of(ceiling))  # one trace instead of one for each size
        # Use powers of two, so that devices share their traces.
        between = [2**power for power in reversed(range(ceiling.bit_length())) if least < 2**power < ceiling]
        timed: list[TimedSize] = []
        lacking: OutOfMemoryError | None = None
        for n in dict.fromkeys((ceiling, least, *between)):  # both ends first: time may run out
            if len(timed) > 1 and self.out_of_time:
                break
            self.report(f"timing {n} sample{'s' * (n > 1)} on {self.runtime.devices[index].label}")
            try:
                seconds = self.micro_seconds(shape_of(n), budget_s=budget_s)
            except OutOfMemoryError as error:
                lacking = error
                continue
            timed.append(TimedSize(n, seconds, self.measured(shape_of(n), budget_s=budget_s).error_s))
        if not timed:
            assert lacking is not None, "there is at least one size"
            raise lacking
        return sorted(timed, key=lambda size: size.samples)

    def rank_seconds(self, index: int, samples: int, *, budget_s: float) -> float:
        """Time a micro-step of one device as a DDP rank."""
        self.report(f"timing {samples} sample{'s' * (samples > 1)} on {self.runtime.devices[index].label}")
        return self.micro_seconds(self.shapes(index, "rank", (), False)(samples), budget_s=budget_s)

    def until_it_stops_paying(self, needed: int = 0, role: Role = "primary") -> tuple[TimeCurve, Ceiling]:
        """Time growing batches on a plain CPU, where memory is predicted and never filled.

        The batch doubles until two doublings in a row gain less than `KNEE_GAIN`, or a step takes longer than
        `LONGEST_STEP_S`. It also stops if the next batch would not fit, or if the time is up. If a model fails with few
        samples, begin with the sample batch's size.

        Args:
            needed: Samples that must run at once, even if they do not pay off.
            role: Role of the device.
        """
        capacity_bytes = self.runtime.capacities_bytes[0]
        before = self.counts.steps
        points: list[tuple[int, float]] = []
        n = self.least_batch()
        if n > self.max_batch_size:
            raise does_not_fit(self, 0)
        limit: Limit = "time"
        shape_of = self.shapes(0, role, (), False)
        sample = min(self.tracer.workload.sample_batch_size, self.max_batch_size)
        while True:
            shape = shape_of(n)
            try:
                peak_bytes = self.traced(shape)[0]
            except UserCodeError:
                if points or n >= sample:
                    raise
                n = sample  # this size runs
                continue
            if peak_bytes > capacity_bytes:
                limit = "memory"
                _log.info("not trying %d samples: they would take %s", n, size_text(peak_bytes))
                break
            self.report(f"timing {n} sample{'s' * (n > 1)} on {self.runtime.devices[0].label}")
            measured = self.measured(shape, budget_s=DOUBLING_BUDGET_S)
            points.append((n, max(1e-9, measured.seconds - measured.update_s)))
            enough = measured.seconds > LONGEST_STEP_S or _stops_paying(points) or self.out_of_time
            if n == self.max_batch_size or (enough and n >= needed):
                limit = "max_batch_size" if n == self.max_batch_size else "time"
                _log.info("not trying more than %d samples: limited by %s", n, limit)
                break
            n = min(2 * n, self.max_batch_size)
        if not points:
            raise does_not_fit(self, 0)
        largest = points[-1][0]
        traced = {size: self.traced(shape_of(size))[0] for size, _ in points}
        fixed_bytes, bytes_per_sample = self.line(lambda size: self.traced(shape_of(size))[0], largest)
        ceiling = Ceiling(
            device=self.runtime.devices[0].label,
            role=role,
            batch_size=largest,
            limited_by=limit,
            fixed_bytes=fixed_bytes,
            bytes_per_sample=bytes_per_sample,
            peak_bytes=traced[largest],
            capacity_bytes=capacity_bytes,
            steps=self.counts.steps - before,
            confirmed=True,
            points=tuple((size, nbytes, False) for size, nbytes in sorted(traced.items())),
        )
        return TimeCurve.of(points), ceiling


def _stops_paying(points: list[tuple[int, float]]) -> bool:
    """Return whether two doublings in a row gained too little. One small gain may be noise."""
    if len(points) < 3:
        return False
    *before, last_but_one, last = [n / seconds for n, seconds in points]
    return max(last_but_one, last) < (1 + KNEE_GAIN) * max(before)
