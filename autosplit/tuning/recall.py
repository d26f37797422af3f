"""Find a saved plan. If the machine has changed a little, confirm the plan by one step, or solve the plan again."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from autosplit.errors import ProfileError, one_line
from autosplit.notes import NOT_FINITE, Note
from autosplit.oom import OutOfMemoryError
from autosplit.plan.plan import Plan
from autosplit.plan.record import with_devices, with_layout, with_layouts, with_notes, with_path
from autosplit.probe.request import Request
from autosplit.profiles import store as profiles
from autosplit.profiles.key import ProfileKey
from autosplit.profiles.store import NOT_SAVED
from autosplit.profiles.validity import differing_facts, memory_shortfall
from autosplit.runtime.protocol import StepShape
from autosplit.solve.split import micro_batch_sizes, proportional_split
from autosplit.tuning.process import Process, Processes

REFRESH_HINT = "To tune again, use --profile refresh (profile='refresh')."

_log = logging.getLogger(__name__)

STEP_BUDGET_S = 1.0
"""Time in seconds for repeating the step of a plan that was solved again, to measure its throughput."""


@dataclass(frozen=True)
class FoundPlan:
    """A saved plan, or the reason why there is none.

    Attributes:
        notes: The reason, or notes on the plan.
        short: Text that names the devices with too little free memory for the plan. None if all have enough.
        differing: Facts that differ from the plan's, but do not change its key.
        unreadable: Whether the system refused to read the profile.
    """

    plan: Plan | None = None
    path: Path | None = None
    notes: tuple[Note, ...] = ()
    short: str | None = None
    differing: tuple[str, ...] = ()
    unreadable: bool = False

    @property
    def holds(self) -> bool:
        """Whether the plan can be used unchanged."""
        return self.plan is not None and self.short is None and not self.differing

    def with_notes(self, *said: Note) -> Plan:
        """Return the plan with these notes, followed by `notes`."""
        assert self.plan is not None
        return with_notes(self.plan, *said, *self.notes)

    @property
    def origin(self) -> str:
        """The beginning of a sentence that names the profile."""
        assert self.path is not None, "a saved plan has a path"
        return f"From the profile {self.path.stem[: profiles.KEY_DIGITS]}"


def find_saved(key: ProfileKey, request: Request, *, measured: bool = False) -> FoundPlan:
    """Return a saved plan, after comparing it with the devices.

    Args:
        measured: Skip a plan whose DDP settings were predicted.
    """
    found = _find_saved(key, request, measured=measured)
    outcome = "remembered" if found.plan else "; ".join(map(str, found.notes)) or "not there"
    _log.info("profile %s: %s", key.digest, outcome)
    if request.profile == "auto" and found.plan is None and not found.notes:
        _log_newest(key)
    return found


def _find_saved(key: ProfileKey, request: Request, *, measured: bool) -> FoundPlan:
    if request.profile != "auto" or request.sampler is not None:
        return FoundPlan()
    found = profiles.find(key.digest, key)
    if found.plan is None:
        return FoundPlan(notes=found.notes, unreadable=found.unreadable)
    if not found.plan.complete:
        return FoundPlan(
            notes=(
                Note("tuned-again", "The search that made the saved plan was interrupted, so autosplit tuned again."),
            )
        )
    if measured and (found.plan.ddp is None or not found.plan.ddp.measured):
        text = "The DDP settings of the saved plan were predicted by one process, so autosplit tuned again."
        return FoundPlan(notes=(Note("tuned-again", text),))
    short = memory_shortfall(found.plan, request.devices, request.capacities_bytes)
    differing = differing_facts(found.plan, request.devices, request.capacities_bytes)
    return FoundPlan(found.plan, found.path, found.notes, short, differing)


def _log_newest(key: ProfileKey) -> None:
    """Log the parts of the key in which the newest profile differs. No other file is read."""
    try:
        paths = profiles.profile_paths()[:1]
    except (OSError, ProfileError):  # there is no cache
        return
    for path in paths:
        plan = profiles.read_or_none(path)
        parts = {} if plan is None else key.differences(plan)
        text = "; ".join(f"{part}: {', '.join(names)}" for part, names in parts.items())
        if text:  # names of an untrusted file, which has no control characters
            _log.info("no profile matches. The newest, %s, differs in %s", path.stem[: profiles.KEY_DIGITS], text[:400])


def from_profile_note(found: FoundPlan) -> Note:
    """Return the note of a plan that comes from a profile."""
    return Note("from-profile", f"{found.origin}. autosplit ran no step. {REFRESH_HINT}")


def save_plan(
    plan: Plan,
    key: ProfileKey,
    found: FoundPlan,
    processes: Processes,
    *,
    always: tuple[Note, ...],
) -> Plan:
    """Save a plan as a profile on each machine. Return the plan with the notes of this run, which are not saved.

    If the profile was unreadable, the note of a failed save replaces the notes of `found`.

    Args:
        always: The other notes of this run.
    """
    failed: tuple[Note, ...] = ()
    path = None
    is_saved = processes.job.request.profile != "off"
    if is_saved and any(note.kind == NOT_FINITE for note in plan.notes):
        # A saved plan would repeat this warning even after the user has fixed the loss.
        failed = (Note(NOT_SAVED, "the plan is not saved, because the loss is not finite"),)
    elif is_saved:
        answers = processes.ask(Process.store, key, plan)
        path, failed = answers[0][0], tuple(dict.fromkeys(note for _, notes in answers for note in notes))
    said = () if failed and found.unreadable else found.notes
    return with_path(with_notes(plan, *said, *always, last=failed), path)


def with_facts(plan: Plan, request: Request) -> Plan:
    """Return a plan with the UUIDs and drivers of the current devices, after a step has confirmed the plan."""
    here = request.devices
    return with_devices(plan, lambda place, planned: replace(planned, uuid=here[place].uuid, driver=here[place].driver))


def confirm_or_solve_again(
    key: ProfileKey, request: Request, found: FoundPlan, processes: Processes
) -> tuple[Plan | None, FoundPlan]:
    """Run one step of a saved plan. If memory is short, solve the plan again first.

    Returns:
        The plan and `found`. If the plan can't be used, the plan is None, and the notes of `found` have the reason.
    """
    plan = found.plan
    assert plan is not None
    if found.short is not None:
        from autosplit.plan.solve_again import resolve  # few tunings find less memory
        from autosplit.solve.change import Change

        nbytes, least = processes.ask(_bucket_bytes_and_least)[0]
        change = Change(capacities_bytes=request.capacities_bytes, waiting_bytes=nbytes, least_batch=least)
        plan = resolve(plan, change)
        if plan is None:
            return None, _given_up(found, "no split fits according to its measurements")
    answers = processes.ask(_run, plan, found.short is not None)
    failed = next(((rank, one) for rank, one in enumerate(answers) if isinstance(one, str)), None)
    if failed is not None:
        who = f"rank {failed[0]}: " if processes.job.has_peers else ""
        return None, _given_up(found, f"one step ran out of memory ({who}{failed[1]})")
    ran = answers[0]
    assert isinstance(ran, Plan)
    if found.short is not None:
        return _makeshift(request, found, ran), found
    return _confirmed(key, request, found, processes), found


def _bucket_bytes_and_least(process: Process) -> tuple[int, int]:
    return process.prober.facts.gradient_bytes, process.prober.least_batch


def _run(process: Process, plan: Plan, measures: bool) -> Plan | str:
    """Run a step of a plan. Return the plan, or the error message if memory ran out.

    If `measures` is true, the plan gets the throughput and the peaks of that step. A plan for DDP stays unchanged,
    because only parts of its step run.
    """
    try:
        return _ran(process, plan, measures=measures)
    except OutOfMemoryError as error:
        return one_line(error)


def _ran(process: Process, plan: Plan, *, measures: bool) -> Plan:
    prober, several, own = process.prober, process.job.has_peers, process.peers.rank
    layout = plan.main
    if several or layout.strategy == "ddp":
        # Run the ranks' parts one after the other, because one process has no other ranks.
        for rank in (own,) if several else range(len(plan.split)):
            here = (rank,) if several else range(len(plan.split))
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
    peaks = measured.peak_bytes or layout.peak_bytes
    seats = tuple(replace(seat, peak_bytes=peak) for seat, peak in zip(layout.seats, peaks, strict=True))
    rate = plan.effective_batch_size / measured.seconds
    if len(seats) > 1:
        return with_layout(plan, replace(layout, seats=seats, samples_per_s=rate, measured=True))
    alone = (replace(one, seats=seats, samples_per_s=rate, measured=True) for one in plan.layouts)
    return with_layouts(plan, *alone)


def _given_up(found: FoundPlan, why: str) -> FoundPlan:
    changed = found.short or "; ".join(found.differing)
    return replace(
        found,
        plan=None,
        short=None,
        differing=(),
        notes=(*found.notes, Note("tuned-again", f"The saved plan was tuned again: {changed}, and {why}.")),
    )


def _confirmed(key: ProfileKey, request: Request, found: FoundPlan, processes: Processes) -> Plan:
    """Return a saved plan that ran on these devices. Save it with their UUIDs and drivers."""
    assert found.plan is not None
    plan = with_path(with_facts(found.plan, request), found.path)
    if request.profile != "off":
        processes.ask(Process.store, key, plan)  # If saving fails, the next run repeats the step.
    confirmed = Note(
        "confirmed-by-one-step", f"The saved plan was confirmed by one step: {'; '.join(found.differing)}."
    )
    return replace(found, plan=plan).with_notes(confirmed, Note("from-profile", f"{found.origin}; {REFRESH_HINT}"))


def _makeshift(request: Request, found: FoundPlan, again: Plan) -> Plan:
    """Return a temporary plan for the smaller free memory. The saved plan is not changed."""
    text = (
        f"{found.short}, so autosplit computed a smaller plan from its measurements and confirmed it with one "
        "step. The smaller plan is not saved"
    )
    if not again.main.measured:
        text += "; its samples/s are predicted"
    devices = request.devices
    again = with_devices(again, lambda place, one: replace(one, memory_bytes=devices[place].capacity_bytes))
    again = with_facts(again, request)
    smaller = Note("less-memory", text)
    return replace(found, plan=again).with_notes(smaller, Note("from-profile", f"{found.origin}; {REFRESH_HINT}"))
