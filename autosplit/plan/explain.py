"""Explain a plan from its stored numbers: its bounds, the alternatives, and the quality of its fit.

A plan for simulated GPUs stores the simulated throughput of hypothetical machines (more memory, faster links). For real
devices, gains are ratios of two predictions of the model that was fitted to the trials.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import msgspec

from autosplit.errors import PlanError
from autosplit.plan.explanation import (
    BINDING_SHARE,
    LIMITS,
    Alternative,
    Bound,
    Change,
    Changed,
    Explained,
    Explanation,
    FitQuality,
    Knee,
    MoreMemory,
)
from autosplit.plan.record import P, PlanRecord, replaced, shares_processor
from autosplit.solve.memory import Ceiling, Region
from autosplit.solve.problem import MOST_WORK, NO_LIMIT_BYTES, Problem
from autosplit.solve.split import even_split
from autosplit.solve.step_time import Fit
from autosplit.solve.trial import KNEE_SHARE

GIB = 2**30

_EXPLAINED = (
    *("split", "effective_batch_size", "samples_per_s", "even_samples_per_s", "region", "fit", "trials", "ddp"),
    *("effective_batch_sizes", "max_batch_size", "accumulates", "sample_batch_size", "simulated", "changes"),
    *("loader_samples_per_s", "lengths"),
)
"""Fields that an explanation depends on, in addition to the devices."""

FASTER = 2.0
"""Factor by which an explanation makes a device faster, or an optimizer step larger."""

MOST_CURVES = 200_000
"""Largest product of a step's forwards and the plan's devices.

Above this product, a prediction would take seconds and is skipped.
"""

MOST_KINDS = 8
"""Largest number of device kinds whose gains are computed separately."""


def explanation_of(plan: PlanRecord) -> Explanation:
    """Return the stored explanation, or explain the plan from its stored numbers."""
    kept = plan.explained
    if kept is not None and kept.of == digest_of(plan):
        stored = kept.explanation  # The file and its digest may have been edited.
        if all(getattr(stored, name) == value for name, value in _repeated(plan).items()):
            return stored
    compares = len(plan.devices) > 1 and not shares_processor(plan)
    rate, labels = plan.even_samples_per_s, tuple(device.label for device in plan.devices)
    problem = problem_of(plan)
    predicted = None if problem is None else problem.rate(plan.split, plan.effective_batch_size)
    return Explanation(
        **_repeated(plan),
        predicted_samples_per_s=predicted,
        **_changed(plan, problem, predicted),
        even=_even(plan, problem, predicted) if compares else None,
        even_measured=Alternative(labels, (), 0, rate, plan.samples_per_s / rate, measured=True) if rate else None,
        fit=_fit_quality(plan),
        knee=_knee(plan),
    )


def with_explanation(plan: P) -> P:
    """Return the plan with its explanation stored in it, so that a reader of the file need not compute it."""
    return replaced(plan, explained=Explained(digest_of(plan), explanation_of(plan)))


def digest_of(plan: PlanRecord) -> str:
    """Return 64 hexadecimal digits that identify the numbers an explanation depends on, equal in every process."""
    devices = [replace(device, uuid=None, driver=None) for device in plan.devices]
    return hashlib.sha256(msgspec.json.encode([devices, *(getattr(plan, name) for name in _EXPLAINED)])).hexdigest()


def _repeated(plan: PlanRecord) -> dict[str, Any]:
    numbers = ("samples_per_s", "loader_samples_per_s", "fastest", "effective_batch_size")
    backends = sorted({name for device in plan.devices for name in device.attention})
    return {
        **{name: getattr(plan, name) for name in (*numbers, "simulated", "lengths")},
        "shares_processor": shares_processor(plan),
        "ddp_samples_per_s": plan.ddp.samples_per_s,
        "ddp_measured": plan.ddp.measured,
        "assumes_loss": plan.loss_rule == "mean",
        "attention": {name: tuple(one.label for one in plan.devices if name in one.attention) for name in backends},
    }


def _changed(plan: PlanRecord, problem: Problem | None, predicted: float | None) -> dict[str, Any]:
    """Return `bounds`, `alone` and `more_memory` of an `Explanation`.

    Use the changed machines, such as one with unlimited memory, that were simulated with the plan. If there are none,
    predict the gains with the plan's cost model.
    """
    if plan.changes is not None:
        return _gains(plan.changes, base_of(plan), plan.samples_per_s, simulated=True)
    if problem is None or predicted is None or (plan.simulated and plan.region is not None):
        return {"bounds": (), "alone": (), "more_memory": None}
    base = max(problem.best(), predicted)

    def rate(relaxed: Relaxed) -> float:
        # More memory does not raise a ceiling that a kernel or the time limits.
        is_same = relaxed.what == "one_gib_more" and relaxed.problem is problem
        return 0.0 if is_same else relaxed.problem.best()

    # Measured steps show only the total overhead of several devices, not its parts.
    costs: tuple[Cost, ...] = ("copies" if plan.region is None else "overhead", "update")
    changes = tuple(changes_of(relaxations(plan, problem, costs), base, rate))
    gains = _gains(changes, base, predicted, simulated=False)
    # Drop gains that are so large that the remaining time is smaller than the error of the fit or of the measurement.
    quality = _fit_quality(plan)
    error_share = 0.0 if quality is None else max(quality.median_share, quality.noise_share)
    return {**gains, "bounds": tuple(bound for bound in gains["bounds"] if bound.gain * error_share < 1)}


def problem_of(plan: PlanRecord) -> Problem | None:
    """Return the problem that a plan solves, or None if it has no fit or if a prediction would take too long."""
    forwards = plan.effective_batch_size / sum(plan.split)
    if plan.fit is None or forwards > MOST_WORK or forwards * len(plan.devices) > MOST_CURVES:
        return None
    return problem_with(plan, plan.fit, tuple(device.ceiling for device in plan.devices), plan.region)


def problem_with(plan: PlanRecord, fit: Fit, ceilings: tuple[Ceiling, ...], region: Region | None) -> Problem:
    """Return the problem of a plan's request for this fit, these ceilings and this region."""
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
            "the plan has no time model, or its step has too many forwards for a prediction. Tune again, or "
            "measure the split with autosplit.measure(workload, split=...).",
        )
    return problem


