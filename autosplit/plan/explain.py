"""Explain a plan by its stored numbers: its bounds, the alternatives, and the quality of its fit. Nothing runs.

A plan for simulated GPUs holds the simulated throughput of changed machines. For real devices, gains are ratios of two
predictions by the model that was fitted to the trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Literal

from autosplit.errors import PlanError
from autosplit.plan.explanation import (
    BINDING_SHARE,
    LIMITS,
    Alternative,
    Bound,
    Change,
    Explanation,
    FitQuality,
    Knee,
    LearningRate,
    MoreMemory,
    What,
)
from autosplit.plan.record import PlanRecord
from autosplit.solve.memory import Ceiling, Region
from autosplit.solve.problem import MOST_WORK, NO_LIMIT_BYTES, Problem
from autosplit.solve.split import even_split
from autosplit.solve.step_time import Fit
from autosplit.solve.trial import KNEE_SHARE

GIB = 2**30

FASTER = 2.0
"""Speed of a faster device, and size of a larger step, relative to the plan's, in the gains of an explanation."""

MOST_CURVES = 200_000
"""Most forwards of a plan, times its devices, for predicting the time of a step. More would take seconds."""

MOST_KINDS = 8
"""Most kinds of devices whose gains are computed separately."""


def explanation_of(plan: PlanRecord) -> Explanation:
    """Explain a plan from its stored numbers."""
    compares = len(plan.devices) > 1 and not plan.shares_processor
    rate, labels = plan.even_samples_per_s, tuple(device.label for device in plan.devices)
    problem = problem_of(plan)
    predicted = None if problem is None else problem.rate(plan.split, plan.effective_batch_size)
    return Explanation(
        **plan.repeated(),
        predicted_samples_per_s=predicted,
        **_relaxed(plan, problem, predicted, alone=compares),
        even=_even(plan, problem, predicted) if compares else None,
        even_measured=Alternative(labels, (), 0, rate, plan.samples_per_s / rate, measured=True) if rate else None,
        fit=_fit_quality(plan),
        knee=_knee(plan),
        learning_rate=_learning_rate(plan),
    )


def _relaxed(plan: PlanRecord, problem: Problem | None, predicted: float | None, *, alone: bool) -> dict[str, Any]:
    """Return the gains on changed machines: simulated ones, or predictions for real devices and for ranks."""
    if plan.changes is not None:
        return _as_simulated(plan, plan.changes)
    if problem is None or predicted is None or (plan.simulated and plan.region is not None):
        return {"bounds": (), "alone": (), "more_memory": None}
    base = max(problem.best(), predicted)
    return {
        "bounds": _bounds(plan, problem, base),
        "alone": _alone(plan, problem, predicted) if alone else (),
        "more_memory": _more_memory(plan, problem, base),
    }


def problem_of(plan: PlanRecord) -> Problem | None:
    """Return the problem that a plan solves, or None if it has no fit, or if predicting a step would take too long."""
    forwards = plan.effective_batch_size / sum(plan.split)
    if plan.fit is None or forwards > MOST_WORK or forwards * len(plan.devices) > MOST_CURVES:
        return None
    return problem_with(plan, plan.fit, tuple(device.ceiling for device in plan.devices), plan.region)


def problem_with(plan: PlanRecord, fit: Fit, ceilings: tuple[Ceiling, ...], region: Region | None) -> Problem:
    """Return the problem of a plan's request with this fit and these ceilings."""
    return Problem.of(
        fit,
        ceilings,
        region,
        effective_batch_sizes=plan.effective_batch_sizes,
        max_batch_size=plan.max_batch_size,
        accumulates=plan.accumulates,
    )


def required_problem(plan: PlanRecord) -> Problem:
    """Return the problem that a plan solves. Raise PlanError if there is none."""
    problem = problem_of(plan)
    if problem is None:
        raise PlanError(
            "the plan holds no fit of a step's time, or one of too many forwards to predict by; expected one that tune "
            "made; tune again, or autosplit.measure(workload, split=...) runs the split itself",
            code="plan-without-fits",
        )
    return problem


