"""Tune in one process: measure all devices, and search the split or solve for DDP's batch sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autosplit.addons import addon
from autosplit.errors import WorkloadError, one_line
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.plan.plan import Plan
from autosplit.plan.record import DdpOptions, DdpPlan, with_notes
from autosplit.probe.prober import timed_sizes
from autosplit.runtime.protocol import Measurement, Runtime, StepShape
from autosplit.solve.memory import Ceiling, MemoryParts, Role
from autosplit.solve.proposals import PATIENCE, error_of
from autosplit.solve.search_space import Space
from autosplit.solve.solver import Solver
from autosplit.solve.step_time import Fit, StepTime, TimeCurve
from autosplit.solve.timed_sizes import TimedSize, curve_of, pooled
from autosplit.solve.trial import LEAST_DIFFERENCE, LEAST_MEASURED_DIFFERENCE, Trial, configuration_of
from autosplit.tuning.assemble import (
    DDP_NOTE,
    Answer,
    measured_ranks,
    rank_answer,
    residuals_of,
    solved_ranks,
    why_single,
)
from autosplit.tuning.memory_bounds import MemoryBounds
from autosplit.tuning.session import POINT_BUDGET_S, TRIAL_BUDGET_S, Session
from autosplit.workload.compiled import compiled_times_note, has_compiled_parts
from autosplit.workload.workload import modules_of

DOUBTFUL_ERROR = 0.3
"""Error of the fitted time model, as a fraction. Above it, the measured times are doubtful."""

TIMES_DISAGREE = "times-disagree"
"""Kind of the note on doubtful times."""

EXACT_PATIENCE = 1
"""`proposals.PATIENCE` for exact times. Then the solver's result and its neighbours are enough."""

MOST_SOLVED = 4
"""Largest number of rounds. A round solves for DDP's batch sizes and times them. Later rounds change them less."""

UNTIMED = TimedSize(1, 1.0)
"""The time of a device that could not be timed: one second per sample."""


_BUCKET_BYTES = 25 * 2**20
"""Size of a DDP bucket in bytes (torch 2.13, ``bucket_cap_mb``)."""

_BUCKET_START_S = 1.1e-4
"""Fixed time of an all-reduce message: its whole time, minus the time of its bytes at the rate of long messages.

For 32 MiB it is 0.17 ms on 8 A100, 0.09 ms on 8 H200, and 0.11 ms on 8 B200 (github.com/stas00/ml-engineering,
network/README.md).
"""


