"""Find the number of samples that fit on each device.

On accelerators, real steps decide, each closer to the size at which memory runs out. Where bytes are counted, steps of
few samples predict the ceiling, and a step of exactly this size confirms it. For simulated GPUs, the prediction
decides. On a CPU without a budget, time is the limit, and the batch grows until a larger batch is hardly faster. The
search never doubles the batch until it runs out of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from autosplit.devices.host_memory import FILLED_SHARE
from autosplit.errors import UserCodeError, one_line
from autosplit.oom import DoesNotFitError, OutOfMemoryError, StepLostError, is_kernel_limit
from autosplit.probe.ceiling_search import WallSearch
from autosplit.probe.prober import Prober, named_steps
from autosplit.runtime.protocol import StepShape
from autosplit.solve.memory import Ceiling, Limit, MemoryParts, Role, largest_fitting
from autosplit.solve.step_time import TimeCurve
from autosplit.text import size_text

_log = logging.getLogger(__name__)

KNEE_GAIN = 0.03
"""Smallest gain in throughput that justifies doubling the batch on a plain CPU: 3%."""

LONGEST_STEP_S = 2.0
"""Longest step on a plain CPU, in seconds. After a longer step, no larger batch is tried."""

MOST_GROWTH = 1.5
"""Largest growth factor of the batch from one step to the next, on a GPU that uses the host's memory.

The first step has one sample. The factor may be larger if the step would fill at most half of the memory even if all of
its bytes beyond those of every step grew with the samples.

