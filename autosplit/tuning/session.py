"""Run the steps of a tuning: check gradients, measure, search, and make the plan."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from autosplit.addons import addon
from autosplit.errors import AutosplitError, InputError
from autosplit.notes import Note
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.plan.plan import Plan
from autosplit.probe.check_result import Check
from autosplit.probe.gradient_check import checks_for, not_checked
from autosplit.probe.request import Request
from autosplit.profiles.key import ProfileKey
from autosplit.runtime.protocol import Measurement
from autosplit.solve.optuna_search import search
from autosplit.solve.proposals import PATIENCE, Proposer, steadied
from autosplit.solve.search_space import Configuration
from autosplit.solve.solver import Solver
from autosplit.solve.split import accumulation_steps, even_split, micro_batch_sizes
from autosplit.solve.trial import Trial, best_trial, configuration_of
from autosplit.text import prose
from autosplit.tuning.assemble import Answer, accumulates, assembled, idle_notes, why_single
from autosplit.tuning.progress import Progress, fraction_of, searched_share
from autosplit.tuning.worker import Workers

_log = logging.getLogger(__name__)

POINT_BUDGET_S = 0.5
"""Time limit in seconds for repeating the measurement of one size."""

TRIAL_BUDGET_S = 1.0
"""Time limit in seconds for repeating the measurement of a trial."""

MOST_FORWARDS = 2**16
"""Largest number of forwards per optimizer step. A larger effective batch is probably the size of a dataset."""

INTERRUPTED_NOTE = Note("interrupted", "The search was interrupted. This is the best plan so far.")

USUAL_SIZES = 8
"""Number of sizes at which a device is timed, for most workloads."""


class Session(ABC):
    """One tuning: it measures, searches, and makes the plan from the measurements.

    Args:
        request: The request, with all devices.
        tell: Function that is called with the progress.
    """

    solver: Solver
    """Predicts step times. Available after the devices have been measured."""

    def __init__(
        self,
        workers: Workers,
        request: Request,
        key: ProfileKey,
        tell: Callable[[Progress], None],
        notes: Sequence[Note] = (),
    ) -> None:
        self.workers, self.worker, self.request, self.key, self.tell = workers, workers.own, request, key, tell
        self.notes = [*notes]
        self.workload, self.prober = self.worker.workload, self.worker.prober
        self.prober.report = self._report
        self.stage = "ceilings"
        self._reports: Counter[str] = Counter()  # Number of reports by stage.
        self.checks: tuple[Check, ...] = ()
        self.trials: list[Trial] = []

    def plan(self) -> Plan:
        """Measure, search, and make the plan.

        On Ctrl-C, return the best plan so far, which is not `complete`. If no trial has succeeded, raise
        KeyboardInterrupt.
        """
        self._begin()
        self._check()
        return self._found()

    @property
    def may_accumulate(self) -> bool:
        """Whether an optimizer step may have several micro-steps."""
        return why_single(self.workload) is None

    # Defined by each kind of session

    @abstractmethod
    def _begin(self) -> None:
        """Raise an error if the workload can't be tuned."""

    @abstractmethod
    def _found(self) -> Plan:
        """Measure, and find the plan."""

    @abstractmethod
    def _measured(self, splits: tuple[tuple[int, ...], ...]) -> Measurement:
        """Run an optimizer step. Raise OutOfMemoryError if it does not fit."""

    @abstractmethod
    def _can_train(self, splits: tuple[tuple[int, ...], ...]) -> bool:
        """Return whether each device gets enough samples in these micro-steps."""

    @abstractmethod
    def _quick_answer(self, best: Trial) -> Answer:
        """Return the results for the best trial, without running another step."""

    @property
    def _patience(self) -> int:
        return PATIENCE

    # Before the search

    def _check(self) -> None:
        """Check whether splitting the batch changes the training. Rank 0 checks for all ranks."""
        self._say("checks", "checking gradients", fraction_of("checks"))
        prepared = self.worker.prepared
        try:
            if prepared.isolated is not None:  # A check that crashes must not end this process.
                self.checks, notes = prepared.isolated.ask(checks_for)
            else:
                self.checks, notes = checks_for(self.workload, prepared.rebuild)
        except AutosplitError as error:
            notes = (not_checked(error),)
        for found in self.checks:
            _log.info("check: %s", found)
        self.notes[:0] = notes  # Put these notes first, because a short report shows only the first note.

    # The search

    def _searched(self) -> Trial:
        self.stage = "search"
        self._tell_trial()
        if self.prober.out_of_time:
            text = (
                "The time limit ended before the search began. The ceilings are the largest batches that had run "
                "by then. autosplit timed few sizes and tried one configuration. Raise time_limit_s to find a "
                "faster plan."
            )
            self.notes.append(Note("time-limit", text))
        most, steps = self.solver.space.region.largest_batch, self.solver.space.max_steps
        _log.info("searching up to %d samples per forward and up to %d forwards per step", most, steps)
        search(
            self.solver.space,
            self._evaluate,
            Proposer(self.solver, patience=self._patience),
            n_trials=self.request.n_trials,
            seed=self.request.seed,
            sampler=self.request.sampler,
            deadline_s=self.request.deadline.end_s,
            on_trial=self._keep,
        )
        best = self._best_trial()
        if best is None:
            raise self._nothing_fits()
        _log.info("trial %d is the fastest", best.number)
        return best

    def _evaluate(self, number: int, configuration: Configuration) -> Trial:
        """Run a configuration. Return a failed trial if it does not fit or can't train."""
        splits = self.solver.splits_of(configuration)
        trial = Trial(
            number, configuration.gpu0_bsz, configuration.batch_size, configuration.accumulation_steps, splits[0]
        )
        if not self._can_train(splits):
            least = self._least_share
            why = "every DDP rank needs a sample" if least == 1 else f"BatchNorm needs {least} samples in training"
            return replace(trial, failure=f"a device would get fewer than {least} samples: {why}")
        try:
            measured = self._measured(splits)
        except OutOfMemoryError as error:
            return replace(trial, failure=prose(str(error)), failed_device=error.device_index)
        return replace(
            trial,
            samples_per_s=sum(map(sum, splits)) / measured.seconds,
            error_share=min(1.0, measured.error_s / measured.seconds),
            peak_bytes=measured.peak_bytes,
        )

    @property
    def _least_share(self) -> int:
        return self.solver.space.region.least_share

    def _best_trial(self) -> Trial | None:
        """Return the best trial according to the time model fitted to all trials, with its own measurements."""
        if not self.trials:
            return None
        solver = self.solver.refitted(self.trials)
        known = steadied(solver, self.trials)
        best = best_trial(solver.space, known, solver.samples_per_s)
        return None if best is None else self.trials[known.index(best)]

    def _even_rate(self, best: Trial) -> float | None:
        """Measure the even split of the same effective batch. If it does not fit, try up to three more micro-steps."""
        count, effective = len(self.request.devices), self._effective_of(best)
        sizes = [best.batch_size]
        if accumulates(self.request, self.workload):
            sizes += [-(-effective // (best.accumulation_steps + more)) for more in (1, 2, 3)]
        for size in dict.fromkeys(sizes):
            splits = tuple(even_split(micro, count) for micro in micro_batch_sizes(effective, size))
            shares = self.solver.space.region_of(len(splits)).gpu0_bounds(size)
            if shares is None or not shares[0] <= splits[0][0] <= shares[1]:
                continue  # According to the memory model, this split does not fit.
            if not self._can_train(splits):
                continue
            known = next((t.samples_per_s for t in self.trials if t.split == splits[0] and t.batch_size == size), None)
            if known is not None:
                return known
            try:
                return effective / self._measured(splits).seconds
            except OutOfMemoryError:
                continue
        return None

    def _nothing_fits(self) -> DoesNotFitError:
        failure = str(self.trials[-1].failure).rstrip(".") if self.trials else "there was no configuration to try"
        least, sizes = self._least_share, self.request.effective_batch_sizes
        refused = not any(self._can_train(self.solver.splits_of(configuration_of(trial))) for trial in self.trials)
        if least > 1 and self.trials and refused:
            return DoesNotFitError(
                f"autosplit can't cut an optimizer step of {0 if sizes is None else sizes[1]} samples into "
                f"forwards of at most {self.prober.max_batch_size}. Each device must get 0 or at least {least} "
                "samples, because BatchNorm needs that many. Pass a different effective_batch_size, or raise "
                "max_batch_size.",
            )
        return DoesNotFitError(
            f"None of {len(self.trials)} configurations ran. The last failure: {failure}. Pass another "
            "effective_batch_size, or use a smaller model, a lower precision or larger devices."
        )

    def _effective_of(self, trial: Trial) -> int:
        return self.solver.space.effective_of(configuration_of(trial))

    # The plan

    def _assembled(self, answer: Answer, *notes: Note) -> Plan:
        plan = assembled(
            self.request,
            self.workload,
            self.key,
            answer,
            trials=tuple(self.trials),
            checks=self.checks,
            loss_rule=self.prober.facts.loss_rule,
            notes=(*self.notes, *notes, *idle_notes(self.request, answer)),
            real_steps=self.prober.steps,
            real_ooms=self.prober.ooms,
        )
        if self.request.simulated:
            chosen = zip(plan.devices, addon("attention_of")(self.prober.runtime), strict=True)
            plan = replace(plan, devices=tuple(replace(device, attention=found) for device, found in chosen))
        return plan

    def _best_so_far(self) -> Plan | None:
        best = self._best_trial()
        if best is None:
            return None
        return replace(self._assembled(self._quick_answer(best), INTERRUPTED_NOTE), complete=False)

    # Progress

    def _keep(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._tell_trial()

    def _tell_trial(self) -> None:
        self._report(f"searching, trial {min(len(self.trials) + 1, self.request.n_trials)}")

    def _confirm(self) -> None:
        self.stage = "confirming"
        self._report("the plan")

    def _report(self, message: str) -> None:
        if self.stage == "confirming":
            message = f"confirming: {message}"
        self._say(self.stage, message, fraction_of(self.stage, self._done_share()))
        self._reports[self.stage] += 1

    def _done_share(self) -> float:
        count = len(self.worker.job.devices)
        if self.stage == "search":
            return searched_share(len(self.trials), self.request.n_trials)
        # Each device has one ceiling as a rank, and one as primary or replica.
        usual = {"ceilings": 2 * count, "times": USUAL_SIZES * count}
        return self._reports[self.stage] / usual.get(self.stage, 2 * count)

    def _say(self, stage: str, message: str, fraction: float) -> None:
        rates = (trial.samples_per_s for trial in self.trials if trial.samples_per_s is not None)
        self.tell(Progress(stage, message, fraction, *self._counted(), max(rates, default=None)))

    def _counted(self) -> tuple[int, int]:
        return self.prober.steps, self.prober.ooms


def most_steps(sizes: tuple[int, int] | None, largest_batch: int) -> int:
    """Return the largest number of accumulation steps to search, for the largest batch of a forward."""
    least, most_samples = (1, 1) if sizes is None else sizes
    fewest = accumulation_steps(least, largest_batch)
    if fewest > MOST_FORWARDS:
        raise InputError(
            f"effective_batch_size is at least {least}, which needs {fewest} forwards of the largest batch that "
            f"fits. Expected at most {MOST_FORWARDS}. Lower effective_batch_size.",
        )
    most = max(fewest, accumulation_steps(most_samples, largest_batch))
    return min(most + max(3, fewest), MOST_FORWARDS)
