"""The largest shares of the devices of one process: each by itself, and all of them at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autosplit.oom import DoesNotFitError
from autosplit.probe.does_not_fit import does_not_fit
from autosplit.probe.request import Request
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.solve.memory import Ceiling, MemoryFit, Region, Role
from autosplit.solve.optuna_search import CeilingStore
from autosplit.solve.search_space import Space
from autosplit.solve.solver import WITHIN_REACH, Solver
from autosplit.solve.split import proportional_split
from autosplit.solve.step_time import StepTime, TimeCurve
from autosplit.solve.trial import Trial
from autosplit.tuning.assemble import accumulates, why_single
from autosplit.tuning.session import most_steps
from autosplit.tuning.worker import Worker


class MemoryBounds:
    """Finds ceilings, and the space of the splits that fit.

    Args:
        request: The request.
        worker: The worker whose devices are measured.
        store: Keeps ceilings, so that a search that was killed can go on.

    Attributes:
        primary: Device 0's ceiling with nobody beside it.
        plain_cpu_curve: The times of a processor without a budget, which its ceiling comes from.
    """

    def __init__(self, request: Request, worker: Worker, store: CeilingStore | None = None) -> None:
        self.request, self.prober, self.store = request, worker.prober, store
        self.on_plain_cpu = worker.on_plain_cpu
        self.why_single = why_single(worker.workload)
        self.accumulates = accumulates(request, worker.workload)
        self.capacities_bytes = self.prober.runtime.capacities_bytes
        self.primary: Ceiling | None = None
        self.replicas: tuple[Ceiling, ...] = ()
        # The same in steps of several micro-steps, where gradients wait; the first only where there are no replicas.
        self.primary_kept: Ceiling | None = None
        self.kept: tuple[Ceiling, ...] | None = None
        self.recalled = 0
        self.plain_cpu_curve: TimeCurve | None = None

    # Each by itself

    def of_roles(self) -> tuple[Ceiling, ...]:
        """Find each device's ceiling as a rank, which is returned, device 0's alone, and the others' as replicas."""
        devices, accumulates = self.request.devices, self.accumulates
        self.primary = primary = self._alone("primary")
        if len(devices) == 1:
            self._refuse_none(primary)
            return (replace(primary, role="rank"),)
        buckets = bucket_bytes(self.prober.tracer.trainee)
        ranks = tuple(self._like(primary, index, "rank", buckets, accumulates) for index in range(len(devices)))
        self.replicas = tuple(self._like(primary, index, "replica", 0, False) for index in range(1, len(devices)))
        return ranks

    def of_ranks(self) -> tuple[Ceiling, ...]:
        """Find each device's ceiling as a rank, and nothing else."""
        first = self._alone("rank")
        self._refuse_none(first)
        others = range(1, len(self.request.devices))
        return (first, *(self._like(first, index, "rank", 0, self.accumulates) for index in others))

    def _refuse_none(self, first: Ceiling) -> None:
        if first.batch_size == 0:
            raise does_not_fit(self.prober, 0)

    def _alone(self, role: Role) -> Ceiling:
        """Find device 0's ceiling with nobody beside it."""
        if self.on_plain_cpu:
            # Where a step can't be accumulated, all its samples have to run at once, whether that pays or not.
            needed = 0 if self.why_single is None else self.request.least_effective
            self.plain_cpu_curve, ceiling = self.prober.until_it_stops_paying(needed)
            return replace(ceiling, role=role)
        return self._ceiling(0, role, accumulates=role == "rank" and self.accumulates)

    def _like(self, known: Ceiling, index: int, role: Role, more_bytes: int, accumulates: bool) -> Ceiling:
        """Find a ceiling, beginning where another device's says that it should be."""
        slope = known.bytes_per_sample
        room_bytes = self.capacities_bytes[index] - known.fixed_bytes - more_bytes
        start = max(1, int(room_bytes / slope)) if slope > 0 else None
        return self._ceiling(index, role, accumulates=accumulates, start=start)

    def _ceiling(
        self, index: int, role: Role, *, elsewhere: tuple[int, ...] = (), accumulates: bool = False, **near: Any
    ) -> Ceiling:
        """Find a ceiling, or take the one that a killed search of the same left in its study; see `Prober.ceiling`."""
        key = f"{index} {role} {elsewhere} {accumulates}"
        known = None if self.store is None else self.store.get(key, self.request.largest_batch)
        if known is not None and known.capacity_bytes == self.capacities_bytes[index]:
            self.recalled += 1
            return known
        found = self.prober.ceiling(index, role, elsewhere=elsewhere, accumulates=accumulates, **near)
        if self.store is not None and not self.prober.out_of_time:
            self.store.put(key, found)
        return found

    # In steps of several micro-steps

    def _keep_replicas(self) -> tuple[Ceiling, ...]:
        """Find the others' ceilings in a step of several micro-steps: their copies and gradients stay all through."""
        if self.kept is None:
            waiting_bytes = bucket_bytes(self.prober.tracer.trainee)
            self.kept = tuple(
                self._like(found, index, "replica", waiting_bytes, True) for index, found in enumerate(self.replicas, 1)
            )
        return self.kept

    def _keep_alone(self) -> Ceiling:
        """Find device 0's ceiling in a step of several micro-steps that it takes by itself."""
        if self.primary_kept is None:
            self.primary_kept = alone = self._measured_primary
            if alone.batch_size and not self.on_plain_cpu:
                self.primary_kept = self._ceiling(0, "primary", accumulates=True, start=alone.batch_size)
        return self.primary_kept

    @property
    def _measured_primary(self) -> Ceiling:
        assert self.primary is not None, "it is measured first"
        return self.primary

    def _kept_ceiling(self, alone: int) -> int:
        """Return what device 0 runs by itself in a step of several micro-steps, its gradients waiting; traced only."""
        if alone == 0:
            return 0
        return min(alone, self.prober.predicted_ceiling(0, "primary", accumulates=True, start=alone))

    # All at once

    def space(self) -> Space:
        """Bound the search by what fits, in one micro-step and in several."""
        sizes, least = self.request.effective_batch_sizes, self.request.least_effective
        alone, why_single = self._measured_primary.batch_size, self.why_single
        # More than all devices hold by themselves does not fit at once; how much of it does need not be traced then.
        reach = alone + sum(ceiling.batch_size for ceiling in self.replicas)
        single = self._region() if reach >= least or not self._waits else None
        several = None
        if self._waits and (single is None or single.largest_batch < self._most_effective):
            several = self._region_of_several()
            if several.largest_batch == 0:
                several, why_single = None, "the gradients that wait for a second micro-step leave no room for a sample"
        region = several or single or self._region()
        if max(region.largest_batch, 0 if single is None else single.largest_batch) == 0:
            raise does_not_fit(self.prober, 0)
        if why_single is None:
            most = most_steps(sizes, region.largest_batch)
            return Space(region if single is None else single, sizes, most, several)
        if least > region.largest_batch:
            raise DoesNotFitError(
                f"{region.largest_batch} samples fit one forward and effective_batch_size is at least {least}, and "
                f"{why_single}; expected all of them to fit; ask for at most {region.largest_batch}, or use a smaller "
                "model or larger devices",
                code="effective-batch-does-not-fit",
            )
        return Space(region, sizes)

    def with_several(self, space: Space, step_time: StepTime) -> Space:
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

    @property
    def _waits(self) -> bool:
        """Whether gradients may wait for further micro-steps, and memory is what bounds these."""
        return self.accumulates and not self.on_plain_cpu

    @property
    def _most_effective(self) -> int:
        """The most samples that an optimizer step may have; 0 where one forward makes a step of any size."""
        sizes = self.request.effective_batch_sizes
        return 0 if sizes is None else sizes[1]

    def _region(self) -> Region:
        """Bound a single micro-step."""
        primary = self._measured_primary
        if not self.replicas:
            return self._region_of(MemoryFit(primary.fixed_bytes, primary.bytes_per_sample), primary.batch_size, ())
        fit = self._plane_beside(primary.batch_size, self.replicas, accumulates=False)
        return self._region_of(fit, primary.batch_size, self.replicas)

    def _region_of_several(self) -> Region:
        """Bound each of several micro-steps."""
        if not self.replicas:
            kept = self._keep_alone()
            return self._region_of(MemoryFit(kept.fixed_bytes, kept.bytes_per_sample), kept.batch_size, ())
        others, alone = self._keep_replicas(), self._kept_ceiling(self._measured_primary.batch_size)
        return self._region_of(self._plane_beside(alone, others, accumulates=True), alone, others)

    def _predicted_region_of_several(self, region: Region) -> Region:
        primary = self._kept_ceiling(region.primary_ceiling)
        if not self.replicas:
            return replace(region, primary_ceiling=primary)
        found: dict[tuple[str, int, int], int] = {}
        kept = []
        for index, ceiling in enumerate(region.replica_ceilings, 1):
            kind = self.request.devices[index].name, self.capacities_bytes[index], ceiling
            if kind not in found:
                found[kind] = self.prober.predicted_ceiling(index, "replica", accumulates=True, start=ceiling)
            kept.append(min(ceiling, found[kind]))
        others = min(sum(kept), max(1, -(-self._most_effective // 2) - primary))  # two micro-steps, about evenly
        fit = self._plane(primary, others, accumulates=True)
        return replace(region, primary=fit, primary_ceiling=primary, replica_ceilings=tuple(kept))

    def _region_of(self, fit: MemoryFit, alone: int, others: tuple[Ceiling, ...]) -> Region:
        return Region(
            primary=fit,
            primary_capacity_bytes=self.capacities_bytes[0],
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

    def _plane(self, share: int, others: int, *, accumulates: bool) -> MemoryFit:
        """Fit device 0's memory; what a real step holds beyond its trace (workspaces, fragmentation) stays with it."""
        line = self._measured_primary
        fit = self.prober.primary_fit(share, others, accumulates=accumulates) if self.prober.has_traces else None
        if self.prober.decides_by_steps:
            sizes = tuple(max(1, ceiling.batch_size) for ceiling in self.replicas)
            beside = proportional_split(others, sizes)
            measured = self.prober.primary_fit_by_steps(fit, share, beside, accumulates=accumulates)
            if measured is not None:
                return measured
        if fit is None:  # nothing is known beside the others: what it holds alone, all of it
            return MemoryFit(line.fixed_bytes, line.bytes_per_sample, line.bytes_per_sample)
        return replace(fit, fixed_bytes=fit.fixed_bytes + self.prober.untraced_bytes(line))

    # Those of a plan

    def of_plan(self, best: Trial) -> tuple[Ceiling, ...]:
        """Find the largest shares that fit all at once: any split within them does."""
        accumulates = best.accumulation_steps > 1
        if not self.replicas:
            return (_no_less(self._keep_alone() if accumulates else self._measured_primary, best, 0),)
        kept = self._keep_replicas() if accumulates else self.replicas
        beside = tuple(_no_less(ceiling, best, index) for index, ceiling in enumerate(kept, 1))
        others = tuple(ceiling.batch_size for ceiling in beside)
        primary = self._ceiling(0, "primary", elsewhere=others, accumulates=accumulates, start=max(1, best.gpu0_bsz))
        if primary.batch_size >= best.gpu0_bsz:
            return (primary, *beside)
        # Device 0 can't gather that much: the others' ceilings come down until the plan's own share fits beside them.
        room = self.prober.room_beside(best.gpu0_bsz, best.split[1:], others, accumulates=accumulates)
        lowered = tuple(replace(c, batch_size=n, confirmed=False) for c, n in zip(beside, room, strict=True))
        return (replace(primary, batch_size=best.gpu0_bsz, confirmed=False), *lowered)

    def known_of(self, best: Trial, space: Space) -> tuple[Ceiling, ...]:
        """Return the same as far as it is known, without running anything."""
        most = space.region_of(best.accumulation_steps).primary_most(best.batch_size)
        others = self.replicas if best.accumulation_steps == 1 or self.kept is None else self.kept
        return (replace(self._measured_primary, batch_size=max(best.gpu0_bsz, most)), *others)


def _no_less(ceiling: Ceiling, best: Trial, index: int) -> Ceiling:
    """Return a ceiling that holds a trial's share: a time limit may have ended the search for it before."""
    share = best.split[index]
    if ceiling.batch_size >= share:
        return ceiling
    peak_bytes = best.peak_bytes[index] if best.peak_bytes else ceiling.peak_bytes
    return replace(ceiling, batch_size=share, peak_bytes=peak_bytes)
