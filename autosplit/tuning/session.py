"""One tuning: measure ceilings and times, search, and hand over what was found to be put together as a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from autosplit.errors import AutosplitError, InputError, WorkloadError, one_line
from autosplit.measure.check_result import Check
from autosplit.measure.gradient_check import checks_for, not_checked
from autosplit.measure.prober import Prober, does_not_fit
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpOptions, DdpPlan
from autosplit.runtime.prepare import Followed, runtime_for
from autosplit.runtime.protocol import Measurement, StepShape
from autosplit.runtime.simulated import SimulatedRuntime
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.solve.memory import Ceiling, MemoryFit, MemoryParts, Region, Role
from autosplit.solve.optuna_search import CeilingStore, search
from autosplit.solve.proposals import PATIENCE, Proposer, error_of, steadied
from autosplit.solve.search_space import (
    LEAST_DIFFERENCE,
    LEAST_MEASURED_DIFFERENCE,
    Configuration,
    Space,
    Trial,
    best_trial,
    configuration_of,
)
from autosplit.solve.solver import WITHIN_REACH, Solver
from autosplit.solve.split import accumulation_steps, even_split, micro_batch_sizes, proportional_split
from autosplit.solve.step_time import Fit, StepTime, TimeCurve
from autosplit.solve.timed_sizes import TimedSize, curve_of, pooled
from autosplit.tuning.assemble import (
    DDP_NOTE,
    Answer,
    Subject,
    assembled,
    lone_rank,
    rank_answer,
    residuals_of,
    solved_ranks,
)
from autosplit.tuning.progress import Progress, fraction_of
from autosplit.tuning.sensitivity import simulated_changes
from autosplit.workload.compiled import has_compiled_parts

__all__ = ["Session", "most_steps"]

_log = logging.getLogger(__name__)

POINT_BUDGET_S = 0.5
"""Repeating one measured size stops after this long."""

TRIAL_BUDGET_S = 1.0
"""Repeating one trial stops after this long."""

DOUBTFUL_ERROR = 0.3
"""Times that miss the model, fitted to themselves, by so much are not to be trusted."""

EXACT_PATIENCE = 1
"""As `proposals.PATIENCE`, where times are exact: the solver's answer and its neighbours tell it all."""


MOST_FORWARDS = 2**16
"""Forwards of one optimizer step: whoever asks for more has mistaken a data set for a batch."""

MOST_SOLVED = 4
"""Times that DDP's shares are solved and timed: each moves a share to where it was not timed by less."""

TOO_FEW = "a share below"

UNTIMED = TimedSize(1, 1.0)
"""The time of a device that has none: a second for each sample."""


