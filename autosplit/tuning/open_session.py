"""Open a session for a workload: follow it, in this process or one of its own, and make what measures it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack

from autosplit.notes import Note
from autosplit.runtime.prepare import Built, Source, follow, isolated_runtime
from autosplit.runtime.subprocess_runtime import IsolatedRuntime
from autosplit.tuning.assemble import Subject
from autosplit.tuning.job import Job
from autosplit.tuning.lone_session import LoneSession
from autosplit.tuning.progress import Progress
from autosplit.tuning.recall import Wanted
from autosplit.tuning.session import Session


def open_session(
    job: Job, built: Built, closing: ExitStack, tell: Callable[[Progress], None], *, isolate: bool
) -> Session:
    """Open a session that measures, and that no plan is remembered by."""
    children = closing.enter_context(ExitStack())
    isolated = isolated_for(job, built.source, children) if isolate else None
    followed = job.peers.each_run(lambda: follow(built, job.own.devices, closing, isolated))
    probing = closing.enter_context(ExitStack())  # after it: a model that is borrowed is given back last
    probing.callback(children.close)
    subject = Subject(Wanted(job.whole, job.machine, {}, {}), followed.workload)
    return session_of(job)(job, subject, followed, tell, probing, closing)


def session_of(job: Job) -> type[Session]:
    """Return the kind of session that a job has."""
    if not job.several:
        return LoneSession
    from autosplit.tuning.joint_session import JointSession

    return JointSession


def isolated_for(job: Job, source: Source, closing: ExitStack) -> IsolatedRuntime | None:
    """Start a process for this rank's real steps; None for simulated cards."""
    devices, capacities_bytes = job.own.devices, job.own.capacities_bytes
    return isolated_runtime(source, devices, capacities_bytes, closing, deadline_s=job.own.deadline_s)


def losses_of(job: Job, isolated: IsolatedRuntime | None) -> tuple[Note, ...]:
    """Return the notes on lost processes, the same on all ranks."""
    told = job.peers.gathered(() if isolated is None else isolated.notes)
    return tuple(dict.fromkeys(itertools.chain(*told)))
