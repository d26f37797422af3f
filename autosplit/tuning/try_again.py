"""Try a remembered plan again on the devices that are here: as it is, or solved again for less memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from autosplit.plan.plan import Plan
from autosplit.probe.prober import Prober
from autosplit.profiles.less_memory import Lack, solved_again
from autosplit.runtime.prepare import Followed, runtime_for
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.solve.split import micro_batch_sizes, proportional_split
from autosplit.tuning.job import Job
from autosplit.tuning.peers import Failure
from autosplit.tuning.recall import REFRESH_HINT, Recalled, Wanted

__all__ = ["tried_again"]

STEP_BUDGET_S = 1.0
"""Repeating the step of a plan that was solved again stops after this long: its throughput is that of the step."""


def tried_again(wanted: Wanted, found: Recalled, followed: Followed, job: Job) -> tuple[Plan | None, Recalled]:
    """Hold a remembered plan against this machine by one step; solve it again where memory is short.

    Where the plan is None, what is returned beside it is to be said of the one that is tuned anew.
    """
    plan, own = found.plan, job.own
    assert plan is not None
    ran: list[Plan] = []

    def prepared() -> Prober:
        return Prober(
            runtime_for(own.devices, own.capacities_bytes, followed, closing), followed.tracer, own.largest_batch
        )

    def lack() -> Lack:
        nbytes = bucket_bytes(prober.tracer.trainee)
        return Lack(job.whole.capacities_bytes, nbytes, prober.least_batch())

    with ExitStack() as closing:
        prober = job.peers.each_run(prepared)
        if found.short is not None:
            lacks = job.peers.all_run(lack)
            plan = solved_again(plan, lacks[0])
            if plan is None:
                return None, _given_up(found, "no split fits that by its measurements")
        failed = job.peers.all_try(lambda: ran.append(_run(plan, prober, job, measures=found.short is not None)))
    if isinstance(failed, Failure):
        who = f"rank {failed.rank}: " if job.several else ""
        return None, _given_up(found, f"one step of it ran out of memory ({who}{failed.message})")
    if found.short is not None:
        return _makeshift(wanted, found, ran[0]), found
    return _confirmed(wanted, found, stores=job.is_first_of_machine), found


def _run(plan: Plan, prober: Prober, job: Job, *, measures: bool) -> Plan:
    """Run a step of a plan; where it `measures`, and can, return the plan with that step's throughput and peaks."""
    if job.several or plan.region is None:
        # Each rank's part on its device by itself: one process has no others to run it with.
        for rank in (job.peers.rank,) if job.several else range(len(plan.split)):
            here = (rank,) if job.several else range(len(plan.split))
            split = tuple(plan.split[rank] if place == rank else 0 for place in here)
            shape = StepShape((split,) * min(2, plan.accumulation_steps), "rank", num_ranks=len(plan.split))
            prober.confirmed_peaks(shape)
        return plan
    sizes = micro_batch_sizes(plan.effective_batch_size, plan.batch_size)
    splits = tuple(proportional_split(size, plan.split) for size in sizes)
    if not measures:
        prober.confirmed_peaks(StepShape(splits[:2]))
        return plan
    measured = prober.step(splits, budget_s=STEP_BUDGET_S)
    peaks = measured.peak_bytes or tuple(device.peak_bytes for device in plan.devices)
    devices = tuple(replace(device, peak_bytes=peak) for device, peak in zip(plan.devices, peaks, strict=True))
    rate, ddp = plan.effective_batch_size / measured.seconds, plan.ddp
    if len(devices) == 1 and ddp.ranks:
        alone = replace(ddp.ranks[0], peak_bytes=peaks[0])
        ddp = replace(ddp, ranks=(alone,), samples_per_s=rate, measured=True)
    return replace(plan, devices=devices, samples_per_s=rate, ddp=ddp)


def _given_up(found: Recalled, why: str) -> Recalled:
    """Return what is left of a remembered plan that does not do: what to say of it."""
    changed = found.short or "; ".join(found.differing)
    return Recalled(notes=(*found.notes, f"{changed}, and {why}: tuned anew"))


def _confirmed(wanted: Wanted, found: Recalled, *, stores: bool) -> Plan:
    """Return a remembered plan that ran here, and keep it with the facts of these devices: once for each twin."""
    assert found.plan is not None
    plan = wanted.with_facts(found.plan).kept_at(found.path)
    if stores:
        wanted.stored(plan)  # where that fails, the next run makes the step once more
    said = f"{'; '.join(found.differing)}: confirmed by one step"
    return replace(found, plan=plan).told(said, f"{found.origin}; {REFRESH_HINT}")


def _makeshift(wanted: Wanted, found: Recalled, again: Plan) -> Plan:
    """Return a plan for as long as memory is short; the remembered one stays for when it is not."""
    said = (
        f"{found.short}: a smaller plan was computed from its measurements, confirmed by one step, and not remembered"
    )
    if again.region is None:
        said += "; its samples/s are predicted"
    here = zip(again.devices, wanted.request.devices, strict=True)
    devices = tuple(replace(planned, memory_bytes=device.capacity_bytes) for planned, device in here)
    again = wanted.with_facts(replace(again, devices=devices))
    return replace(found, plan=again).told(said, f"{found.origin}; {REFRESH_HINT}")