class Session:
    """One tuning: the measurements so far, and the plan they make.

    Args:
        subject: What the plan is for.
        followed: The workload with its tracer.
        tell: Told how far it is.
        closing: Gets what has to be undone at the end.
        study_name: Of the search's study.
    """

    def __init__(
        self,
        subject: Subject,
        followed: Followed,
        tell: Callable[[Progress], None],
        closing: ExitStack,
        *,
        study_name: str,
    ) -> None:
        request = subject.request
        self.tell, self.study_name, self.isolated = tell, study_name, followed.isolated
        self.rebuild = followed.rebuild
        self.notes = [*followed.notes]
        self.runtime = runtime_for(request.devices, request.capacities_bytes, followed, closing)
        request = replace(request, capacities_bytes=self.runtime.capacities_bytes)
        self.subject, self.request = replace(subject, request=request), request
        self.prober = Prober(
            self.runtime, followed.tracer, request.largest_batch, self._report, deadline_s=request.deadline_s
        )
        self.store: CeilingStore | None = None
        self.recalled = 0  # ceilings that a killed search left there
        self.stage = "ceilings"
        self.checks: tuple[Check, ...] = ()
        self.trials: list[Trial] = []
        self.evaluated = 0  # of these; the others are those of a search that was cut off
        self.solver: Solver | None = None
        self.primary_alone: Ceiling | None = None
        self.replicas: tuple[Ceiling, ...] = ()
        # The same in steps of several micro-steps, where gradients wait; the first only where there are no replicas.
        self.primary_kept: Ceiling | None = None
        self.kept: tuple[Ceiling, ...] | None = None

    def plan(self) -> Plan:
        """Measure, search, and put the plan together.

        Raises:
            DoesNotFitError: Not even the smallest batch fits, or a step that can't be accumulated does not.
            WorkloadError: `max_batch_size` is below the samples of a step that can't be accumulated.
        """
        self._refuse_bounded_step()
        if self.request.storage is not None and self.request.strategy != "ddp":
            self.store = CeilingStore(self.request.storage, self.study_name)
        self._check()
        self._bound_by_tracing()
        plan = self._ddp_plan() if self.request.strategy == "ddp" else self._balanced_plan()
        if self._is_compiled():
            plan = plan.with_notes(last=[self._compiled_note(max(plan.split))])
        self._say("done", "done", 1.0)
        return plan

    def _check(self) -> None:
        """See what splitting changes about the training, before anything is searched."""
        self._say("checks", "the gradient of the sample batch, whole and cut", 0.0)
        try:
            if self.isolated is not None:  # what might end the process runs in the other one
                self.checks, notes = self.isolated.ask(checks_for)
            else:
                self.checks, notes = checks_for(self.subject.workload, self.rebuild)
        except AutosplitError as error:
            notes = (not_checked(error),)
        for found in self.checks:
            _log.info("check: %s", found)
        self.notes += notes

    def _balanced_plan(self) -> Plan:
        ranks, primary = self._ceilings()
        space = self._space(primary)
        curves = self._curves(ranks)
        step_time = self._step_time(space, curves)
        self.solver = Solver(
            self._with_several(space, step_time),
            step_time,
            tells_apart=LEAST_DIFFERENCE if self.runtime.simulated else LEAST_MEASURED_DIFFERENCE,
        )
        most, steps = self.solver.space.region.largest_batch, self.solver.space.max_steps
        _log.info("the search is of up to %d samples per forward and up to %d forwards per step", most, steps)
        self._search(self.solver.space)
        best = self._best_trial()
        if best is None:
            raise self._nothing_fits()
        _log.info("the answer is trial %d", best.number)
        self._doubt_the_times()
        even = self._even_rate(best)
        ceilings = self._final_ceilings(best)
        ddp = self._ddp(best, ceilings if len(ranks) == 1 else ranks, step_time)
        answer = self._answer(best, ceilings, ddp, even)
        plan = self._assembled(replace(answer, memory=self._memory_of(best)))
        if not isinstance(self.runtime, SimulatedRuntime):
            return plan
        self._say("search", "other machines", 1.0)
        return replace(plan, changes=simulated_changes(plan.solved(), self.runtime, deadline_s=self.request.deadline_s))

    def _memory_of(self, best: Trial) -> tuple[MemoryParts | None, ...]:
        """Tell what each device's memory is full of."""
        if not best.peak_bytes:
            return ()
        assert self.solver is not None
        splits = self.solver.splits_of(configuration_of(best), best.split)
        return self.prober.parts(StepShape(splits[:2]), best.peak_bytes)

    def _ddp_plan(self) -> Plan:
        """Solve DDP's batch sizes from what each device does by itself; nothing is searched."""
        ranks = self._rank_ceilings()
        curves = self._curves(ranks)
        step_time = self._rank_time(curves, ranks)
        ddp, step_time = self._solved_ranks(ranks, step_time)
        if not ddp.ranks:
            raise DoesNotFitError(
                f"DDP has no answer on {', '.join(device.label for device in self.request.devices)}: {ddp.reason}; "
                "expected a rank on each device; leave strategy='ddp' out, or use a smaller model or larger devices"
            )
        answer = rank_answer(ddp, Fit(step_time, self._all_reduce_seconds(step_time)))
        memory = self.prober.rank_parts(answer.split, answer.peak_bytes, accumulates=answer.accumulation_steps > 1)
        return self._assembled(replace(answer, memory=memory), DDP_NOTE)

    def _is_compiled(self) -> bool:
        return any(map(has_compiled_parts, self.subject.workload.modules))

    def _compiled_note(self, samples: int) -> str:
        """Run the model once as it was compiled, where it can be, and say what came of it."""
        note = "the model is compiled, and its memory and time are those of its eager form"
        if self.runtime.simulated:
            return f"{note}; no compiled step was run"
        self._report("a compiled step")
        try:
            peaks = self.runtime.peaks(StepShape(((samples, *(0 for _ in self.request.devices[1:])),), compiled=True))
        except OutOfMemoryError as error:
            return f"{note}; compiled, {samples} samples do not fit: {error}"
        except Exception as error:  # noqa: BLE001  # whatever a compiler can't do
            return f"{note}; compiled, no step could be run ({one_line(error)})"
        held = f", and holds {peaks[0]} bytes" if peaks else "; how much it holds can't be followed on a cpu"
        return f"{note}; a compiled step of {samples} samples on {self.request.devices[0].label} ran{held}"

    def _bound_by_tracing(self) -> None:
        """Look at no batch that can't be traced, where a step is a trace: on simulated cards."""
        if self.request.simulated and self.prober.largest_traced < self.request.largest_batch:
            self.prober.max_batch_size = self.prober.largest_traced
            self.notes.append(
                f"no batch over {self.prober.max_batch_size} was looked at: real tensors fill this machine"
            )

    def _refuse_bounded_step(self) -> None:
        least, most = self.request.least_effective, self.request.max_batch_size
        if most is not None and most < least and not self.subject.may_accumulate:
            raise WorkloadError(
                f"max_batch_size is {most} and effective_batch_size at least {least}, and {self._why_single()}; "
                f"expected one forward to hold them all; raise max_batch_size to {least}, or ask for fewer samples"
            )

    def _why_single(self) -> str:
        if self.subject.workload.step is not None:
            return "a custom step can't be accumulated"
        return "a loss over the whole batch (loss_scope='batch') can't be accumulated"

    def best_so_far(self) -> Plan | None:
        """Return the best plan that the trials so far make, without running anything more."""
        best = self._best_trial()
        if best is None or self.solver is None:
            return None
        region = self.solver.space.region_of(best.accumulation_steps)
        assert self.primary_alone is not None, "trials are made after the ceilings are known"
        primary = self.primary_alone
        ceilings = (
            replace(primary, batch_size=max(best.gpu0_bsz, region.primary_most(best.batch_size))),
            *self._others_in(best.accumulation_steps),
        )
        ddp = DdpPlan((), 0.0, "the search was interrupted before DDP was solved")
        plan = self._assembled(
            self._answer(best, ceilings, ddp, None), "the search was interrupted: this is the best so far"
        )
        return replace(plan, complete=False)

    # Measurements

    def _ceilings(self) -> tuple[tuple[Ceiling, ...], Ceiling]:
        """Find each device's ceiling as a rank, device 0's alone, and the others' as replicas."""
        devices, accumulates = self.request.devices, self.subject.accumulates
        self.primary_alone = primary = self._alone("primary")
        if len(devices) == 1:
            if primary.batch_size == 0:
                raise does_not_fit(self.prober, 0)
            return (replace(primary, role="rank"),), primary
        buckets = bucket_bytes(self.prober.tracer.trainee)
        ranks = tuple(self._like(primary, index, "rank", buckets, accumulates) for index in range(len(devices)))
        self.replicas = tuple(self._like(primary, index, "replica", 0, False) for index in range(1, len(devices)))
        return ranks, primary

    def _keep_replicas(self) -> tuple[Ceiling, ...]:
        """Find the others' ceilings in a step of several micro-steps: their copies and gradients stay all through."""
        waiting_bytes = bucket_bytes(self.prober.tracer.trainee)
        self.kept = tuple(
            self._like(found, index, "replica", waiting_bytes, True) for index, found in enumerate(self.replicas, 1)
        )
        return self.kept

    def _keep_alone(self) -> Ceiling:
        """Find device 0's ceiling in a step of several micro-steps that it takes by itself."""
        alone = self.primary_alone
        assert alone is not None, "it is measured first"
        self.primary_kept = alone
        if alone.batch_size and not self._on_plain_cpu():
            slope = float(alone.bytes_per_sample)
            self.primary_kept = self._ceiling(0, "primary", accumulates=True, start=alone.batch_size, slope=slope)
        return self.primary_kept

    def _others_in(self, steps: int) -> tuple[Ceiling, ...]:
        """Return the others' ceilings in a step of so many micro-steps."""
        return self.replicas if steps == 1 or self.kept is None else self.kept

    def _rank_ceilings(self) -> tuple[Ceiling, ...]:
        """Find each device's ceiling as a rank, and nothing else."""
        first = self._alone("rank")
        if first.batch_size == 0:
            raise does_not_fit(self.prober, 0)
        others = range(1, len(self.request.devices))
        return (first, *(self._like(first, index, "rank", 0, self.subject.accumulates) for index in others))

    def _alone(self, role: Role) -> Ceiling:
        """Find device 0's ceiling with nobody beside it."""
        if self._on_plain_cpu():
            # Where a step can't be accumulated, all its samples have to run at once, whether that pays or not.
            needed = 0 if self.subject.may_accumulate else self.request.least_effective
            self.plain_cpu_curve, ceiling = self.prober.until_it_stops_paying(needed)
            return replace(ceiling, role=role)
        return self._ceiling(0, role, accumulates=role == "rank" and self.subject.accumulates)

    def _like(self, known: Ceiling, index: int, role: Role, more_bytes: int, accumulates: bool) -> Ceiling:
        """Find a ceiling, beginning where another device's says that it should be."""
        slope = known.bytes_per_sample
        room_bytes = self.runtime.capacities_bytes[index] - known.fixed_bytes - more_bytes
        start = max(1, int(room_bytes / slope)) if slope > 0 else None
        return self._ceiling(index, role, accumulates=accumulates, start=start, slope=slope)

    def _ceiling(
        self, index: int, role: Role, *, elsewhere: tuple[int, ...] = (), accumulates: bool = False, **near: Any
    ) -> Ceiling:
        """Find a ceiling, or take the one that a killed search of the same left in its study; see `Prober.ceiling`."""
        key = f"{index} {role} {elsewhere} {accumulates}"
        known = None if self.store is None else self.store.get(key, self.request.largest_batch)
        if known is not None and known.capacity_bytes == self.runtime.capacities_bytes[index]:
            self.recalled += 1
            return known
        found = self.prober.ceiling(index, role, elsewhere=elsewhere, accumulates=accumulates, **near)
        if self.store is not None and not self.prober.out_of_time:
            self.store.put(key, found)
        return found

    def _on_plain_cpu(self) -> bool:
        return self.request.kind == "cpu" and not self.request.devices[0].budgeted

    def _space(self, primary: Ceiling) -> Space:
        """Bound the search by what fits, in one micro-step and in several."""
        sizes, least = self.request.effective_batch_sizes, self.request.least_effective
        why_single = None if self.subject.may_accumulate else self._why_single()
        # More than all devices hold by themselves does not fit at once; how much of it does need not be traced then.
        reach = primary.batch_size + sum(ceiling.batch_size for ceiling in self.replicas)
        single = self._region(primary) if reach >= least or not self._waits else None
        several = None
        if self._waits and (single is None or single.largest_batch < self._most_effective):
            several = self._region_of_several(primary)
            if several.largest_batch == 0:
                several, why_single = None, "the gradients that wait for a second micro-step leave no room for a sample"
        region = several or single or self._region(primary)
        if max(region.largest_batch, 0 if single is None else single.largest_batch) == 0:
            raise does_not_fit(self.prober, 0)
        if why_single is None:
            most = most_steps(sizes, region.largest_batch)
            return Space(region if single is None else single, sizes, most, several)
        if least > region.largest_batch:
            raise DoesNotFitError(
                f"{region.largest_batch} samples fit one forward and effective_batch_size is at least {least}, and "
                f"{why_single}; expected all of them to fit; ask for at most {region.largest_batch}, or use a smaller "
                "model or larger devices"
            )
        return Space(region, sizes)

    @property
    def _waits(self) -> bool:
        """Whether gradients may wait for further micro-steps, and memory is what bounds these."""
        return self.subject.accumulates and not self._on_plain_cpu()

    def _with_several(self, space: Space, step_time: StepTime) -> Space:
        """Bound steps of several micro-steps apart where all samples fit one, if these promise about as much.

        Gradients wait on each device, then. It is only traced: trials will tell.
        """
        if not self._waits or space.accumulating is not None or space.max_steps == 1:
            return space
        solver = Solver(space, step_time)
        answers = solver.answers()
        several = next((c for c in answers if c.accumulation_steps > 1), None)
        if several is None:
            return space
        promise = solver.samples_per_s(several) / solver.samples_per_s(answers[0])
        if promise < (WITHIN_REACH if self.prober.tracer.fake else 1.0):
            return replace(space, max_steps=1)
        region = self._predicted_region_of_several(space.region)
        return replace(space, accumulating=region) if region.largest_batch else replace(space, max_steps=1)

    def _predicted_region_of_several(self, region: Region) -> Region:
        primary = self._kept_ceiling(region.primary_ceiling)
        if not self.replicas:
            return replace(region, primary_ceiling=primary)
        found: dict[tuple[str, int, int], int] = {}
        kept = []
        for index, ceiling in enumerate(region.replica_ceilings, 1):
            kind = self.request.devices[index].name, self.runtime.capacities_bytes[index], ceiling
            if kind not in found:
                found[kind] = self.prober.predicted_ceiling(index, "replica", accumulates=True, start=ceiling)
            kept.append(min(ceiling, found[kind]))
        others = min(sum(kept), max(1, -(-self._most_effective // 2) - primary))  # two micro-steps, about evenly
        fit = self._plane(primary, others, accumulates=True)
        return replace(region, primary=fit, primary_ceiling=primary, replica_ceilings=tuple(kept))

    @property
    def _most_effective(self) -> int:
        """The most samples that an optimizer step may have; 0 where one forward makes a step of any size."""
        sizes = self.request.effective_batch_sizes
        return 0 if sizes is None else sizes[1]

    def _region(self, primary: Ceiling) -> Region:
        """Bound a single micro-step."""
        if not self.replicas:
            return self._region_of(MemoryFit(primary.fixed_bytes, primary.bytes_per_sample), primary.batch_size, ())
        fit = self._plane_beside(primary.batch_size, self.replicas, accumulates=False)
        return self._region_of(fit, primary.batch_size, self.replicas)

    def _region_of_several(self, primary: Ceiling) -> Region:
        """Bound each of several micro-steps."""
        if not self.replicas:
            kept = self._keep_alone()
            return self._region_of(MemoryFit(kept.fixed_bytes, kept.bytes_per_sample), kept.batch_size, ())
        others, alone = self._keep_replicas(), self._kept_ceiling(primary.batch_size)
        return self._region_of(self._plane_beside(alone, others, accumulates=True), alone, others)

    def _region_of(self, fit: MemoryFit, alone: int, others: tuple[Ceiling, ...]) -> Region:
        return Region(
            primary=fit,
            primary_capacity_bytes=self.runtime.capacities_bytes[0],
            primary_ceiling=alone,
            replica_ceilings=tuple(ceiling.batch_size for ceiling in others),
            max_batch_size=self.prober.max_batch_size,
            least_share=self.prober.least_batch(),
        )

    def _plane_beside(self, alone: int, others: tuple[Ceiling, ...], *, accumulates: bool) -> MemoryFit:
        """Fit device 0's memory about where it is full, with the others beside it."""
        share = min(self.prober.max_batch_size, alone)
        room = max(1, self.prober.max_batch_size - share)
        return self._plane(share, min(room, sum(c.batch_size for c in others)), accumulates=accumulates)

    def _kept_ceiling(self, alone: int) -> int:
        """Return what device 0 runs by itself in a step of several micro-steps, its gradients waiting; traced only."""
        if alone == 0:
            return 0
        return min(alone, self.prober.predicted_ceiling(0, "primary", accumulates=True, start=alone))

    def _plane(self, share: int, others: int, *, accumulates: bool) -> MemoryFit:
        """Fit device 0's memory; what a real step holds beyond its trace (workspaces, fragmentation) stays with it."""
        assert self.primary_alone is not None, "it is measured first"
        fit = self.prober.primary_fit(share, others, accumulates=accumulates) if self.prober.has_traces else None
        if self.prober.decides_by_steps:
            sizes = tuple(max(1, ceiling.batch_size) for ceiling in self.replicas)
            beside = proportional_split(others, sizes)
            measured = self.prober.primary_fit_by_steps(fit, share, beside, accumulates=accumulates)
            if measured is not None:
                return measured
        if fit is None:  # nothing is known beside the others: what it holds alone, all of it
            line = self.primary_alone
            return MemoryFit(line.fixed_bytes, line.bytes_per_sample, line.bytes_per_sample)
        return replace(fit, fixed_bytes=fit.fixed_bytes + self.prober.untraced_bytes(self.primary_alone))

    def _curves(self, ranks: tuple[Ceiling, ...]) -> tuple[TimeCurve, ...]:
        """Time each device alone; devices that share a processor share a curve."""
        self.stage = "times"
        if self._on_plain_cpu():
            return (self.plain_cpu_curve,)
        if self.runtime.shares_processor:
            widest = max(range(len(ranks)), key=lambda index: ranks[index].batch_size)
            return (curve_of(self._timed_sizes(widest, ranks[widest])),) * len(ranks)
        kinds = [
            (device.name, most)
            for device, most in zip(self.request.devices, self.runtime.capacities_bytes, strict=True)
        ]
        timed = [self._timed_sizes(index, rank) for index, rank in enumerate(ranks)]
        return tuple(map(curve_of, pooled(timed, kinds)))

    def _timed_sizes(self, index: int, rank: Ceiling) -> list[TimedSize]:
        """Time a device as a rank; where it holds much less so, with gradient buckets and all, as what it is here."""
        role: Role = "rank"
        ceiling = rank.batch_size
        if self.primary_alone is not None and index == 0 and self.primary_alone.batch_size > 2 * ceiling:
            role, ceiling = "primary", self.primary_alone.batch_size
        elif self.replicas and index > 0 and self.replicas[index - 1].batch_size > 2 * ceiling:
            role, ceiling = "replica", self.replicas[index - 1].batch_size
        if ceiling == 0:
            return [UNTIMED]  # it gets no samples, so its time is never asked for
        label = self.request.devices[index].label
        for alone in (True, False) if role == "replica" else (True,):
            try:
                timed = self.prober.timed_sizes(index, ceiling, role=role, budget_s=POINT_BUDGET_S, alone=alone)
            except OutOfMemoryError as error:
                why = str(error)
                continue
            if not alone:
                self.notes.append(f"{label} holds too little to be timed by itself; its time is that of whole steps")
            return timed
        self.notes.append(f"{label} could not be timed, and is taken for slow: {why}")
        return [UNTIMED]

    def _step_time(self, space: Space, curves: tuple[TimeCurve, ...]) -> StepTime:
        """Fit the time of a step: the devices' own curves, and what replicas add."""
        update_s = self.prober.update_seconds()
        fitted = StepTime.bare(curves, update_s, adds_up=self.runtime.shares_processor)
        if not self.replicas or self.runtime.shares_processor:
            return fitted
        known: dict[tuple[str, int], tuple[float, float]] = {}
        for index in range(1, len(curves)):
            kind = self.request.devices[index].name, self.runtime.capacities_bytes[index]
            if kind not in known:
                measured = self._steps_of_two(space, index)
                one = fitted.with_overhead(index, measured) if measured else fitted
                known[kind] = one.copies_s[index], one.gather_s_per_sample[index]
            fitted = fitted.with_costs_of(index, *known[kind])
        return fitted

    def _steps_of_two(self, space: Space, index: int) -> list[tuple[tuple[int, ...], float]]:
        """Time two steps that device 0 and another make together, equally: a small one and one as large as fits."""
        least = self.prober.least_batch()
        region = space.region
        most = min(region.primary_ceiling, region.replica_ceilings[index - 1], self.prober.max_batch_size // 2)
        while most > least and region.primary_most(2 * most) < most:
            most //= 2
        measured = []
        for share in sorted({least, max(least, most)}):
            split = tuple(share if place in (0, index) else 0 for place in range(len(self.request.devices)))
            if share > most:
                continue
            self._report(f"time of the split {split}")
            try:
                seconds = self.prober.micro_seconds(StepShape((split,)), budget_s=POINT_BUDGET_S)
            except OutOfMemoryError:
                continue  # the plane was a little too good there; the trials will tell
            measured.append((split, seconds))
        return measured

    def _rank_time(self, curves: tuple[TimeCurve, ...], ranks: tuple[Ceiling, ...]) -> StepTime:
        """Return the ranks' curves with the time of copying parameters and gradients, by one small balanced step."""
        bare = StepTime.bare(curves, self.prober.update_seconds(), adds_up=self.runtime.shares_processor)
        if len(ranks) == 1 or self.runtime.shares_processor or self.runtime.simulated:
            return bare  # a simulated all-reduce is computed; on one processor nothing is copied
        split = (max(1, min(rank.batch_size for rank in ranks) // 4),) * len(ranks)
        try:
            seconds = self.prober.micro_seconds(StepShape((split,)), budget_s=POINT_BUDGET_S)
        except OutOfMemoryError:
            return bare
        return bare.with_copies(split, seconds)

    # The search

    def _search(self, space: Space) -> None:
        assert self.solver is not None
        self.stage = "search"
        if self.prober.out_of_time:
            self.notes.append(
                "the time limit was over before the search began: ceilings are what was seen to fit until then, times "
                "are of few sizes, and one configuration was tried; more time (time_limit_s) may find a faster one"
            )
        search(
            space,
            self._evaluate,
            Proposer(self.solver, patience=EXACT_PATIENCE if self._few_trials_tell() else PATIENCE),
            n_trials=self.request.n_trials,
            seed=self.request.seed,
            sampler=self.request.sampler,
            deadline_s=self.request.deadline_s,
            storage=self.request.storage,
            study_name=self.study_name,
            on_trial=self._keep,
            on_trouble=self.notes.append,
        )
        self.store = None  # the search has come to its end, and what is measured from here on is of this one only
        kept = len(self.trials) - self.evaluated
        if kept:
            self.notes.append(
                f"{kept} of {len(self.trials)} trials are those of a search that was cut off, from storage"
            )
        if self.recalled:
            self.notes.append(f"{self.recalled} ceilings are those of a search that was cut off, from storage")

    def _best_trial(self) -> Trial | None:
        """Return the answer among the trials, by what all of them together tell of each; as it was measured."""
        if self.solver is None:
            return None
        solver = self.solver.refitted(self.trials)
        known = steadied(solver, self.trials)
        best = best_trial(solver.space, known, solver.samples_per_s)
        return None if best is None else self.trials[known.index(best)]

    def _doubt_the_times(self) -> None:
        """Say so where the times that were measured do not go together."""
        assert self.solver is not None
        off = error_of(self.solver.refitted(self.trials), self.trials)
        if not self.runtime.simulated and off > DOUBTFUL_ERROR:
            self.notes.append(
                f"the times do not go together (off by {off:.0%}): is the machine busy with something else? tune again "
                "with profile='refresh' (--profile refresh) when it is not; where others compute, too, "
                "OMP_NUM_THREADS=1 may steady a processor"
            )

    def _few_trials_tell(self) -> bool:
        """Tell whether more trials would only chase noise: times are exact, or no split is faster than another."""
        return self.runtime.simulated or self.runtime.shares_processor

    def _keep(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._report(f"{len(self.trials)} of at most {self.request.n_trials} trials")

    def _evaluate(self, number: int, configuration: Configuration) -> Trial:
        """Run a configuration; one that fails is a failed trial."""
        assert self.solver is not None
        self.evaluated += 1
        splits = self.solver.splits_of(configuration)
        trial = Trial(
            number, configuration.gpu0_bsz, configuration.batch_size, configuration.accumulation_steps, splits[0]
        )
        if not self._can_train(*splits):
            least = self.prober.least_batch()
            return replace(trial, failure=f"{TOO_FEW} {least}: BatchNorm needs {least} samples to train on")
        try:
            measured = self._measured(splits)
        except OutOfMemoryError as error:
            return replace(trial, failure=str(error), failed_device=error.device_index)
        return replace(
            trial,
            samples_per_s=sum(map(sum, splits)) / measured.seconds,
            error_share=measured.error_s / measured.seconds,
            peak_bytes=measured.peak_bytes,
        )

    def _measured(self, splits: tuple[tuple[int, ...], ...]) -> Measurement:
        copies_s = 0.0 if self.solver is None else self.solver.step_time.copying_s(splits)
        return self.prober.step(splits, budget_s=TRIAL_BUDGET_S, copies_s=copies_s)

    def _can_train(self, *splits: tuple[int, ...]) -> bool:
        least = self.solver.space.region.least_share if self.solver is not None else self.prober.least_batch()
        return not any(0 < share < least for split in splits for share in split)

    def _even_rate(self, best: Trial) -> float | None:
        """Measure the even split of the same effective batch, in as many micro-steps more as it needs to fit."""
        if not self.replicas or self.runtime.shares_processor or self.prober.out_of_time:
            return None
        count, effective = len(self.request.devices), self._effective_of(best)
        sizes = [best.batch_size]
        if self.subject.accumulates:
            sizes += [-(-effective // (best.accumulation_steps + more)) for more in (1, 2, 3)]
        assert self.solver is not None
        for size in dict.fromkeys(sizes):
            splits = tuple(even_split(micro, count) for micro in micro_batch_sizes(effective, size))
            shares = self.solver.space.region_of(len(splits)).gpu0_bounds(size)
            if shares is None or not shares[0] <= splits[0][0] <= shares[1]:
                continue  # by the model it does not fit, and need not be run to see
            if not self._can_train(*splits):
                continue
            known = next((t.samples_per_s for t in self.trials if t.split == splits[0] and t.batch_size == size), None)
            if known is not None:
                return known
            try:
                return effective / self._measured(splits).seconds
            except OutOfMemoryError:
                continue
        return None

    def _nothing_fits(self) -> DoesNotFitError:
        failure = self.trials[-1].failure if self.trials else "no configuration was in the space"
        if self.trials and all(trial.failure and trial.failure.startswith(TOO_FEW) for trial in self.trials):
            return DoesNotFitError(
                f"no forward of at most {self.prober.max_batch_size} samples cuts a step of {self._most_effective} so "
                f"that each device has none or {self.prober.least_batch()}, on fewer of which BatchNorm does not "
                "train; expected one; ask for another effective_batch_size, or raise max_batch_size"
            )
        return DoesNotFitError(
            f"none of {len(self.trials)} configurations could be run; the last: {failure}; "
            "expected at least one; use a smaller model, a lower precision or a larger device"
        )

    # The plan

    def _ddp(self, best: Trial, ranks: tuple[Ceiling, ...], step_time: StepTime) -> DdpPlan:
        """Solve DDP's batch sizes from the same measurements; one rank alone takes the plan's own."""
        if len(ranks) == 1:
            return lone_rank(ranks[0], best, self._effective_of(best), self._ddp_options(), self.prober.least_batch())
        return self._solved_ranks(ranks, step_time)[0]

    def _solved_ranks(self, ranks: tuple[Ceiling, ...], step_time: StepTime) -> tuple[DdpPlan, StepTime]:
        """Solve DDP's batch sizes until each rank was timed at its own.

        Between sizes that were timed a curve is a line, and the rate that is told would be of no step.

        Returns:
            The answer, and the times with these sizes among them.
        """
        for _ in range(MOST_SOLVED):
            ddp = solved_ranks(
                self.subject,
                ranks,
                step_time,
                self._ddp_options(),
                all_reduce_s=self._all_reduce_seconds(step_time),
                least_batch=self.prober.least_batch(),
            )
            curves = self._timed_at([rank.batch_size for rank in ddp.ranks], step_time.curves)
            if curves == step_time.curves or self.prober.out_of_time:
                break
            step_time = replace(step_time, curves=curves)
        return ddp, step_time

    def _timed_at(self, shares: Sequence[int], curves: tuple[TimeCurve, ...]) -> tuple[TimeCurve, ...]:
        """Return the ranks' curves with the times of these shares; where one can't be timed, the curve as it was."""
        if self.runtime.shares_processor or self._on_plain_cpu():
            return curves  # one curve for all, of sizes that really ran
        timed = list(curves)
        for index, share in enumerate(shares):
            if any(samples == share for samples, _ in curves[index].points):
                continue
            try:
                seconds = self.prober.rank_seconds(index, share, budget_s=POINT_BUDGET_S)
            except OutOfMemoryError:
                continue
            timed[index] = TimeCurve.of([*curves[index].points, (share, seconds)])
        return tuple(timed)

    def _ddp_options(self) -> DdpOptions:
        return DdpOptions(find_unused_parameters=self.prober.tracer.leaves_unused())

    def _all_reduce_seconds(self, step_time: StepTime) -> float:
        """Return the time of DDP's all-reduce: a ring over simulated links, or those that replicas' copies took."""
        count = len(self.request.devices)
        if count == 1:
            return 0.0
        if self.request.simulated:
            link = min(device.spec.link_bytes_per_s for device in self.request.devices if device.spec is not None)
            # A ring sends 2 (W - 1) / W of the gradients over each link (Patarasuk and Yuan 2009).
            return 2 * (count - 1) / count * bucket_bytes(self.prober.tracer.trainee) / link
        # A replica's copies are its parameters' way out and its gradients' way home, one replica after the other. A
        # ring sends over all links at once, both ways, and the slowest decides.
        return (count - 1) / count * max(step_time.copies_s)

    def _final_ceilings(self, best: Trial) -> tuple[Ceiling, ...]:
        """Find the largest shares that fit all at once: any split within them does."""
        accumulates = best.accumulation_steps > 1
        if not self.replicas:
            alone = (self.primary_kept or self._keep_alone()) if accumulates else self.primary_alone
            assert alone is not None, "it is the only one"
            return (alone,)
        if accumulates and self.kept is None:
            self._keep_replicas()
        beside = self._others_in(best.accumulation_steps)
        others = tuple(ceiling.batch_size for ceiling in beside)
        assert self.solver is not None
        fit = self.solver.space.region_of(best.accumulation_steps).primary
        slope = fit.bytes_per_share + fit.bytes_per_batch
        primary = self._ceiling(
            0, "primary", elsewhere=others, accumulates=accumulates, start=max(1, best.gpu0_bsz), slope=slope
        )
        if primary.batch_size >= best.gpu0_bsz:
            return (primary, *beside)
        # Device 0 can't gather that much: the others' ceilings come down until the plan's own share fits beside them.
        room = self.prober.room_beside(best.gpu0_bsz, best.split[1:], others, accumulates=accumulates)
        lowered = tuple(replace(c, batch_size=n, confirmed=False) for c, n in zip(beside, room, strict=True))
        return (replace(primary, batch_size=best.gpu0_bsz, confirmed=False), *lowered)

    def _answer(
        self, best: Trial, ceilings: tuple[Ceiling, ...], ddp: DdpPlan, even_samples_per_s: float | None
    ) -> Answer:
        assert self.solver is not None
        assert best.samples_per_s is not None
        return Answer(
            split=best.split,
            accumulation_steps=best.accumulation_steps,
            effective_batch_size=self._effective_of(best),
            samples_per_s=best.samples_per_s,
            peak_bytes=best.peak_bytes,
            ceilings=ceilings,
            curves=self.solver.step_time.curves,
            ddp=ddp,
            even_samples_per_s=even_samples_per_s,
            region=self.solver.space.region_of(best.accumulation_steps),
            fit=self._fit(),
        )

    def _effective_of(self, trial: Trial) -> int:
        assert self.solver is not None
        return self.solver.space.effective_of(configuration_of(trial))

    def _fit(self) -> Fit:
        """Fit the model to the trials as well, and hold it against every one that ran."""
        assert self.solver is not None
        step_time = self.solver.refitted(self.trials).step_time
        residuals = residuals_of(self.solver, step_time, self.trials)
        return Fit(step_time, self._all_reduce_seconds(step_time), residuals)

    def _assembled(self, answer: Answer, *notes: str) -> Plan:
        return assembled(
            self.subject,
            answer,
            trials=tuple(self.trials),
            checks=self.checks,
            notes=(*self.notes, *notes),
            real_steps=self.prober.counts.steps,
            real_ooms=self.prober.counts.ooms,
        )

    # Progress

    def _report(self, message: str) -> None:
        done = len(self.trials) / self.request.n_trials if self.stage == "search" else 0.0
        self._say(self.stage, message, fraction_of(self.stage, done))

    def _say(self, stage: str, message: str, fraction: float) -> None:
        rates = (trial.samples_per_s for trial in self.trials if trial.samples_per_s is not None)
        counts = self.prober.counts
        rate = max(rates, default=None)
        self.tell(Progress(stage, message, fraction, counts.steps, counts.ooms, rate))


def most_steps(sizes: tuple[int, int] | None, largest_batch: int) -> int:
    """Return the most accumulation steps that are worth a look.

    Args:
        sizes: The least and the most samples of an optimizer step; None for one forward of any size.
        largest_batch: The most samples that a forward holds.

    Raises:
        InputError: Even the fewest are more than `MOST_FORWARDS`.
    """
    least, most_samples = (1, 1) if sizes is None else sizes
    fewest = accumulation_steps(least, largest_batch)
    if fewest > MOST_FORWARDS:
        raise InputError(
            f"effective_batch_size is at least {least}, which takes {fewest} forwards of what fits; expected at most "
            f"{MOST_FORWARDS}; ask for fewer samples"
        )
    most = max(fewest, accumulation_steps(most_samples, largest_batch))
    return min(most + max(3, fewest), MOST_FORWARDS)
