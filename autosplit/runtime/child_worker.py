"""Run real steps in a separate process, so that a crash or a lack of host memory costs only one call.

The process builds the workload. It is replaced if it dies or hangs, or after a CUDA error that makes later calls fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from autosplit.accelerators import backend, is_accelerator
from autosplit.devices.device import Device
from autosplit.errors import AutosplitError, from_user_code, one_line, users_errors
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError, StepLostError, is_kernel_limit, is_oom
from autosplit.runtime.accelerator import AcceleratorWorker
from autosplit.runtime.child_process import UNHURRIED_S, Child, ChildLostError, LostCauseError
from autosplit.runtime.cpu import MOST_FEW, CpuWorker
from autosplit.runtime.protocol import Facts, Measurement, StepMemory, StepShape
from autosplit.runtime.trainee import ran_a_step
from autosplit.solve.memory import MemoryParts
from autosplit.workload.workload import Workload

T = TypeVar("T")

LocalWorker = CpuWorker | AcceleratorWorker

START_LIMIT_S = 60.0
"""Minimum time limit for importing torch and building a workload, even near the end of the tuning's time limit."""

CALL_LIMIT_S = 10.0
"""Minimum time limit of a call. A call runs a few steps, and the first step chooses kernels."""

ASKED_LIMIT_S = 30.0
"""Minimum time limit in seconds of a function that the child runs on its workload. It usually takes a few seconds."""

ALERT_LIMIT_S = 3.0
"""Minimum time limit of a call after another call has hung."""

SLOWER_BY = 20.0
"""Time limit of a call as a multiple of the longest call. Steps grow from 1/8 of a ceiling to the whole ceiling."""

FUTILE_DEATHS = 3
"""Maximum lost processes if no call has returned, because then the number of samples is not the cause.

After this many hanging calls, also stop at the end of the time limit.
"""


