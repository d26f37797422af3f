"""Explain a plan by its stored numbers: what bounds it, what else there is, how good its fit was. Nothing runs.

What was not measured is the model's prediction, at the parameters that were fitted to the trials, and its gains are
ratios of two predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import median

from autosplit.explanation import (
    BINDING_SHARE,
    Alternative,
    Bound,
    Explanation,
    FitQuality,
    LearningRate,
    MoreMemory,
    Solved,
    What,
)
from autosplit.relaxing import MOST_WORK, NO_LIMIT_BYTES, Overhead, Problem
from autosplit.split import even_split

__all__ = ["explanation_of"]

GIB = 2**30

FASTER = 2.0
"""What a faster device would bring is told of one so many times as fast; of a larger step, so many times as large."""

MOST_CURVES = 200_000
"""Forwards of a plan times its devices: of more, a step's time is not predicted, which would take seconds."""

MOST_KINDS = 8
"""Of so many kinds of devices each is looked at by itself."""


def explanation_of(plan: Solved) -> Explanation:
    """Explain a plan, from its numbers alone.

    Args:
        plan: What is explained.
    """
    several = len(plan.devices) > 1
    shares_processor = several and all(device.kind == "cpu" for device in plan.devices)
    problem = _problem(plan)
    predicted = None if problem is None else problem.rate(plan.split, plan.effective_batch_size)
    base = 0.0 if problem is None or predicted is None else max(problem.best(), predicted)
    return Explanation(
        samples_per_s=plan.samples_per_s,
        predicted_samples_per_s=predicted,
        bounds=() if problem is None else _bounds(plan, problem, base),
        even=_even(plan, problem, predicted) if several and not shares_processor else None,
        even_measured=_even_measured(plan),
        alone=_alone(plan, problem, predicted) if several and not shares_processor else (),
        more_memory=None if problem is None else _more_memory(plan, problem, base),
        fit=_fit_quality(plan),
        fastest=plan.fastest,
        ddp_samples_per_s=plan.ddp_samples_per_s,
        ddp_measured=plan.ddp_measured,
        learning_rate=_learning_rate(plan),
        shares_processor=shares_processor,
        simulated=plan.simulated,
    )


def _problem(plan: Solved) -> Problem | None:
    forwards = plan.effective_batch_size / sum(plan.split)
    if plan.fit is None or forwards > MOST_WORK or forwards * len(plan.devices) > MOST_CURVES:
        return None
    return Problem.of(
        plan.fit,
        tuple(device.ceiling for device in plan.devices),
        plan.region,
        effective_batch_sizes=plan.effective_batch_sizes,
        max_batch_size=plan.max_batch_size,
        accumulates=plan.accumulates,
    )


def _bounds(plan: Solved, problem: Problem, base: float) -> tuple[Bound, ...]:
    """Return what binds: memory and sizes first, each of both by its gain."""
    memory = _binding(_memory_relaxed(plan, problem), base)
    if not memory and len(plan.devices) > 1:
        everywhere = problem
        for index in range(len(plan.devices)):
            everywhere = everywhere.with_memory(index, NO_LIMIT_BYTES)
        memory = _binding([("memory", None, everywhere)], base)
    limits = [*memory, *_binding(_sizes_relaxed(plan, problem), base)]
    times = _binding(_times_relaxed(plan, problem), base)
    return (*sorted(limits, key=lambda bound: -bound.gain), *sorted(times, key=lambda bound: -bound.gain))


def _binding(relaxed: Iterable[tuple[What, str | None, Problem]], base: float) -> list[Bound]:
    found = []
    for what, device, problem in relaxed:
        rate = max(base, problem.best())
        if rate > base * (1 + BINDING_SHARE):
            found.append(Bound(what, device, rate, rate / base))
    return found


def _memory_relaxed(plan: Solved, problem: Problem) -> Iterator[tuple[What, str | None, Problem]]:
    for index in _kinds(plan):
        yield "memory", plan.devices[index].label, problem.with_memory(index, NO_LIMIT_BYTES)