def base_of(plan: PlanRecord) -> float:
    """Return the highest simulated samples/s on the plan's own machine."""
    return max([plan.samples_per_s, *(trial.samples_per_s or 0.0 for trial in plan.trials)])


def _gains(changes: Iterable[Change], base: float, own: float, *, simulated: bool) -> dict[str, Any]:
    """Convert changes into bounds, alternatives and memory gains.

    Args:
        base: The best samples/s on the plan's machine.
        own: The samples/s of the plan.
    """
    bounds, alone, memory = [], [], None
    for change in changes:
        rate = change.samples_per_s
        if change.what == "alone":
            if change.device is not None:
                alone.append(Alternative((change.device,), (), 0, rate, own / rate, measured=simulated))
        elif change.what == "one_gib_more":
            if change.device is not None and memory is None:
                memory = MoreMemory(change.device, max(base, rate), max(base, rate) / base, simulated=simulated)
        elif rate > base * (1 + BINDING_SHARE):
            bounds.append(Bound(change.what, change.device, rate, rate / base))
    return {
        "bounds": tuple(sorted(bounds, key=lambda bound: (bound.what not in LIMITS, -bound.gain))),
        "alone": tuple(sorted(alone, key=lambda one: -one.samples_per_s)),
        "more_memory": memory,
    }


@dataclass(frozen=True)
class Relaxed:
    """A plan's problem with one property changed.

    Attributes:
        what: The property, as in `Change`.
        device: Label of the changed device. None for all devices, or if the property concerns no single device.
        indices: Positions of the changed devices.
    """

    what: Changed
    device: str | None
    indices: tuple[int, ...]
    problem: Problem


Cost = Literal["link", "copies", "gather", "overhead", "update"]


