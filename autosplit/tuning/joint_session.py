"""Tune on all ranks of a job: each rank measures its own device, and all ranks run the trials together.

each rank   ceiling, times | dry pass, all exchange results, timed step | ...
rank 0                     | searches, proposes a step                  | the plan
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autosplit.errors import WorkloadError
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpOptions
from autosplit.probe.ceilings import ceiling_by_time, ceiling_of, does_not_fit
from autosplit.probe.prober import timed_sizes
from autosplit.runtime.accelerator import twinned
from autosplit.runtime.protocol import Measurement
from autosplit.solve.memory import Ceiling, Region
from autosplit.solve.search_space import Space
from autosplit.solve.solver import Solver
from autosplit.solve.step_time import BACKWARD_SHARE, Fit, RankStepTime, StepTime, TimeCurve
from autosplit.solve.timed_sizes import TimedSize, curve_of, pooled
from autosplit.solve.trial import LEAST_MEASURED_DIFFERENCE, Trial
from autosplit.tuning.assemble import Answer, accumulates, measured_ranks, rank_answer, residuals_of, why_no_ranks
from autosplit.tuning.peers import Failure
from autosplit.tuning.session import POINT_BUDGET_S, TRIAL_BUDGET_S, Session, most_steps
from autosplit.tuning.worker import Worker

LEAST_SEEN = 0.05
"""Smallest fraction of an all-reduce that the backward does not hide: about the first bucket."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank on its own device.

    Attributes:
        timed: Time of a micro-step in seconds, by number of samples.
        unused: Whether a trainable parameter got no gradient.
    """

    ceiling: Ceiling
    timed: tuple[TimedSize, ...]
    update_s: float
    least_batch: int
    unused: bool
    steps: int
    ooms: int


class JointSession(Session):
    """Tune on all ranks of a job. It runs on rank 0, which sends orders that the other ranks execute."""

    ranks: tuple[Measured, ...] = ()

    def _begin(self) -> None:
        why_not = why_no_ranks(self.request, self.workload, (), 1)
        if why_not is not None:
            raise WorkloadError(f"DDP can't train this workload: {why_not}.")

    def _found(self) -> Plan:
        self.ranks = tuple(self._measured_alone())
        small = tuple(rank.ceiling for rank in self.ranks)
        why_not = why_no_ranks(self.request, self.workload, small, self._least_batch())
        if why_not is not None:
            raise DoesNotFitError(
                f"DDP can't train this workload: {why_not}. Expected a rank on each device. Use a smaller model or "
                "larger devices.",
            )
        self.workers.ask(Worker.begin_steps, self._options())
        reduce_s = max(self.workers.ask(_all_reduce_seconds))
        self.solver = Solver(self._space(), self._step_time(reduce_s), tells_apart=LEAST_MEASURED_DIFFERENCE)
        try:
            best = self._searched()
            self._confirm()
            plan = self._assembled(replace(self._quick_answer(best), even_samples_per_s=self._even_rate(best)))
        except KeyboardInterrupt:
            best_so_far = self._best_so_far() if self.worker.peers.stopped else None
            if best_so_far is None:  # Or this is a second Ctrl-C, and the ranks may be at different places.
                raise
            return best_so_far
        self._say("done", "done", 1.0)
        return plan

    # Measurements of single ranks

    def _measured_alone(self) -> list[Measured]:
        """Let every rank measure its own device. All ranks do this at the same time, as in training."""
        count = len(self.request.devices)
        needed = 0 if self.may_accumulate else -(-self.request.least_effective // count)
        found = self.workers.ask(_ceiling, needed, accumulates(self.request, self.workload))
        self.stage = "times"
        return self.workers.ask(_measured, found)

    def _least_batch(self) -> int:
        return max(rank.least_batch for rank in self.ranks)

    def _options(self) -> DdpOptions:
        return DdpOptions(find_unused_parameters=any(rank.unused for rank in self.ranks))

    # The search

    def _space(self) -> Space:
        needed, asked = len(self.ranks) * self._least_batch(), self.request.largest_batch
        if asked < needed:
            raise DoesNotFitError(
                f"{len(self.ranks)} ranks need a batch of at least {needed} samples, but at most {asked} are "
                "allowed. Raise effective_batch_size or max_batch_size, or name fewer devices.",
            )
        ceilings = tuple(rank.ceiling.batch_size for rank in self.ranks)
        region = Region.apart(ceilings, min(asked, sum(ceilings)), self._least_batch())
        sizes = self.request.effective_batch_sizes
        if self.may_accumulate:
            return Space(region, sizes, most_steps(sizes, region.largest_batch))
        if self.request.least_effective > region.largest_batch:
            raise DoesNotFitError(
                f"One forward over all ranks fits at most {region.largest_batch} samples. The step needs "
                f"{self.request.least_effective}, and this workload can't accumulate gradients. Lower "
                "effective_batch_size.",
            )
        return Space(region, sizes)

    def _step_time(self, reduce_s: float) -> RankStepTime:
        """Fit the time of a step: the ranks' curves, and the part of the all-reduce that no backward hides."""
        capacities = twinned(self.request.devices, [rank.ceiling.capacity_bytes for rank in self.ranks])
        kinds = [
            (device.name, capacity_bytes)
            for device, capacity_bytes in zip(self.request.devices, capacities, strict=True)
        ]
        curves = tuple(map(curve_of, pooled([rank.timed for rank in self.ranks], kinds)))
        largest = max(curve(rank.ceiling.batch_size) for curve, rank in zip(curves, self.ranks, strict=True))
        seen_s = max(reduce_s - BACKWARD_SHARE * largest, LEAST_SEEN * reduce_s)
        count = len(curves)
        copies = (0.0, *(seen_s / (count - 1),) * (count - 1))
        return RankStepTime(curves, copies, (0.0,) * count, max(rank.update_s for rank in self.ranks), adds_up=False)

    def _measured(self, splits: tuple[tuple[int, ...], ...]) -> Measurement:
        found = self.workers.ask(Worker.step, splits, TRIAL_BUDGET_S)[0]
        if isinstance(found, Failure):
            raise OutOfMemoryError(f"rank {found.rank}: {found.message}", device_index=found.rank)
        peaks, measured = found
        return replace(measured, peak_bytes=tuple(peaks))

    def _can_train(self, splits: tuple[tuple[int, ...], ...]) -> bool:
        least = self._least_share
        return min(splits[0]) >= least and (least == 1 or min(map(min, splits)) >= least)

    # The plan

    def _quick_answer(self, best: Trial) -> Answer:
        ceilings = tuple(
            replace(rank.ceiling, batch_size=max(rank.ceiling.batch_size, share))
            for rank, share in zip(self.ranks, best.split, strict=True)
        )
        ddp = measured_ranks(ceilings, best, self._effective_of(best), self._options(), self._least_batch())
        return rank_answer(ddp, self._fit(best))

    def _fit(self, best: Trial) -> Fit:
        fitted = self.solver.refitted(self.trials).step_time
        curves = tuple(TimeCurve(tuple((n, fitted.contention * s) for n, s in curve.points)) for curve in fitted.curves)
        busy_s = max(curve(share) for curve, share in zip(curves, best.split, strict=True))
        # Add the part that the backward hides. `overlapped_seconds` subtracts it again.
        reduce_s = BACKWARD_SHARE * busy_s + sum(fitted.copies_s)
        return Fit(
            StepTime.bare(curves, fitted.update_s, adds_up=False),
            reduce_s,
            residuals_of(self.solver, fitted, self.trials),
        )

    def _assembled(self, answer: Answer, *notes: Note) -> Plan:
        count, steps = len(self.ranks), self.worker.steps
        assert steps is not None, "`begin_steps` sets it on all ranks"
        text = f"With strategy 'ddp', {count} ranks ran all measured steps together."
        plan = super()._assembled(answer, *notes, Note("ddp-measured", text))
        return replace(
            plan,
            real_steps=sum(rank.steps for rank in self.ranks) + count * steps.steps,
            real_ooms=sum(rank.ooms for rank in self.ranks) + steps.ooms,
        )

    def _counted(self) -> tuple[int, int]:
        steps, ooms = super()._counted()
        together = self.worker.steps
        return (steps, ooms) if together is None else (steps + together.steps, ooms + together.ooms)


