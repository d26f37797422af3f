"""Return the plan of the strategy that autosplit recommends, so that each report shows the recommended one."""

from __future__ import annotations

from dataclasses import replace

from autosplit.plan.explanation import BINDING_SHARE
from autosplit.plan.record import P, PlanRecord, replaced
from autosplit.solve.split import accumulation_steps


def recommends_ddp(plan: PlanRecord) -> bool:
    """Return whether DDP is faster than the plan's own split. If both are equal, the simpler wrapper is recommended.

    A caller who passed ``strategy="balanced"`` has decided.
    """
    if plan.fastest != "ddp" or plan.request.get("strategy") == "balanced":
        return False
    return plan.ddp.samples_per_s > plan.samples_per_s * (1 + BINDING_SHARE)


def recommended_plan(plan: P) -> P:
    """Return the plan itself, or its DDP settings as a plan for DDP only, as ``strategy="ddp"`` returns it.

    The search ran BalancedDataParallel, so a plan for DDP has no trials. It has the time model of the ranks.
    """
    if not recommends_ddp(plan):
        return plan
    ranks, ddp = plan.ddp.ranks, plan.ddp
    split, forwards = tuple(rank.batch_size for rank in ranks), ranks[0].accumulation_steps
    batch_size = sum(split)
    is_whole = ddp.effective_batch_size and accumulation_steps(ddp.effective_batch_size, batch_size) == forwards
    curves = [None] * len(ranks) if ddp.fit is None else ddp.fit.step_time.curves
    return replaced(
        plan,
        split=split,
        gpu0_bsz=split[0],
        batch_size=batch_size,
        accumulation_steps=forwards,
        effective_batch_size=ddp.effective_batch_size if is_whole else batch_size * forwards,
        samples_per_s=ddp.samples_per_s,
        even_samples_per_s=None,
        ceilings=tuple(rank.ceiling.batch_size for rank in ranks),
        devices=tuple(
            replace(
                device,
                share=rank.batch_size,
                peak_bytes=rank.peak_bytes,
                busy_s=device.busy_s if curve is None else curve(rank.batch_size),
                ceiling=rank.ceiling,
                memory=None,
            )
            for device, rank, curve in zip(plan.devices, ranks, curves, strict=True)
        ),
        region=None,
        fit=ddp.fit,
        trials=(),
        changes=None,
        explained=None,
        notes=tuple(note for note in plan.notes if note.kind != "device-idle"),
    )