class ChildWorker:
    """A worker in a separate process, which starts immediately and loads in the background.

    Args:
        make: A picklable function that makes the real worker in that process. Its argument is the largest number of
            samples of the smallest step that predicts others.
        deadline_s: `time.monotonic()` of the time limit, or None. One call may take at most half of the remaining time.
            A smaller step can then still run.

    Raises:
        InputError: `make` cannot be pickled.
    """

    exact = False

    def __init__(
        self,
        make: Callable[[int], LocalWorker],
        devices: tuple[Device, ...],
        *,
        deadline_s: float | None = None,
    ) -> None:
        self.devices = devices
        self.steps = 0
        self._deadline_s = deadline_s
        self._longest_s = 0.0  # of the calls that returned
        self._answered = False  # whether a call ever returned or raised an error of the worker
        self._hung = 0  # number of calls that reached their time limit
        self._is_new = True  # whether no call of this process has returned
        self._capacities_bytes: tuple[int, ...] | None = None
        # The cause of each lost process, by method, step and arguments. Such a call is not repeated.
        self._deadly: dict[tuple[str, StepShape, tuple[StepShape, ...]], str] = {}
        self._make = make
        self._most_few = MOST_FEW  # halved if a step of few samples kills the process
        self._child = self._started()

    def _started(self) -> Child:
        child = Child(partial(_Served, partial(self._make, self._most_few), _settings()))
        child.start()
        return child

    @property
    def capacities_bytes(self) -> tuple[int, ...]:
        """Memory that training may use on each device, without the contexts of the isolated process."""
        if self._capacities_bytes is None:
            self._get_ready()
        assert self._capacities_bytes is not None, "_get_ready did not set the capacities"
        return self._capacities_bytes

    @property
    def notes(self) -> tuple[Note, ...]:
        """A note for each cause of lost processes."""
        by_cause: dict[str, list[StepShape]] = {}
        for (_, shape, _), cause in self._deadly.items():
            by_cause.setdefault(cause, []).append(shape)
        return tuple(Note("process-lost", _lost_text(shapes, cause)) for cause, shapes in by_cause.items())

    def facts(self) -> Facts:
        """Return what small steps of the workload show. Raises errors like `peaks`."""
        found: Facts = self._from_few("facts")
        return found

    def predicted(self, shape: StepShape) -> tuple[MemoryParts, ...] | None:
        """Predict the parts of each device's peak. None on accelerators. Raises errors like `peaks`."""
        if is_accelerator(self.devices[0].kind):
            return None
        found: tuple[MemoryParts, ...] = self._from_few("predicted", shape)
        return found

    def prediction_holds(self, shape: StepShape) -> bool:  # noqa: ARG002  # the protocol's
        """Return True: real steps confirm predictions."""
        return True

    def known_parts(self, shape: StepShape) -> tuple[MemoryParts, ...]:
        """Return the parts of each device's memory that are known without running the step."""
        found: tuple[MemoryParts, ...] = self._from_few("known_parts", shape)
        return found

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Return the peak bytes of a step on each device.

        Raises:
            OutOfMemoryError: A device ran out of memory. The error names the device.
            StepLostError: The process died, or was killed because it hung.
            UserCodeError: The workload's own code raised.
            AutosplitError: The process cannot be started, or dies in every call.
        """
        found: tuple[int, ...] = self._call("peaks", shape, shape)
        return found

    def memory(self, shape: StepShape) -> StepMemory:
        """Run a step on accelerators until its memory is steady, and return that memory. Raises errors like `peaks`."""
        found: StepMemory = self._call("memory", shape, shape)
        return found

    def measure(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Time a step for up to `budget_s`, and return its memory if known. Raises errors like `peaks`."""
        found: Measurement = self._call("measure", shape, shape, budget_s=budget_s)
        return found

    def ask(self, function: Callable[[Workload], T]) -> T:
        """Call a function on the workload in the isolated process. The function and its result must be picklable.

        Raises:
            AutosplitError: The process died, or was killed because it hung.
        """
        self._get_ready()
        try:
            found: T = self._child.call("ask", function, limit_s=ASKED_LIMIT_S)
        except ChildLostError as lost:
            raise AutosplitError(
                f"The isolated process {lost.cause}. Run a single step of the workload to see why.",
            ) from None
        return found

    def close(self) -> None:
        """End the process, if any."""
        self._child.close()

    def _from_few(self, name: str, *args: StepShape) -> Any:
        """Call a method that runs steps of few samples. If the process dies, use fewer samples."""
        while True:
            few = StepShape(((3 * self._most_few,),))
            try:
                return self._call(name, few, *args)
            except StepLostError:
                if self._most_few <= 2:  # steps of fewer samples would not show the slope
                    raise
            self._most_few //= 2
            self._child.close()
            self._child = self._started()

    def _call(self, name: str, step: StepShape, *args: StepShape, **options: float) -> Any:
        """Call a method of the worker in the child with `args`.

        `step` is the step that the method runs. It names a lost process, and `args` may lack it.
        """
        # Do not repeat a step that killed a process.
        known = self._deadly.get((name, step, args))
        if known is not None:
            raise self._lost_step(step, known)
        self._get_ready()
        began_s = time.monotonic()
        self.steps += 1
        try:
            answer, more_steps = self._child.call("run", name, args, options, limit_s=self._limit_s())
        except ChildLostError as lost:
            self._deadly[name, step, args] = cause = lost.cause
            self._hung += lost.hung
            self._is_new = True
        except AutosplitError:
            self._answered = True
            raise
        else:
            self._answered, self._is_new = True, False
            self._longest_s = max(self._longest_s, time.monotonic() - began_s)
            self.steps += more_steps - 1
            return answer
        self._refuse_to_go_on(cause)
        raise self._lost_step(step, cause)

    def _get_ready(self) -> None:
        own_s = UNHURRIED_S if self._deadline_s is None else self._deadline_s - time.monotonic()
        try:
            self._child.get_ready(max(own_s, START_LIMIT_S))
            if self._capacities_bytes is None:
                self._capacities_bytes = self._child.call("capacities", limit_s=ASKED_LIMIT_S)
        except ChildLostError as lost:
            raise AutosplitError(
                f"The process for real steps {lost.cause} before it had built the workload. Fix the error that it "
                "printed above, or leave isolate out (--no-isolate).",
            ) from None

    def _refuse_to_go_on(self, cause: str) -> None:
        if len(self._deadly) >= FUTILE_DEATHS and not self._answered:
            raise AutosplitError(
                f"The process for real steps died in each of its first {FUTILE_DEATHS} calls. The last time, it "
                f"{cause}. Run a single step of the workload to see why, or leave isolate out (--no-isolate).",
            )
        out_of_time = self._deadline_s is not None and time.monotonic() > self._deadline_s
        if out_of_time and self._hung >= FUTILE_DEATHS:
            raise AutosplitError(
                f"The time limit is over and {self._hung} steps have hung. The last process {cause}. Use a "
                "max_batch_size at which steps end, or raise time_limit_s.",
            )

    def _lost_step(self, shape: StepShape, cause: str) -> StepLostError:
        active = [index for index, samples in enumerate(shape.splits[0]) if samples]
        index = active[0] if len(active) == 1 else None
        return StepLostError(
            f"The process that ran {_samples_text(shape)} {cause}. Expected the step to end. Use fewer samples.",
            device=None if index is None else self.devices[index].label,
            device_index=index,
            capacity_bytes=0 if index is None else self.capacities_bytes[index],
        )

    def _limit_s(self) -> float:
        # A new process also starts CUDA and copies the model, so the short limit does not apply to its first call.
        is_alert = self._hung and not (self._is_new and is_accelerator(self.devices[0].kind))
        least_s = ALERT_LIMIT_S if is_alert else CALL_LIMIT_S
        least_s = max(least_s, SLOWER_BY * self._longest_s)
        if self._hung:
            return least_s
        return max(least_s, UNHURRIED_S if self._deadline_s is None else (self._deadline_s - time.monotonic()) / 2)


