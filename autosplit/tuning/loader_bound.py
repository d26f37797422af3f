"""Hold a plan against a DataLoader: which of them bounds the run, and a smaller batch where devices would wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autosplit.notes import Note
from autosplit.plan.plan import Plan
from autosplit.probe.loader_result import MeasuredLoader
from autosplit.profiles.less_memory import Lack, solved_again
from autosplit.text import rate_text


def bounded_by_loader(plan: Plan, found: Sequence[MeasuredLoader]) -> Plan:
    """Return the plan with what its loader loads; of one forward of any size, the smallest that takes as much."""
    shares = plan.split if len(found) > 1 else (plan.batch_size,)
    rates = [
        one.samples_per_s * plan.batch_size / share if share else float("inf")
        for one, share in zip(found, shares, strict=True)
    ]
    rate = min(rates)
    slowest = found[rates.index(rate)]
    notes = [*slowest.notes]
    if plan.simulated:
        text = "the loader was measured on this machine, not on one with the simulated GPUs"
        notes.append(Note("loader-of-this-machine", text))
    smaller = _smaller(plan, rate) if rate < plan.takes_samples_per_s else None
    if smaller is not None:
        text = (
            f"the loader loads {rate_text(rate)}: {smaller.batch_size:,} samples per forward train as fast as "
            f"{plan.batch_size:,}; this is predicted from the plan's measurements, and not saved"
        )
        notes.append(Note("loader-bound", text))
        plan = smaller
    fed = replace(plan, loader_settings=slowest.settings, loader_samples_per_s=rate)
    return fed.kept_at(plan.path).with_notes(last=notes)


def _smaller(plan: Plan, rate: float) -> Plan | None:
    """Return the plan of the smallest batch that takes what the loader loads; None where the plan's has to stay."""
    if plan.effective_batch_sizes is not None or plan.lengths is not None:
        return None
    capacities_bytes = tuple(device.capacity_bytes for device in plan.devices)
    least = plan.ddp.least_batch if plan.region is None else plan.region.least_share
    again = solved_again(plan, Lack(capacities_bytes, 0, least, rate))
    return again if again is not None and again.batch_size < plan.batch_size else None