# Run by each rank


def _ceiling(worker: Worker, needed: int, accumulates: bool) -> tuple[Ceiling, tuple[TimedSize, ...]]:
    """Find this rank's ceiling. On a plain CPU, also return its times."""
    prober = worker.prober
    if prober.limited_by_time:
        curve, found = ceiling_by_time(prober, needed, "rank")
        return found, tuple(TimedSize(samples, seconds) for samples, seconds in curve.points)
    found = ceiling_of(prober, 0, "rank", accumulates=accumulates)
    if found.batch_size == 0:
        raise does_not_fit(prober, 0)
    return found, ()


def _measured(worker: Worker, found: list[tuple[Ceiling, tuple[TimedSize, ...]]]) -> Measured:
    prober = worker.prober
    own, timed = found[worker.peers.rank]
    if not timed:
        timed = tuple(timed_sizes(prober, 0, own.batch_size, role="rank", budget_s=POINT_BUDGET_S))
    return Measured(
        own,
        timed,
        0.0 if prober.limited_by_time else prober.update_seconds(),
        prober.least_batch,  # runs the user's code
        prober.facts.leaves_unused,
        prober.steps,
        prober.ooms,
    )


def _all_reduce_seconds(worker: Worker) -> float:
    assert worker.steps is not None, "`begin_steps` sets it"
    return worker.steps.all_reduce_seconds(worker.prober.facts.gradient_bytes)
