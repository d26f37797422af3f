"""Run one step of a remembered plan, to see that it still holds: on a twin of its machine, or with less memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from autosplit.measure.prober import Prober
from autosplit.plan.plan import Plan
from autosplit.profiles.resolve import Lack
from autosplit.runtime.prepare import Followed, runtime_for
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.solve.split import micro_batch_sizes, proportional_split
from autosplit.tuning.job import Job

__all__ = ["Confirmer"]

STEP_BUDGET_S = 1.0
"""Repeating the step of a plan that was solved again stops after this long: its throughput is that of the step."""


class Confirmer:
    """Runs a step of a plan, or this rank's part of one.

    Args:
        closing: Gets what has to be undone at the end.
    """

    def __init__(self, job: Job, followed: Followed, closing: ExitStack) -> None:
        self.job = job
        runtime = runtime_for(job.own.devices, job.own.capacities_bytes, followed, closing)
        self.prober = Prober(runtime, followed.tracer, job.own.largest_batch)

    def lack(self) -> Lack:
        """Say what there is now, for `solved_again`."""
        nbytes = bucket_bytes(self.prober.tracer.trainee)
        return Lack(self.job.whole.capacities_bytes, nbytes, self.prober.least_batch())

    def run(self, plan: Plan, *, measures: bool) -> Plan:
        """Run a step of a plan.

        Returns:
            The plan; where `measures` asks for them and they could be measured, with the step's throughput and peaks.

        Raises:
            OutOfMemoryError: It does not fit.
        """
        if self.job.several:  # this rank's part by itself, on the one device that this process has
            share = ((plan.split[self.job.peers.rank],),) * min(2, plan.accumulation_steps)
            self.prober.confirmed_peaks(StepShape(share, "rank", num_ranks=len(plan.split)))
            return plan
        if plan.region is None:
            self._run_ranks(plan)
            return plan
        if not measures:
            self.prober.confirmed_peaks(StepShape(_splits_of(plan)[:2]))
            return plan
        measured = self.prober.step(_splits_of(plan), budget_s=STEP_BUDGET_S)
        peaks = measured.peak_bytes or tuple(device.peak_bytes for device in plan.devices)
        devices = tuple(replace(device, peak_bytes=peak) for device, peak in zip(plan.devices, peaks, strict=True))
        rate, ddp = plan.effective_batch_size / measured.seconds, plan.ddp
        if len(devices) == 1 and ddp.ranks:
            alone = replace(ddp.ranks[0], peak_bytes=peaks[0])
            ddp = replace(ddp, ranks=(alone,), samples_per_s=rate, measured=True)
        return replace(plan, devices=devices, samples_per_s=rate, ddp=ddp)

    def _run_ranks(self, plan: Plan) -> None:
        """Run each rank's part on its device by itself: one process has no others to run it with."""
        count = len(plan.split)
        for rank, samples in enumerate(plan.split):
            split = tuple(samples if place == rank else 0 for place in range(count))
            shape = StepShape((split,) * min(2, plan.accumulation_steps), "rank", num_ranks=count)
            self.prober.confirmed_peaks(shape)


def _splits_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the micro-steps of an optimizer step."""
    sizes = micro_batch_sizes(plan.effective_batch_size, plan.batch_size)
    return tuple(proportional_split(size, plan.split) for size in sizes)
