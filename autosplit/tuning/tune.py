"""Define `tune()`: the order of the stages. Other modules have the stages.

`recall_or_tune`   build the workload | stored plan? return it, or confirm it by one step
`measure_and_search`
  check            compare the gradients of a whole and a split batch, on this machine's CPU
  survey           ceilings and times of every device, from real steps. For `sim:` devices, computed from a trace
  search           trials of whole steps (Optuna). Not for DDP in one process, which is solved from the survey
  plan             the fastest trial, its ceilings, and DDP's settings

In one process, all this runs here. In a job (strategy "ddp" under torchrun), all this runs on rank 0. The other ranks
run rank 0's orders: every rank surveys its own device, and all ranks run each trial together. `drive` sends the orders,
and every rank returns the same plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.errors import AutosplitError, InputError, ends_tracebacks, from_user_code, shown, warn_user
from autosplit.notes import NOT_FINITE, TIMES_DISAGREE, Note
from autosplit.plan.plan import Plan
from autosplit.plan.record import replaced, with_notes
from autosplit.probe.check_result import Check, changed
from autosplit.probe.request import Request, checked_request
from autosplit.profiles.key import ProfileKey, machine_of
from autosplit.runtime.prepare import Source, workload_source
from autosplit.runtime.trainee import ran_a_step
from autosplit.tuning.keywords import suggests_keywords
from autosplit.tuning.process import Process, Processes, alone, drive, equal_on_all_ranks
from autosplit.tuning.progress import Progress, fraction_of, never_falling, progress_listener
from autosplit.tuning.recall import confirm_or_solve_again, find_saved, from_profile_note, save_plan
from autosplit.tuning.run import Run, Survey
from autosplit.workload.workload import Workload

_log = logging.getLogger(__name__)

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
    devices: str | Device | torch.device | Sequence[str | int | Device | torch.device] | None = None,
    strategy: str = "auto",
    precision: str | None = None,
    effective_batch_size: int | tuple[int, int] | str | None = None,
    max_batch_size: int | None = None,
    reserve: str | float | None = None,
    n_trials: int = 24,
    time_limit_s: float | None = None,
    sampler: Any = None,
    isolate: bool = False,
    profile: str = "auto",
    name: str | None = None,
    seed: int = 0,
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
        sample_batch: One batch of training data. See `Workload` for this argument and those up to `loss_reduction`.
        loss_fn: ``loss_fn(outputs, targets)``.
        compute_loss: ``compute_loss(model, batch)``.
        optimizer: A class, a factory or an optimizer object. Default: AdamW.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss combines the samples of a batch. Default: ``"mean"``.
        devices: Devices such as ``"cuda:0,1"``, ``"cpu:2GiB,cpu:1GiB"`` or ``"sim:2xA100-40GB+1xRTX3090"``. Default:
            every visible GPU, or the CPU if there is none.
        strategy: ``"auto"`` and ``"balanced"`` search the split of BalancedDataParallel, and also solve for DDP's
            batch sizes. ``"ddp"`` plans for DDP only, and the plan's split has the ranks' batch sizes. In one process,
            DDP's plan is computed from measurements of single devices. Its samples/s are predicted, and there are no
            trials. In a job (torchrun, Slurm, or an existing process group), call `tune` on every rank. The ranks
            measure their devices at the same time, rank 0 searches, all ranks run the trials together, and every rank
            gets the same plan.
        precision: ``"none"``, ``"bf16"`` or ``"fp16"``. It overrides the precision of a `Workload`. `tune_best` tries
            several.
        effective_batch_size: Samples per optimizer step, which the plan has exactly. Or a range such as ``(256, 1024)``
            or ``"256:1024"``. The plan has the fastest size of the range. Default: one forward per step, with the
            smallest batch that has 97% of the best throughput.
        max_batch_size: Largest number of samples per forward.
        reserve: Memory to keep free on every device: bytes, ``"1GiB"``, or a fraction (``0.05``, ``"5%"``). Default: 5%
            on GPUs.
        n_trials: Largest number of trials of the search.
        time_limit_s: Time in seconds after which no further trial begins. At least one trial is run. After this time,
            fewer sizes are measured for it. With `isolate`, a step that hangs is also ended.
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
    _refuse_several(precision)
    request = request_for(
        devices,
        strategy,
        effective_batch_size=effective_batch_size,
        max_batch_size=max_batch_size,
        reserve=reserve,
        n_trials=n_trials,
        time_limit_s=time_limit_s,
        sampler=sampler,
        profile=profile,
        name=name,
        seed=seed,
    )
    described: dict[str, Any] = {"loss_fn": loss_fn, "compute_loss": compute_loss, "optimizer": optimizer}
    described |= {"loss_reduction": loss_reduction, "precision": precision}

    def source_of(_variant: int) -> Source:
        return workload_source(model_or_workload, sample_batch, described)

    with progress_listener(progress) as listener:
        plan = tune_request(request, source_of, never_falling(listener or quiet), isolate=isolate)
    return with_warnings(plan)


def _refuse_several(precision: Any) -> None:
    if isinstance(precision, (tuple, list)) or (isinstance(precision, str) and "," in precision):
        raise InputError(
            f"precision is {shown(precision)}. Expected one precision. To try several, call "
            f"autosplit.tune_best(model, sample_batch, precision={shown(precision)})."
        )


_WARNINGS = {
    TIMES_DISAGREE: DoubtfulTimesWarning,
    NOT_FINITE: NotFiniteWarning,
    "loss-assumed": AssumedLossWarning,
}
"""Warnings of `tune`, by the kind of the note."""


def with_warnings(plan: Plan) -> Plan:
    """Warn about an assumed or NaN loss, doubtful times, and if splitting changes the training. Return the plan."""
    for note in plan.notes:
        if note.kind in _WARNINGS:
            warn_user(note.text, _WARNINGS[note.kind])
    found = changed(plan.checks)
    if found:
        others = f". See plan.checks for {len(found) - 1} more." if len(found) > 1 else "."
        warn_user(f"{str(found[0]).rstrip('.')}{others}", ChangedTrainingWarning)
    return plan


def tune_request(
    request: Request,
    source_of: Callable[[int], Source],
    listener: Callable[[Progress], None],
    *,
    isolate: bool = False,
) -> Plan:
    """Return the plan of a checked request, on every rank of a job. See `tune`."""
    with process_for(request, source_of, isolate=isolate) as process:
        # Rank 0 runs the lambda, and the other ranks its orders. The job's request has the devices of all ranks.
        plan = drive(process, lambda processes: Tuning(processes, process.job.request, listener).plan())
    # A stored plan may have several lengths, which only `tune_lengths` requests.
    return plan if plan.lengths is None else replaced(plan, lengths=None)


@dataclass(frozen=True)
class Tuning:
    """A tuning, as rank 0 or the only process runs it.

    Attributes:
        processes: All processes that tune together. Each has a worker, which runs steps on the process's own devices.
        request: The request, with the devices of all ranks.
        progress: Function that is called with each `Progress`.
    """

    processes: Processes
    request: Request
    progress: Callable[[Progress], None]

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            TuningInterrupted: Ctrl-C was pressed.
        """
        try:
            with users_code_named():
                return recall_or_tune(self)
        except TuningInterrupted:
            raise
        except KeyboardInterrupt:  # there is no plan to return
            raise TuningInterrupted(None) from None


