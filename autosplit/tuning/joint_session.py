"""One tuning by all ranks together: each measures its own device, rank 0 searches, and all run what it proposes.

each rank   ceiling | times | ---- told to all ---- | dry pass, all agree, timed step | ...
rank 0                                search:         proposes, learns                 the plan, told to all
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torch import nn

from autosplit.accelerators import backend, bounded, is_accelerator
from autosplit.errors import AutosplitError, WorkloadError
from autosplit.measure.check_result import Check
from autosplit.measure.gradient_check import checks_for, not_checked
from autosplit.measure.prober import Prober, does_not_fit
from autosplit.oom import DoesNotFitError
from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpOptions
from autosplit.runtime.accelerator import twinned
from autosplit.runtime.prepare import Followed, runtime_for
from autosplit.runtime.protocol import Measurement
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.solve.memory import Ceiling, Region
from autosplit.solve.optuna_search import CeilingStore, search
from autosplit.solve.proposals import Proposer, steadied
from autosplit.solve.search_space import (
    LEAST_MEASURED_DIFFERENCE,
    Configuration,
    Space,
    Trial,
    best_trial,
    configuration_of,
)
from autosplit.solve.solver import Solver
from autosplit.solve.split import even_split
from autosplit.solve.step_time import BACKWARD_SHARE, Fit, RankStepTime, StepTime, TimeCurve
from autosplit.solve.timed_sizes import TimedSize, curve_of, pooled
from autosplit.tuning.assemble import Subject, assembled, measured_ranks, rank_answer, residuals_of, why_no_ranks
from autosplit.tuning.job import Job
from autosplit.tuning.peers import Failure
from autosplit.tuning.progress import Progress, fraction_of
from autosplit.tuning.rank_steps import RankSteps
from autosplit.tuning.session import POINT_BUDGET_S, TRIAL_BUDGET_S, most_steps
from autosplit.workload.workload import Workload

__all__ = ["JointSession", "refuse_waiting"]

_log = logging.getLogger(__name__)

TOGETHER_NOTE = "strategy 'ddp': every throughput is that of steps which {} ranks ran together"

INTERRUPTED_NOTE = "the search was interrupted: this is the best so far"

LEAST_SEEN = 0.05
"""Of an all-reduce: the first bucket's share or so is hidden by nothing."""

LEAST_CONTENTION = 0.1
"""Where the all-reduce takes nearly all the time, a fit may find that computing takes none, which can't be."""

_Order = Sequence[Sequence[int]] | Failure | None
"""What rank 0 says comes next: a step of these shares; that it failed; or nothing."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank on its own device.

    Attributes:
        ceiling: As a rank.
        timed: Seconds of a micro-step by its samples.
        update_s: The optimizer.
        least_batch: The fewest samples that it trains on.
        unused: A trainable parameter got no gradient.
        steps: Real steps so far.
        ooms: How many of them ran out of memory.
    """

    ceiling: Ceiling
    timed: tuple[TimedSize, ...]
    update_s: float
    least_batch: int
    unused: bool
    steps: int
    ooms: int


def refuse_waiting(workload: Workload) -> None:
    """Refuse a model that waits for the other ranks in its forward: each measures its device by itself.

    Raises:
        WorkloadError: It has such a module, which is named.
    """
    for part in (part for one in workload.modules for part in one.modules()):
        if isinstance(part, nn.SyncBatchNorm) or type(part).__name__.startswith("FSDP"):
            raise WorkloadError(
                f"the model has a {type(part).__name__}, which waits for all ranks in every forward, and each rank "
                "measures its device by itself; expected a plain model; tune that, and convert or shard it in training "
                "(ctx.wrap(model, sync_batchnorm=True), ctx.shard(model))"
            )


