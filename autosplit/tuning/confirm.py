"""Run one step of a remembered plan, to see that it still holds: on a twin of its machine, or with less memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from autosplit.measure.prober import Prober
from autosplit.measure.request import Request
from autosplit.plan.plan import Plan
from autosplit.profiles.resolve import Lack, solved_again
from autosplit.runtime.prepare import Followed, runtime_for
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.solve.split import micro_batch_sizes, proportional_split

__all__ = ["Confirmer"]

STEP_BUDGET_S = 1.0
"""Repeating the step of a plan that was solved again stops after this long: its throughput is that of the step."""


class Confirmer:
    """Runs steps of plans.

    Args:
        request: What was asked for, with the devices and what they may hold now.
        followed: The workload with its tracer.
        closing: Gets what has to be undone at the end.
    """

    def __init__(self, request: Request, followed: Followed, closing: ExitStack) -> None:
        runtime = runtime_for(request.devices, request.capacities_bytes, followed, closing)
        self.request = request
        self.prober = Prober(runtime, followed.tracer, request.largest_batch)

    def run(self, plan: Plan) -> None:
        """Run a step of a plan for its memory.

        Raises:
            OutOfMemoryError: It does not fit.
        """
        if plan.region is None:
            self._run_ranks(plan)
        else:
            self.prober.confirmed_peaks(StepShape(_splits_of(plan)[:2]))

    def run_rank(self, plan: Plan, rank: int) -> None:
        """Run one rank's part of a step, on the one device that this process has.

        Raises:
            OutOfMemoryError: It does not fit.
        """
        shape = StepShape(((plan.split[rank],),) * min(2, plan.accumulation_steps), "rank", num_ranks=len(plan.split))
        self.prober.confirmed_peaks(shape)

    def lack(self, request: Request) -> Lack:
        """Say what there is now, for `solved_again`.

        Args:
            request: With all devices that the plan is for.
        """
        return Lack(request.capacities_bytes, bucket_bytes(self.prober.tracer.trainee), self.prober.least_batch())

    def solved_again(self, plan: Plan) -> Plan | None:
        """Solve a plan again under what its devices may hold now, and run a step of what comes of it.

        Args:
            plan: One that no longer fits.

        Returns:
            The plan, with that step's throughput and peaks; None where the fits of the old one have no answer.

        Raises:
            OutOfMemoryError: It does not fit either.
        """
        again = solved_again(plan, self.lack(self.request))
        if again is None:
            return None
        if again.region is None:
            self._run_ranks(again)
            return again
        measured = self.prober.step(_splits_of(again), budget_s=STEP_BUDGET_S)
        peaks = measured.peak_bytes or tuple(device.peak_bytes for device in again.devices)
        devices = tuple(replace(device, peak_bytes=peak) for device, peak in zip(again.devices, peaks, strict=True))
        rate, ddp = again.effective_batch_size / measured.seconds, again.ddp
        if len(devices) == 1 and ddp.ranks:
            alone = replace(ddp.ranks[0], peak_bytes=peaks[0])
            ddp = replace(ddp, ranks=(alone,), samples_per_s=rate, measured=True)
        return replace(again, devices=devices, samples_per_s=rate, ddp=ddp)

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