class LoneSession(Session):
    """Tune in one process. See `Session`."""

    memory: MemoryBounds

    @property
    def runtime(self) -> Runtime:
        """The runtime that runs the steps."""
        return self.prober.runtime

    @property
    def _patience(self) -> int:
        # With exact times, or if all splits are equally fast, more trials would only find noise.
        return EXACT_PATIENCE if self.runtime.simulated or self.runtime.shares_processor else PATIENCE

    def _begin(self) -> None:
        least, most = self.request.least_effective, self.request.max_batch_size
        reason = why_single(self.workload)
        if most is not None and most < least and reason is not None:
            raise WorkloadError(
                f"max_batch_size is {most} and effective_batch_size at least {least}, and {reason}. One forward "
                f"must run all samples. Raise max_batch_size to {least}, or lower effective_batch_size.",
            )
        largest = self.prober.facts.largest_batch
        if largest is not None and largest < self.request.largest_batch:
            self.prober.max_batch_size = largest
            text = (
                f"autosplit tried no batch above {self.prober.max_batch_size}, because real tensors would fill "
                "this machine's memory."
            )
            self.notes.append(Note("larger-batches-not-tried", text))

    def _found(self) -> Plan:
        self.memory = MemoryBounds(self.request, self.worker)
        try:
            plan = self._ddp_plan() if self.request.strategy == "ddp" else self._balanced_plan()
            if any(map(has_compiled_parts, modules_of(self.workload))):
                plan = with_notes(plan, last=[self.compiled_note(max(plan.split))])
            self._say("done", "done", 1.0)
        except KeyboardInterrupt:
            best = self._best_so_far()
            if best is None:
                raise
            return best
        return plan

    def _balanced_plan(self) -> Plan:
        ranks = self.memory.of_roles()
        space = self.memory.space()
        step_time = self._step_time(space, self._curves(ranks))
        self.solver = Solver(
            self.memory.with_several(space, step_time),
            step_time,
            tells_apart=LEAST_DIFFERENCE if self.runtime.simulated else LEAST_MEASURED_DIFFERENCE,
        )
        best = self._searched()
        self._confirm()
        self._doubt_the_times()
        matters = self.memory.replicas and not self.runtime.shares_processor and not self.prober.out_of_time
        even_rate = self._even_rate(best) if matters else None
        answer = replace(self._quick_answer(best), ceilings=self.memory.of_plan(best), even_samples_per_s=even_rate)
        if len(ranks) > 1:
            ddp, _ = self._solved_ranks(ranks, step_time)
        else:  # the search measured the plain model on the only device
            least = self.prober.least_batch
            ddp = measured_ranks(answer.ceilings, best, answer.effective_batch_size, self._ddp_options(), least)
        plan = self._assembled(replace(answer, ddp=ddp, memory=self._memory_of(best)))
        if not self.request.simulated:
            return plan
        self._report("simulating other machines")
        changes = addon("simulated_changes")(plan, self.runtime, deadline_s=self.request.deadline.end_s)
        return replace(plan, changes=changes)

    def _ddp_plan(self) -> Plan:
        """Solve for DDP's batch sizes from measurements of single devices. No trials are run."""
        ranks = self.memory.of_ranks()
        step_time = self._rank_time(self._curves(ranks), [rank.batch_size for rank in ranks])
        ddp, step_time = self._solved_ranks(ranks, step_time)
        if not ddp.ranks:
            raise DoesNotFitError(
                f"DDP can't train this workload on {', '.join(device.label for device in self.request.devices)}: "
                f"{ddp.reason}. Expected a rank on each device. Leave strategy='ddp' out, or use a smaller model or "
                "larger devices.",
            )
        answer = rank_answer(ddp, Fit(step_time, self._all_reduce_seconds(step_time)))
        memory = self.prober.rank_parts(answer.split, answer.peak_bytes, accumulates=answer.accumulation_steps > 1)
        return self._assembled(replace(answer, memory=memory), DDP_NOTE)

    def compiled_note(self, samples: int) -> Note:
        """Return a note on torch.compile: the result of one compiled step, or published results for simulated GPUs."""
        if self.runtime.simulated:
            return Note("compiled", compiled_times_note(modules_of(self.workload)))
        said = "The model is compiled, but memory and time are those of the uncompiled model"
        self._report("running a compiled step")
        try:
            peaks = self.runtime.peaks(StepShape(((samples, *(0 for _ in self.request.devices[1:])),), compiled=True))
        except OutOfMemoryError as error:
            return Note("compiled", f"{said}. A compiled step of {samples} samples does not fit: {error}")
        except Exception as error:  # noqa: BLE001  # the compiler may raise anything
            return Note("compiled", f"{said}. No compiled step ran ({one_line(error)}).")
        held = f", and needs {peaks[0]} bytes." if peaks else ". Its memory can't be tracked on a CPU."
        text = f"{said}. A compiled step of {samples} samples on {self.request.devices[0].label} ran{held}"
        return Note("compiled", text)

    # Times

    def _curves(self, ranks: tuple[Ceiling, ...]) -> tuple[TimeCurve, ...]:
        self.stage = "times"
        if self.memory.plain_cpu_curve is not None:
            return (self.memory.plain_cpu_curve,)
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
        """Time a device as a DDP rank, or in its own role if that role fits more than twice the samples."""
        role: Role = "rank"
        ceiling = rank.batch_size
        own = self.memory.primary if index == 0 else next(iter(self.memory.replicas[index - 1 : index]), None)
        if own is not None and own.batch_size > 2 * ceiling:
            role, ceiling = own.role, own.batch_size
        if ceiling == 0:
            return [UNTIMED]  # This device gets no samples, so its time is not used.
        label = self.request.devices[index].label
        for alone in (True, False) if role == "replica" else (True,):
            try:
                timed = timed_sizes(self.prober, index, ceiling, role=role, budget_s=POINT_BUDGET_S, alone=alone)
            except OutOfMemoryError as error:
                why = str(error)
                continue
            if not alone:
                text = (
                    f"{label} fits too few samples to be timed alone, so autosplit took its time from steps of "
                    "all devices."
                )
                self.notes.append(Note("not-timed-alone", text))
            return timed
        self.notes.append(Note("not-timed", f"autosplit could not time {label}, and assumes that it is slow: {why}"))
        return [UNTIMED]

    def _step_time(self, space: Space, curves: tuple[TimeCurve, ...]) -> StepTime:
        update_s = self.prober.update_seconds()
        fitted = StepTime.bare(curves, update_s, adds_up=self.runtime.shares_processor)
        if not self.memory.replicas or self.runtime.shares_processor:
            return fitted
        kinds = [
            (device.name, most)
            for device, most in zip(self.request.devices, self.runtime.capacities_bytes, strict=True)
        ]
        firsts = {kind: index for index, kind in reversed([*enumerate(kinds)][1:])}
        measured = {kind: self._steps_of_two(space, index) for kind, index in firsts.items()}
        fitted = self._with_host(fitted)
        for index, kind in enumerate(kinds[1:], 1):
            one = fitted.with_overhead(firsts[kind], *measured[kind]) if measured[kind][0] else fitted
            fitted = fitted.with_costs_of(index, one.copies_s[firsts[kind]], one.gather_s_per_sample[firsts[kind]])
        return fitted

    def _with_host(self, fitted: StepTime) -> StepTime:
        """Fit the time that the host needs to start a device, from steps of one and of two micro-steps."""
        if not self.may_accumulate:
            return fitted
        least = self.prober.least_batch
        for samples in sorted({max(2, least), least}, reverse=True):
            split = (samples,) * len(self.request.devices)
            timed = self._timed(split, 1, 2)
            if timed:
                return fitted.with_host(split, *timed)
        return fitted

    def _steps_of_two(
        self, space: Space, index: int
    ) -> tuple[list[tuple[tuple[int, ...], float]], tuple[tuple[int, ...], float] | None]:
        """Time two steps of device 0 and one other device with equal samples: a small step, and the largest that fits.

        Returns:
            Both steps, and the time of one more micro-step of the largest step, in seconds.
        """
        least = self.prober.least_batch
        region = space.region
        most = min(region.primary_ceiling, region.replica_ceilings[index - 1], self.prober.max_batch_size // 2)
        while most > least and region.primary_most(2 * most) < most:
            most //= 2
        few = max(least, 2) if most > 2 else least  # see `runtime.linear_memory`

        def both(share: int) -> tuple[int, ...]:
            return tuple(share if place in (0, index) else 0 for place in range(len(self.request.devices)))

        splits = [both(share) for share in sorted({few, max(few, most)}) if share <= most]
        measured = [(split, seconds) for split in splits for seconds in self._timed(split, 1)]
        while measured and self.may_accumulate and most >= few:
            timed = self._timed(both(most), 1, 2)
            if timed:
                return measured, (both(most), timed[1] - timed[0])
            most //= 2
        return measured, None

    def _timed(self, split: tuple[int, ...], *counts: int) -> list[float]:
        self._report(f"timing the split {split}")
        try:
            return [self.prober.micro_seconds(StepShape((split,) * count), budget_s=POINT_BUDGET_S) for count in counts]
        except OutOfMemoryError:
            return []  # The memory model was slightly too low. Trials will show what fits.

    # The search

    def _measured(self, splits: tuple[tuple[int, ...], ...]) -> Measurement:
        return self.prober.step(splits, budget_s=TRIAL_BUDGET_S, copies_s=self.solver.step_time.copying_s(splits))

    def _can_train(self, splits: tuple[tuple[int, ...], ...]) -> bool:
        return not any(0 < share < self._least_share for split in splits for share in split)

    def _doubt_the_times(self) -> None:
        off = error_of(self.solver.refitted(self.trials), self.trials)
        if not self.runtime.simulated and off > DOUBTFUL_ERROR:
            text = (
                f"The measured times contradict each other by {100 * off:.0f}%, probably because the machine is "
                "busy. Tune again later with profile='refresh' (--profile refresh). If other processes share the "
                "CPU, set OMP_NUM_THREADS=1 in the environment."
            )
            self.notes.append(Note(TIMES_DISAGREE, text))

    # DDP

    def _solved_ranks(self, ranks: tuple[Ceiling, ...], step_time: StepTime) -> tuple[DdpPlan, StepTime]:
        """Solve for DDP's batch sizes, and time each rank at its own. Return the settings and the time model.

        Without these times, the curves would be interpolated at the batch sizes, and the predicted samples/s would be
        inexact.
        """
        for _ in range(MOST_SOLVED):
            ddp = solved_ranks(
                self.request,
                self.workload,
                ranks,
                step_time,
                self._ddp_options(),
                all_reduce_s=self._all_reduce_seconds(step_time),
                least_batch=self.prober.least_batch,
            )
            curves = self._timed_at([rank.batch_size for rank in ddp.ranks], step_time.curves)
            if curves == step_time.curves or self.prober.out_of_time:
                break
            step_time = replace(step_time, curves=curves)
        return ddp, step_time

    def _timed_at(self, shares: Sequence[int], curves: tuple[TimeCurve, ...]) -> tuple[TimeCurve, ...]:
        """Return the ranks' curves with the times at these batch sizes. A rank that can't be timed keeps its curve."""
        if self.runtime.shares_processor or self.prober.limited_by_time:
            return curves  # All ranks share one curve, and its sizes were measured.
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

    def rank_fit(self, split: Sequence[int]) -> Fit:
        """Time each device as a DDP rank at its own batch size, and return the time model."""
        timed = [self.prober.rank_seconds(index, n, budget_s=TRIAL_BUDGET_S) for index, n in enumerate(split)]
        step_time = self._rank_time(tuple(TimeCurve(((n, s),)) for n, s in zip(split, timed, strict=True)), split)
        return Fit(step_time, self._all_reduce_seconds(step_time))

    def _rank_time(self, curves: tuple[TimeCurve, ...], shares: Sequence[int]) -> StepTime:
        """Return the ranks' time model. One small balanced step yields the time of copying parameters and gradients."""
        bare = StepTime.bare(curves, self.prober.update_seconds(), adds_up=self.runtime.shares_processor)
        if len(shares) == 1 or self.runtime.shares_processor or self.runtime.simulated:
            return bare  # The simulation computes the all-reduce. On one CPU nothing is copied.
        split = (max(self.prober.least_batch, min(shares) // 4),) * len(shares)
        try:
            seconds = self.prober.micro_seconds(StepShape((split,)), budget_s=POINT_BUDGET_S)
        except OutOfMemoryError:
            return bare
        except Exception as error:  # noqa: BLE001  # DDP cuts no batch and replicates no model, so its ranks can train
            text = (
                f"autosplit could not time copies between the devices ({one_line(error)}). The predicted samples/s do "
                "not include DDP's all-reduce."
            )
            self.notes.append(Note("copies-not-timed", text))
            return bare
        return bare.with_copies(split, seconds)

    def _ddp_options(self) -> DdpOptions:
        return DdpOptions(find_unused_parameters=self.prober.facts.leaves_unused)

    def _all_reduce_seconds(self, step_time: StepTime) -> float:
        """Return the time of DDP's all-reduce, for a ring over simulated links or over the links of the replicas."""
        count = len(self.request.devices)
        if count == 1:
            return 0.0
        if self.request.simulated:
            link = min(device.spec.link_bytes_per_s for device in self.request.devices if device.spec is not None)
            nbytes = self.prober.facts.gradient_bytes
            # A ring sends 2 (W - 1) / W of the gradients over each link (Patarasuk and Yuan 2009).
            return 2 * (count - 1) / count * nbytes / link + math.ceil(nbytes / _BUCKET_BYTES) * _BUCKET_START_S
        # A replica's copy time includes its parameters and its gradients, and the replicas are copied one after the
        # other. A ring sends over all links at once in both directions, so the slowest link decides.
        return (count - 1) / count * max(step_time.copies_s)

    # The answer

    def _quick_answer(self, best: Trial) -> Answer:
        assert best.samples_per_s is not None
        step_time = self.solver.refitted(self.trials).step_time
        residuals = residuals_of(self.solver, step_time, self.trials)
        return Answer(
            split=best.split,
            accumulation_steps=best.accumulation_steps,
            effective_batch_size=self._effective_of(best),
            samples_per_s=best.samples_per_s,
            peak_bytes=best.peak_bytes,
            ceilings=self.memory.known_of(best, self.solver.space),
            curves=self.solver.step_time.curves,
            ddp=DdpPlan((), 0.0, "the search was interrupted before DDP was solved"),
            region=self.solver.space.region_of(best.accumulation_steps),
            fit=Fit(step_time, self._all_reduce_seconds(step_time), residuals),
        )

    def _memory_of(self, best: Trial) -> tuple[MemoryParts | None, ...]:
        if not best.peak_bytes:
            return ()
        splits = self.solver.splits_of(configuration_of(best), best.split)
        return self.prober.parts(StepShape(splits[:2]), best.peak_bytes)
