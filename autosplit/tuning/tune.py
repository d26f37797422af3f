"""`tune()`: facts, measurements, fitted cost, search, plan. It composes the other modules and has no algorithm."""

from __future__ import annotations

import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torch import Tensor

from autosplit.errors import AutosplitError, InputError, UserCodeError, from_user_code
from autosplit.oom import DoesNotFitError
from autosplit.plan.explanation import TunedWay
from autosplit.plan.plan import Plan
from autosplit.probe.check_result import changed
from autosplit.probe.request import Request, checked_request
from autosplit.profiles.key import machine_of, workload_of
from autosplit.profiles.tuning_lock import WaitingWarning
from autosplit.rng import kept_rng
from autosplit.runtime.live_tensors import untouched
from autosplit.runtime.prepare import Built, Source, build, follow, workload_source
from autosplit.runtime.trainee import ran_a_step
from autosplit.solve.padded_length import checked_lengths
from autosplit.tuning.assemble import Subject
from autosplit.tuning.job import Job, alone, refuse_waiting
from autosplit.tuning.lone_session import CONTRADICTION
from autosplit.tuning.open_session import isolated_for, losses_of, session_of
from autosplit.tuning.progress import Progress, fraction_of, heard_by, onward, part_of
from autosplit.tuning.recall import Recalled, Wanted, amended, tried_again
from autosplit.workload.checkpointing import Checkpointing, checkpointing_list
from autosplit.workload.fits import checked_fits
from autosplit.workload.precision import native_ones, precision_list, without_bf16

_log = logging.getLogger(__name__)

INTERRUPTED_NOTE = "tuning was interrupted before every way was tuned for: this is the best plan of those that were"

LENGTHS_INTERRUPTED_NOTE = "tuning was interrupted before shorter samples were looked at: tune again to have them"

NO_GPU_NOTE = (
    "no GPU is visible, so the plan is for the processor; devices='sim:2xRTX3090' (--devices) plans for other GPUs"
)
"""Said where no devices were named and there is no GPU."""


class ChangedTrainingWarning(UserWarning):
    """Splitting the batch changes the training: something in the model looks at the whole batch."""


