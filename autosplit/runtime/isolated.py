"""Real steps in a process of their own: what dies there (a kernel, the process, the host's memory) costs one call.

The process builds the workload from its source itself, runs the real runtime, and answers with plain numbers. It is
replaced when it dies, when it hangs, and when CUDA has failed in a way that makes every later call fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from autosplit.devices import Device
from autosplit.errors import AutosplitError, from_user_code, one_line
from autosplit.isolation import UNHURRIED_S, Child, ChildLostError, LostCauseError
from autosplit.oom import OutOfMemoryError, is_kernel_limit, is_oom
from autosplit.runtime.cpu import CpuRuntime
from autosplit.runtime.cuda import CudaRuntime
from autosplit.runtime.measurement import Measurement, StepShape
from autosplit.trainee import ran_a_step
from autosplit.workload import Workload

__all__ = ["IsolatedRuntime", "StepLostError"]

T = TypeVar("T")

RealRuntime = CpuRuntime | CudaRuntime

START_LIMIT_S = 60.0
"""What importing torch and building a workload may take, however little of a time limit is left."""

CALL_LIMIT_S = 10.0
"""The same for a call: a few steps, with the kernels chosen in the first."""

ASKED_LIMIT_S = 30.0
"""The same for a question about the workload, which is to take a few seconds."""

COMPILED_LIMIT_S = 120.0
"""The same for a compiled step, which is compiled in it."""

ALERT_LIMIT_S = 3.0
"""The same once a call has hung: others may, too."""

SLOWER_BY = 20.0
"""A call may take so much longer than the longest that was answered: steps grow from 1/16 of a ceiling to all of it."""

FUTILE_DEATHS = 3
"""So many processes may be lost where none has ever answered: the fault is not in the number of samples. And so many
may hang before the end of a time limit also ends the attempts."""


class StepLostError(OutOfMemoryError):
    """The process that ran a step died of it; counted as a lack of memory, which is what it mostly is."""


class IsolatedRuntime:
    """A runtime in a process of its own, which is started at once and loads meanwhile.

    Args:
        make: Picklable; makes the real runtime, there.
        devices: What the step is spread over.
        capacities_bytes: What each may hold.
        deadline_s: `time.monotonic()` by which all should be done; None for no limit. Half of what is left is the
            most that one call may take of it, so that something smaller can still be run after a step that hangs.

    Raises:
        InputError: `make` can't be pickled.

    """

    simulated = False

    def __init__(
        self,
        make: Callable[[], RealRuntime],
        devices: tuple[Device, ...],
        capacities_bytes: tuple[int, ...],
        *,
        deadline_s: float | None = None,
    ) -> None:
        self.devices = devices
        self.capacities_bytes = capacities_bytes
        self.shares_processor = devices[0].kind == "cpu"
        self._deadline_s = deadline_s
        self._longest_s = 0.0
        self._answered = False
        self._hung = 0
        self._deadly: dict[tuple[str, StepShape], str] = {}
        self._child = Child(partial(_Served, make, _Settings.of_this_process()))
        self._child.start()

    @property
    def notes(self) -> tuple[str, ...]:
        """What became of the processes that were lost, a sentence for each cause."""
        by_cause: dict[str, list[StepShape]] = {}
        for (_, shape), cause in self._deadly.items():
            by_cause.setdefault(cause, []).append(shape)
        return tuple(_lost_text(shapes, cause) for cause, shapes in by_cause.items())

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step for its memory and return each device's peak, in bytes.

        Raises:
            OutOfMemoryError: A device ran out of memory; it is named.
            StepLostError: The process died of it, or was ended because it hung.
            UserCodeError: The workload's own code raised; its cause is what.
            AutosplitError: The process can't be started, or dies of whatever it is asked.
        """
        found: tuple[int, ...] = self._call("peaks", shape)
        return found

    def measure(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Run a step for its time, and for its memory where one run gives both.

        Args:
            shape: The step.
            budget_s: Stop repeating after this long.

        Raises:
            AutosplitError: As `peaks`, with the same leaves.
        """
        found: Measurement = self._call("measure", shape, budget_s)
        return found

    def ask(self, function: Callable[[Workload], T]) -> T:
        """Call a function on the workload, there.

        Args:
            function: Picklable: one that can be imported; so is what it returns.

        Raises:
            AutosplitError: The process died of it, or was ended because it hung.
        """
        self._get_ready()
        try:
            found: T = self._child.call("ask", function, limit_s=ASKED_LIMIT_S)
        except ChildLostError as lost:
            raise AutosplitError(f"the process that was asked {lost.cause}; expected an answer") from None
        return found

    def close(self) -> None:
        """End the process, if there is one."""
        self._child.close()

    def _call(self, name: str, shape: StepShape, *args: float) -> Any:
        # What a process died of once is not run again.
        known = self._deadly.get((name, shape))
        if known is not None:
            raise self._lost_step(shape, known)
        self._get_ready()
        began_s = time.monotonic()
        try:
            answer = self._child.call(name, shape, *args, limit_s=self._limit_s(shape))
        except ChildLostError as lost:
            self._deadly[name, shape] = cause = lost.cause
            self._hung += lost.hung
        except AutosplitError:
            self._answered = True
            raise
        else:
            self._answered = True
            self._longest_s = max(self._longest_s, time.monotonic() - began_s)
            return answer
        self._refuse_to_go_on(cause)
        raise self._lost_step(shape, cause)

    def _get_ready(self) -> None:
        own_s = UNHURRIED_S if self._deadline_s is None else self._deadline_s - time.monotonic()
        try:
            self._child.get_ready(max(own_s, START_LIMIT_S))
        except ChildLostError as lost:
            raise AutosplitError(
                f"the process for real steps {lost.cause} before it had built the workload; expected it to start; "
                "mend what it says above (a script that tunes needs `if __name__ == '__main__':`), or leave isolate "
                "out (--no-isolate)"
            ) from None

    def _refuse_to_go_on(self, cause: str) -> None:
        """Give up where a process dies of anything, or steps go on hanging after the time limit."""
        if len(self._deadly) >= FUTILE_DEATHS and not self._answered:
            raise AutosplitError(
                f"the process for real steps died in each of its first {FUTILE_DEATHS} calls, the last time it "
                f"{cause}; expected a step to end; run one step of the workload by itself to see why, or leave "
                "isolate out (--no-isolate)"
            )
        out_of_time = self._deadline_s is not None and time.monotonic() > self._deadline_s
        if out_of_time and self._hung >= FUTILE_DEATHS:
            raise AutosplitError(
                f"the time limit is over and {self._hung} steps have hung; the last process {cause}; expected steps "
                "to end; ask for a max_batch_size at which they do, or raise time_limit_s"
            )

    def _lost_step(self, shape: StepShape, cause: str) -> StepLostError:
        active = [index for index, samples in enumerate(shape.splits[0]) if samples]
        index = active[0] if len(active) == 1 else None
        return StepLostError(
            f"the process that ran {_samples_text(shape)} {cause}; expected the step to end; give it fewer samples",
            device=None if index is None else self.devices[index].label,
            device_index=index,
            capacity_bytes=0 if index is None else self.capacities_bytes[index],
        )

    def _limit_s(self, shape: StepShape) -> float:
        """Return how long a call may take before it is taken to hang."""
        least_s = COMPILED_LIMIT_S if shape.compiled else ALERT_LIMIT_S if self._hung else CALL_LIMIT_S
        least_s = max(least_s, SLOWER_BY * self._longest_s)
        if self._hung:
            return least_s
        return max(least_s, UNHURRIED_S if self._deadline_s is None else (self._deadline_s - time.monotonic()) / 2)


def _lost_text(shapes: list[StepShape], cause: str) -> str:
    least = _samples_text(min(shapes, key=lambda shape: shape.num_samples))
    if len(shapes) == 1:
        return f"the process that ran {least} {cause}: counted as out of memory"
    return f"{len(shapes)} processes, the least of them at {least}, were lost: each {cause}; counted as out of memory"


def _samples_text(shape: StepShape) -> str:
    split = shape.splits[0]
    samples = f"{sum(split)} samples" if sum(map(bool, split)) < 2 else f"the split {split}"
    return f"{samples} in {len(shape.splits)} micro-steps" if len(shape.splits) > 1 else samples


# ---------------------------------------------------------------------------------------------- in the other process


@dataclass(frozen=True)
class _Settings:
    """What a process may have set of torch that changes what a step takes."""

    num_threads: int
    matmul_precision: str
    benchmark: bool
    deterministic: bool

    @classmethod
    def of_this_process(cls) -> _Settings:
        cudnn = torch.backends.cudnn
        return cls(torch.get_num_threads(), torch.get_float32_matmul_precision(), cudnn.benchmark, cudnn.deterministic)

    def take_over(self) -> None:
        torch.set_num_threads(self.num_threads)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.benchmark = self.benchmark
        torch.backends.cudnn.deterministic = self.deterministic


class _Served:
    """The real runtime, whose errors are made fit to travel."""

    def __init__(self, make: Callable[[], RealRuntime], settings: _Settings) -> None:
        settings.take_over()
        try:
            self._runtime = make()
        except (AutosplitError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            raise from_user_code(error, "the workload") from error
        self._ran = False

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        return self._guarded(lambda: self._runtime.peaks(shape))

    def measure(self, shape: StepShape, budget_s: float) -> Measurement:
        return self._guarded(lambda: self._runtime.measure(shape, budget_s=budget_s))

    def ask(self, function: Callable[[Workload], T]) -> T:
        return self._guarded(lambda: function(self._runtime.workload))

    def _guarded(self, run: Callable[[], T]) -> T:
        try:
            answer = run()
        except (AutosplitError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            if self._cuda_is_lost():
                raise LostCauseError(f"lost CUDA to {one_line(error)}") from error
            if is_oom(error, smaller_ran=self._ran):
                raise OutOfMemoryError(f"out of memory: {one_line(error)}; give it fewer samples") from error
            if is_kernel_limit(error):
                raise  # the prober knows what to make of it
            if isinstance(error, SystemExit) or ran_a_step(error.__traceback__):
                raise from_user_code(error, "the workload") from error
            raise
        self._ran = True
        return answer

    def _cuda_is_lost(self) -> bool:
        """Tell whether an error stays (an illegal access, a failed assertion in a kernel), so that all calls fail."""
        try:
            for device in self._runtime.devices:
                if device.kind == "cuda":
                    torch.cuda.synchronize(device.index)
        except RuntimeError:
            return True
        return False
