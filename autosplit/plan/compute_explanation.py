"""Explain a layout from its plan's numbers: its bounds, the alternatives, and the quality of its fit.

A plan for simulated GPUs stores the simulated throughput of hypothetical machines (more memory, faster links). For real
devices, gains are ratios of two predictions of the model that was fitted to the trials.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from autosplit.plan.explanation import (
    BINDING_SHARE,
    LIMITS,
    Alternative,
    Bound,
    Explanation,
    FitQuality,
    Knee,
    MoreMemory,
    WhatIf,
)
from autosplit.plan.layout import Layout
from autosplit.plan.record import PlanRecord
from autosplit.plan.solve_again import problem_of
from autosplit.plan.what_ifs import RemovableCost, predicted_rate, relaxations, what_ifs_of
from autosplit.solve.problem import Problem
from autosplit.solve.split import even_split
from autosplit.solve.trial import KNEE_SHARE, Trial


def explanation_of(plan: PlanRecord, layout: Layout | None = None) -> Explanation:
    """Explain a layout of a plan, by default `PlanRecord.main`."""
    layout = layout or plan.main
    problem = problem_of(plan, layout)
    predicted = None if problem is None else problem.rate(layout.split, layout.effective_batch_size)
    ddp, labels = plan.ddp, tuple(device.label for device in layout.devices)
    rate, even_rate = layout.samples_per_s, layout.even_samples_per_s if layout.measured else None
    backends = sorted({name for device in layout.devices for name in device.attention})
    compares = len(layout.seats) > 1 and not layout.shares_processor
    return Explanation(
        samples_per_s=rate,
        loader_samples_per_s=plan.loader_samples_per_s,
        predicted_samples_per_s=predicted,
        **_gains_of(plan, layout, problem, predicted),
        even=_even(layout, problem, predicted) if compares else None,
        even_measured=Alternative(labels, (), 0, even_rate, rate / even_rate, measured=True) if even_rate else None,
        fit=_fit_quality(layout, _trials_of(plan, layout)),
        knee=_knee(plan, layout),
        fastest=plan.fastest if layout is plan.main else None,
        effective_batch_size=layout.effective_batch_size,
        simulated=plan.simulated,
        lengths=plan.lengths,
        shares_processor=layout.shares_processor,
        ddp_samples_per_s=0.0 if ddp is None else ddp.samples_per_s,
        ddp_measured=ddp is not None and ddp.measured,
        assumes_loss=plan.loss_rule == "mean",
        attention={name: tuple(one.label for one in layout.devices if name in one.attention) for name in backends},
    )


def base_of(plan: PlanRecord) -> float:
    """Return the highest simulated samples/s of BalancedDataParallel on the plan's own machine."""
    return max([plan.samples_per_s, *(trial.samples_per_s or 0.0 for trial in plan.trials)])


def _trials_of(plan: PlanRecord, layout: Layout) -> tuple[Trial, ...]:
    """Return the trials that ran a layout's strategy. The trials of a plan for both strategies split batches."""
    return plan.trials if layout is plan.main else ()


def _gains_of(plan: PlanRecord, layout: Layout, problem: Problem | None, predicted: float | None) -> dict[str, Any]:
    """Return `bounds`, `alone` and `more_memory` of an `Explanation`.

    Use the what-ifs that were simulated with the plan. If there are none, predict the gains with the cost model.
    """
    is_balanced = layout.strategy == "balanced"
    if is_balanced and plan.what_ifs is not None:
        return _gains(plan.what_ifs, base_of(plan), layout.samples_per_s, simulated=True)
    if problem is None or predicted is None or (plan.simulated and is_balanced):
        return {"bounds": (), "alone": (), "more_memory": None}
    base = max(problem.best(), predicted)
    # Measured steps show only the total overhead of several devices, not its parts.
    costs: Sequence[RemovableCost] = ("overhead" if is_balanced else "copies", "update")
    found = what_ifs_of(relaxations(plan, layout, problem, costs), base, lambda one: predicted_rate(problem, one))
    gains = _gains(found, base, predicted, simulated=False)
    # Drop gains that are so large that the remaining time is smaller than the error of the fit or of the measurement.
    quality = _fit_quality(layout, _trials_of(plan, layout))
    error_share = 0.0 if quality is None else max(quality.median_share, quality.noise_share)
    return {**gains, "bounds": tuple(bound for bound in gains["bounds"] if bound.gain * error_share < 1)}


def _gains(what_ifs: Iterable[WhatIf], base: float, own: float, *, simulated: bool) -> dict[str, Any]:
    """Convert what-ifs into bounds, alternatives and memory gains.

    Args:
        base: The best samples/s on the plan's machine.
        own: The samples/s of the layout.
    """
    bounds, alone, memory = [], [], None
    for what_if in what_ifs:
        rate = what_if.samples_per_s
        if what_if.what == "alone":
            if what_if.device is not None:
                alone.append(Alternative((what_if.device,), (), 0, rate, own / rate, measured=simulated))
        elif what_if.what == "one_gib_more":
            if what_if.device is not None and memory is None:
                memory = MoreMemory(what_if.device, max(base, rate), max(base, rate) / base, simulated=simulated)
        elif rate > base * (1 + BINDING_SHARE):
            bounds.append(Bound(what_if.what, what_if.device, rate, rate / base))
    return {
        "bounds": tuple(sorted(bounds, key=lambda bound: (bound.what not in LIMITS, -bound.gain))),
        "alone": tuple(sorted(alone, key=lambda one: -one.samples_per_s)),
        "more_memory": memory,
    }


def _even(layout: Layout, problem: Problem | None, predicted: float | None) -> Alternative | None:
    was_measured = layout.measured and layout.even_samples_per_s is not None
    if was_measured or layout.split == even_split(layout.batch_size, len(layout.seats)):
        return None  # the layout is even, or the even split was measured
    found = None if problem is None else problem.even(layout.effective_batch_size)
    if found is None or predicted is None:
        return None
    labels, rate = tuple(device.label for device in layout.devices), found.samples_per_s
    return Alternative(labels, found.split, found.accumulation_steps, rate, predicted / rate)


def _knee(plan: PlanRecord, layout: Layout) -> Knee | None:
    trials = _trials_of(plan, layout)
    rates = [(rate, trial.batch_size) for trial in trials if (rate := trial.samples_per_s) is not None]
    if plan.request.get("effective_batch_size") is not None or not rates:
        return None
    rate, size = max(rates)
    smallest = min(tried for reached, tried in rates if reached >= KNEE_SHARE * rate)
    return Knee(layout.batch_size, size, rate) if size > layout.batch_size == smallest else None


def _fit_quality(layout: Layout, trials: Sequence[Trial]) -> FitQuality | None:
    residuals = [] if layout.cost is None else [r for r in layout.cost.residuals if r.measured_s > 0]
    if not residuals:
        return None
    errors = [abs(residual.predicted_s / residual.measured_s - 1) for residual in residuals]
    noise = [trial.error_share for trial in trials if trial.samples_per_s is not None]
    return FitQuality(median(errors), max(errors), len(errors), median(noise) if noise else 0.0)