class DoubtfulTimesWarning(UserWarning):
    """The times of a plan contradict each other: the machine was busy while it was tuned."""


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C while tuning.

    Attributes:
        plan: The best so far; None where no trial had succeeded.
        path: The profile it was saved as; None where it was not.
    """

    def __init__(self, plan: Plan | None) -> None:
        super().__init__(plan)
        self.plan = plan
        self.path = None if plan is None else plan.path

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
    sampler: Any = None,
    isolate: bool = False,
    profile: str = "auto",
    name: str | None = None,
    seed: int = 0,
    lengths: Any = None,
    checkpointing: Any = None,
    fits: str | Sequence[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    **unknown: NoReturn,
) -> Plan:
    """Find how much of the batch goes on which device, how big it may be, and how many accumulation steps.

    The model, its optimizer and every random number generator are left as they were, bit for bit, also after an
    exception or Ctrl-C: copies are trained.

    Args:
        model_or_workload: A module with its `sample_batch`, a `Workload`, or a function that returns a `Workload`
            (for ``sim:`` it is called under fake tensors where it makes more than 256 MiB, so that a model larger than
            this machine can be planned; then it may be called several times).
        sample_batch: One batch as training sees it; see `Workload`, as for all up to `make_batch`.
        loss_fn: ``loss_fn(outputs, targets)``.
        compute_loss: ``compute_loss(model, batch)``.
        optimizer: A class, a factory or a live instance. Default: AdamW.
        make_batch: ``make_batch(n)``; with `lengths` ``make_batch(n, length=length)``.
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
            of which the fastest is taken. Default: one forward, the smallest with 97 % of the best throughput.
        max_batch_size: The most samples per forward.
        reserve: Kept free on every device: bytes, ``"1GiB"``, or a share (``0.05``, ``"5%"``). Default: 5 % on GPUs.
        n_trials: Trials of the search, at most.
        time_limit_s: No trial but the first begins after this long, and what that one needs is looked at in few sizes
            from then on; a wait for another process is not counted. With `isolate`, a step that hangs is ended, too.
        storage: An Optuna storage URL that keeps the study. Trials that were enqueued there (`gpu0_bsz`, `batch_size`,
            `accumulation_steps`; what is left out is drawn) are made first. A plan that is remembered opens none.
        sampler: One of Optuna's, which draws all `n_trials` in the place of autosplit's cost model, whatever plan is
            remembered. Default: the cost model proposes, and Optuna's TPE explores where it is off.
        isolate: Run real steps in a process of its own: what ends or hangs it (a crash in a kernel, the system's
            out-of-memory killer) costs one step, counts as a lack of memory and is told in the notes. The workload
            must be picklable, and is built there once more. On ``sim:`` nothing runs, so that nothing is isolated.
        profile: ``"auto"`` uses a remembered plan for this kind of machine and this workload, and remembers a new one;
            ``"refresh"`` tunes anew; ``"off"`` neither reads nor writes. On other cards of the same kind, or with
            another driver, one step confirms it; where less memory is free than it takes, it is solved again from its
            fits. While another process tunes the same thing, this one waits for its plan, up to half an hour (with a
            time limit twice that, and at least a minute), and then tunes by itself; ``"off"`` waits for nobody.
        name: Keeps plans for otherwise equal workloads apart: up to 64 characters on one line.
        seed: Of the search.
        lengths: The length of each sample of the data set, where they differ: a list, an array or a tensor. The sample
            batch is taken with samples of the longest (cropped or repeated; by ``make_batch(n, length=length)`` where
            one is given), and shorter ones are measured, too, so that `Plan.token_sampler` makes batches of like
            length, as many samples as fit at that length.
        checkpointing: The class of the layers that a model repeats, or its name, or several; ``"auto"`` for a model of
            transformers. It is tuned for none of them checkpointed, every second and all: the fastest is the plan,
            whose `checkpointed` names the layers. Default: the model as it is.
        fits: What else the plan leaves room for: ``"resume"``, a checkpoint that was loaded onto the device and is
            still there (one that is loaded to the host takes nothing); ``"save"``, a copy of model and optimizer that
            is saved while training goes on; ``"eval"``, evaluation: `Plan.fits` has the largest batch of each device
            beside what a DDP rank keeps there. Several in a tuple or a text with commas. Default: nothing.
        progress: Called with a `Progress` now and then. Default: a bar in a notebook, a line on a terminal, and nothing
            elsewhere.

    Raises:
        InputError: An argument that can't be used; `DeviceError` and `WorkloadError` are among its leaves.
        DoesNotFitError: Not even the smallest batch fits.
        UserCodeError: The workload's own code raised on its own sample.
        RankFailedError: In a job, what another rank raised.
        TuningInterrupted: Ctrl-C; it carries the best plan so far.

    Warns:
        ChangedTrainingWarning: The check found that splitting the batch changes the training; `Plan.checks` has more.
        DoubtfulTimesWarning: The plan's times contradict each other, also where it is remembered.
        WaitingWarning: Another process tunes the same thing, and no `progress` was given to hear of it.
    """
    _refuse_unknown(unknown)
    if strategy == "ddp":
        from autosplit.tuning.rank_group import own_part

        devices = own_part(devices)
    request = checked_request(
        devices=devices,
        strategy=strategy,
        effective_batch_size=effective_batch_size,
        max_batch_size=max_batch_size,
        reserve=reserve,
        n_trials=n_trials,
        time_limit_s=time_limit_s,
        storage=storage,
        sampler=sampler,
        profile=profile,
        name=name,
        seed=seed,
    )
    numbers = None if lengths is None else checked_lengths(lengths)
    described = {"loss_fn": loss_fn, "compute_loss": compute_loss, "optimizer": optimizer, "make_batch": make_batch}
    described |= {"batch_dim": batch_dim or None, "fits": None if fits is None else checked_fits(fits)}

    def source(**way: Any) -> Source:
        return workload_source(model_or_workload, sample_batch, {**described, **way})

    with job_for(request) as job, heard_by(progress) as heard:
        asked = _Asked(request, reserve, onward(heard or quiet), isolate, job, heard=heard is not None)
        plan = _tuned_ways(asked, source, precision, checkpointing, numbers)
    _warn_of(plan)
    return plan


_REPLACED = {"loader": "autosplit.fit_to_loader(plan, loader)"}
"""Former arguments of `tune`, each with the call that replaces it."""


def _refuse_unknown(keywords: Mapping[str, object]) -> None:
    """Raise InputError for a former argument of `tune`, and TypeError for any other unknown keyword."""
    for name in keywords:
        if name in _REPLACED:
            raise InputError(
                f"{name}= is no longer an argument of tune(). Call {_REPLACED[name]} with the plan that tune() returns."
            )
        raise TypeError(f"tune() got an unexpected keyword argument {name!r}")


def _warn_of(plan: Plan) -> None:
    """Warn the caller of `tune` of times that contradict each other, and of training that splitting changes."""
    for note in plan.notes:
        if note.startswith(CONTRADICTION):
            warnings.warn(note, DoubtfulTimesWarning, stacklevel=3)
    found = changed(plan.checks)
    if found:
        others = f"; {len(found) - 1} more in plan.checks" if len(found) > 1 else ""
        warnings.warn(f"{found[0]}{others}", ChangedTrainingWarning, stacklevel=3)


@dataclass(frozen=True)
class _Asked:
    """The arguments of `tune`, less the workload.

    Attributes:
        ignoring: What the nearest remembered plan must not differ in alone: several of it are tuned for.
        waits: Seconds spent waiting for other processes so far, which the time limit does not count.
    """

    request: Request
    reserve: object
    progress: Callable[[Progress], None]
    isolate: bool
    job: Job
    heard: bool = False
    ignoring: tuple[str, ...] = ()
    waits: list[float] = field(default_factory=list)

    def tell_waiting(self, message: str) -> None:
        """Tell of a wait by the progress that was asked for, else by a warning; it may last for minutes."""
        if not self.heard:
            warnings.warn(f"{message}; profile='off' waits for nobody", WaitingWarning, stacklevel=2)
        self.progress(Progress("waiting", message, 0.0))


@contextmanager
def job_for(request: Request) -> Iterator[Job]:
    """Meet the other ranks, where DDP is to be tuned by several."""
    if request.strategy == "ddp":
        from autosplit.tuning.rank_group import in_a_job, joined

        if in_a_job():
            with joined(request) as job:
                yield job
            return
    yield alone(request, machine_of(request.devices))


@dataclass(frozen=True)
class Way:
    """A way to train that is tuned for."""

    precision: str | None
    checkpointing: Checkpointing | None


def _tuned_ways(
    asked: _Asked,
    source: Callable[..., Source],
    precision: str | Sequence[str] | None,
    checkpointing: Any,
    lengths: Sequence[int] | None,
) -> Plan:
    """Tune for each requested combination of precision and checkpointing, and for all lengths."""
    peers, wanted = asked.job.peers, precision_list(precision)
    lacking = [*itertools.chain(*peers.all_run(lambda: without_bf16(wanted, asked.job.own.devices)))]
    precisions, notes = native_ones(wanted, lacking)
    ways = [Way(one, layers) for one in precisions for layers in checkpointing_list(checkpointing)]

    def make(way: Way, length: int | None = None if lengths is None else max(lengths)) -> Source:
        return source(**vars(way), length=length)

    if lengths is None:
        return without_lengths(_fastest_of(ways, make, asked, notes)[0])
    return _tuned_by_length(lengths, ways, make, asked, notes)


def without_lengths(plan: Plan) -> Plan:
    """Return a plan for samples of one length: the plan in a profile may have several."""
    return plan if plan.lengths is None else replace(plan, lengths=None).kept_at(plan.path)


def _tuned_by_length(
    lengths: Sequence[int], ways: Sequence[Way], make: Callable[..., Source], asked: _Asked, notes: tuple[str, ...]
) -> Plan:
    """Tune for samples of the longest length, then measure shorter ones, which is half of the progress."""
    from autosplit.extras.tuned_lengths import with_lengths  # a known exception in tests/test_layers.py

    def longest(part: Progress) -> None:
        if part.stage != "done":
            asked.progress(replace(part, fraction=part.fraction / 2))

    def shorter(part: Progress) -> None:
        asked.progress(replace(part, fraction=0.5 + part.fraction / 2))

    try:
        plan, way = _fastest_of(ways, make, replace(asked, progress=longest), notes, more=1)
    except UserCodeError as error:
        raise UserCodeError(
            f"{error}; its samples had the longest of the lengths, {max(lengths)}: cut them where the model takes none "
            "so long, and where another dimension was taken for the length pass make_batch(n, length=...)",
            error.frames,
        ) from error
    job = asked.job.with_more_time(sum(asked.waits))
    told = shorter if job.peers.rank == 0 else quiet
    try:
        with users_code_named():
            found = with_lengths(plan, lengths, functools.partial(make, way), job, told, isolate=asked.isolate)
    except KeyboardInterrupt:
        raise TuningInterrupted(plan.with_notes(LENGTHS_INTERRUPTED_NOTE)) from None
    told(Progress("done", "done", 1.0))
    return found


def _fastest_of(
    ways: Sequence[Way], make: Callable[[Way], Source], asked: _Asked, notes: tuple[str, ...], more: int = 0
) -> tuple[Plan, Way]:
    """Tune for each way to train, and take the fastest; so many `more` things have a share of the time, too."""
    names, sources = _names_of(ways), [make(way) for way in ways]  # what can't be made is refused before any is tuned
    plans: dict[str, Plan] = {}
    misfits: list[DoesNotFitError] = []
    ignoring = tuple(part for part in ("precision", "checkpointing") if len({getattr(way, part) for way in ways}) > 1)
    for number, (name, source) in enumerate(zip(names, sources, strict=True)):
        timed = asked.request.with_more_time(sum(asked.waits)).with_share_of_time(len(ways) + more - number)
        told = asked.progress if len(ways) == 1 else part_of(asked.progress, number, len(ways), name)
        try:
            one = replace(asked, request=timed, progress=told, ignoring=ignoring)
            plans[name] = _tune_source(one, source)
        except TuningInterrupted as interrupted:
            if not plans:
                raise
            best = _fastest(plans if interrupted.plan is None else {**plans, name: interrupted.plan})[1]
            # Whole for its way, as it may be, it is not what was asked for.
            partial = replace(best, complete=False).with_notes(INTERRUPTED_NOTE)
            raise TuningInterrupted(partial.kept_at(best.path)) from None
        except DoesNotFitError as misfit:  # the others may
            misfits.append(misfit)
            notes = (*notes, f"{name} is left out: {misfit}")
    if not plans:
        raise misfits[0]
    return _chosen(plans, asked.job).with_notes(*notes), ways[names.index(_fastest(plans)[0])]


def _names_of(ways: Sequence[Way]) -> list[str]:
    """Return what tells the ways apart."""
    precise = len({way.precision for way in ways}) > 1
    chosen = len({way.checkpointing for way in ways}) > 1
    return [
        ", ".join(
            [f"precision {way.precision}"] * precise + [str(way.checkpointing or "no layer checkpointed")] * chosen
        )
        for way in ways
    ]


def _fastest(plans: Mapping[str, Plan]) -> tuple[str, Plan]:
    return max(plans.items(), key=lambda named: named[1].samples_per_s)


def _chosen(plans: Mapping[str, Plan], job: Job) -> Plan:
    """Return the fastest of the ways' plans with what each gave; its profile holds that, too."""
    name, best = _fastest(plans)
    if len(plans) < 2:
        return replace(best, ways=()).kept_at(best.path)
    named = {name: best, **plans}
    ways = tuple(TunedWay(one, plan.batch_size, plan.samples_per_s) for one, plan in named.items())
    return amended(best, job, ways=ways)


