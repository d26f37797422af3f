"""Define `tune()`: build, measure, fit the time model, search, and make the plan. Other modules have the algorithms."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.devices.device import Device
from autosplit.errors import AutosplitError, UserCodeError, ends_tracebacks, from_user_code, warn_user
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError
from autosplit.plan.explanation import TunedWay
from autosplit.plan.plan import Plan
from autosplit.plan.record import replaced, with_notes
from autosplit.probe.check_result import changed
from autosplit.probe.gradient_check import NOT_FINITE
from autosplit.probe.request import Request, checked_request
from autosplit.profiles.key import ProfileKey, machine_of
from autosplit.runtime.prepare import Source, workload_source
from autosplit.runtime.trainee import ran_a_step
from autosplit.solve.padded_length import checked_lengths
from autosplit.tuning.keywords import suggests_keywords
from autosplit.tuning.lone_session import TIMES_DISAGREE, LoneSession
from autosplit.tuning.progress import Progress, fraction_of, heard_by, onward, part_of
from autosplit.tuning.recall import Recalled, kept, log_newest, nothing_run, recalled, tried_again
from autosplit.tuning.session import Session
from autosplit.tuning.worker import Variant, Worker, Workers, agreed, alone, drive
from autosplit.workload.checkpointing import Checkpointing, checkpointing_list
from autosplit.workload.precision import native_ones, precision_list, without_bf16
from autosplit.workload.workload import Workload, checked_fits

_log = logging.getLogger(__name__)

INTERRUPTED_NOTE = Note(
    "interrupted", "Tuning was interrupted before all variants were tuned. This is the best plan so far."
)

LENGTHS_INTERRUPTED_NOTE = Note(
    "interrupted", "Tuning was interrupted before the shorter sequence lengths were measured. Tune again."
)

NO_GPU_NOTE = Note(
    "no-gpu",
    "No GPU is visible, so the plan is for the CPU. devices='sim:2xRTX3090' (--devices) plans for other GPUs.",
)


class ChangedTrainingWarning(UserWarning):
    """Splitting the batch changes the training, because a part of the model or the loss uses the whole batch."""


class DoubtfulTimesWarning(UserWarning):
    """The times of a plan contradict each other, because the machine was busy during the tuning."""


class AssumedLossWarning(UserWarning):
    """No loss was given, so the plan is for the mean of the model's outputs."""


class NotFiniteWarning(UserWarning):
    """The loss of the sample batch, or its gradient, is NaN or infinite."""


class TuningInterrupted(KeyboardInterrupt):
    """The tuning was interrupted by Ctrl-C.

    Attributes:
        plan: The best plan so far. None if no trial has succeeded.
        path: The profile with this plan. None if it was not saved.
    """

    def __init__(self, plan: Plan | None) -> None:
        super().__init__(plan)
        self.plan = plan
        self.path = None if plan is None else plan.path

    def __str__(self) -> str:
        return "tuning was interrupted"


