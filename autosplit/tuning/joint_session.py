"""A tuning by all ranks together: each measures its own device, rank 0 searches, and all run what it proposes.

each rank   ceiling | times | ---- told to all ---- | dry pass, all agree, timed step | ...
rank 0                                search:         proposes, learns                 the plan, told to all
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosplit.accelerators import backend, bounded, is_accelerator
from autosplit.errors import WorkloadError
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpOptions
from autosplit.probe.does_not_fit import does_not_fit
from autosplit.runtime.accelerator import twinned
from autosplit.runtime.protocol import Measurement
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.solve.memory import Ceiling, Region
from autosplit.solve.search_space import Space
from autosplit.solve.solver import Solver
from autosplit.solve.step_time import BACKWARD_SHARE, Fit, RankStepTime, StepTime, TimeCurve
from autosplit.solve.timed_sizes import TimedSize, curve_of, pooled
from autosplit.solve.trial import LEAST_MEASURED_DIFFERENCE, Trial
from autosplit.tuning.assemble import Answer, measured_ranks, rank_answer, residuals_of, why_no_ranks
from autosplit.tuning.peers import Failure
from autosplit.tuning.rank_steps import RankSteps
from autosplit.tuning.session import POINT_BUDGET_S, TRIAL_BUDGET_S, Session, most_steps

_log = logging.getLogger(__name__)


LEAST_SEEN = 0.05
"""Of an all-reduce: the first bucket's share or so is hidden by nothing."""

_Order = Sequence[Sequence[int]] | Failure | None
"""What rank 0 says comes next: a step of these shares; that it failed; or nothing."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank on its own device.

    Attributes:
        timed: Seconds of a micro-step by its samples.
        unused: A trainable parameter got no gradient.
    """

    ceiling: Ceiling
    timed: tuple[TimedSize, ...]
    update_s: float
    least_batch: int
    unused: bool
    steps: int
    ooms: int
    evaluation: Ceiling | None