def base_of(plan: PlanRecord) -> float:
    """Return the highest simulated samples/s on the plan's own machine."""
    return max([plan.samples_per_s, *(trial.samples_per_s or 0.0 for trial in plan.trials)])


def _as_simulated(plan: PlanRecord, changes: tuple[Change, ...]) -> dict[str, Any]:
    base, bounds, alone, memory = base_of(plan), [], [], None
    for change in changes:
        rate = change.samples_per_s
        if change.what == "alone":
            if change.device is not None:
                alone.append(Alternative((change.device,), (), 0, rate, plan.samples_per_s / rate, measured=True))
        elif change.what == "one_gib_more":
            if change.device is not None and memory is None:
                memory = MoreMemory(change.device, max(base, rate), max(base, rate) / base, simulated=True)
        elif rate > base * (1 + BINDING_SHARE):
            bounds.append(Bound(change.what, change.device, rate, rate / base))
    return {"bounds": _in_order(bounds), "alone": _fastest_first(alone), "more_memory": memory}


def _fastest_first(alone: Iterable[Alternative]) -> tuple[Alternative, ...]:
    return tuple(sorted(alone, key=lambda one: -one.samples_per_s))


def _in_order(bounds: Sequence[Bound]) -> tuple[Bound, ...]:
    """Sort bounds of memory and sizes first, each group by gain."""
    return tuple(sorted(bounds, key=lambda bound: (bound.what not in LIMITS, -bound.gain)))


def _bounds(plan: PlanRecord, problem: Problem, base: float) -> tuple[Bound, ...]:
    memory = _binding(memory_relaxed(plan, problem), base)
    if not memory and len(plan.devices) > 1:
        memory = _binding([("memory", None, all_memory_relaxed(problem))], base)
    times = _binding((*sizes_relaxed(plan, problem), *_times_relaxed(plan, problem)), base)
    # Drop gains so large that the remaining time is smaller than the error of the fit or the measurement.
    quality = _fit_quality(plan)
    error_share = 0.0 if quality is None else max(quality.median_share, quality.noise_share)
    return _in_order([bound for bound in (*memory, *times) if bound.gain * error_share < 1])


def _binding(relaxed: Iterable[Relaxed], base: float) -> list[Bound]:
    found = []
    for what, device, problem in relaxed:
        rate = max(base, problem.best())
        if rate > base * (1 + BINDING_SHARE):
            found.append(Bound(what, device, rate, rate / base))
    return found


Relaxed = tuple[What, "str | None", Problem]


def memory_relaxed(plan: PlanRecord, problem: Problem) -> Iterator[Relaxed]:
    """Yield the problem without the memory limit of one device, for a device of each kind."""
    for index in kinds_of(plan):
        yield "memory", plan.devices[index].label, problem.with_memory(index, NO_LIMIT_BYTES)


def all_memory_relaxed(problem: Problem) -> Problem:
    """Return the problem without any memory limits."""
    for index in range(len(problem.ceilings)):
        problem = problem.with_memory(index, NO_LIMIT_BYTES)
    return problem


def sizes_relaxed(plan: PlanRecord, problem: Problem) -> Iterator[Relaxed]:
    """Yield the problem with larger forwards, and with larger steps."""
    most = None if plan.effective_batch_sizes is None else plan.effective_batch_sizes[1]
    asked = plan.max_batch_size
    if asked is not None and (most is None or asked < most):
        yield "max_batch_size", None, problem.with_most(int(FASTER * asked) if most is None else most)
    if most is not None:
        larger = problem.with_effective(int(FASTER * most), max_batch_size=asked)
        yield "effective_batch_size", None, larger


def _times_relaxed(plan: PlanRecord, problem: Problem) -> Iterator[Relaxed]:
    if problem.step_time.adds_up or len(plan.devices) == 1:
        label = plan.devices[0].label if len(plan.devices) == 1 else None
        yield "device", label, problem.faster(range(len(plan.devices)), FASTER)
    else:
        for index in kinds_of(plan):
            yield "device", plan.devices[index].label, problem.faster((index,), FASTER)
    # Measurements of whole steps show the total cost between devices, but not its parts.
    overhead: Literal["copies", "overhead"] = "copies" if plan.region is None else "overhead"
    yield overhead, None, problem.without(overhead)
    yield "update", None, problem.without("update")


