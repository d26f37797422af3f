"""Time training steps: sizes of one device, and growing batches of a processor until they stop paying."""

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
"""Samples of a ceiling from which on a share of one is hardly given: 3 % of what the device holds."""

KNEE_GAIN = 0.03
"""On a plain CPU no larger batch is tried once two doublings in a row gained less throughput."""

LONGEST_STEP_S = 2.0
"""On a plain CPU no larger batch is tried once a step takes longer."""

DOUBLING_BUDGET_S = 0.5
"""Repeating one of those batches stops after this long."""


class Stopwatch(StepRunner):
    """Times steps of one workload on one runtime."""

    def timed_sizes(
        self, index: int, ceiling: int, *, role: Role, budget_s: float, alone: bool = True
    ) -> list[TimedSize]:
        """Time one device alone on its ceiling and on every power of two from the least share on, or from 2.

        A slow device among fast ones gets a hundredth of its ceiling; a curve that ended above would hold its time for
        constant there, and leave the device with next to nothing.

        Args:
            role: ``"rank"``, ``"primary"``, or ``"replica"`` for a device that holds no more than that: it is timed
                without an optimizer.
            alone: Time a replica without the first device, so that neither copies nor a gather count. By itself it
                holds more at once than its part of a step.

        Raises:
            OutOfMemoryError: None of them could be run.
        """
        # A simulated step of one sample is followed, those of more are told: of a large ceiling that is not worth it.
        least = min(max(self.least_batch(), 2 if self.runtime.simulated and ceiling >= MANY else 1), ceiling)
        apart = alone and role == "replica"
        shape_of = self.forward_and_backward(index) if apart else self.shapes(index, role, (), False)
        if self.runtime.simulated:
            self.foretold(shape_of(ceiling))  # or each size is followed
        # Powers of two, so that a trace which one device needs serves the others, too.
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
        """Time growing batches on a plain CPU, whose memory is predicted and never filled.

        The batch doubles until that twice gains less than `KNEE_GAIN` of throughput, or a step takes longer than
        `LONGEST_STEP_S`, or the next would not fit, or the time limit is over. A model that fails with a few samples
        is looked at from the sample batch's size on.

        Args:
            needed: So many samples have to run at once, whether that pays or not.
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
                n = sample  # which is known to run
                continue
            if peak_bytes > capacity_bytes:
                limit = "memory"
                _log.info("%d samples are not tried: they would hold %s", n, size_text(peak_bytes))
                break
            self.report(f"timing {n} sample{'s' * (n > 1)} on {self.runtime.devices[0].label}")
            measured = self.measured(shape, budget_s=DOUBLING_BUDGET_S)
            points.append((n, max(1e-9, measured.seconds - measured.update_s)))
            enough = measured.seconds > LONGEST_STEP_S or _stops_paying(points) or self.out_of_time
            if n == self.max_batch_size or (enough and n >= needed):
                limit = "max_batch_size" if n == self.max_batch_size else "time"
                _log.info("no more than %d samples are tried: limited by %s", n, limit)
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
    """Tell whether two doublings in a row gained too little: one alone may be the machine's noise."""
    if len(points) < 3:
        return False
    *before, last_but_one, last = [n / seconds for n, seconds in points]
    return max(last_but_one, last) < (1 + KNEE_GAIN) * max(before)