class JointSession:
    """One tuning as one rank sees it; every rank has one, and calls the same of it.

    Args:
        job: The ranks.
        subject: What the plan is for, with the devices of all of them.
        followed: The workload with its tracer, on this rank.
        tell: Told how far it is, on rank 0.
        closing: Gets what has to be undone at the end.
        probing: Ends what measures this rank's device by itself: a GPU's memory has to be free of it before all ranks
            step together.
        study_name: Of the search's study.
    """

    def __init__(
        self,
        job: Job,
        subject: Subject,
        followed: Followed,
        tell: Callable[[Progress], None],
        closing: ExitStack,
        probing: ExitStack,
        *,
        study_name: str,
    ) -> None:
        self.job, self.peers, self.subject, self.followed = job, job.peers, subject, followed
        self.request, self.tell, self.study_name = subject.request, tell, study_name
        self.notes = [*followed.notes]
        self.stage = "ceilings"
        self.trials: list[Trial] = []
        self.checks: tuple[Check, ...] = ()
        self.solver: Solver | None = None
        self.ranks: tuple[Measured, ...] = ()
        self._probing = probing
        runtime = runtime_for(job.own.devices, job.own.capacities_bytes, followed, probing)
        count = self.peers.world_size
        self.prober = Prober(
            runtime,
            followed.tracer,
            self.request.largest_batch,
            self._report,
            num_ranks=count,
            deadline_s=self.request.deadline_s,
        )
        self.store: CeilingStore | None = None  # rank 0's
        self.closing = closing
        self.steps: RankSteps | None = None
        self._stopped = False  # all ranks know that Ctrl-C came

    def plan(self) -> Plan:
        """Measure, search, and put the plan together; the same one on every rank.

        Returns:
            The plan; where Ctrl-C came, the best so far, which is not `complete`.

        Raises:
            DoesNotFitError: Not even the smallest batch fits a rank, or nothing that was tried did.
            RankFailedError: Another rank failed.
            KeyboardInterrupt: Ctrl-C, before any trial had succeeded.
        """
        self.peers.all_run(self._refuse_unfit)
        self.peers.all_run(self._check)
        self.ranks = tuple(self._measured_alone())
        self.peers.all_run(self._refuse_small)
        self.steps = self._rank_steps()
        self.closing.callback(self.steps.close)
        reduce_s = max(self.peers.all_run(self._all_reduce_seconds))
        plan: Plan | None = None
        if self.peers.rank == 0:
            plan = self._searched(reduce_s)
        else:
            self._follow_orders()
        plan = self.peers.told(plan)
        if plan is None:
            self.peers.part()
            raise KeyboardInterrupt
        return plan

    def _refuse_unfit(self) -> None:
        if self.request.storage is not None and self.peers.rank == 0:
            self.store = CeilingStore(self.request.storage, self.study_name)
        why_not = why_no_ranks(self.subject, (), 1)
        if why_not is not None:
            raise WorkloadError(f"DDP has no answer: {why_not}")

    def _check(self) -> None:
        """See what splitting changes about the training, on rank 0 for all."""
        if self.peers.rank != 0:
            return
        self._say("checks", "the gradient of the sample batch, whole and cut", 0.0)
        try:
            self.checks, notes = checks_for(self.subject.workload, self.followed.rebuild)
        except AutosplitError as error:
            notes = (not_checked(error),)
        self.notes += notes

    # Each rank by itself

    def _measured_alone(self) -> list[Measured]:
        """Let every rank measure its own device, all at the same time, as they will train."""
        ranks = range(self.peers.world_size)
        store, largest = self.store, self.request.largest_batch
        left = self.peers.told([None if store is None else store.get(f"{rank} rank", largest) for rank in ranks])
        found = self.peers.all_run(lambda: self._ceiling(left[self.peers.rank]))
        if self.store is not None and not self.prober.out_of_time:
            for rank, (ceiling, _) in enumerate(found):
                self.store.put(f"{rank} rank", ceiling)
        self.stage = "times"
        mine = found[self.peers.rank]
        times = self.peers.all_run(lambda: self._times(mine[0], mine[1]))
        everyones = self.peers.all_run(lambda: self._own_findings(mine[0], times[self.peers.rank]))
        said = self.peers.gathered(tuple(self.notes))
        for rank, notes in enumerate(said[1:], 1):
            self.notes += [f"rank {rank}: {note}" for note in notes if note not in said[0]]
        return everyones

    def _own_findings(self, ceiling: Ceiling, timed: tuple[TimedSize, ...]) -> Measured:
        counts = self.prober.counts
        return Measured(
            ceiling,
            timed,
            0.0 if self._on_plain_cpu() else self.prober.update_seconds(),
            self.prober.least_batch(),  # runs the user's code
            self.prober.tracer.leaves_unused(),
            counts.steps,
            counts.ooms,
        )

    def _ceiling(self, left: Ceiling | None) -> tuple[Ceiling, tuple[TimedSize, ...]]:
        """Find this rank's ceiling; of a plain processor, which grows until it stops paying, its times as well.

        Args:
            left: The one that a killed search of the same left in its study.
        """
        if self._on_plain_cpu():
            needed = 0 if self.subject.may_accumulate else -(-self.request.least_effective // self.peers.world_size)
            curve, ceiling = self.prober.until_it_stops_paying(needed, "rank")
            return ceiling, tuple(TimedSize(samples, seconds) for samples, seconds in curve.points)
        if left is not None and left.capacity_bytes == self.prober.runtime.capacities_bytes[0]:
            return left, ()
        ceiling = self.prober.ceiling(0, "rank", accumulates=self.subject.accumulates)
        if ceiling.batch_size == 0:
            raise does_not_fit(self.prober, 0)
        return ceiling, ()

    def _times(self, ceiling: Ceiling, known: tuple[TimedSize, ...]) -> tuple[TimedSize, ...]:
        if known:
            return known
        return tuple(self.prober.timed_sizes(0, ceiling.batch_size, role="rank", budget_s=POINT_BUDGET_S))

    def _on_plain_cpu(self) -> bool:
        return self.request.kind == "cpu" and not self.job.own.devices[0].budgeted

    def _refuse_small(self) -> None:
        why_not = why_no_ranks(self.subject, tuple(rank.ceiling for rank in self.ranks), self._least_batch())
        if why_not is not None:
            raise DoesNotFitError(
                f"DDP has no answer: {why_not}; expected a rank on each device; use a smaller model or larger devices"
            )

    def _least_batch(self) -> int:
        return max(rank.least_batch for rank in self.ranks)

    # All ranks together

    def _rank_steps(self) -> RankSteps:
        if is_accelerator(self.request.kind):
            self._probing.close()
            self._bound_memory()
        return RankSteps(
            self.subject.workload,
            self.prober.runtime,
            self.job.device,
            self.peers,
            backend=self.job.backend,
            options=self._options().keywords(),
        )

    def _bound_memory(self) -> None:
        """Let the allocator hold no more than this rank's capacity, or the user's own limit, until the end."""
        most_bytes = self.prober.runtime.capacities_bytes[0]
        self.closing.enter_context(bounded(backend(self.request.kind), self.job.device, most_bytes))

    def _options(self) -> DdpOptions:
        return DdpOptions(find_unused_parameters=any(rank.unused for rank in self.ranks))

    def _all_reduce_seconds(self) -> float:
        assert self.steps is not None, "it is made before"
        return self.steps.all_reduce_seconds(bucket_bytes(self.prober.tracer.trainee))

    def _run(self, splits: Sequence[Sequence[int]]) -> tuple[list[int], Measurement] | Failure:
        """Run a step of these shares with all ranks."""
        assert self.steps is not None, "it is made before"
        sizes = tuple(split[self.peers.rank] for split in splits)
        _log.info("all ranks step together: %s samples on rank %d", sizes, self.peers.rank)
        return self.steps.measured(sizes, budget_s=TRIAL_BUDGET_S)

    # Ranks above 0

    def _follow_orders(self) -> None:
        """Run what rank 0 orders, until it has no more."""
        while True:
            order = self._exchanged(None)
            if isinstance(order, Failure):
                self.peers.part()
                raise order.as_error()
            if order is None:
                return
            self._run(order)

    def _exchanged(self, order: _Order) -> _Order:
        """Let rank 0 say what comes next, and all of them whether Ctrl-C came; then nothing comes next."""
        told = self.peers.gathered((order, self.peers.interrupts.came))
        return None if any(came for _, came in told) else told[0][0]

    # Rank 0

    def _searched(self, reduce_s: float) -> Plan | None:
        """Search, and put the plan together; None where Ctrl-C came before any trial had succeeded."""
        try:
            measured = LEAST_MEASURED_DIFFERENCE
            self.solver = Solver(self._space(), self._step_time(reduce_s), tells_apart=measured)
            try:
                self._search(self.solver)
                even = self._even_rate()
            except KeyboardInterrupt:
                if not self._stopped:
                    raise  # a second one, at once: the others are not at the same place
                best = self._best_trial()
                return None if best is None else self._interrupted(best)
            best = self._best_trial()
            if best is None:
                raise self._nothing_fits()
            plan = self._assembled(best, even)
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
                "asked for; expected as many; raise effective_batch_size or max_batch_size, or name fewer devices"
            )
        ceilings = tuple(rank.ceiling.batch_size for rank in self.ranks)
        region = Region.apart(ceilings, min(self.request.largest_batch, sum(ceilings)), self._least_batch())
        sizes = self.request.effective_batch_sizes
        if self.subject.may_accumulate:
            return Space(region, sizes, most_steps(sizes, region.largest_batch))
        if self.request.least_effective > region.largest_batch:
            raise DoesNotFitError(
                f"the ranks hold {region.largest_batch} samples together, and a step that can't be accumulated has "
                f"{self.request.least_effective}; expected all of them to fit; ask for fewer by effective_batch_size"
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

    def _search(self, solver: Solver) -> None:
        self.stage = "search"
        search(
            solver.space,
            self._evaluate,
            Proposer(solver),
            n_trials=self.request.n_trials,
            seed=self.request.seed,
            sampler=self.request.sampler,
            deadline_s=self.request.deadline_s,
            storage=self.request.storage,
            study_name=self.study_name,
            on_trial=self._keep,
            on_trouble=self.notes.append,
        )

    def _evaluate(self, number: int, configuration: Configuration) -> Trial:
        """Let all ranks run a configuration; one that does not fit is a failed trial."""
        assert self.solver is not None
        splits = self.solver.splits_of(configuration)
        steps = configuration.accumulation_steps
        trial = Trial(number, configuration.gpu0_bsz, configuration.batch_size, steps, splits[0])
        least = self._least_batch()
        if min(splits[0]) < least or (least > 1 and min(map(min, splits)) < least):
            why = "DDP's ranks all take part" if least == 1 else f"BatchNorm needs {least} samples to train on"
            return replace(trial, failure=f"a share below {least}: {why}")
        found = self._together(splits)
        if isinstance(found, Failure):
            return replace(trial, failure=f"rank {found.rank}: {found.message}", failed_device=found.rank)
        peaks, measured = found
        return replace(
            trial,
            samples_per_s=sum(map(sum, splits)) / measured.seconds,
            error_share=min(1.0, measured.error_s / measured.seconds),
            peak_bytes=tuple(peaks),
        )

    def _together(self, splits: tuple[tuple[int, ...], ...]) -> tuple[list[int], Measurement] | Failure:
        """Order a step of all ranks, and run this one's part.

        Raises:
            KeyboardInterrupt: Ctrl-C came, on any rank; nobody runs it.
        """
        if self._exchanged(splits) is None:
            self._stopped = True
            raise KeyboardInterrupt
        return self._run(splits)

    def _best_trial(self) -> Trial | None:
        if self.solver is None:
            return None
        solver = self.solver.refitted(self.trials)
        known = steadied(solver, self.trials)
        best = best_trial(solver.space, known, solver.samples_per_s)
        return None if best is None else self.trials[known.index(best)]

    def _even_rate(self) -> float | None:
        """Measure equal shares of the best's batch, where no trial did; None where they do not fit."""
        best = self._best_trial()
        if best is None:
            return None
        even = even_split(best.batch_size, self.peers.world_size)
        known = next((t for t in self.trials if t.split == even and t.batch_size == best.batch_size), None)
        if known is not None:
            return known.samples_per_s
        assert self.solver is not None
        configuration = replace(configuration_of(best), gpu0_bsz=even[0])
        fits = all(share <= rank.ceiling.batch_size for share, rank in zip(even, self.ranks, strict=True))
        if not fits or min(even) < self._least_batch():
            return None
        splits = self.solver.splits_of(configuration, even)
        found = self._together(splits)
        return None if isinstance(found, Failure) else sum(map(sum, splits)) / found[1].seconds

    def _nothing_fits(self) -> DoesNotFitError:
        failure = self.trials[-1].failure if self.trials else "no configuration was in the space"
        return DoesNotFitError(
            f"none of {len(self.trials)} configurations could be run; the last: {failure}; expected at least one; ask "
            "for another effective_batch_size, or use a smaller model or larger devices"
        )

    # The plan

    def _interrupted(self, best: Trial) -> Plan:
        return replace(self._assembled(best, None, INTERRUPTED_NOTE), complete=False)

    def _assembled(self, best: Trial, even_samples_per_s: float | None, *notes: str) -> Plan:
        assert self.solver is not None
        assert self.steps is not None
        fit = self._fit()
        ceilings = tuple(
            replace(rank.ceiling, batch_size=max(rank.ceiling.batch_size, share))
            for rank, share in zip(self.ranks, best.split, strict=True)
        )
        effective = self.solver.space.effective_of(configuration_of(best))
        ddp = measured_ranks(ceilings, best, effective, self._options(), self._least_batch())
        return assembled(
            self.subject,
            replace(rank_answer(ddp, fit), even_samples_per_s=even_samples_per_s),
            trials=tuple(self.trials),
            checks=self.checks,
            notes=(*self.notes, *notes, TOGETHER_NOTE.format(self.peers.world_size)),
            real_steps=sum(rank.steps for rank in self.ranks) + self.peers.world_size * self.steps.steps,
            real_ooms=sum(rank.ooms for rank in self.ranks) + self.steps.ooms,
        )

    def _fit(self) -> Fit:
        """Return the model as it was fitted to the trials, in the words in which `Problem` solves ranks again."""
        assert self.solver is not None
        fitted = self.solver.refitted(self.trials).step_time
        slower = max(LEAST_CONTENTION, fitted.contention)
        curves = tuple(TimeCurve(tuple((n, slower * s) for n, s in curve.points)) for curve in fitted.curves)
        best = self._best_trial()
        assert best is not None, "there is a plan"
        busy_s = max(curve(share) for curve, share in zip(curves, best.split, strict=True))
        # As much as a backward hides, and what was seen: `overlapped_seconds` takes the first off again.
        reduce_s = BACKWARD_SHARE * busy_s + sum(fitted.copies_s)
        return Fit(
            StepTime.bare(curves, fitted.update_s, adds_up=False),
            reduce_s,
            residuals_of(self.solver, fitted, self.trials),
        )

    # Progress

    def _keep(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._report(f"{len(self.trials)} of at most {self.request.n_trials} trials")

    def _report(self, message: str) -> None:
        done = len(self.trials) / self.request.n_trials if self.stage == "search" else 0.0
        self._say(self.stage, message, fraction_of(self.stage, done))

    def _say(self, stage: str, message: str, fraction: float) -> None:
        rates = (trial.samples_per_s for trial in self.trials if trial.samples_per_s is not None)
        counts = self.prober.counts
        steps, ooms = (0, 0) if self.steps is None else (self.steps.steps, self.steps.ooms)
        rate = max(rates, default=None)
        self.tell(Progress(stage, message, fraction, counts.steps + steps, counts.ooms + ooms, rate))