With a factor of 2, a step of 75% of the capacity ran out of memory on an emulated device. The allocator reserved more
than the earlier steps had shown.
"""

DOUBLING_BUDGET_S = 0.5
"""Time limit in seconds for repeating one batch size on a plain CPU."""


def ceiling_of(
    prober: Prober,
    index: int,
    role: Role,
    *,
    elsewhere: tuple[int, ...] = (),
    accumulates: bool = False,
    start: int | None = None,
    most: int | None = None,
) -> Ceiling:
    """Find the ceiling of one device in one role.

    Args:
        role: Role of the device. Only device 0 may be ``primary``.
        elsewhere: For ``primary``, the samples of the other devices in the same step. Default: none.
        accumulates: Whether a step has several micro-steps, so that gradients are in memory throughout the second.
        start: The first size to try. Default: the sample batch's size.
        most: The largest size to try. Default: the prober's `max_batch_size`.
    """
    if prober.evidence == "time":
        return ceiling_by_time(prober, role=role)[1]
    device, capacity_bytes = prober.worker.devices[index], prober.worker.capacities_bytes[index]
    prober.report(f"probing device {index + 1} of {len(prober.worker.devices)}: {device.label} as {role}")
    most = most or prober.max_batch_size
    start = min(max(prober.least_batch, start or prober.workload.sample_batch_size), most)
    steps, ooms = prober.steps, prober.ooms
    counted = _Predictions(prober, index, prober.shapes(index, role, elsewhere, accumulates))
    found = 0 if prober.evidence == "steps" else counted.largest(start, most)
    predict: Callable[[int], float] = counted
    corrected, ran = predict, dict[int, int]()
    limit: Limit = "memory"
    if prober.evidence == "steps" or (found and not prober.worker.exact):
        search, limit = _by_steps(counted, role, found or start, most)
        found, corrected, ran = search.found, search.corrected, search.allocated
        if prober.keeps_distance(index):
            found = search.predicted(capacity_bytes)
        predict = corrected if prober.evidence == "steps" else counted
    if limit == "memory" and found >= most:
        limit = "max_batch_size"
    elif limit == "memory" and prober.out_of_time and corrected(found + 1) <= capacity_bytes:
        limit = "time"
    known = ran if prober.evidence == "steps" else {**counted.known, **ran}
    return _logged_ceiling(
        *(prober, index, role, found, limit, predict),
        peak_bytes=ran.get(found) or (int(predict(found)) if found else 0),
        steps=prober.steps - steps,
        ooms=prober.ooms - ooms,
        confirmed=found > 0 and not prober.worker.exact and (found in ran or prober.evidence != "steps"),
        points=tuple((n, known[n], n in ran) for n in sorted(known)),
    )


def predicted_ceiling(prober: Prober, index: int, role: Role, *, accumulates: bool, start: int) -> int:
    """Predict a ceiling. Return 0 if not even one sample fits, and `start` on accelerators."""
    if prober.evidence == "steps":
        return start  # Trials will show whether this size fits.
    predictions = _Predictions(prober, index, prober.shapes(index, role, (), accumulates))
    return predictions.largest(max(1, start), prober.max_batch_size)


def ceiling_by_time(prober: Prober, needed: int = 0, role: Role = "primary") -> tuple[TimeCurve, Ceiling]:
    """Time growing batches on a plain CPU, where memory is predicted and never filled.

    The batch doubles until two doublings in a row gain less than `KNEE_GAIN`, or a step takes longer than
    `LONGEST_STEP_S`. It also stops if the next batch would not fit, or if the time is up. If a model fails with few
    samples, begin with the sample batch's size.

    Args:
        needed: Samples that must run at once, even if a smaller batch is as fast.
    """
    most, steps = prober.max_batch_size, prober.steps
    points: list[tuple[int, float]] = []
    n = prober.least_batch
    if n > most:
        raise does_not_fit(prober, 0)
    shape_of = prober.shapes(0, role, (), False)
    sample = min(prober.workload.sample_batch_size, most)
    while True:
        try:
            peak_bytes = prober.predicted(shape_of(n))[0]
        except UserCodeError:
            if points or n >= sample:
                raise
            n = sample  # The workload is known to run at this size.
            continue
        if peak_bytes > prober.worker.capacities_bytes[0]:
            limit: Limit = "memory"
            break
        prober.report(f"timing {n} sample{'s' * (n > 1)} on {prober.worker.devices[0].label}")
        measured = prober.measured(shape_of(n), budget_s=DOUBLING_BUDGET_S)
        points.append((n, max(1e-9, measured.seconds - measured.update_s)))
        is_enough = measured.seconds > LONGEST_STEP_S or _stops_paying(points) or prober.out_of_time
        if n == most or (is_enough and n >= needed):
            limit = "max_batch_size" if n == most else "time"
            break
        n = min(2 * n, most)
    if not points:
        raise does_not_fit(prober, 0)
    predicted = {size: prober.predicted(shape_of(size))[0] for size, _ in points}
    return TimeCurve.of(points), _logged_ceiling(
        *(prober, 0, role, points[-1][0], limit, lambda size: prober.predicted(shape_of(size))[0]),
        peak_bytes=predicted[points[-1][0]],
        steps=prober.steps - steps,
        confirmed=True,
        points=tuple((size, nbytes, False) for size, nbytes in sorted(predicted.items())),
    )


def _stops_paying(points: list[tuple[int, float]]) -> bool:
    rates = [n / seconds for n, seconds in points]
    return len(rates) > 2 and max(rates[-2:]) < (1 + KNEE_GAIN) * max(rates[:-2])


def _logged_ceiling(
    prober: Prober,
    index: int,
    role: Role,
    found: int,
    limit: Limit,
    predict: Callable[[int], float],
    *,
    peak_bytes: int,
    steps: int,
    confirmed: bool,
    points: tuple[tuple[int, int, bool], ...],
    ooms: int = 0,
) -> Ceiling:
    device, capacity_bytes = prober.worker.devices[index], prober.worker.capacities_bytes[index]
    fixed_bytes, bytes_per_sample = prober.line(predict, found)
    _log.info(
        "%s as %s: the ceiling is %d samples, limited by %s, %s: %s of %s",
        *(device.label, role, found, limit, "a step of it ran" if confirmed else "predicted"),
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
        steps=steps,
        ooms=ooms,
        confirmed=confirmed,
        points=points,
    )


@dataclass
class _Predictions:
    """Predict the memory of one device in one kind of step, where bytes are counted.

    Attributes:
        shape_of: Function that makes the step with n samples on the device.
        known: Predicted bytes by number of samples.
    """

    prober: Prober
    index: int
    shape_of: Callable[[int], StepShape]
    known: dict[int, int] = field(default_factory=dict)

    def __call__(self, n: int) -> int:
        n = max(n, self.prober.least_batch)  # A smaller batch can't run.
        if n not in self.known:
            self.known[n] = self.prober.predicted(self.shape_of(n))[self.index]
        return self.known[n]

    def largest(self, start: int, most: int) -> int:
        """Return the largest size that fits, or 0. Search again if the prediction of this size was wrong."""
        least, capacity_bytes = self.prober.least_batch, self.prober.worker.capacities_bytes[self.index]
        while True:
            found = largest_fitting(self, capacity_bytes, least=0, most=most, start=start)
            if self.prober.prediction_holds(self.shape_of(max(found, least))):
                return 0 if found < least else found
            self.known.clear()


def _by_steps(predictions: _Predictions, role: Role, start: int, most: int) -> tuple[WallSearch, Limit]:
    """Find a ceiling by real steps. Where bytes are counted, the steps confirm the predictions."""
    prober, index, least = predictions.prober, predictions.index, predictions.prober.least_batch
    device, capacity_bytes = prober.worker.devices[index], prober.worker.capacities_bytes[index]
    # Equal devices in equal steps have equal ceilings.
    careful = prober.keeps_distance(index)
    kind = device.name, capacity_bytes, role, len(predictions.shape_of(2).splits)
    place, equal = prober.found_on.get(kind, (index, 0))
    counted = prober.evidence != "steps"
    limit: Limit = "memory"
    search = WallSearch(
        predictions if counted else None,
        int(FILLED_SHARE * capacity_bytes) if careful else capacity_bytes,
        least,
        most,
        start=least if careful else max(start, least),
        known=equal if place != index else 0,
        counted=counted,
    )
    n = search.next() if most >= least else None
    while n is not None:
        if careful and search.found:
            n = min(n, max(search.found + 1, int(MOST_GROWTH * search.found), search.safe(search.found) // 2))
        before, shape = prober.steps, predictions.shape_of(n)
        try:
            with named_steps(shape):
                peak_bytes = prober.peaks(shape)[index]
        except OutOfMemoryError as error:
            prober.ooms += 1
            search.ran_out(n, blind=isinstance(error, StepLostError))
            _log.info("ran %s: out of memory (%s)", shape, error)
        except RuntimeError as error:
            if not is_kernel_limit(error):
                raise
            limit = "kernel"
            search.ran_out(n, blind=True)
            _log.info("ran %s: too large for a kernel (%s)", shape, one_line(error))
        else:
            memory = prober.memories.get(shape)
            reserved_bytes = peak_bytes if memory is None else memory.reserved_bytes[index]
            search.ran(n, peak_bytes, reserved_bytes, prober.steps - before)
            search.held_bytes = 0 if counted else _held_bytes(prober.worker.known_parts(shape)[index])
            _log.info("ran %s: %s on %s", shape, size_text(peak_bytes), device.label)
        if prober.out_of_time and search.found:
            break
        n = search.next()
        if n is None and (prober.exact or (counted and search.is_uneven)) and search.has_neighbour and not careful:
            n = search.found + 1  # Add one sample at a time until a step fails.
    prober.found_on[kind] = index, search.found
    return search, limit


def _held_bytes(parts: MemoryParts) -> int:
    """Return the bytes that a step holds when its activations are largest. Gradients may not exist yet."""
    return parts.parameters_bytes + parts.optimizer_bytes


def does_not_fit(prober: Prober, index: int) -> DoesNotFitError:
    """Return the error for a device on which not even one sample fits, with the bytes needed and available."""
    device, capacity_bytes = prober.worker.devices[index], prober.worker.capacities_bytes[index]
    least = prober.least_batch
    if prober.max_batch_size < least:
        return DoesNotFitError(
            f"A batch of {prober.max_batch_size} is the largest allowed, but BatchNorm trains on at least {least}. "
            f"Expected at least {least}. Raise effective_batch_size or max_batch_size.",
        )
    shape = prober.shapes(index, "rank", (), False)(least)
    known_bytes = prober.worker.known_parts(shape)[index].total_bytes
    needed_bytes = known_bytes if prober.evidence == "steps" else prober.predicted(StepShape(((least,),)))[0]
    return DoesNotFitError(
        _why_not(prober, index, needed_bytes),
        device=device.label,
        device_index=index,
        requested_bytes=needed_bytes,
        capacity_bytes=capacity_bytes,
    )


def _why_not(prober: Prober, index: int, needed_bytes: int) -> str:
    device, capacity_bytes = prober.worker.devices[index], prober.worker.capacities_bytes[index]
    where = f"{device.label} ({device.name})"
    fits = needed_bytes <= capacity_bytes
    lost = [note.text for note in prober.worker.notes]
    if fits and (lost or prober.out_of_time):
        return (
            f"No step of the workload finished on {where}: "
            f"{'; '.join(lost).rstrip('.') or 'the time limit was over'}. At least {needed_bytes} bytes are needed, "
            f"and {capacity_bytes} are allowed. "
            f"{'Run one step by itself to see why.' if lost else 'Raise time_limit_s.'}"
        )
    needs = f"it needs {size_text(needed_bytes)} ({needed_bytes} bytes)"
    if fits:
        needs = f"a step needs more than {size_text(needed_bytes)} ({needed_bytes} bytes)"
    sharded = " Or shard the model: autosplit.tune_sharded plans FSDP2." if len(prober.worker.devices) > 1 else ""
    return (
        f"The workload does not fit on {where} at batch {prober.least_batch}: {needs}, and {capacity_bytes} "
        f"({size_text(capacity_bytes)}) are allowed. Use a smaller model, a lower precision, or a larger device."
        f"{sharded}"
    )
