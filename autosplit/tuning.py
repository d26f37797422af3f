"""`tune()`: facts, measurements, fitted cost, search, plan. It composes the other modules and has no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autosplit import profiles
from autosplit.assembly import Subject
from autosplit.errors import AutosplitError, ProfileError, from_user_code
from autosplit.notebook import notebook_bar
from autosplit.oom import DoesNotFitError
from autosplit.plan import Plan
from autosplit.precisions import native_ones, precision_list
from autosplit.progress import Progress
from autosplit.request import Request, checked_request
from autosplit.rng import kept_rng
from autosplit.runtime.isolated import IsolatedRuntime
from autosplit.session import Session
from autosplit.staging import Source, build, follow, isolated_runtime, workload_source
from autosplit.trainee import ran_a_step

if TYPE_CHECKING:
    from autosplit.ddp.job import Job

__all__ = ["Progress", "TuningInterrupted", "tune"]


NO_GPU_NOTE = (
    "no GPU is visible, so this is for the processor; devices='sim:2xRTX3090' (--devices) plans for GPUs elsewhere"
)
"""Said where no devices were named and there is no GPU."""


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C while tuning.

    Attributes:
        plan: The best so far; None where no trial had succeeded.
        path: The profile it was saved as; None where it was not.
    """

    def __init__(self, plan: Plan | None, path: Path | None) -> None:
        super().__init__(plan, path)
        self.plan = plan
        self.path = path

    def __str__(self) -> str:
        """Say what happened."""
        return "tuning was interrupted"