def quiet(progress: Progress) -> None:
    """Report to nobody."""


def _tune_source(asked: _Asked, source: Source) -> Plan:
    try:
        with users_code_named():
            return _tuned(asked, asked.job, source)
    except TuningInterrupted:
        raise
    except KeyboardInterrupt:  # before there was anything to keep
        raise TuningInterrupted(None) from None


@contextmanager
def users_code_named() -> Iterator[None]:
    """Tell what the workload's own code raises from what is ours."""
    try:
        yield
    except AutosplitError:
        raise
    except (Exception, SystemExit) as error:
        # What the model, the loss or the optimizer raises beyond the first step, or an exit that would pass for ours.
        if isinstance(error, SystemExit) or ran_a_step(error.__traceback__):
            raise from_user_code(error, "the workload") from error
        raise


def _tuned(asked: _Asked, job: Job, source: Source) -> Plan:
    """Tune as one process of a job; all of them return the same plan, and each machine remembers it."""
    peers, deadline_s = job.peers, asked.request.deadline_s
    told = asked.progress if peers.rank == 0 else quiet
    told(Progress("building", "building the model", 0.0))
    job = replace(job, own=replace(job.own, deadline_s=deadline_s), whole=replace(job.whole, deadline_s=deadline_s))
    with kept_rng(), ExitStack() as closing:
        built = peers.each_run(lambda: build(source, job.own.devices))
        closing.enter_context(untouched(built.workload))
        described = job.agreed("the workload", workload_of(built.workload))
        wanted = Wanted(job.whole, job.machine, described, job.whole.facts(asked.reserve), measured=job.several)
        turn = closing.enter_context(wanted.turn(asked.tell_waiting)) if peers.rank == 0 else None
        found = wanted.recalled_in_turn(turn, job)
        _log.info("profile %s: %s", wanted.key, "remembered" if found.plan else "; ".join(found.notes) or "not there")
        # Of this run and not of the plan, which is remembered for whoever names the processor, too.
        defaulted = (NO_GPU_NOTE,) if job.whole.defaulted and job.whole.kind == "cpu" else ()
        if found.holds:
            return found.told(wanted.nothing_run(found), *found.wait_notes, *defaulted)
        asked.waits.append(found.waited_s)
        job = job.with_more_time(found.waited_s)
        told(Progress("tracing", "tracing the model", fraction_of("tracing")))
        return _tuned_anew(asked, job, source, built, replace(wanted, request=job.whole), found, defaulted)


