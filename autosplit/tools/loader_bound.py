"""Fit a plan to a DataLoader: report whether the loader or the devices limit it, and reduce the batch if useful."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from autosplit.cli.workload_arguments import users_errors
from autosplit.errors import InputError
from autosplit.notes import Note
from autosplit.plan.explanation import loader_target
from autosplit.plan.plan import Plan
from autosplit.plan.record import replaced, with_notes
from autosplit.plan.solve_again import resolve
from autosplit.solve.change import Change
from autosplit.text import rate_text
from autosplit.tools.loader_result import MeasuredLoader
from autosplit.tools.loader_speed import check_loader, measure_loader
from autosplit.tuning.rank_group import in_a_job, peers_here
from autosplit.workload.from_file import load_loader


def fit_to_loader(plan: Plan, loader: DataLoader[Any] | MeasuredLoader) -> Plan:
    """Return the plan with the speed and the fastest settings of the training DataLoader.

    If the loader is slower than the devices and no effective batch size was requested, the returned plan has the
    smallest batch that is as fast as the loader. The saved profile is unchanged.

    In a job, call this function on every rank after `tune`, if the plan is for DDP only (``strategy="ddp"``). The ranks
    exchange their measurements, and each returns the same plan.

    Args:
        plan: The plan that `tune` returned.
        loader: The DataLoader (each rank's own), or the result of `measure_loader` for it.

    Raises:
        InputError: The speed of the loader can't be measured, or the job and the plan differ in the number of ranks.
        RankFailedError: The measurement failed on another rank.
    """

    def measured() -> MeasuredLoader:
        return loader if isinstance(loader, MeasuredLoader) else measure_loader(loader)

    if plan.balanced is not None or not in_a_job():
        return bounded_by_loader(plan, [measured()])
    with peers_here() as peers:
        loads = peers.all_run(measured)
        peers.part()
    if len(loads) != len(plan.split):
        raise InputError(
            f"The job has {len(loads)} ranks, but the plan has {len(plan.split)}. Call fit_to_loader in the job that "
            "tuned the plan.",
            code="world-size",
        )
    return bounded_by_loader(plan, loads)


def loader_fit(spec: str) -> Callable[[Plan], Plan]:
    """Return a function that fits a plan to the DataLoader of a file. The DataLoader is loaded and checked now."""
    with users_errors(spec):
        loader = load_loader(spec)
        check_loader(loader)

    def fit(plan: Plan) -> Plan:
        with users_errors(spec):
            return fit_to_loader(plan, loader)

    return fit


def bounded_by_loader(plan: Plan, found: Sequence[MeasuredLoader]) -> Plan:
    """Return the plan fitted to measured loaders: one for the whole process, or one for each rank."""
    shares = plan.split if len(found) > 1 else (plan.batch_size,)
    rates = [
        one.samples_per_s * plan.batch_size / share if share else float("inf")
        for one, share in zip(found, shares, strict=True)
    ]
    rate = min(rates)
    slowest = found[rates.index(rate)]
    notes = [*slowest.notes]
    if plan.simulated:
        text = "The loader was measured on this machine, which does not have the simulated GPUs."
        notes.append(Note("loader-of-this-machine", text))
    smaller = _smaller(plan, rate) if rate < loader_target(plan.samples_per_s, plan.lengths) else None
    if smaller is not None:
        text = (
            f"The loader loads {rate_text(rate)}, so {smaller.batch_size:,} samples per forward train as fast as "
            f"{plan.batch_size:,}. autosplit predicted this from the plan's measurements, and did not save it."
        )
        notes.append(Note("loader-bound", text))
        plan = smaller
    fed = replaced(plan, loader_settings=slowest.settings, loader_samples_per_s=rate)
    return with_notes(fed, last=notes)


def _smaller(plan: Plan, rate: float) -> Plan | None:
    if plan.effective_batch_sizes is not None or plan.lengths is not None:
        return None
    capacities_bytes = tuple(device.capacity_bytes for device in plan.devices)
    least = plan.main.least_batch
    again = resolve(plan, Change(capacities_bytes=capacities_bytes, least_batch=least, loader_samples_per_s=rate))
    return again if again is not None and again.batch_size < plan.batch_size else None