def tune(
    model_or_workload: Any,
    sample_batch: Any = None,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    compute_loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    batch_dim: int = 0,
    make_batch: Callable[[int], Any] | None = None,
    devices: Any = None,
    strategy: str = "auto",
    precision: str | Sequence[str] | None = None,
    effective_batch_size: int | tuple[int, int] | str | None = None,
    max_batch_size: int | None = None,
    reserve: str | float | None = None,
    n_trials: int = 24,
    time_limit_s: float | None = None,
    storage: str | None = None,
    isolate: bool = False,
    profile: str = "auto",
    name: str | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Find how much of the batch goes on which device, how big it may be, and how many accumulation steps.

    The model, its optimizer and every random number generator are left as they were, bit for bit, also after an
    exception or Ctrl-C: copies are trained.

    Args:
        model_or_workload: A module with its `sample_batch`, a `Workload`, or a function that returns a `Workload`
            (for ``sim:`` it is called under fake tensors, so that a model larger than this machine can be planned).
        sample_batch: One batch as training sees it; see `Workload`, as for all up to `make_batch`.
        loss_fn: ``loss_fn(outputs, targets)``.
        compute_loss: ``compute_loss(model, batch)``.
        optimizer: A class, a factory or a live instance. Default: AdamW.
        batch_dim: The batch dimension.
        make_batch: ``make_batch(n)``.
        devices: ``"cuda:0,1"``, ``"cpu:2GiB,cpu:1GiB"``, ``"sim:2xA100-40GB+1xRTX3090"`` and the like. Default: every
            visible GPU; without any, the processor.
        strategy: ``"auto"`` and ``"balanced"`` search BalancedDataParallel's split and solve DDP's beside it;
            ``"ddp"`` gives DDP's alone, and the plan's split holds the ranks' batch sizes. In one process it is solved
            from each device's own measurements: samples/s are predicted, and there are no trials. In a job (torchrun,
            Slurm, or a process group that is there) call it on every rank: each measures its own device at the same
            time, rank 0 searches, all run its trials together, and every rank gets the same plan.
        precision: ``"none"``, ``"bf16"`` or ``"fp16"``; replaces what a `Workload` says. Several, as in
            ``("none", "bf16")``, are each tuned for, and the faster is the plan; bf16 only where the devices have it.
        effective_batch_size: Samples per optimizer step, kept exactly; or a range, ``(256, 1024)`` or ``"256:1024"``,
            of which the fastest is taken. Default: one forward of whatever is best.
        max_batch_size: The most samples per forward.
        reserve: Kept free on every device: bytes, ``"1GiB"``, or a share (``0.05``, ``"5%"``). Default: 5 % on GPUs.
        n_trials: Trials of the search, at most.
        time_limit_s: No trial begins after this long; with `isolate`, a step that hangs is ended, too.
        storage: An Optuna storage URL that keeps the study.
        isolate: Run real steps in a process of its own: what ends or hangs it (a crash in a kernel, the system's
            out-of-memory killer) costs one step, counts as a lack of memory and is told in the notes. The workload
            must be picklable, and is built there once more. On ``sim:`` nothing runs, so that nothing is isolated.
        profile: ``"auto"`` uses a remembered plan for this kind of machine and this workload, and remembers a new one;
            ``"refresh"`` tunes anew; ``"off"`` neither reads nor writes.
        name: Keeps plans for otherwise equal workloads apart.
        seed: Of the search.
        progress: Called with a `Progress` now and then. Default: a bar in a notebook, nothing elsewhere.

    Returns:
        The plan.

    Raises:
        InputError: An argument that can't be used; `DeviceError` and `WorkloadError` are among its leaves.
        DoesNotFitError: Not even the smallest batch fits.
        UserCodeError: The workload's own code raised on its own sample.
        RankFailedError: In a job, what another rank raised.
        TuningInterrupted: Ctrl-C; it carries the best plan so far.
    """
    request = checked_request(
        devices=devices,
        strategy=strategy,
        effective_batch_size=effective_batch_size,
        max_batch_size=max_batch_size,
        reserve=reserve,
        n_trials=n_trials,
        time_limit_s=time_limit_s,
        storage=storage,
        profile=profile,
        name=name,
        seed=seed,
    )
    described = {
        "loss_fn": loss_fn,
        "compute_loss": compute_loss,
        "optimizer": optimizer,
        "make_batch": make_batch,
        "batch_dim": batch_dim or None,
    }
    with _job(request) as job:
        devices_of_all = request.devices if job is None else job.whole.devices
        precisions, notes = native_ones(precision_list(precision), devices_of_all)

        def make(one: str | None) -> Source:
            return workload_source(model_or_workload, sample_batch, {**described, "precision": one})

        asked = _Asked(request, reserve, progress or notebook_bar() or _quiet, isolate, job)
        return _fastest_of(precisions, make, asked, notes)


@dataclass(frozen=True)
class _Asked:
    """What `tune` was asked for, less the workload.

    Attributes:
        request: Checked.
        reserve: As it was asked for.
        progress: Told how far it is.
        isolate: Real steps run in a process of their own.
        job: The ranks that tune together; None where this process does it alone.
    """

    request: Request
    reserve: object
    progress: Callable[[Progress], None]
    isolate: bool
    job: Job | None


@contextmanager
def _job(request: Request) -> Iterator[Job | None]:
    """Meet the other ranks, where DDP is to be tuned by several."""
    if request.strategy != "ddp":
        yield None
        return
    from autosplit.ddp.job import in_a_job, joined

    if not in_a_job():
        yield None
        return
    with joined(request) as job:
        yield job


def _fastest_of(
    precisions: Sequence[str | None], make: Callable[[str | None], Source], asked: _Asked, notes: tuple[str, ...]
) -> Plan:
    """Tune for each precision, and take the fastest."""
    plans: list[Plan] = []
    misfits: list[DoesNotFitError] = []
    for number, one in enumerate(precisions):
        timed = asked.request.with_share_of_time(len(precisions) - number)
        told = _part_of(asked.progress, number, len(precisions), one)
        try:
            plans.append(_tune_source(replace(asked, request=timed, progress=told), make(one)))
        except TuningInterrupted as interrupted:
            if not plans:
                raise
            found = plans if interrupted.plan is None else [*plans, interrupted.plan]
            raise TuningInterrupted(_with_notes(_fastest(found), INTERRUPTED_NOTE), interrupted.path) from None
        except DoesNotFitError as misfit:  # the others may
            misfits.append(misfit)
            notes = (*notes, f"precision {one} is left out: {misfit}")
    if not plans:
        raise misfits[0]
    return _with_notes(_fastest(plans), *_compared(plans), *notes)


INTERRUPTED_NOTE = "tuning was interrupted before every precision was tuned for: this is the best of those that were"


def _fastest(plans: list[Plan]) -> Plan:
    return max(plans, key=lambda plan: plan.samples_per_s)


def _compared(plans: list[Plan]) -> tuple[str, ...]:
    """Say what each precision gave, where several were tuned for."""
    if len(plans) < 2:
        return ()
    rates = ", ".join(f"{plan.precision} {plan.samples_per_s:,.0f} samples/s" for plan in plans)
    return (f"precisions: {rates}; {_fastest(plans).precision} is the plan's",)


def _with_notes(plan: Plan, *notes: str) -> Plan:
    return replace(plan, notes=(*notes, *plan.notes)) if notes else plan


def _part_of(
    progress: Callable[[Progress], None], number: int, count: int, precision: str | None
) -> Callable[[Progress], None]:
    """Report one tuning of several as its part of the whole."""
    if count == 1:
        return progress

    def tell(part: Progress) -> None:
        message = f"{precision}: {part.message}"
        progress(replace(part, message=message, fraction=(number + part.fraction) / count))

    return tell


def _quiet(progress: Progress) -> None:
    """Report to nobody."""


def _tune_source(asked: _Asked, source: Source) -> Plan:
    try:
        if asked.job is not None:
            return _tuned_together(asked, asked.job, source)
        return _tuned(asked, source)
    except TuningInterrupted:
        raise
    except KeyboardInterrupt:  # before there was anything to keep
        raise TuningInterrupted(None, None) from None
    except AutosplitError:
        raise
    except (Exception, SystemExit) as error:
        # What the model, the loss or the optimizer raises beyond the first step, or an exit that would pass for ours.
        if isinstance(error, SystemExit) or ran_a_step(error.__traceback__):
            raise from_user_code(error, "the workload") from error
        raise


def _tuned(asked: _Asked, source: Source) -> Plan:
    request = asked.request
    with kept_rng(), ExitStack() as closing:
        built = build(source, request.devices)
        machine, described = profiles.machine_of(request.devices), profiles.workload_of(built.workload)
        key = profiles.key_of(machine, described, request.facts(asked.reserve), request.name)
        remembered, notes = _remembered(request, key, machine, described)
        if remembered is not None:
            return remembered
        isolated = _isolated(request, source, closing) if asked.isolate else None
        followed = follow(built, request.devices, closing, isolated)
        if request.defaulted and request.kind == "cpu":
            notes = (*notes, NO_GPU_NOTE)
        subject = Subject(request, followed.workload, machine, described)
        study_name = _study_name(request, key)
        session = Session(subject, followed, asked.progress, closing, notes=notes, study_name=study_name)
        try:
            plan = session.plan()
        except KeyboardInterrupt:
            best = session.best_so_far()
            best = None if best is None else _with_losses(best, isolated)
            raise TuningInterrupted(best, None if best is None else _stored(request, key, best)[1]) from None
        return _stored(request, key, _with_losses(plan, isolated))[0]


def _tuned_together(asked: _Asked, job: Job, source: Source) -> Plan:
    """Tune as one rank of a job; all of them return the same plan, and each machine remembers it."""
    from autosplit.ddp.joint import JointSession, refuse_waiting

    own = replace(job.own, deadline_s=asked.request.deadline_s)
    whole = replace(job.whole, deadline_s=asked.request.deadline_s)
    with kept_rng(), ExitStack() as closing:
        built = job.peers.each_run(lambda: build(source, own.devices))
        described = job.agreed("the workload", profiles.workload_of(built.workload))
        key = profiles.key_of(job.machine, described, whole.facts(asked.reserve), whole.name)
        remembered, notes = job.told(lambda: _remembered(whole, key, job.machine, described, measured=True))
        if remembered is not None:
            return remembered
        job.peers.each_run(lambda: refuse_waiting(built.workload))
        probing = closing.enter_context(ExitStack())
        isolated = _isolated(own, source, probing) if asked.isolate else None
        followed = job.peers.each_run(lambda: follow(built, own.devices, closing, isolated))
        subject = Subject(whole, followed.workload, job.machine, described)
        tell = asked.progress if job.place.rank == 0 else _quiet
        study_name = _study_name(whole, key)
        session = JointSession(job, subject, followed, tell, closing, probing, notes=notes, study_name=study_name)
        plan = session.plan()
        path: Path | None = None
        if job.is_first_of_machine:
            plan, path = _stored(whole, key, plan)
        if not plan.complete:
            job.peers.part()
            raise TuningInterrupted(plan, path)
        return plan


def _isolated(request: Request, source: Source, closing: ExitStack) -> IsolatedRuntime | None:
    devices, capacities_bytes = request.devices, request.capacities_bytes
    return isolated_runtime(source, devices, capacities_bytes, closing, deadline_s=request.deadline_s)


def _with_losses(plan: Plan, isolated: IsolatedRuntime | None) -> Plan:
    """Add to a plan's notes what became of the processes that its steps ran in."""
    return plan if isolated is None else replace(plan, notes=(*plan.notes, *isolated.notes))