def _lost_text(shapes: list[StepShape], cause: str) -> str:
    least = _samples_text(min(shapes, key=lambda shape: shape.num_samples))
    if len(shapes) == 1:
        return f"The process that ran {least} {cause}. This counts as out of memory."
    return f"{len(shapes)} processes, the smallest at {least}, were lost: each {cause}. This counts as out of memory."


def _samples_text(shape: StepShape) -> str:
    split = shape.splits[0]
    samples = f"{sum(split)} samples" if sum(map(bool, split)) < 2 else f"the split {split}"
    return f"{samples} in {len(shape.splits)} micro-steps" if len(shape.splits) > 1 else samples


# ---------------------------------------------------------------------------------------------- in the other process


_NEW_PRECISIONS = ("", "cuda.matmul.", "cudnn.conv.", "cudnn.rnn.", "mkldnn.matmul.", "mkldnn.conv.", "mkldnn.rnn.")


_Settings = list[tuple[Callable[..., object], tuple[Any, ...]]]
"""Calls that apply this process's torch settings elsewhere, if they affect the time or memory of a step."""


def _settings() -> _Settings:
    try:
        precision = torch.get_float32_matmul_precision() if torch.backends.cudnn.allow_tf32 is not None else None
    except RuntimeError:  # torch can't read this setting if the program set the new precision settings
        precision = None
    calls: _Settings = [
        (torch.set_num_threads, (torch.get_num_threads(),)),
        (torch.set_deterministic_debug_mode, (torch.get_deterministic_debug_mode(),)),
    ]
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        is_on = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()
        calls.append((getattr(torch.backends.cuda, f"enable_{kernel}_sdp"), (is_on,)))
    names = [f"{place}fp32_precision" for place in _NEW_PRECISIONS]
    if precision is not None:
        calls.append((torch.set_float32_matmul_precision, (precision,)))
        names = ["cudnn.allow_tf32"]
    paths = ("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", *names)
    return [*calls, *((_switch, (path, attrgetter(path)(torch.backends))) for path in paths)]


def _switch(path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    place = attrgetter(owner)(torch.backends) if owner else torch.backends
    if getattr(place, name) != value:
        setattr(place, name, value)


def _take_over(settings: _Settings) -> None:
    for function, args in settings:
        function(*args)


class _Served:
    """The real worker. It converts errors, so that the parent can raise them."""

    def __init__(self, make: Callable[[], LocalWorker], settings: _Settings) -> None:
        _take_over(settings)
        with users_errors("the workload"):
            self._worker = make()
        self._ran = False

    def capacities(self) -> tuple[int, ...]:
        return self._worker.capacities_bytes

    def run(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, int]:
        """Call a method of the worker. Also return the number of steps that it ran."""
        before = self._worker.steps
        return self._guarded(partial(getattr(self._worker, name), *args, **options)), self._worker.steps - before

    def ask(self, function: Callable[[Workload], T]) -> T:
        return self._guarded(lambda: function(self._worker.workload))

    def _guarded(self, run: Callable[[], T]) -> T:
        try:
            answer = run()
        except (AutosplitError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            if self._device_is_lost():
                raise LostCauseError(
                    f"lost the {self._worker.devices[0].kind.upper()} device: {one_line(error)}"
                ) from error
            if is_oom(error, smaller_ran=self._ran):
                raise OutOfMemoryError(f"Out of memory: {one_line(error)}. Use fewer samples.") from error
            if is_kernel_limit(error):
                raise  # the search for ceilings handles kernel limits
            if isinstance(error, SystemExit) or ran_a_step(error.__traceback__):
                raise from_user_code(error, "the workload") from error
            raise
        self._ran = True
        return answer

    def _device_is_lost(self) -> bool:
        try:
            for device in self._worker.devices:
                if is_accelerator(device.kind):
                    backend(device.kind).synchronize(device.index)
        except RuntimeError:
            return True
        return False
