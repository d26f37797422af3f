"""Run the trials of a tuning, and choose the fastest."""

from __future__ import annotations

import logging
from dataclasses import replace

from autosplit.notes import TIMES_DISAGREE, Note
from autosplit.oom import DoesNotFitError, OutOfMemoryError
from autosplit.runtime.protocol import Measurement
from autosplit.solve.optuna_search import search
from autosplit.solve.proposals import Proposer, error_of, steadied
from autosplit.solve.search_space import Configuration
from autosplit.solve.solver import Solver
from autosplit.solve.split import even_split, micro_batch_sizes
from autosplit.solve.trial import Trial, best_trial, configuration_of
from autosplit.text import prose
from autosplit.tuning.assemble import accumulates
from autosplit.tuning.run import TRIAL_BUDGET_S, Run

_log = logging.getLogger(__name__)

DOUBTFUL_ERROR = 0.3
"""Error of the fitted time model, as a fraction. Above it, the measured times are doubtful."""

TIME_LIMIT_NOTE = Note(
    "time-limit",
    "The time limit ended before the search began. The ceilings are the largest batches that had run by then. "
    "autosplit timed few sizes and tried one configuration. Raise time_limit_s to find a faster plan.",
)


class Search:
    """The trials of a tuning. The solver proposes configurations, and each is run on all devices.

    Attributes:
        trials: The trials so far.
    """

    def __init__(self, run: Run, solver: Solver, patience: int) -> None:
        self.trials: list[Trial] = []
        self.solver = solver
        self._run, self._patience = run, patience

    def best_of_all(self) -> Trial:
        """Run all trials, and return the fastest.

        Raises:
            DoesNotFitError: No trial succeeded.
        """
        run, request = self._run, self._run.request
        run.report.stage = "search"
        run.report.trial()
        if run.prober.out_of_time:
            run.notes.append(TIME_LIMIT_NOTE)
        most, steps = self.solver.space.region.largest_batch, self.solver.space.max_steps
        _log.info("searching up to %d samples per forward and up to %d forwards per step", most, steps)
        search(
            self.solver.space,
            self._evaluate,
            Proposer(self.solver, patience=self._patience),
            n_trials=request.n_trials,
            seed=request.seed,
            sampler=request.sampler,
            deadline_s=request.deadline.end_s,
            on_trial=self._keep,
        )
        best = self.best()
        if best is None:
            raise self._nothing_fits()
        _log.info("trial %d is the fastest", best.number)
        return best

    def best(self) -> Trial | None:
        """Return the best trial according to the time model fitted to all trials, with its own measurements."""
        if not self.trials:
            return None
        solver = self.solver.refitted(self.trials)
        known = steadied(solver, self.trials)
        best = best_trial(solver.space, known, solver.samples_per_s)
        return None if best is None else self.trials[known.index(best)]

    def measured(self, splits: tuple[tuple[int, ...], ...]) -> Measurement:
        """Run an optimizer step. Raise OutOfMemoryError if it does not fit."""
        copies_s = self.solver.step_time.copying_s(splits)
        return self._run.processes.step(splits, budget_s=TRIAL_BUDGET_S, copies_s=copies_s)

    def even_rate(self, best: Trial) -> float | None:
        """Measure the even split of the same effective batch. If it does not fit, try up to three more micro-steps."""
        request = self._run.request
        count, effective = len(request.devices), self.effective_of(best)
        sizes = [best.batch_size]
        if accumulates(request, self._run.workload):
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
                return effective / self.measured(splits).seconds
            except OutOfMemoryError:
                continue
        return None

    def effective_of(self, trial: Trial) -> int:
        """Return the samples of a trial's optimizer step."""
        return self.solver.space.effective_of(configuration_of(trial))

    def doubts(self) -> tuple[Note, ...]:
        """Return a note if the measured times contradict each other."""
        off = error_of(self.solver.refitted(self.trials), self.trials)
        if self._run.prober.worker.exact or off <= DOUBTFUL_ERROR:
            return ()
        text = (
            f"The measured times contradict each other by {100 * off:.0f}%, probably because the machine is "
            "busy. Tune again later with profile='refresh' (--profile refresh). If other processes share the "
            "CPU, set OMP_NUM_THREADS=1 in the environment."
        )
        return (Note(TIMES_DISAGREE, text),)

    def _keep(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._run.report.rates.append(trial.samples_per_s)
        self._run.report.trial()

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
            measured = self.measured(splits)
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

    def _can_train(self, splits: tuple[tuple[int, ...], ...]) -> bool:
        """Return whether each device gets enough samples. In a job, every rank takes part in the first micro-step."""
        least = self._least_share
        if not self._run.processes.job.has_peers:
            return not any(0 < share < least for split in splits for share in split)
        return min(splits[0]) >= least and (least == 1 or min(map(min, splits)) >= least)

    def _nothing_fits(self) -> DoesNotFitError:
        failure = str(self.trials[-1].failure).rstrip(".") if self.trials else "there was no configuration to try"
        return DoesNotFitError(
            f"None of {len(self.trials)} configurations ran. The last failure: {failure}. Pass another "
            "effective_batch_size, or use a smaller model, a lower precision or larger devices."
        )
