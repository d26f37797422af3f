"""Run real steps on this machine's CPU. The tracker measures and limits memory.

Memory and time are measured in separate runs, because tracking an op takes longer than some ops.
"""

from __future__ import annotations

import gc

from autosplit.devices.device import Device
from autosplit.errors import one_line
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.rng import kept_rng
from autosplit.runtime.memory_tracker import Tracker
from autosplit.runtime.protocol import Measurement, StepShape
from autosplit.runtime.timing import timed
from autosplit.runtime.tracked_step import run_placed, run_until_settled, wrapper_for
from autosplit.runtime.trainee import Trainee
from autosplit.workload.workload import Workload


class CpuRuntime:
    """A training step on CPU devices. They share one CPU, so their compute times add up.

    Args:
        capacities_bytes: Memory limit of each device, enforced only for devices with a budget.
    """

    simulated = False
    shares_processor = True

    def __init__(self, devices: tuple[Device, ...], capacities_bytes: tuple[int, ...], trainee: Trainee) -> None:
        self.devices = devices
        self.capacities_bytes = capacities_bytes
        self.trainee = trainee
        self._has_stepped = any(optimizer.state for optimizer in trainee.optimizers.items)
        self._has_settled = False

    @property
    def workload(self) -> Workload:
        """The workload that runs."""
        return self.trainee.workload

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step under the tracker and return each device's peak, in bytes."""
        if shape.compiled:
            return self._compiled(shape)
        if shape.arrangement == "eval" or self._has_settled:
            return self._tracked(shape)
        # The optimizer creates its state in the first step, so only later steps show the full memory.
        if not self._has_stepped:
            self._tracked(shape)
            self._has_stepped = True
        peaks = run_until_settled(self.trainee, lambda: self._tracked(shape))
        self._has_settled = True
        return peaks

    def measure(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Time a step without the tracker, for up to `budget_s`. Only `peaks` enforces memory budgets."""
        trainee = self.trainee
        sizes = [sum(split) for split in shape.splits]
        with kept_rng():
            models = trainee.wrapped(wrapper_for(trainee.workload, shape.splits[0]))
            batches = trainee.batches(sizes)
            if shape.arrangement == "eval":
                return timed(lambda _mark: trainee.evaluate(models, batches[0]), budget_s)
            try:
                return timed(lambda mark: trainee.step(models, batches, sizes, mark, updates=shape.updates), budget_s)
            finally:
                for wrapper in models.modules:
                    wrapper.zero_grad(set_to_none=True)  # see run_placed

    def _compiled(self, shape: StepShape) -> tuple[int, ...]:
        """Run a compiled step. The tracker cannot track compiled code, so return no peaks."""
        trainee, sizes = self.trainee, [sum(split) for split in shape.splits]
        with kept_rng():
            trainee.step(trainee.compiled(), trainee.batches(sizes), sizes)
        return ()

    def _tracked(self, shape: StepShape) -> tuple[int, ...]:
        places = [index for index, samples in enumerate(shape.splits[0]) if samples or not shape.alone]
        short = StepShape(
            tuple(tuple(split[index] for index in places) for split in shape.splits), shape.arrangement, shape.num_ranks
        )
        tracker = Tracker(
            [self.devices[index].label for index in places],
            [self.capacities_bytes[index] if self.devices[index].budgeted else None for index in places],
            draws=self.trainee.draws,
        )
        gc.collect(1)  # free tensors in reference cycles of an earlier step now, not while this step is timed
        message = None
        try:
            with kept_rng():
                found = run_placed(self.trainee, short, tracker, lambda _phase: None)
        except OutOfMemoryError:
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_oom(error):
                raise
            message = one_line(error)
        if message is not None:  # outside the except block, whose traceback keeps tensors alive
            raise OutOfMemoryError(
                f"This machine ran out of memory before any budget was reached: {message}. Use fewer samples.",
                device=self.devices[places[0]].label if len(places) == 1 else None,
                device_index=places[0] if len(places) == 1 else None,
            )
        peaks = [0] * len(self.devices)
        for index, peak_bytes in zip(places, found, strict=True):
            peaks[index] = peak_bytes
        return tuple(peaks)
