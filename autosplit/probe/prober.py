"""Find the number of samples that fit on each device.

A ceiling is predicted from traces, checked with a small real step, and confirmed by a step of exactly this size. On
accelerators a real step costs less than a trace. There a few real steps decide, and traces choose the first size. For
simulated GPUs the trace decides. The search never doubles the batch until it runs out of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autosplit.errors import one_line
from autosplit.oom import OutOfMemoryError, StepLostError, is_kernel_limit
from autosplit.probe.step_runner import balanced, named_steps
from autosplit.probe.stopwatch import Stopwatch
from autosplit.probe.wall_search import WallSearch
from autosplit.runtime.protocol import StepShape
from autosplit.solve.memory import Ceiling, Limit, MemoryFit, Role, largest_fitting
from autosplit.solve.split import proportional_split
from autosplit.text import size_text

_log = logging.getLogger(__name__)


@dataclass
class Observations:
    """Measurements of one device in one role.

    Attributes:
        index: Position of the device.
        role: Role of the device.
        shape_of: Make the step with n samples on the device.
        predict: Predict the bytes of n samples.
        predicted: Bytes by number of samples, from traces.
        ran: Bytes by number of samples, from real steps.
        limit: The limit that ended the search, if it was not memory.
        lost: Whether a step killed its process. Then the failure shows nothing about memory.
    """

    index: int
    role: Role
    shape_of: Callable[[int], StepShape]
    predict: Callable[[int], float] = float
    predicted: dict[int, int] = field(default_factory=dict)
    ran: dict[int, int] = field(default_factory=dict)
    limit: Limit | None = None
    lost: bool = False

    def points(self) -> tuple[tuple[int, int, bool], ...]:
        """Return ``(samples, bytes, ran)`` of all sizes that were tried, in ascending order."""
        known = {**self.predicted, **self.ran}
        return tuple((n, known[n], n in self.ran) for n in sorted(known))


@dataclass
class Prober(Stopwatch):
    """Finds ceilings and times of one workload on one runtime, see `StepRunner`."""

    _equals: dict[tuple[str, int, Role, int], tuple[int, int]] = field(default_factory=dict)

    def ceiling(
        self,
        index: int,
        role: Role,
        *,
        elsewhere: tuple[int, ...] = (),
        accumulates: bool = False,
        start: int | None = None,
    ) -> Ceiling:
        """Find the ceiling of one device in one role.

        Args:
            index: Position of the device.
            role: Role of the device. Only device 0 may be ``primary``.
            elsewhere: For ``primary``, the samples of the other devices in the same step. Default: none.
            accumulates: Whether a step has several micro-steps, so that gradients are in memory throughout the second.
            start: The first size to try. Default: the sample batch's size.
        """
        device, capacity_bytes = self.runtime.devices[index], self.runtime.capacities_bytes[index]
        self.report(f"probing device {index + 1} of {len(self.runtime.devices)}: {device.label} as {role}")
        start = min(max(self.least_batch(), start or self.tracer.workload.sample_batch_size), self.max_batch_size)
        steps, ooms = self.counts.steps, self.counts.ooms
        seen = Observations(index, role, self.shapes(index, role, elsewhere, accumulates))
        found = 0 if self.decides_by_steps else self._by_traces(seen, start)
        corrected = seen.predict
        if self.decides_by_steps or (found and not self.runtime.simulated):
            found, corrected = self._by_steps(seen, found or start)
        limit: Limit = seen.limit or ("max_batch_size" if found >= self.max_batch_size else "memory")
        if limit == "memory" and self.out_of_time and corrected(found + 1) <= capacity_bytes:
            limit = "time"
        confirmed = found > 0 and not self.runtime.simulated
        peak_bytes = seen.ran[found] if confirmed else int(seen.predict(found)) if found else 0
        fixed_bytes, bytes_per_sample = self.line(seen.predict, found)
        _log.info(
            "%s as %s: the ceiling is %d samples, limited by %s, %s: %s of %s",
            *(device.label, role, found, limit, "a step of it ran" if confirmed else "by traces"),
            *(size_text(peak_bytes), size_text(capacity_bytes)),
        )
        return Ceiling(
            device=device.label,
            role=role,
            batch_size=found,
            limited_by=limit,
            fixed_bytes=fixed_bytes,
            bytes_per_sample=bytes_per_sample,
            peak_bytes=peak_bytes,
            capacity_bytes=capacity_bytes,
            steps=self.counts.steps - steps,
            ooms=self.counts.ooms - ooms,
            confirmed=confirmed,
            points=seen.points(),
        )

    def _by_traces(self, seen: Observations, start: int) -> int:
        """Find a ceiling by predictions. Check the last prediction by a trace.

        Return 0 if not even one sample fits.
        """
        least = self.least_batch()

        def traced(n: int) -> float:
            n = max(n, least)  # a smaller batch can't be traced
            if n not in seen.predicted:
                seen.predicted[n] = self.traced(seen.shape_of(n))[seen.index]
            return seen.predicted[n]

        seen.predict = traced
        capacity_bytes = self.runtime.capacities_bytes[seen.index]
        while True:
            found = largest_fitting(traced, capacity_bytes, least=0, most=self.max_batch_size, start=start)
            if self.foretold(seen.shape_of(max(found, least))):
                return 0 if found < least else found
            seen.predicted.clear()

    def _by_steps(self, seen: Observations, start: int) -> tuple[int, Callable[[int], float]]:
        """Find a ceiling by real steps. Return it with a function that predicts the bytes of other sizes.

        On accelerators the steps decide. On a CPU with a budget they confirm the traces, whose memory model is exact.
        """
        index, least = seen.index, self.least_batch()
        counted = not self.decides_by_steps
        if not counted:
            seen.predict = lambda n: self.traced(seen.shape_of(max(n, least)))[index]
        search = WallSearch(
            seen.predict if self.has_traces else None,
            self.runtime.capacities_bytes[index],
            least,
            self.max_batch_size,
            start=max(start, least),
            # Traces with real tensors were already such steps, so no smaller step is needed first.
            known=self._alike(seen) or (start if counted and not self.tracer.fake else 0),
            counted=counted,
        )
        n = search.next() if self.max_batch_size >= least else None
        while n is not None:
            before = self.counts.steps
            if self._ran(seen, n):
                memory = self._memories.get(seen.shape_of(n))
                reserved_bytes = seen.ran[n] if memory is None else memory.reserved_bytes[index]
                search.ran(n, seen.ran[n], reserved_bytes, self.counts.steps - before)
            else:
                search.ran_out(n)
                search.blind = seen.limit == "kernel" or seen.lost
            n = None if self.out_of_time and search.found else self._following(search, index)
        if not counted:
            seen.predict = search.corrected
        self._equals[self._kind(seen)] = index, search.found
        return search.found, search.corrected

    def _following(self, search: WallSearch, index: int) -> int | None:
        """Return the next size to run. If the ceiling must be exact, add one sample at a time until a step fails."""
        n = search.next()
        if n is None and self.exact and search.found < self.max_batch_size and search.failed != search.found + 1:
            n = search.found + 1
        if n is not None:
            _log.info(
                "next %d on %s: %d ran, out of the sizes tried", n, self.runtime.devices[index].label, search.found
            )
        return n

    def _alike(self, seen: Observations) -> int | None:
        """Return the ceiling of an equal device in the same role that was found before, or None."""
        other, found = self._equals.get(self._kind(seen), (seen.index, 0))
        return found if other != seen.index and found else None

    def _kind(self, seen: Observations) -> tuple[str, int, Role, int]:
        """Return a key that is equal for equal devices in equal steps: name, capacity, role, number of micro-steps."""
        device, capacity_bytes = self.runtime.devices[seen.index], self.runtime.capacities_bytes[seen.index]
        return device.name, capacity_bytes, seen.role, len(seen.shape_of(2).splits)

    def _ran(self, seen: Observations, n: int) -> bool:
        """Run a step to measure its memory, and store the result. Return whether it ran."""
        shape = seen.shape_of(n)
        try:
            with named_steps(shape):
                seen.ran[n] = self.peaks(shape)[seen.index]
        except OutOfMemoryError as error:
            _log.info("ran %s: out of memory (%s)", shape, error)
            self.counts.ooms += 1
            seen.lost = seen.lost or isinstance(error, StepLostError)
            return False
        except RuntimeError as error:
            if not is_kernel_limit(error):
                raise
            _log.info("ran %s: too large for a kernel (%s)", shape, one_line(error))
            seen.limit = "kernel"
            return False
        _log.info("ran %s: %s on %s", shape, size_text(seen.ran[n]), self.runtime.devices[seen.index].label)
        return True

    # Fits of device 0

    def predicted_ceiling(self, index: int, role: Role, *, accumulates: bool, start: int) -> int:
        """Return a ceiling by traces alone, or 0 if not even one sample fits. See `ceiling`."""
        if not self.has_traces:
            return start  # trials will show
        seen = Observations(index, role, self.shapes(index, role, (), accumulates))
        return self._by_traces(seen, max(1, start))

    def primary_fit(self, share: int, elsewhere: int, *, accumulates: bool) -> MemoryFit:
        """Fit device 0's peak memory to its samples and the whole batch, with samples on other devices.

        Another moment of the step may become the peak at other sizes, so the peak is only piecewise linear. Fit it near
        the limit, with about the most samples on device 0 and on the other devices.
        """
        # One sample is not on the line through larger batches. See Note [A batch of one] in affine_traces.
        least = max(self.least_batch(), 2 if share > 2 else 1)
        share, elsewhere = max(share, least + 1), max(elsewhere, least + 1)
        less = max(least, share - max(1, share // 4))
        fewer = max(least, elsewhere - max(1, elsewhere // 2))

        def point(own: int, others: int) -> tuple[int, int, int]:
            return own, own + others, self.traced(balanced((own, others), accumulates=accumulates))[0]

        # If it was wrong, the points below are traced.
        self.foretold(balanced((share, elsewhere), accumulates=accumulates))
        # The second point has more samples on device 0. The third has more samples on the other devices only.
        return MemoryFit.through(point(less, fewer), point(share, fewer), point(less, elsewhere))

    def primary_fit_by_steps(
        self, traced: MemoryFit | None, share: int, others: Sequence[int], *, accumulates: bool
    ) -> MemoryFit | None:
        """Fit device 0's peak memory to real steps on all devices, with about half of the samples that fit on each.

        Args:
            traced: The linear model from traces. Two steps are run to correct its slopes by a common factor. Without
                it, three steps are run to fit a new model.
            share: Samples on device 0.
            others: Samples on the other devices.
            accumulates: Whether a step has several micro-steps.
        """
        least = self.least_batch()

        def part(samples: int, quarters: int) -> int:
            return samples and max(least * quarters, samples * quarters // 4)

        def point(own: int, beside: int) -> tuple[StepShape, tuple[int, int, int]]:
            split = (part(max(1, share), own), *(part(samples, beside) for samples in others))
            shape = balanced(split, accumulates=accumulates)
            return shape, (split[0], sum(split), self.confirmed_peaks(shape)[0])

        try:
            if traced is None:
                return MemoryFit.through(*(point(own, beside)[1] for own, beside in ((1, 1), (2, 1), (1, 2))))
            points = [point(1, 1), point(2, 2)]
        except OutOfMemoryError as error:
            _log.info("device 0 with the others: out of memory (%s)", error)
            self.counts.ooms += 1
            return None
        (t0, y0), (t1, y1) = ((self.traced(shape)[0], peak) for shape, (_, _, peak) in points)
        scale = max(0.0, (y1 - y0) / (t1 - t0)) if t1 > t0 else 1.0
        fixed_bytes = y1 - scale * (t1 - traced.fixed_bytes)
        return MemoryFit(fixed_bytes, scale * traced.bytes_per_share, scale * traced.bytes_per_batch)

    def untraced_bytes(self, ceiling: Ceiling) -> int:
        """Return the bytes that a confirmed step on device 0 used beyond its trace, or 0 if the ceiling was not run."""
        if not ceiling.confirmed or not ceiling.batch_size or not self.has_traces:
            return 0
        shape = self.shapes(0, "primary", (), False)(ceiling.batch_size)
        return max(0, ceiling.peak_bytes - self.traced(shape)[0])

    def room_beside(
        self, share: int, least: tuple[int, ...], most: tuple[int, ...], *, accumulates: bool
    ) -> tuple[int, ...]:
        """Return the most samples on the other devices that leave room for device 0's own samples."""

        def lowered(total: int) -> tuple[int, ...]:
            return proportional_split(total, tuple(max(1, n) for n in most), most)

        def peak(total: int) -> float:
            return self.traced(balanced((share, max(total, self.least_batch())), accumulates=accumulates))[0]

        if not self.has_traces:
            return least
        total = largest_fitting(
            peak, self.runtime.capacities_bytes[0], least=sum(least), most=sum(most), start=sum(least) + 1
        )
        grown = lowered(total)
        return grown if all(n >= floor for n, floor in zip(grown, least, strict=True)) else least