def _tuned_anew(
    asked: _Asked,
    job: Job,
    source: Source,
    built: Built,
    wanted: Wanted,
    found: Recalled,
    defaulted: tuple[str, ...],
) -> Plan:
    """Try what is remembered again, else measure and search."""
    with ExitStack() as closing:
        if job.several:
            job.peers.each_run(lambda: refuse_waiting(built.workload))
        children = closing.enter_context(ExitStack())
        isolated = isolated_for(job, source, children) if asked.isolate else None
        followed = job.peers.each_run(
            lambda: follow(built, job.own.devices, closing, isolated, described=wanted.described)
        )
        probing = closing.enter_context(ExitStack())  # after it: a model that is borrowed is given back last
        probing.callback(children.close)
        if found.plan is not None:
            plan, found = tried_again(wanted, found, followed, job)
            if plan is not None:
                return plan.with_notes(last=[*defaulted, *losses_of(job, isolated)])
        nearest = job.told(lambda: () if found.notes else wanted.nearest(asked.ignoring))
        told = asked.progress if job.peers.rank == 0 else quiet
        session = session_of(job)(job, Subject(wanted, followed.workload), followed, told, probing, closing)
        plan = replace(session.plan(), checkpointed=followed.checkpointed).with_notes(last=losses_of(job, isolated))
        said = (*found.wait_notes, *found.notes, *nearest)
        plan = wanted.kept(plan, found, said, defaulted, stores=job.is_first_of_machine)
        if not plan.complete:
            job.peers.part()
            raise TuningInterrupted(plan)
        return plan
