"""Try a remembered plan again on the devices that are here: as it is, or solved again for less memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from autosplit.plan.plan import Plan
from autosplit.profiles.resolve import solved_again
from autosplit.runtime.prepare import Followed
from autosplit.tuning.confirm import Confirmer
from autosplit.tuning.job import Job
from autosplit.tuning.peers import Failure
from autosplit.tuning.recall import REFRESH_HINT, Recalled, Wanted

__all__ = ["tried_again"]


def tried_again(wanted: Wanted, found: Recalled, followed: Followed, job: Job) -> tuple[Plan | None, Recalled]:
    """Hold a remembered plan against this machine by one step; solve it again where memory is short.

    Returns:
        The plan; or None, and what is to be said of what is tuned anew.
    """
    plan = found.plan
    assert plan is not None
    ran: list[Plan] = []
    with ExitStack() as closing:
        confirmer = job.peers.each_run(lambda: Confirmer(job, followed, closing))
        if found.short is not None:
            lacks = job.peers.all_run(confirmer.lack)
            plan = solved_again(plan, lacks[0])
            if plan is None:
                return None, _given_up(found, "its fits have no answer to that")
        failed = job.peers.all_try(lambda: ran.append(confirmer.run(plan, measures=found.short is not None)))
    if isinstance(failed, Failure):
        who = f"rank {failed.rank}: " if job.several else ""
        return None, _given_up(found, f"one step of it ran out of memory ({who}{failed.message})")
    if found.short is not None:
        return _makeshift(wanted, found, ran[0]), found
    return _confirmed(wanted, found, stores=job.is_first_of_machine), found


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
    said = f"{found.short}: solved again from its fits, confirmed by one step, and not remembered"
    if again.region is None:
        said += "; its samples/s are predicted"
    memories = [device.capacity_bytes for device in wanted.request.devices]
    devices = tuple(
        replace(device, memory_bytes=memory) for device, memory in zip(again.devices, memories, strict=True)
    )
    again = wanted.with_facts(replace(again, devices=devices))
    return replace(found, plan=again).told(said, f"{found.origin}; {REFRESH_HINT}")