def request_for(spec: Any, strategy: str, **options: Any) -> Request:
    """Parse the devices and check the arguments. In a job that trains with DDP, keep this rank's accelerator only."""
    parse: Callable[[Any], tuple[Device, ...]] = parse_devices
    if strategy == "ddp":
        from autosplit.tuning.rank_group import in_a_job, own_devices

        parse = own_devices if in_a_job() else parse
    return checked_request(devices=parse(spec), defaulted=spec is None, strategy=strategy, **options)


@contextmanager
def process_for(request: Request, source_of: Callable[[int], Source], *, isolate: bool) -> Iterator[Process]:
    """Yield this process as a part of the tuning. If several ranks tune DDP, connect to the other ranks first."""
    with ExitStack() as closing:
        job = None
        if request.strategy == "ddp":
            from autosplit.tuning.rank_group import in_a_job, joined_job

            if in_a_job():
                job = closing.enter_context(joined_job(request))
        yield closing.enter_context(
            Process(job or alone(request, machine_of(request.devices)), source_of, isolate=isolate)
        )


def quiet(progress: Progress) -> None:
    """Do not report progress."""


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


def recall_or_tune(tuning: Tuning) -> Plan:
    """Return the stored plan, or measure the devices, search, and store the plan.

    Raises:
        TuningInterrupted: Ctrl-C was pressed. The best plan so far was stored for `autosplit show`. The next tuning
            does not use it, because it is not complete.
    """
    processes, request = tuning.processes, tuning.request
    tuning.progress(Progress("building", "building the model", 0.0))
    processes.ask(Process.build)
    key = ProfileKey(processes.job.machine, equal_on_all_ranks(processes.ask(Process.description)), request.facts())
    found = find_saved(key, request, measured=processes.job.has_peers)  # a job takes no plan that was only predicted
    # This note belongs to the run, not to the plan. The same stored plan may be returned for an explicit "cpu".
    defaulted = (NO_GPU_NOTE,) if request.defaulted and request.kind == "cpu" else ()
    if found.holds:
        return found.with_notes(from_profile_note(found), *defaulted)
    tuning.progress(Progress("preparing", "preparing the model", fraction_of("preparing")))
    request, notes = processes.prepare(request, key)
    if found.plan is not None:
        # The machine differs a little. If less memory is free, solve the plan again. Then confirm it by one step.
        plan, found = confirm_or_solve_again(key, request, found, processes)
        if plan is not None:
            return with_notes(plan, last=[*defaulted, *processes.crash_notes()])
    plan = measure_and_search(Run.of(processes, request, key, tuning.progress, notes))
    plan = save_plan(with_notes(plan, last=processes.crash_notes()), key, found, processes, always=defaulted)
    if not plan.complete:
        raise TuningInterrupted(plan)
    return plan


