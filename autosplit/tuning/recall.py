"""Recall a remembered plan: one that still holds, one that a step confirms or solves again, or why there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosplit.errors import AutosplitError, ProfileError
from autosplit.notes import Note
from autosplit.plan.plan import Plan
from autosplit.probe.prober import Prober
from autosplit.probe.request import Request
from autosplit.profiles import store as profiles
from autosplit.profiles.differences import nearest_note
from autosplit.profiles.key import key_of
from autosplit.profiles.less_memory import Lack, solved_again
from autosplit.profiles.store import NOT_SAVED
from autosplit.profiles.tuning_lock import Turn, wait_limit_s
from autosplit.profiles.validity import differing_facts, memory_shortfall
from autosplit.runtime.prepare import Followed, runtime_for
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import bucket_bytes
from autosplit.solve.split import micro_batch_sizes, proportional_split
from autosplit.tuning.job import Job
from autosplit.tuning.peers import Failure

REFRESH_HINT = "--profile refresh (profile='refresh') tunes anew"

MOST_LOOKED_AT = 200
"""Profiles, the newest first, among which the nearest is looked for."""

JOB_SLICE_S = 0.5
"""So often the ranks of a job that waits hear of each other: Ctrl-C reaches all, and no collective times out."""


STEP_BUDGET_S = 1.0
"""Repeating the step of a plan that was solved again stops after this long: its throughput is that of the step."""


@dataclass(frozen=True)
class Recalled:
    """A remembered plan, or why there is none.

    Attributes:
        notes: Why there is none, or what is to be said of it.
        short: Which devices have too little memory free for it; None where all have enough.
        differing: Facts that are others than the plan's and do not make another plan of it.
        waited_s: Spent waiting for another process, which `wait_notes` tell of.
        trouble: Why nobody could be waited for, if so.
    """

    plan: Plan | None = None
    path: Path | None = None
    notes: tuple[Note, ...] = ()
    short: str | None = None
    differing: tuple[str, ...] = ()
    unreadable: bool = False
    waited_s: float = 0.0
    wait_notes: tuple[Note, ...] = ()
    trouble: str | None = None

    @property
    def holds(self) -> bool:
        """Whether there is a plan that holds as it is."""
        return self.plan is not None and self.short is None and not self.differing

    def told(self, *said: Note) -> Plan:
        """Return the plan with where it comes from, and what else is to be said of it."""
        assert self.plan is not None
        return self.plan.with_notes(*said, *self.notes)

    @property
    def origin(self) -> str:
        """Where the plan comes from."""
        assert self.path is not None, "it is remembered"
        return f"from the profile {self.path.stem[: profiles.KEY_DIGITS]}"


@dataclass(frozen=True)
class Wanted:
    """The request, machine and workload that a plan is wanted for.

    Attributes:
        measured: A plan whose DDP answer is predicted does not do.
    """

    request: Request
    machine: dict[str, Any]
    described: dict[str, Any]
    facts: Mapping[str, Any]
    measured: bool = False

    @property
    def key(self) -> str:
        """The profile's key."""
        return key_of(self.machine, self.described, self.facts, self.request.name)

    @property
    def asked(self) -> dict[str, Any]:
        """The part of the request that is in the key, as a plan keeps it."""
        return {**self.facts, "name": self.request.name}

    def recalled(self) -> Recalled:
        """Look for a plan, and hold it against what there is now."""
        if self.request.profile != "auto" or self.request.sampler is not None:
            return Recalled()
        found = self._remembered()
        if found.plan is None:
            return Recalled(notes=found.notes, unreadable=found.unreadable)
        if not found.plan.complete:
            return Recalled(
                notes=(Note("tuned-again", "the search of the saved plan was interrupted, so it was tuned again"),)
            )
        if self.measured and not found.plan.ddp.measured:
            text = "the DDP settings of the saved plan were predicted by one process, so they were tuned again"
            return Recalled(notes=(Note("tuned-again", text),))
        request = self.request
        return Recalled(
            found.plan,
            found.path,
            found.notes,
            memory_shortfall(found.plan, request.devices, request.capacities_bytes),
            differing_facts(found.plan, request.devices, request.capacities_bytes),
        )

    def recalled_in_turn(self, turn: Turn | None, job: Job) -> Recalled:
        """Look for a plan; where there is none that holds, wait for the turn to tune, and look again.

        Rank 0, which alone has a turn, does so for all of its job.
        """
        found = job.told(self.recalled)
        if found.holds or self.request.profile == "off":
            return found

        def wait() -> dict[str, Any] | None:
            assert turn is not None, "it is rank 0's"
            ended = turn.wait(JOB_SLICE_S if job.several else float("inf"))
            waited = {"waited_s": turn.waited_s, "wait_notes": turn.notes, "trouble": turn.trouble}
            return waited if ended else None

        while (waited := job.told(wait)) is None:
            pass
        # Also where nobody was waited for: another may have ended between the first look and the lock.
        again = job.told(self.recalled)
        if again.plan is None and not again.notes:  # what the first look has moved out of the way is to be told of
            again = replace(again, notes=found.notes, unreadable=found.unreadable)
        return replace(again, **waited)

    def nothing_run(self, found: Recalled) -> Note:
        """Return the note of a plan that comes from a profile."""
        unused = "" if self.request.storage is None else ", and the storage was not opened"
        return Note("from-profile", f"{found.origin}: nothing was run{unused}; {REFRESH_HINT}")

    def turn(self, tell: Callable[[str], None]) -> Turn:
        """Return what waits for another process that tunes the same thing, and tells of it when the wait begins."""
        limit_s = wait_limit_s(self.request.remaining_s)
        try:
            return Turn(profiles.turn_path(self.key), limit_s=limit_s, tell=tell)
        except ProfileError as error:  # nobody knows where the cache is
            return Turn(None, limit_s=limit_s, tell=tell, trouble=str(error))

    def nearest(self, ignoring: Sequence[str] = ()) -> tuple[Note, ...]:
        """Return a note that names the most similar profile and what differs, if there is one."""
        if self.request.profile != "auto":
            return ()
        try:
            remembered = profiles.profiles(MOST_LOOKED_AT)
        except (OSError, ProfileError):  # there is no cache
            return ()
        parts = {"machine": self.machine, "workload": self.described, "request": self.asked}
        told = nearest_note(remembered, **parts, ignoring=ignoring)
        return () if told is None else (told,)

    def kept(
        self, plan: Plan, found: Recalled, said: tuple[Note, ...], always: tuple[Note, ...], *, stores: bool = True
    ) -> Plan:
        """Save a plan as a profile, and return it with the notes of this run, which the profile does not hold.

        Args:
            said: Notes on the cache. They are left out if the plan could not be saved either: one note is enough.
            always: The other notes of this run.
            stores: Whether this process saves the plan: one of each machine does.
        """
        if self.request.profile != "off":  # on every rank alike, and now, when nobody waits for a line of it
            plan = plan.with_explanation()
        path, failed = self.stored(plan) if stores else (None, ())
        if failed and found.unreadable:
            said = ()
        if path is not None and found.trouble is not None:
            text = f"autosplit could not wait for other processes that tune the same workload: {found.trouble}"
            said = (*said, Note("not-waited", text))
        return plan.with_notes(*said, *always, last=failed).kept_at(path)

    def stored(self, plan: Plan) -> tuple[Path | None, tuple[Note, ...]]:
        """Save a plan, and return its file and notes. An interrupted search does not replace a finished one."""
        if self.request.profile == "off":
            return None, ()
        there = None if plan.complete else self._remembered().plan
        if there is not None and there.complete:
            text = "the plan is not saved: its search was interrupted, and a profile has the plan of a finished one"
            return None, (Note(NOT_SAVED, text),)
        try:
            return profiles.store(self.key, plan), ()
        except ProfileError as error:
            return None, (Note(NOT_SAVED, f"the plan is not saved: {error}"),)

    def _remembered(self) -> profiles.Found:
        return profiles.find(self.key, machine=self.machine, workload=self.described, request=self.asked)

    def with_facts(self, plan: Plan) -> Plan:
        """Return a plan with the facts of the devices that are here, on which a step has confirmed it."""
        devices = tuple(
            replace(planned, uuid=device.uuid, driver=device.driver)
            for planned, device in zip(plan.devices, self.request.devices, strict=True)
        )
        return replace(plan, devices=devices)