def relaxations(plan: PlanRecord, problem: Problem, costs: Sequence[Cost]) -> Iterator[Relaxed]:
    """Yield variants of the problem: without one of the bounds, with 1 GiB more memory, and with a single device.

    Args:
        costs: The costs between devices that can be changed separately.
    """
    labels = [device.label for device in plan.devices]
    every = tuple(range(len(labels)))
    kinds = _kinds_of(plan)
    full = tuple(index for index in every if plan.devices[index].ceiling.limited_by == "memory")
    for index in kinds:
        yield Relaxed("memory", labels[index], (index,), problem.with_memory(index, NO_LIMIT_BYTES))
    if len(labels) > 1:
        without_limits = problem
        for index in every:
            without_limits = without_limits.with_memory(index, NO_LIMIT_BYTES)
        yield Relaxed("memory", None, full, without_limits)
    asked, most = plan.max_batch_size, None if plan.effective_batch_sizes is None else plan.effective_batch_sizes[1]
    if asked is not None and (most is None or asked < most):
        larger = problem.with_most(int(FASTER * asked) if most is None else most)
        yield Relaxed("max_batch_size", None, (), larger)
    if most is not None:
        larger = problem.with_effective(int(FASTER * most), max_batch_size=asked)
        yield Relaxed("effective_batch_size", None, (), larger)
    fullest = max(every, key=lambda index: plan.devices[index].peak_bytes / max(1, plan.devices[index].capacity_bytes))
    yield Relaxed("one_gib_more", labels[fullest], (fullest,), problem.with_memory(fullest, GIB))
    if problem.step_time.adds_up and len(labels) > 1:
        yield Relaxed("device", None, every, problem.faster(every, FASTER))
    else:
        for index in kinds:
            yield Relaxed("device", labels[index], (index,), problem.faster((index,), FASTER))
    for cost in costs:
        yield Relaxed(cost, None, every, problem.with_links(FASTER) if cost == "link" else problem.without(cost))
    for index, ceiling in _alone_of(plan) if len(labels) > 1 and not shares_processor(plan) else ():
        yield Relaxed("alone", labels[index], (index,), problem.alone(index, ceiling))


def changes_of(relaxed: Iterable[Relaxed], base: float, rate: Callable[[Relaxed], float]) -> Iterator[Change]:
    """Yield the samples/s of changed problems. A problem that no batch fits (a rate of 0) is left out.

    Unlimited memory on all devices is tried only if unlimited memory on a single device does not raise the rate.
    """
    binds = False
    for one in relaxed:
        found = 0.0 if binds and (one.what, one.device) == ("memory", None) else rate(one)
        binds = binds or (one.what == "memory" and found > base * (1 + BINDING_SHARE))
        if found > 0:
            yield Change(one.what, one.device, found)


def _kinds_of(plan: PlanRecord) -> list[int]:
    firsts: dict[object, int] = {}
    for index, device in enumerate(plan.devices):
        firsts.setdefault((index == 0, device.name, device.capacity_bytes, device.ceiling.batch_size), index)
    return list(firsts.values())[:MOST_KINDS]


def _alone_of(plan: PlanRecord) -> Iterator[tuple[int, int]]:
    names = set()
    ranks = [rank.ceiling.batch_size for rank in plan.ddp.ranks] or [0] * len(plan.devices)
    for index, device in enumerate(plan.devices):
        ceiling = plan.region.primary_ceiling if index == 0 and plan.region is not None else ranks[index]
        if ceiling >= 1 and device.name not in names:
            names.add(device.name)
            yield index, ceiling


def _even(plan: PlanRecord, problem: Problem | None, predicted: float | None) -> Alternative | None:
    if plan.even_samples_per_s is not None or plan.split == even_split(sum(plan.split), len(plan.split)):
        return None  # the plan is even, or the even split was measured
    found = None if problem is None else problem.even(plan.effective_batch_size)
    if found is None or predicted is None:
        return None
    labels, rate = tuple(device.label for device in plan.devices), found.samples_per_s
    return Alternative(labels, found.split, found.accumulation_steps, rate, predicted / rate)


def _knee(plan: PlanRecord) -> Knee | None:
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
