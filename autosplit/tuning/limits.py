"""Find the largest batch of each device of one process, for a single device and in a step of all devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autosplit.errors import InputError
from autosplit.oom import DoesNotFitError
from autosplit.probe.ceilings import ceiling_by_time, ceiling_of, does_not_fit, predicted_ceiling
from autosplit.probe.primary_memory import primary_fit, room_beside
from autosplit.probe.prober import Prober
from autosplit.probe.request import Request
from autosplit.solve.memory import Ceiling, MemoryFit, Region, Role
from autosplit.solve.search_space import Space
from autosplit.solve.solver import WITHIN_REACH, Solver
from autosplit.solve.split import accumulation_steps, proportional_split
from autosplit.solve.step_time import StepTime, TimeCurve
from autosplit.solve.trial import Trial
from autosplit.tuning.assemble import accumulates
from autosplit.workload.workload import why_single

MOST_FORWARDS = 2**16
"""Largest number of forwards per optimizer step. A larger effective batch is probably the size of a dataset."""


class Limits:
    """Find ceilings, and the splits that fit.

    Attributes:
        primary: Device 0's ceiling if the other devices have no samples.
        replicas: The other devices' ceilings as replicas.
        primary_accumulating: Like `primary`, in steps of several micro-steps. Set only if there are no replicas.
        replicas_accumulating: Like `replicas`, in steps of several micro-steps.
        plain_cpu_curve: The times of a CPU without a budget. They limit its ceiling.
    """

    def __init__(self, request: Request, prober: Prober) -> None:
        self.request, self.prober = request, prober
        self.why_single = why_single(prober.workload)
        self.accumulates = accumulates(request, prober.workload)
        self.capacities_bytes = self.prober.worker.capacities_bytes
        self.primary: Ceiling | None = None
        self.replicas: tuple[Ceiling, ...] = ()
        self.primary_accumulating: Ceiling | None = None
        self.replicas_accumulating: tuple[Ceiling, ...] | None = None
        self.plain_cpu_curve: TimeCurve | None = None

    # Single devices

    def of_roles(self) -> tuple[Ceiling, ...]:
        """Find each device's ceilings in a step of one micro-step. Return the ceilings as DDP ranks."""
        devices, accumulates = self.request.devices, self.accumulates
        self.primary = primary = self._alone("primary")
        if len(devices) == 1:
            self._refuse_none(primary)
            return (replace(primary, role="rank"),)
        buckets = self.prober.facts.gradient_bytes
        ranks = tuple(self._like(primary, index, "rank", buckets, accumulates) for index in range(len(devices)))
        self.replicas = tuple(self._like(primary, index, "replica", 0, False) for index in range(1, len(devices)))
        return ranks

    def of_ranks(self) -> tuple[Ceiling, ...]:
        """Return each device's ceiling as a DDP rank."""
        first = self._alone("rank")
        self._refuse_none(first)
        others = range(1, len(self.request.devices))
        return (first, *(self._like(first, index, "rank", 0, self.accumulates) for index in others))

    def _refuse_none(self, first: Ceiling) -> None:
        if first.batch_size == 0:
            raise does_not_fit(self.prober, 0)

    def _alone(self, role: Role) -> Ceiling:
        if self.prober.evidence == "time":
            # Without accumulation, all samples of a step must run at once, even if a smaller batch is as fast.
            needed = 0 if self.why_single is None else self.request.least_effective
            self.plain_cpu_curve, found = ceiling_by_time(self.prober, needed)
            return replace(found, role=role)
        return self._ceiling(0, role, accumulates=role == "rank" and self.accumulates)

    def _like(self, known: Ceiling, index: int, role: Role, more_bytes: int, accumulates: bool) -> Ceiling:
        slope = known.bytes_per_sample
        room_bytes = self.capacities_bytes[index] - known.fixed_bytes - more_bytes
        start = max(1, int(room_bytes / slope)) if slope > 0 else None
        return self._ceiling(index, role, accumulates=accumulates, start=start)

    def _ceiling(
        self, index: int, role: Role, *, elsewhere: tuple[int, ...] = (), accumulates: bool = False, **near: Any
    ) -> Ceiling:
        return ceiling_of(self.prober, index, role, elsewhere=elsewhere, accumulates=accumulates, **near)

    # In steps of several micro-steps

    def _accumulating_replicas(self) -> tuple[Ceiling, ...]:
        """Find the replicas' ceilings if a step has several micro-steps. Copies and gradients then stay in memory."""
        if self.replicas_accumulating is None:
            waiting_bytes = self.prober.facts.gradient_bytes
            self.replicas_accumulating = tuple(
                self._like(found, index, "replica", waiting_bytes, True) for index, found in enumerate(self.replicas, 1)
            )
        return self.replicas_accumulating

    def _accumulating_primary(self) -> Ceiling:
        if self.primary_accumulating is None:
            self.primary_accumulating = alone = self._measured_primary
            if alone.batch_size and self.prober.evidence != "time":
                self.primary_accumulating = self._ceiling(0, "primary", accumulates=True, start=alone.batch_size)
        return self.primary_accumulating

    @property
    def _measured_primary(self) -> Ceiling:
        assert self.primary is not None, "`primary` is measured first"
        return self.primary

    def _accumulating_ceiling(self, alone: int) -> int:
        """Predict device 0's ceiling in a step of several micro-steps, if the other devices have no samples."""
        if alone == 0:
            return 0
        return min(alone, predicted_ceiling(self.prober, 0, "primary", accumulates=True, start=alone))

    # All devices in one step

    def space(self) -> Space:
        """Return the splits that fit, in one micro-step and in several."""
        sizes, least = self.request.effective_batch_sizes, self.request.least_effective
        alone, why_single = self._measured_primary.batch_size, self.why_single
        # A batch above the sum of the devices' own ceilings does not fit one micro-step, so do not trace it.
        reach = alone + sum(ceiling.batch_size for ceiling in self.replicas)
        single = self._region() if reach >= least or not self._waits else None
        several = None
        if self._waits and (single is None or single.largest_batch < self._most_effective):
            several = self._region_of_several()
            if several.largest_batch == 0:
                several, why_single = (
                    None,
                    "the accumulated gradients leave no memory for a second micro-step",
                )
        region = several or single or self._region()
        if max(region.largest_batch, 0 if single is None else single.largest_batch) == 0:
            raise does_not_fit(self.prober, 0)
        if why_single is None:
            most = most_steps(sizes, region.largest_batch)
            return Space(region if single is None else single, sizes, most, several)
        if least > region.largest_batch:
            raise DoesNotFitError(
                f"{region.largest_batch} samples fit one forward, but effective_batch_size is at least {least}, and "
                f"{why_single}. Lower effective_batch_size to at most {region.largest_batch}, raise max_batch_size, or "
                "use a smaller model or larger devices.",
            )
        return Space(region, sizes)

    def with_several(self, space: Space, step_time: StepTime) -> Space:
        """Return the space with separate bounds for several micro-steps, if these may be as fast as one micro-step.

        With several micro-steps, each device keeps its gradients in between. The bounds are predicted, and trials
        confirm them.
        """
        if not self._waits or space.accumulating is not None or space.max_steps == 1:
            return space
        solver = Solver(space, step_time)
        ranked = solver.ranked()
        several = next((c for c in ranked if c.accumulation_steps > 1), None)
        if several is None:
            return space
        promise = solver.samples_per_s(several) / solver.samples_per_s(ranked[0])
        if promise < (1.0 if self.prober.evidence == "steps" else WITHIN_REACH):
            return replace(space, max_steps=1)
        region = self._predicted_region_of_several(space.region)
        return replace(space, accumulating=region) if region.largest_batch else replace(space, max_steps=1)

    @property
    def _waits(self) -> bool:
        return self.accumulates and self.prober.evidence != "time"

    @property
    def _most_effective(self) -> int:
        sizes = self.request.effective_batch_sizes
        return 0 if sizes is None else sizes[1]

    def _region(self) -> Region:
        primary = self._measured_primary
        if not self.replicas:
            return self._region_of(MemoryFit(primary.fixed_bytes, primary.bytes_per_sample), primary.batch_size, ())
        fit = self._plane_beside(primary.batch_size, self.replicas, accumulates=False)
        return self._region_of(fit, primary.batch_size, self.replicas)

    def _region_of_several(self) -> Region:
        if not self.replicas:
            primary = self._accumulating_primary()
            return self._region_of(MemoryFit(primary.fixed_bytes, primary.bytes_per_sample), primary.batch_size, ())
        others, alone = self._accumulating_replicas(), self._accumulating_ceiling(self._measured_primary.batch_size)
        return self._region_of(self._plane_beside(alone, others, accumulates=True), alone, others)

    def _predicted_region_of_several(self, region: Region) -> Region:
        primary = self._accumulating_ceiling(region.primary_ceiling)
        if not self.replicas:
            return replace(region, primary_ceiling=primary)
        found: dict[tuple[str, int, int], int] = {}
        kept = []
        for index, ceiling in enumerate(region.replica_ceilings, 1):
            kind = self.request.devices[index].name, self.capacities_bytes[index], ceiling
            if kind not in found:
                found[kind] = predicted_ceiling(self.prober, index, "replica", accumulates=True, start=ceiling)
            kept.append(min(ceiling, found[kind]))
        others = min(sum(kept), max(1, -(-self._most_effective // 2) - primary))  # about half a step
        fit = self._plane(primary, others, accumulates=True)
        return replace(region, primary=fit, primary_ceiling=primary, replica_ceilings=tuple(kept))

    def _region_of(self, fit: MemoryFit, alone: int, others: tuple[Ceiling, ...]) -> Region:
        return Region(
            primary=fit,
            primary_capacity_bytes=self.capacities_bytes[0],
            primary_ceiling=alone,
            replica_ceilings=tuple(ceiling.batch_size for ceiling in others),
            max_batch_size=self.prober.max_batch_size,
            least_share=self.prober.least_batch,
        )

    def _plane_beside(self, alone: int, others: tuple[Ceiling, ...], *, accumulates: bool) -> MemoryFit:
        share = min(self.prober.max_batch_size, alone)
        room = max(1, self.prober.max_batch_size - share)
        return self._plane(share, min(room, sum(c.batch_size for c in others)), accumulates=accumulates)

    def _plane(self, share: int, others: int, *, accumulates: bool) -> MemoryFit:
        beside = proportional_split(others, tuple(max(1, ceiling.batch_size) for ceiling in self.replicas))
        return primary_fit(self.prober, self._measured_primary, share, beside, accumulates=accumulates)

    # Ceilings of a plan

    def of_plan(self, best: Trial) -> tuple[Ceiling, ...]:
        """Return ceilings that are valid at the same time: every split within them fits.

        Device 0 gathers all outputs, so its ceiling is found with the others at theirs. If it is below the plan's
        split, the others are lowered.
        """
        accumulates = best.accumulation_steps > 1
        if not self.replicas:
            return (_no_less(self._accumulating_primary() if accumulates else self._measured_primary, best, 0),)
        measured = self._accumulating_replicas() if accumulates else self.replicas
        replicas = tuple(_no_less(ceiling, best, index) for index, ceiling in enumerate(measured, 1))
        replica_sizes = tuple(ceiling.batch_size for ceiling in replicas)
        primary = self._ceiling(
            0, "primary", elsewhere=replica_sizes, accumulates=accumulates, start=max(1, best.gpu0_bsz)
        )
        if primary.batch_size >= best.gpu0_bsz:
            return (primary, *replicas)
        # Device 0 can't gather the outputs of that many samples. Lower the other ceilings until the plan's own split
        # fits.
        room = room_beside(self.prober, best.gpu0_bsz, best.split[1:], replica_sizes, accumulates=accumulates)
        lowered = tuple(replace(c, batch_size=n, confirmed=False) for c, n in zip(replicas, room, strict=True))
        return (replace(primary, batch_size=best.gpu0_bsz, confirmed=False), *lowered)

    def known_of(self, best: Trial, space: Space) -> tuple[Ceiling, ...]:
        """Return the known ceilings, without running another step."""
        most = space.region_of(best.accumulation_steps).primary_most(best.batch_size)
        accumulating = None if best.accumulation_steps == 1 else self.replicas_accumulating
        others = self.replicas if accumulating is None else accumulating
        return (replace(self._measured_primary, batch_size=max(best.gpu0_bsz, most)), *others)


def _no_less(ceiling: Ceiling, best: Trial, index: int) -> Ceiling:
    """Raise a ceiling to the samples that a trial ran, if a time limit ended the ceiling's search too early."""
    share = best.split[index]
    if ceiling.batch_size >= share:
        return ceiling
    peak_bytes = best.peak_bytes[index] if best.peak_bytes else ceiling.peak_bytes
    return replace(ceiling, batch_size=share, peak_bytes=peak_bytes)


def most_steps(sizes: tuple[int, int] | None, largest_batch: int) -> int:
    """Return the largest number of accumulation steps to search, for the largest batch of a forward."""
    least, most_samples = (1, 1) if sizes is None else sizes
    fewest = accumulation_steps(least, largest_batch)
    if fewest > MOST_FORWARDS:
        raise InputError(
            f"effective_batch_size is at least {least}, which needs {fewest} forwards of the largest batch that "
            f"fits. Expected at most {MOST_FORWARDS}. Lower effective_batch_size.",
        )
    most = max(fewest, accumulation_steps(most_samples, largest_batch))
    return min(most + max(3, fewest), MOST_FORWARDS)