def amended(plan: Plan, job: Job, **changes: Any) -> Plan:
    """Return a plan with changes, which its profile gets as well.

    A plan that was solved again for less memory is not what its profile holds, which then stays as it is.
    """
    if plan.path is not None and job.is_first_of_machine:
        with contextlib.suppress(AutosplitError, OSError):  # the profile is whole without them
            kept = Plan.load(plan.path)
            if kept.split == plan.split:
                profiles.store(plan.path.stem, replace(kept, **changes))
    return replace(plan, **changes).kept_at(plan.path)


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
    """Return a result without the saved plan, with a note on why it cannot be used."""
    changed = found.short or "; ".join(found.differing)
    return Recalled(notes=(*found.notes, Note("tuned-again", f"{changed}, and {why}, so it was tuned again")))


def _confirmed(wanted: Wanted, found: Recalled, *, stores: bool) -> Plan:
    """Return a saved plan that ran here, and save it with the facts of these devices."""
    assert found.plan is not None
    plan = wanted.with_facts(found.plan).kept_at(found.path)
    if stores:
        wanted.stored(plan)  # where that fails, the next run makes the step once more
    confirmed = Note("confirmed-by-one-step", f"{'; '.join(found.differing)}: confirmed by one step")
    return replace(found, plan=plan).told(confirmed, Note("from-profile", f"{found.origin}; {REFRESH_HINT}"))


def _makeshift(wanted: Wanted, found: Recalled, again: Plan) -> Plan:
    """Return a plan for as long as memory is short. The saved plan stays as it is."""
    text = f"{found.short}: a smaller plan was computed from its measurements, confirmed by one step, and not saved"
    if again.region is None:
        text += "; its samples/s are predicted"
    here = zip(again.devices, wanted.request.devices, strict=True)
    devices = tuple(replace(planned, memory_bytes=device.capacity_bytes) for planned, device in here)
    again = wanted.with_facts(replace(again, devices=devices))
    smaller = Note("less-memory", text)
    return replace(found, plan=again).told(smaller, Note("from-profile", f"{found.origin}; {REFRESH_HINT}"))