def kinds_of(plan: PlanRecord) -> list[int]:
    """Return one device of each kind: device 0, and the first of each kind of the others."""
    found: dict[tuple[bool, str, int, int], int] = {}
    for index, device in enumerate(plan.devices):
        found.setdefault((index == 0, device.name, device.capacity_bytes, device.ceiling.batch_size), index)
    return list(found.values())[:MOST_KINDS]


def alone_of(plan: PlanRecord) -> Iterator[tuple[int, int]]:
    """Yield one device of each name, with the most samples that it can run alone."""
    names = set()
    ranks = [rank.ceiling.batch_size for rank in plan.ddp.ranks] or [0] * len(plan.devices)
    for index, device in enumerate(plan.devices):
        ceiling = plan.region.primary_ceiling if index == 0 and plan.region is not None else ranks[index]
        if ceiling >= 1 and device.name not in names:
            names.add(device.name)
            yield index, ceiling


def fullest_of(plan: PlanRecord) -> int:
    """Return the index of the device with the least free memory, relative to its capacity."""
    shares = [device.peak_bytes / max(1, device.capacity_bytes) for device in plan.devices]
    return max(range(len(shares)), key=lambda index: shares[index])


def _even(plan: PlanRecord, problem: Problem | None, predicted: float | None) -> Alternative | None:
    if plan.even_samples_per_s is not None or plan.split == even_split(sum(plan.split), len(plan.split)):
        return None  # the plan is even, or the even split was measured
    found = None if problem is None else problem.even(plan.effective_batch_size)
    if found is None or predicted is None:
        return None
    labels, rate = tuple(device.label for device in plan.devices), found.samples_per_s
    return Alternative(labels, found.split, found.accumulation_steps, rate, predicted / rate)


def _alone(plan: PlanRecord, problem: Problem, predicted: float) -> tuple[Alternative, ...]:
    rates = [(plan.devices[index].label, problem.alone(index, ceiling).best()) for index, ceiling in alone_of(plan)]
    return _fastest_first(Alternative((label,), (), 0, rate, predicted / rate) for label, rate in rates if rate > 0)


def _more_memory(plan: PlanRecord, problem: Problem, base: float) -> MoreMemory | None:
    fullest = fullest_of(plan)
    more = problem.with_memory(fullest, GIB)
    if more is problem:  # limited by a kernel or by time
        return None
    rate = max(base, more.best())
    return MoreMemory(plan.devices[fullest].label, rate, rate / base)


def _knee(plan: PlanRecord) -> Knee | None:
    """Return the fastest batch that was tried, if the plan has a smaller batch that is almost as fast."""
    rates = [(rate, trial.batch_size) for trial in plan.trials if (rate := trial.samples_per_s) is not None]
    if plan.request.get("effective_batch_size") is not None or not rates:
        return None
    rate, size = max(rates)
    smallest = min(tried for reached, tried in rates if reached >= KNEE_SHARE * rate)
    return Knee(plan.batch_size, size, rate) if size > plan.batch_size == smallest else None


def _fit_quality(plan: PlanRecord) -> FitQuality | None:
    residuals = [] if plan.fit is None else [r for r in plan.fit.residuals if r.measured_s > 0]
    if not residuals:
        return None
    errors = [abs(residual.predicted_s / residual.measured_s - 1) for residual in residuals]
    noise = [trial.error_share for trial in plan.trials if trial.samples_per_s is not None]
    return FitQuality(median(errors), max(errors), len(errors), median(noise) if noise else 0.0)


def _learning_rate(plan: PlanRecord) -> LearningRate | None:
    now = plan.sample_batch_size
    if not now or now == plan.effective_batch_size:
        return None
    ratio = plan.effective_batch_size / now
    return LearningRate(now, plan.effective_batch_size, ratio, math.sqrt(ratio))