class JointSession(Session):
    """A tuning as one rank of a job sees it; see `Session`."""

    ranks: tuple[Measured, ...] = ()
    steps: RankSteps | None = None
    _stopped = False
    """All ranks know that Ctrl-C came."""

    def _begin(self) -> None:
        self._open_storage()
        why_not = why_no_ranks(self.subject, (), 1)
        if why_not is not None:
            raise WorkloadError(f"DDP has no answer: {why_not}", code="no-ddp-plan")

    def _found(self) -> Plan:
        self.ranks = tuple(self._measured_alone())
        self.peers.all_run(self._refuse_small)
        self.steps = self.rank_steps(self._options())
        self._closing.callback(self.steps.close)
        nbytes = bucket_bytes(self.prober.tracer.trainee)
        reduce_s = max(self.peers.all_run(lambda: self._rank_steps_made.all_reduce_seconds(nbytes)))
        plan: Plan | None = None
        if self.peers.rank == 0:
            plan = self._lead(reduce_s)
        else:
            self._follow_orders()
        plan = self.peers.gathered(plan)[0]
        if plan is None:
            self.peers.part()
            raise KeyboardInterrupt
        return plan

    # Each rank by itself

    def _measured_alone(self) -> list[Measured]:
        """Let every rank measure its own device, all at the same time, as they will train."""
        ranks = range(self.peers.world_size)
        store, largest = self.store, self.request.largest_batch
        left = self.peers.gathered([None if store is None else store.get(f"{rank} rank", largest) for rank in ranks])[0]
        found = self.peers.all_run(lambda: self._ceiling(left[self.peers.rank]))
        self.recalled = sum(ceiling == known for (ceiling, _), known in zip(found, left, strict=True))
        if self.store is not None and not self.prober.out_of_time:
            for rank, (ceiling, _) in enumerate(found):
                self.store.put(f"{rank} rank", ceiling)
        self.stage = "times"
        ceiling, known = found[self.peers.rank]
        size = ceiling.batch_size
        timed = self.peers.each_run(
            lambda: known or tuple(self.prober.timed_sizes(0, size, role="rank", budget_s=POINT_BUDGET_S))
        )
        evaluation = self.peers.each_run(lambda: self._evaluation(0))
        everyones = self.peers.all_run(lambda: self._own_findings(ceiling, timed, evaluation))
        said = self.peers.gathered(tuple(self.notes))
        for rank, notes in enumerate(said[1:], 1):
            self.notes += [Note(note.kind, f"rank {rank}: {note}") for note in notes if note not in said[0]]
        return everyones

    def _ceiling(self, left: Ceiling | None) -> tuple[Ceiling, tuple[TimedSize, ...]]:
        """Find this rank's ceiling, unless a killed search has left it; of a plain processor its times as well."""
        if self._on_plain_cpu:
            needed = 0 if self.subject.may_accumulate else -(-self.request.least_effective // self.peers.world_size)
            curve, ceiling = self.prober.until_it_stops_paying(needed, "rank")
            return ceiling, tuple(TimedSize(samples, seconds) for samples, seconds in curve.points)
        if left is not None and left.capacity_bytes == self.prober.runtime.capacities_bytes[0]:
            return left, ()
        ceiling = self.prober.ceiling(0, "rank", accumulates=self.subject.accumulates)
        if ceiling.batch_size == 0:
            raise does_not_fit(self.prober, 0)
        return ceiling, ()

    def _own_findings(self, ceiling: Ceiling, timed: tuple[TimedSize, ...], evaluation: Ceiling | None) -> Measured:
        return Measured(
            ceiling,
            timed,
            0.0 if self._on_plain_cpu else self.prober.update_seconds(),
            self.prober.least_batch(),  # runs the user's code
            self.prober.tracer.leaves_unused(),
            *super()._counted(),
            evaluation,
        )

    def _refuse_small(self) -> None:
        why_not = why_no_ranks(self.subject, tuple(rank.ceiling for rank in self.ranks), self._least_batch())
        if why_not is not None:
            raise DoesNotFitError(
                f"DDP has no answer: {why_not}; expected a rank on each device; use a smaller model or larger devices",
                code="no-ddp-plan",
            )

    def _least_batch(self) -> int:
        return max(rank.least_batch for rank in self.ranks)

    # All ranks together

    def rank_steps(self, options: DdpOptions) -> RankSteps:
        """Make what runs steps of all ranks together; this rank's device is measured by itself no more."""
        if is_accelerator(self.request.kind):
            self._probing.close()  # a card's memory has to be free of it before all ranks step together
            # Until the end the allocator holds no more than this rank's capacity, or the user's own limit.
            most_bytes = self.prober.runtime.capacities_bytes[0]
            self._closing.enter_context(bounded(backend(self.request.kind), self.job.device, most_bytes))
        return RankSteps(
            self.subject.workload,
            self.prober.runtime,
            self.job.device,
            self.peers,
            backend=self.job.backend,
            options=options.keywords(),
        )

    @property
    def _rank_steps_made(self) -> RankSteps:
        assert self.steps is not None, "they are made once every device was measured"
        return self.steps

    def _options(self) -> DdpOptions:
        return DdpOptions(find_unused_parameters=any(rank.unused for rank in self.ranks))

    def _run(self, splits: Sequence[Sequence[int]]) -> tuple[list[int], Measurement] | Failure:
        """Run a step of these shares with all ranks."""
        sizes = tuple(split[self.peers.rank] for split in splits)
        _log.info("all ranks step together: %s samples on rank %d", sizes, self.peers.rank)
        return self._rank_steps_made.measured(sizes, budget_s=TRIAL_BUDGET_S)

    def _exchanged(self, order: _Order) -> _Order:
        """Let rank 0 say what comes next, and all of them whether Ctrl-C came; then nothing comes next."""
        told = self.peers.gathered((order, self.peers.interrupts.came))
        return None if any(came for _, came in told) else told[0][0]

    def _follow_orders(self) -> None:
        """Run what rank 0 orders, until it has no more; for the ranks above 0."""
        while True:
            order = self._exchanged(None)
            if isinstance(order, Failure):
                self.peers.part()
                raise order.as_error()
            if order is None:
                return
            self._run(order)

    # Rank 0

    def _lead(self, reduce_s: float) -> Plan | None:
        """Search, and put the plan together; None where Ctrl-C came before any trial had succeeded."""
        try:
            self.solver = Solver(self._space(), self._step_time(reduce_s), tells_apart=LEAST_MEASURED_DIFFERENCE)
            try:
                best = self._searched()
                self._confirm()
                plan = self._assembled(replace(self._quick_answer(best), even_samples_per_s=self._even_rate(best)))
            except KeyboardInterrupt:
                if not self._stopped:
                    raise  # a second one, at once: the others are not at the same place
                return self._best_so_far()
        except BaseException as error:
            if not self.peers.parted and not isinstance(error, KeyboardInterrupt):  # the others wait to hear of it
                self._exchanged(self.peers.failure(error))
                self.peers.part()
            raise
        self._exchanged(None)
        self._say("done", "done", 1.0)
        return plan

    def _space(self) -> Space:
        """Bound the search by what each rank holds."""
        needed, asked = self.peers.world_size * self._least_batch(), self.request.largest_batch
        if asked < needed:
            raise DoesNotFitError(
                f"{self.peers.world_size} ranks need a batch of at least {needed} samples, and at most {asked} were "
                "asked for; expected as many; raise effective_batch_size or max_batch_size, or name fewer devices",
                code="batch-below-ranks",
            )
        ceilings = tuple(rank.ceiling.batch_size for rank in self.ranks)
        region = Region.apart(ceilings, min(asked, sum(ceilings)), self._least_batch())
        sizes = self.request.effective_batch_sizes
        if self.subject.may_accumulate:
            return Space(region, sizes, most_steps(sizes, region.largest_batch))
        if self.request.least_effective > region.largest_batch:
            raise DoesNotFitError(
                f"the ranks hold {region.largest_batch} samples together, and a step that can't be accumulated has "
                f"{self.request.least_effective}; expected all of them to fit; ask for fewer by effective_batch_size",
                code="effective-batch-does-not-fit",
            )
        return Space(region, sizes)

    def _step_time(self, reduce_s: float) -> RankStepTime:
        """Fit the time of a step: the ranks' own, and what the all-reduce adds where no backward hides it."""
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
        """Order a step of all ranks, and run this one's part; nobody runs it where Ctrl-C came on any rank."""
        if self._exchanged(splits) is None:
            self._stopped = True
            raise KeyboardInterrupt
        found = self._run(splits)
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
        """Return the model as it was fitted to the trials, in the words in which `Problem` solves ranks again."""
        fitted = self.solver.refitted(self.trials).step_time
        curves = tuple(TimeCurve(tuple((n, fitted.contention * s) for n, s in curve.points)) for curve in fitted.curves)
        busy_s = max(curve(share) for curve, share in zip(curves, best.split, strict=True))
        # As much as a backward hides, and what was seen: `overlapped_seconds` takes the first off again.
        reduce_s = BACKWARD_SHARE * busy_s + sum(fitted.copies_s)
        return Fit(
            StepTime.bare(curves, fitted.update_s, adds_up=False),
            reduce_s,
            residuals_of(self.solver, fitted, self.trials),
        )

    def _assembled(self, answer: Answer, *notes: Note) -> Plan:
        text = f"strategy 'ddp': every throughput is of steps that {self.peers.world_size} ranks ran together"
        plan = super()._assembled(answer, *notes, Note("ddp-measured", text))
        plan = self._with_evaluation(plan, [rank.evaluation for rank in self.ranks])
        together = self._rank_steps_made
        return replace(
            plan,
            real_steps=sum(rank.steps for rank in self.ranks) + self.peers.world_size * together.steps,
            real_ooms=sum(rank.ooms for rank in self.ranks) + together.ooms,
        )

    def _counted(self) -> tuple[int, int]:
        steps, ooms = super()._counted()
        return (steps, ooms) if self.steps is None else (steps + self.steps.steps, ooms + self.steps.ooms)
