"""Solve the split of a plan's ranks again from the times that the ranks measured in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autosplit.errors import InputError
from autosplit.plan.plan import Plan
from autosplit.solve.fastest_split import fastest_split
from autosplit.solve.problem import Problem, Solution
from autosplit.solve.split import micro_batch_sizes, short_split
from autosplit.solve.step_time import Fit, StepTime, TimeCurve

LEAST_GAIN = 0.05
"""Smallest predicted gain of another split. Each switch starts the loader's workers again, which takes seconds."""


def refuse_rebalance(rebalance: object, *, can_switch: bool, meets: bool) -> None:
    """Raise InputError if the argument `rebalance` is unknown, or if the split cannot change in this loop.

    Args:
        can_switch: Whether the loader has a batch sampler that can change its split.
        meets: Whether the ranks synchronise in every forward. A rank's own time then includes waits for other ranks.
    """
    if rebalance not in ("off", "auto"):
        raise InputError(f"rebalance is {rebalance!r}. Expected 'off' or 'auto'.", code="rebalance-value")
    if rebalance == "auto" and (meets or not can_switch):
        why = "the model has SyncBatchNorm or is sharded" if meets else "the loader has no batch sampler of ctx"
        raise InputError(
            f"rebalance is 'auto', but {why}. Expected a model of ctx.wrap whose ranks synchronise only in the "
            "backward, and a loader with ctx.batch_sampler or ctx.loader. Leave rebalance out.",
            code="rebalance-unsupported",
        )


def rank_curves(plan: Plan) -> tuple[TimeCurve, ...]:
    """Return the time of a micro-step on each rank. Without a fitted plan, all ranks take 1 s per sample."""
    return plan.fit.step_time.curves if plan.fit is not None else (TimeCurve(((1, 1.0),)),) * len(plan.ddp.ranks)


def planned_s(plan: Plan, effective_batch_size: int) -> list[float]:
    """Predict the compute time of each rank in an optimizer step from the `rank_curves`."""
    sizes = tuple(rank.batch_size for rank in plan.ddp.ranks)
    counted = Counter(short_split(size, sizes) for size in micro_batch_sizes(effective_batch_size, sum(sizes)))
    return [
        sum(count * curve(max(plan.ddp.least_batch, split[rank])) for split, count in counted.items())
        for rank, curve in enumerate(rank_curves(plan))
    ]


def solved_again(
    plan: Plan, effective_batch_size: int, own_s: Sequence[float], step_s: float, *, keeps_batch: bool
) -> Solution | None:
    """Return a split that is faster by at least `LEAST_GAIN`, or None. It keeps the ceilings of the ranks.

    Args:
        effective_batch_size: Samples per optimizer step, which stay the same.
        own_s: The measured time of each rank's own work in an optimizer step.
        step_s: The measured time of an optimizer step.
        keeps_batch: Whether the samples per forward must also stay the same, as for a loss that compares samples.
    """
    ranks, least = plan.ddp.ranks, plan.ddp.least_batch
    times = zip(rank_curves(plan), own_s, planned_s(plan, effective_batch_size), strict=True)
    curves = tuple(
        TimeCurve(tuple((samples, seconds * own / planned) for samples, seconds in curve.points))
        for curve, own, planned in times
    )
    problem = Problem.of(
        Fit(StepTime.bare(curves, max(0.0, step_s - max(own_s)), adds_up=False)),
        tuple(rank.ceiling for rank in ranks),
        None,
        effective_batch_sizes=(effective_batch_size, effective_batch_size),
        max_batch_size=plan.max_batch_size,
        accumulates=plan.accumulates,
        least_batch=least,
    )
    sizes = tuple(rank.batch_size for rank in ranks)
    if keeps_batch:
        caps = [rank.ceiling.batch_size for rank in ranks]
        split = fastest_split(sum(sizes), curves, caps, [min(least, size) for size in sizes])
        rate = problem.rate(split, effective_batch_size)
        found: Solution | None = Solution(split, ranks[0].accumulation_steps, effective_batch_size, rate)
    else:
        found = problem.solve()
    enough = (1 + LEAST_GAIN) * problem.rate(sizes, effective_batch_size)
    return None if found is None or found.samples_per_s < enough else found


def with_split(plan: Plan, split: Sequence[int], accumulation_steps: int, samples_per_s: float) -> Plan:
    """Return the plan with other batch sizes of its ranks. The settings of BalancedDataParallel stay the same."""
    ranks = tuple(
        replace(rank, batch_size=size, accumulation_steps=accumulation_steps, peak_bytes=rank.ceiling.bytes_at(size))
        for rank, size in zip(plan.ddp.ranks, split, strict=True)
    )
    return replace(plan, ddp=replace(plan.ddp, ranks=ranks, samples_per_s=samples_per_s, measured=False))