def _sizes_relaxed(plan: Solved, problem: Problem) -> Iterator[tuple[What, str | None, Problem]]:
    most = None if plan.effective_batch_sizes is None else plan.effective_batch_sizes[1]
    asked = plan.max_batch_size
    if asked is not None and (most is None or asked < most):
        yield "max_batch_size", None, problem.with_most(int(FASTER * asked) if most is None else most)
    if most is not None:
        larger = problem.with_effective(int(FASTER * most), max_batch_size=asked)
        yield "effective_batch_size", None, larger


def _times_relaxed(plan: Solved, problem: Problem) -> Iterator[tuple[What, str | None, Problem]]:
    if problem.step_time.adds_up or len(plan.devices) == 1:
        label = plan.devices[0].label if len(plan.devices) == 1 else None
        yield "device", label, problem.faster(range(len(plan.devices)), FASTER)
    else:
        for index in _kinds(plan):
            yield "device", plan.devices[index].label, problem.faster((index,), FASTER)
    overheads: tuple[Overhead, ...] = ("copies", "gather", "contention", "update")
    for overhead in overheads:
        yield overhead, None, problem.without(overhead)


def _kinds(plan: Solved) -> list[int]:
    """Return a device of each kind: device 0, and of the others that are alike the first."""
    found: dict[tuple[bool, str, int, int], int] = {}
    for index, device in enumerate(plan.devices):
        found.setdefault((index == 0, device.name, device.capacity_bytes, device.ceiling.batch_size), index)
    return list(found.values())[:MOST_KINDS]


def _even(plan: Solved, problem: Problem | None, predicted: float | None) -> Alternative | None:
    if plan.split == even_split(sum(plan.split), len(plan.split)):
        return None
    found = None if problem is None else problem.even(plan.effective_batch_size)
    if found is None or predicted is None:
        return None
    labels = tuple(device.label for device in plan.devices)
    rate = found.samples_per_s
    return Alternative(labels, found.split, found.accumulation_steps, rate, predicted / rate)


def _even_measured(plan: Solved) -> Alternative | None:
    if plan.even_samples_per_s is None or plan.even_samples_per_s <= 0:
        return None
    labels = tuple(device.label for device in plan.devices)
    return Alternative(
        labels, (), 0, plan.even_samples_per_s, plan.samples_per_s / plan.even_samples_per_s, measured=True
    )


def _alone(plan: Solved, problem: Problem | None, predicted: float | None) -> tuple[Alternative, ...]:
    if problem is None or predicted is None:
        return ()
    found: dict[str, Alternative] = {}
    for index, device in enumerate(plan.devices):
        ceiling = plan.region.primary_ceiling if index == 0 and plan.region is not None else device.rank_ceiling
        if ceiling is None or ceiling < 1 or device.name in found:
            continue
        rate = problem.alone(index, ceiling).best()
        if rate > 0:
            found[device.name] = Alternative((device.label,), (), 0, rate, predicted / rate)
    return tuple(sorted(found.values(), key=lambda one: -one.samples_per_s))


def _more_memory(plan: Solved, problem: Problem, base: float) -> MoreMemory | None:
    shares = [device.peak_bytes / max(1, device.capacity_bytes) for device in plan.devices]
    fullest = max(range(len(shares)), key=lambda index: shares[index])
    more = problem.with_memory(fullest, GIB)
    if more is problem:  # a kernel or time limits it
        return None
    rate = max(base, more.best())
    return MoreMemory(plan.devices[fullest].label, rate, rate / base)


def _fit_quality(plan: Solved) -> FitQuality | None:
    residuals = [] if plan.fit is None else [r for r in plan.fit.residuals if r.measured_s > 0]
    if not residuals:
        return None
    errors = [abs(residual.predicted_s / residual.measured_s - 1) for residual in residuals]
    noise = [trial.error_share for trial in plan.trials if trial.samples_per_s is not None]
    return FitQuality(median(errors), max(errors), len(errors), median(noise) if noise else 0.0)


def _learning_rate(plan: Solved) -> LearningRate | None:
    now = plan.sample_batch_size
    if not now or now == plan.effective_batch_size:
        return None
    ratio = plan.effective_batch_size / now
    return LearningRate(now, plan.effective_batch_size, ratio, math.sqrt(ratio))