@ends_tracebacks
@suggests_keywords
def tune(
    model_or_workload: nn.Module | Workload | Callable[[], Workload],
    sample_batch: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    compute_loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = None,
    loss_reduction: str | None = None,
    batch_dim: int = 0,
    make_batch: Callable[[int], Any] | None = None,
    devices: str | Device | torch.device | Sequence[str | int | Device | torch.device] | None = None,
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
) -> Plan:
    """Find the fastest split, batch size and number of accumulation steps for a workload on the given devices.

    autosplit trains copies. The model, its optimizer and all random number generators stay unchanged, bit for bit, even
    after an exception or Ctrl-C. If the model is already on a GPU, the copy uses the model's memory until `tune`
    restores the values. So do not use the model in another thread meanwhile.

    Args:
        model_or_workload: A module with its `sample_batch`, a `Workload`, or a function that returns a `Workload`. For
            ``sim:`` devices, a function that makes more than 256 MiB is called under fake tensors, possibly several
            times. So a model larger than this machine can be planned.
        sample_batch: One batch of training data. See `Workload` for this argument and those up to `make_batch`.
        loss_fn: ``loss_fn(outputs, targets)``.
        compute_loss: ``compute_loss(model, batch)``.
        optimizer: A class, a factory or an optimizer object. Default: AdamW.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss combines the samples of a batch. Default: ``"mean"``.
        batch_dim: The batch dimension. Default: 0.
        make_batch: ``make_batch(n)``; with `lengths`, ``make_batch(n, length=length)``.
        devices: Devices such as ``"cuda:0,1"``, ``"cpu:2GiB,cpu:1GiB"`` or ``"sim:2xA100-40GB+1xRTX3090"``. Default:
            every visible GPU, or the CPU if there is none.
        strategy: ``"auto"`` and ``"balanced"`` search the split of BalancedDataParallel, and also solve for DDP's
            batch sizes. ``"ddp"`` plans for DDP only, and the plan's split has the ranks' batch sizes. In one process,
            DDP's plan is computed from measurements of single devices. Its samples/s are predicted, and there are no
            trials. In a job (torchrun, Slurm, or an existing process group), call `tune` on every rank. The ranks
            measure their devices at the same time, rank 0 searches, all ranks run the trials together, and every rank
            gets the same plan.
        precision: ``"none"``, ``"bf16"`` or ``"fp16"``. It overrides the precision of a `Workload`. If several are
            given, as in ``("none", "bf16")``, each is tuned, and the fastest plan is returned. bf16 is left out if a
            device has no native support.
        effective_batch_size: Samples per optimizer step, which the plan has exactly. Or a range such as ``(256, 1024)``
            or ``"256:1024"``. The plan has the fastest size of the range. Default: one forward per step, with the
            smallest batch that has 97% of the best throughput.
        max_batch_size: Largest number of samples per forward.
        reserve: Memory to keep free on every device: bytes, ``"1GiB"``, or a fraction (``0.05``, ``"5%"``). Default: 5%
            on GPUs.
        n_trials: Largest number of trials of the search.
        time_limit_s: Time in seconds after which no further trial begins. At least one trial is run. After this time,
            fewer sizes are measured for it. With `isolate`, a step that hangs is also ended.
        storage: An Optuna storage URL that stores the study. Trials that are enqueued in it (`gpu0_bsz`, `batch_size`,
            `accumulation_steps`; missing values are drawn) are run first. The storage is not used if a stored plan is
            returned.
        sampler: An Optuna sampler that draws all `n_trials`, instead of autosplit's cost model. With a sampler, stored
            plans are ignored. Default: the cost model proposes trials, and Optuna's TPE explores if the model is
            inaccurate.
        isolate: Run real steps in a separate process. If a crash in a kernel, the system's out-of-memory killer or a
            hang ends that process, only one step is lost. The step counts as out of memory, and the plan gets a note.
            The workload must be picklable, and is built again in that process. That process does not run the main
            script, unless the workload has a class or function of a script whose call is below
            ``if __name__ == "__main__":``. No effect on ``sim:`` devices.
        profile: ``"auto"`` returns a stored plan for this kind of machine and this workload, and stores a new plan.
            ``"refresh"`` tunes again. ``"off"`` neither reads nor stores plans. On other GPUs of the same kind, or with
            another driver, one step confirms a stored plan. If less memory is free than the plan needs, the plan is
            solved again from its fits.
        name: Name that distinguishes plans of equal workloads: up to 64 characters on one line.
        seed: Random seed of the search.
        lengths: Length of each sample of the dataset, if they differ: a list, an array or a tensor. The sample batch
            gets samples of the greatest length (cropped or repeated, or made by ``make_batch(n, length=length)``).
            Shorter samples are measured, too. So `Plan.token_sampler` can group samples of similar length, with as many
            samples per batch as fit.
        checkpointing: Class of the layers that a model repeats, or its name, or several; ``"auto"`` for a model of
            transformers. The options are to checkpoint none, every second or all of these layers. Each option is tuned.
            The fastest plan is returned, with the names of the layers in `checkpointed`. Default: the model stays
            unchanged.
        fits: Tasks that must fit into memory in addition to training. ``"resume"``: a loaded checkpoint that stays on
            the device (a checkpoint that is loaded to the host needs nothing). ``"save"``: a copy of model and
            optimizer that is saved during training. ``"eval"``: evaluation; `Plan.fits` has the largest batch of
            each device, next to the memory that a DDP rank keeps. Pass several as a tuple or a comma-separated text.
            Default: none.
        progress: Function that is called with a `Progress` from time to time. Default: a bar in a notebook, a line on a
            terminal, and nothing elsewhere.

    Raises:
        InputError: An argument is invalid. `DeviceError` and `WorkloadError` are subclasses.
        DoesNotFitError: Not even the smallest batch fits.
        UserCodeError: The workload's own code raised on its sample batch.
        RankFailedError: In a job, another rank raised.
        TuningInterrupted: Ctrl-C was pressed. The exception has the best plan so far.

    Warns:
        ChangedTrainingWarning: The check found that splitting the batch changes the training, see `Plan.checks`.
        AssumedLossWarning: No loss was given, and the model's outputs contain none.
        DoubtfulTimesWarning: The plan's times contradict each other. A stored plan warns, too.
        NotFiniteWarning: The loss of the sample batch, or its gradient, is NaN or infinite.
    """
    request = checked_request(
        devices=devices_of_process(devices, strategy),
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
    described["loss_reduction"] = loss_reduction
    precisions, layers = precision_list(precision), checkpointing_list(checkpointing)

    def source_of(variant: Variant) -> Source:
        chosen = {**vars(variant), "checkpointing": layers[variant.checkpointing]}
        return workload_source(model_or_workload, sample_batch, {**described, **chosen})

    with worker_for(request, source_of, isolate=isolate) as worker, heard_by(progress) as heard:
        options = worker.job.request, onward(heard or quiet), layers
        plan = drive(worker, lambda workers: _tuned_variants(_Tuning(workers, *options), precisions, numbers))
    return _warned(plan)


_WARNINGS = {
    TIMES_DISAGREE: DoubtfulTimesWarning,
    NOT_FINITE: NotFiniteWarning,
    "loss-assumed": AssumedLossWarning,
}
"""Warnings of `tune`, by the kind of the note."""


def _warned(plan: Plan) -> Plan:
    """Warn about an assumed or NaN loss, doubtful times, and if splitting changes the training. Return the plan."""
    for note in plan.notes:
        if note.kind in _WARNINGS:
            warn_user(note.text, _WARNINGS[note.kind])
    found = changed(plan.checks)
    if found:
        others = f". See plan.checks for {len(found) - 1} more." if len(found) > 1 else "."
        warn_user(f"{str(found[0]).rstrip('.')}{others}", ChangedTrainingWarning)
    return plan


@dataclass(frozen=True)
class _Tuning:
    """The arguments of `tune` except the workload."""

    workers: Workers
    request: Request
    progress: Callable[[Progress], None]
    checkpointings: Sequence[Checkpointing | None]


def devices_of_process(devices: Any, strategy: str) -> Any:
    """Return the devices that this process may use. For DDP, they are its part of the machine's devices."""
    if strategy != "ddp":
        return devices
    from autosplit.tuning.rank_group import own_part

    return own_part(devices)


@contextmanager
def worker_for(request: Request, source_of: Callable[[Variant], Source], *, isolate: bool) -> Iterator[Worker]:
    """Yield the worker of this process. If several ranks tune DDP, connect to the other ranks first."""
    with ExitStack() as closing:
        job = None
        if request.strategy == "ddp":
            from autosplit.tuning.rank_group import in_a_job, joined

            if in_a_job():
                job = closing.enter_context(joined(request))
        yield closing.enter_context(
            Worker(job or alone(request, machine_of(request.devices)), source_of, isolate=isolate)
        )


def _tuned_variants(tuning: _Tuning, wanted: tuple[str | None, ...], lengths: Sequence[int] | None) -> Plan:
    lacking = itertools.chain(*tuning.workers.ask(_without_bf16, wanted))
    precisions, notes = native_ones(wanted, [*lacking])
    length = None if lengths is None else max(lengths)
    layers = range(len(tuning.checkpointings))
    variants = [Variant(*one, length) for one in itertools.product(precisions, layers)]
    if lengths is None:
        plan, _ = _fastest_of(variants, tuning, notes)
        # A stored plan may have several lengths, which this call did not request.
        return plan if plan.lengths is None else replaced(plan, lengths=None)
    return _tuned_by_length(lengths, variants, tuning, notes)


def _without_bf16(worker: Worker, wanted: tuple[str | None, ...]) -> list[str]:
    return without_bf16(wanted, worker.job.devices)


def _tuned_by_length(
    lengths: Sequence[int], variants: Sequence[Variant], tuning: _Tuning, notes: tuple[Note, ...]
) -> Plan:
    """Tune for samples of the greatest length, as 50% of the progress. Then measure shorter samples."""
    from autosplit.extras.tuned_lengths import with_lengths  # an allowed layering violation, see tests/test_layers.py

    def longest(part: Progress) -> None:
        if part.stage != "done":
            tuning.progress(replace(part, fraction=part.fraction / 2))

    def shorter(part: Progress) -> None:
        tuning.progress(replace(part, fraction=0.5 + part.fraction / 2))

    try:
        plan, variant = _fastest_of(variants, replace(tuning, progress=longest), notes, more=1)
    except UserCodeError as error:
        raise UserCodeError(
            f"{error}; its samples had the longest of the lengths, {max(lengths)}. If the model takes no samples of "
            "this length, cut them. If another dimension was used as the length, pass make_batch(n, length=...)",
            error.frames,
        ) from error
    try:
        with users_code_named():
            found = with_lengths(plan, lengths, variant, tuning.request, tuning.workers, shorter)
    except KeyboardInterrupt:
        raise TuningInterrupted(with_notes(plan, LENGTHS_INTERRUPTED_NOTE)) from None
    shorter(Progress("done", "done", 1.0))
    return found


def _fastest_of(
    variants: Sequence[Variant], tuning: _Tuning, notes: tuple[Note, ...], more: int = 0
) -> tuple[Plan, Variant]:
    """Tune each variant, and return the plan and the variant that are fastest.

    The variants share the time limit with `more` other tasks.
    """
    tuning.workers.ask(Worker.prepare, variants)
    names = _names_of(variants, tuning.checkpointings)
    plans: dict[str, Plan] = {}
    misfits: list[DoesNotFitError] = []
    for number, name in enumerate(names):
        timed = replace(tuning.request, deadline=tuning.request.deadline.part(len(variants) + more - number))
        told = tuning.progress if len(variants) == 1 else part_of(tuning.progress, number, len(variants), name)
        try:
            plans[name] = _tuned_variant(replace(tuning, request=timed, progress=told), number)
        except TuningInterrupted as interrupted:
            if not plans:
                raise
            best = _fastest(plans if interrupted.plan is None else {**plans, name: interrupted.plan})[1]
            # The plan may be complete for its variant, but not all requested variants were tuned.
            raise TuningInterrupted(with_notes(replaced(best, complete=False), INTERRUPTED_NOTE)) from None
        except DoesNotFitError as misfit:  # other variants may fit
            misfits.append(misfit)
            notes = (*notes, Note("variant-left-out", f"{name} is left out: {misfit}"))
    if not plans:
        raise misfits[0]
    return with_notes(_chosen(plans, tuning.workers), *notes), variants[names.index(_fastest(plans)[0])]


def _names_of(variants: Sequence[Variant], checkpointings: Sequence[Checkpointing | None]) -> list[str]:
    precise = len({variant.precision for variant in variants}) > 1
    names = []
    for variant in variants:
        parts = [f"precision {variant.precision}"] if precise else []
        if len(checkpointings) > 1:
            parts.append(str(checkpointings[variant.checkpointing] or "no checkpointed layer"))
        names.append(", ".join(parts))
    return names


def _fastest(plans: Mapping[str, Plan]) -> tuple[str, Plan]:
    return max(plans.items(), key=lambda named: named[1].samples_per_s)


def _chosen(plans: Mapping[str, Plan], workers: Workers) -> Plan:
    name, best = _fastest(plans)
    if len(plans) < 2:
        return replaced(best, ways=())
    named = {name: best, **plans}
    ways = tuple(TunedWay(one, plan.batch_size, plan.samples_per_s) for one, plan in named.items())
    return workers.amended(best, ways=ways)


def quiet(progress: Progress) -> None:
    """Do not report progress."""


def _tuned_variant(tuning: _Tuning, number: int) -> Plan:
    try:
        with users_code_named():
            return _tuned(tuning, number)
    except TuningInterrupted:
        raise
    except KeyboardInterrupt:  # Ctrl-C came before any plan was found.
        raise TuningInterrupted(None) from None


@contextmanager
def users_code_named() -> Iterator[None]:
    """Convert errors of the workload's own code to UserCodeError. Errors of autosplit pass unchanged."""
    try:
        yield
    except AutosplitError:
        raise
    except (Exception, SystemExit) as error:
        # The user's code may raise after the first step. Or it may call sys.exit(), which looks like autosplit's own
        # exit.
        if isinstance(error, SystemExit) or ran_a_step(error.__traceback__):
            raise from_user_code(error, "the workload") from error
        raise


def _tuned(tuning: _Tuning, number: int) -> Plan:
    workers, request = tuning.workers, tuning.request
    tuning.progress(Progress("building", "building the model", 0.0))
    workers.ask(Worker.build, number)
    key = ProfileKey(workers.job.machine, agreed(workers.ask(Worker.description)), request.facts())
    found = recalled(key, request, measured=workers.job.several)
    _log.info(
        "profile %s: %s",
        key.digest,
        "remembered" if found.plan else "; ".join(map(str, found.notes)) or "not there",
    )
    # This note belongs to the run, not to the plan. The same stored plan may be returned for an explicit "cpu".
    defaulted = (NO_GPU_NOTE,) if request.defaulted and request.kind == "cpu" else ()
    if found.holds:
        return found.told(nothing_run(found, request), *defaulted)
    tuning.progress(Progress("tracing", "tracing the model", fraction_of("tracing")))
    request, notes = workers.trace(request, key)
    if found.plan is not None:
        plan, found = tried_again(key, request, found, workers)
        if plan is not None:
            return with_notes(plan, last=[*defaulted, *workers.losses()])
    return _tuned_anew(tuning, request, key, found, notes, defaulted)


def _tuned_anew(
    tuning: _Tuning,
    request: Request,
    key: ProfileKey,
    found: Recalled,
    notes: tuple[Note, ...],
    defaulted: tuple[Note, ...],
) -> Plan:
    workers = tuning.workers
    if request.profile == "auto" and not found.notes:
        log_newest(key)
    session = session_of(workers)(workers, request, key, tuning.progress, notes)
    plan = replace(session.plan(), checkpointed=workers.own.followed.checkpointed)
    plan = with_notes(plan, last=workers.losses())
    plan = kept(plan, key, found, workers, always=defaulted)
    if not plan.complete:
        raise TuningInterrupted(plan)
    return plan


def session_of(workers: Workers) -> type[Session]:
    """Return the class of the session: `JointSession` if a job has several ranks, otherwise `LoneSession`."""
    if not workers.job.several:
        return LoneSession
    from autosplit.tuning.joint_session import JointSession

    return JointSession