def measure_and_search(run: Run) -> Plan:
    """Check the gradients, measure the devices, search, and make the plan.

    After Ctrl-C, return the best plan so far, which is not `complete`. If no trial has succeeded, raise
    KeyboardInterrupt.
    """
    from autosplit.tuning.answer import interrupted_plan, ranks_plan, solved_ranks_plan, split_plan
    from autosplit.tuning.search import Search  # Here, because a stored plan needs none of these.

    checks = check_gradients(run)
    survey = search = None
    try:
        survey = survey_devices(run)
        if survey.solver is None:  # DDP in one process
            plan = solved_ranks_plan(run, survey, checks)
        else:
            search = Search(run, survey.solver, survey.patience)
            best = search.best_of_all()
            planned = split_plan if survey.limits is not None else ranks_plan
            plan = planned(run, survey, search, best, checks)
    except KeyboardInterrupt:
        # In a job, a second Ctrl-C raises at once. Then the ranks are at different places, and can't store a plan.
        if survey is None or search is None or not run.processes.all_stopped:
            raise
        so_far = interrupted_plan(run, survey, search, checks)
        if so_far is None:
            raise
        plan = so_far
    else:
        run.report.begin("done", "done")
    return replace(plan, checkpointed=run.prober.facts.checkpointed)


def survey_devices(run: Run) -> Survey:
    """Measure the devices: which batches fit, and how long they take.

    BalancedDataParallel's devices, and those of DDP in one process, are measured one after the other. In a job, every
    rank measures its own device, all ranks at the same time. Simulated devices compute their answers from a trace.
    """
    from autosplit.tuning.survey import survey_alone, survey_split

    if run.request.strategy != "ddp":
        return survey_split(run)
    if not run.processes.job.has_peers:
        return survey_alone(run)
    from autosplit.tuning.rank_survey import survey_ranks  # loads torch.distributed

    return survey_ranks(run)


def check_gradients(run: Run) -> tuple[Check, ...]:
    """Check on the CPU whether splitting the batch changes the training. The plan gets the result, or a note."""
    from autosplit.probe.gradient_check import checks_for, not_checked

    run.report.begin("checks", "checking gradients")
    prepared = run.processes.own.prepared
    checks: tuple[Check, ...] = ()
    try:
        # With `isolate`, the check runs in another process, because a check that crashes must not end this one.
        checks, notes = prepared.worker.ask(partial(checks_for, rebuild=prepared.rebuild))
    except AutosplitError as error:
        notes = (not_checked(error),)
    for found in checks:
        _log.info("check: %s", found)
    run.notes[:0] = notes  # Put these notes first, because a short report shows only the first note.
    return checks