def _study_name(request: Request, key: str) -> str:
    return f"{request.name or 'autosplit'}-{key}"


def _remembered(
    request: Request, key: str, machine: dict[str, Any], workload: dict[str, Any], *, measured: bool = False
) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the plan that is remembered and still holds; otherwise why not, if there was one.

    Args:
        request: What was asked for.
        key: The profile's.
        machine: By `profiles.machine_of`.
        workload: By `profiles.workload_of`.
        measured: A plan whose DDP answer is predicted does not do.
    """
    if request.profile != "auto":
        return None, ()
    found = profiles.find(key, machine=machine, workload=workload)
    if found.plan is None:
        return None, found.notes
    if not found.plan.complete:
        return None, (
            *found.notes,
            "the search of the remembered plan was interrupted: tuned anew",
        )
    if measured and not found.plan.ddp.measured:
        return None, (*found.notes, "the remembered plan's DDP answer was predicted by one process: tuned anew")
    short = profiles.memory_shortfall(found.plan, request.devices, request.capacities_bytes)
    if short is not None:
        return None, (*found.notes, f"{short}: tuned anew")
    said = f"from the profile {found.path}: nothing was run; --profile refresh (profile='refresh') tunes anew"
    differing = profiles.differing_facts(found.plan, request.devices)
    return replace(found.plan, notes=(said, *found.notes, *differing, *found.plan.notes)), ()


def _stored(request: Request, key: str, plan: Plan) -> tuple[Plan, Path | None]:
    """Remember a plan; where that fails, the plan says so."""
    if request.profile == "off":
        return plan, None
    try:
        return plan, profiles.store(key, plan)
    except ProfileError as error:
        return replace(plan, notes=(*plan.notes, f"the plan is not remembered: {error}")), None
