"""Define what the stages of one tuning share, and what they measure: `Run` and `Survey`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autosplit.notes import Note
from autosplit.plan.layout import DdpOptions
from autosplit.probe.prober import Prober
from autosplit.probe.request import Request
from autosplit.profiles.key import ProfileKey
from autosplit.solve.memory import Ceiling
from autosplit.solve.step_time import StepTime
from autosplit.tuning.process import Processes
from autosplit.tuning.progress import Progress, Reporter
from autosplit.workload.workload import Workload, why_single

if TYPE_CHECKING:  # a stored plan needs neither
    from autosplit.solve.solver import Solver
    from autosplit.tuning.limits import Limits

POINT_BUDGET_S = 0.5
"""Time limit in seconds for repeating the measurement of one size."""

TRIAL_BUDGET_S = 1.0
"""Time limit in seconds for repeating the measurement of a trial."""


@dataclass(frozen=True)
class Run:
    """One tuning of a prepared workload.

    Attributes:
        request: The request, with all devices.
        report: Reports the progress.
        notes: The notes so far. The stages add theirs.
    """

    processes: Processes
    request: Request
    key: ProfileKey
    report: Reporter
    notes: list[Note] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        processes: Processes,
        request: Request,
        key: ProfileKey,
        listener: Callable[[Progress], None],
        notes: tuple[Note, ...] = (),
    ) -> Run:
        """Begin a run, whose progress goes to `tell`."""
        own = processes.own
        report = Reporter(listener, own.counted, num_devices=len(own.job.devices), n_trials=request.n_trials)
        own.prober.report = report
        return cls(processes, request, key, report, [*notes])

    @property
    def prober(self) -> Prober:
        """The prober of this process's devices."""
        return self.processes.own.prober

    @property
    def workload(self) -> Workload:
        """The workload that is tuned."""
        return self.processes.own.workload

    @property
    def may_accumulate(self) -> bool:
        """Whether an optimizer step may have several micro-steps."""
        return why_single(self.workload) is None


@dataclass(frozen=True)
class Survey:
    """What the devices can do, as measured one by one before a search.

    Attributes:
        ranks: The ceiling of each device as a DDP rank.
        step_time: The time model of a step, fitted to the measurements.
        least_batch: The smallest batch that a device can train on.
        options: The options of DDP.
        solver: Proposes configurations. None if none is tried: DDP in one process is solved from the measurements.
        limits: Finds BalancedDataParallel's ceilings. None for DDP.
        patience: See `proposals.PATIENCE`. 0 if nothing is tried.
    """

    ranks: tuple[Ceiling, ...]
    step_time: StepTime
    least_batch: int
    options: DdpOptions
    solver: Solver | None = None
    limits: Limits | None = None
    patience: int = 0
