"""Run real steps on this machine's CPU. The tracker measures and limits memory.

Memory and time are measured in separate runs, because tracking an op takes longer than some ops.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from autosplit.devices.device import Device
from autosplit.errors import one_line
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.rng import preserved_rng
from autosplit.runtime.linear_memory import CountedStep, predicted_parts, predicts
from autosplit.runtime.memory_tracker import Tracker
from autosplit.runtime.protocol import Facts, Measurement, StepShape
from autosplit.runtime.small_steps import GradientsSeen, facts_of, few_samples, least_batch_of, small_step
from autosplit.runtime.timing import timed
from autosplit.runtime.tracked_step import run_placed, run_until_settled, wrapper_for
from autosplit.runtime.trainee import Trainee
from autosplit.solve.memory import MemoryParts
from autosplit.workload.workload import Workload

T = TypeVar("T")

MOST_FEW = 8
"""Default of the largest number of samples of the smallest step that predicts others. Such a step is short."""

NO_PARTS = MemoryParts(0, 0, 0, 0, 0)


class CpuWorker:
    """A training step on CPU devices. They share one CPU, so their compute times add up.

    Args:
        capacities_bytes: Memory limit of each device, enforced only for devices with a budget.
        largest_batch: The largest batch to run on one device.
        most_few: The largest number of samples of the smallest step that predicts others.

    Attributes:
        steps: Number of steps so far.
    """

    exact = False
    notes: tuple[Note, ...] = ()

    def __init__(
        self,
        devices: tuple[Device, ...],
        capacities_bytes: tuple[int, ...],
        trainee: Trainee,
        largest_batch: int,
        most_few: int = MOST_FEW,
    ) -> None:
        self.devices = devices
        self.capacities_bytes = capacities_bytes
        self.trainee = trainee
        self._largest_batch = largest_batch
        self._most_few = most_few
        self._counted: dict[StepShape, list[CountedStep]] = {}
        self._gradients = GradientsSeen()
        self.steps = 0

    @property
    def workload(self) -> Workload:
        """The workload that runs."""
        return self.trainee.workload

    def ask(self, function: Callable[[Workload], T]) -> T:
        """Call a function on the workload."""
        return function(self.workload)

    def facts(self) -> Facts:
        """Return what small steps show, see `protocol.Facts`."""
        return facts_of(self.trainee, self._gradients, least_batch=self._least_batch, samples=self._few)

    @cached_property
    def _least_batch(self) -> int:
        return least_batch_of(self.trainee, lambda samples: self._count(small_step(self.workload, samples)))

    @cached_property
    def _few(self) -> int:
        """The samples of the smallest step that predicts others. Run such steps until their memory is steady."""
        most = self._largest_batch
        few = max(self._least_batch, min(2, most), min(self.workload.sample_batch_size, self._most_few, most // 3))
        return few_samples(self.workload, few, self._settle)

    def _settle(self, samples: int) -> None:
        run_until_settled(self.trainee, lambda: self._count(small_step(self.workload, samples)))

    def predicted(self, shape: StepShape) -> tuple[MemoryParts, ...]:
        """Predict the parts of each device's peak from steps of few samples, which run without a memory limit."""
        places = _places(shape)
        split = tuple(shape.splits[0][index] for index in places)
        few = self._few  # settles the memory
        sizes = [size for size in (few, 2 * few, 3 * few) if size <= self._largest_batch or size == few]
        varied = [index for index, samples in enumerate(split) if samples > 1] if len(sizes) > 1 else []
        base = tuple(few if index in varied else samples for index, samples in enumerate(split))
        kind = _short(replace(shape, splits=(base,) * min(2, len(shape.splits))))
        if kind not in self._counted:
            # A loss over the whole batch may be quadratic in the samples. A third step of one device shows this.
            pairs = [(index, size) for index in varied for size in (sizes[1:] if index == varied[0] else sizes[1:2])]
            others = [(*base[:index], size, *base[index + 1 :]) for index, size in pairs]
            counted = [replace(kind, splits=(own,) * len(kind.splits)) for own in (base, *others)]
            self._counted[kind] = self._smooth([*map(self._count, counted)], kind)
        found = [NO_PARTS] * len(shape.splits[0])
        for index, parts in zip(places, predicted_parts(self._counted[kind], split), strict=True):
            found[index] = parts
        return tuple(found)

    def _smooth(self, steps: list[CountedStep], kind: StepShape) -> list[CountedStep]:
        """Replace three steps by two if a fourth is not on their curve. oneDNN rounds the blocks of an LSTM."""
        base, index = kind.splits[0], next((index for index, n in enumerate(kind.splits[0]) if n > 1), 0)
        is_known = 4 * base[index] > self._largest_batch or len(steps) <= sum(n > 1 for n in base) + 1
        if is_known or predicts(steps[:2], steps[2]):
            return steps
        split = (*base[:index], 4 * base[index], *base[index + 1 :])
        other = self._count(replace(kind, splits=(split,) * len(kind.splits)))
        return steps if predicts(steps[:3], other) else [steps[0], other, *steps[3:]]

    known_parts = predicted

    def prediction_holds(self, shape: StepShape) -> bool:  # noqa: ARG002  # the protocol's
        """Return True: real steps confirm predictions."""
        return True

    def _count(self, shape: StepShape) -> CountedStep:
        """Run a step without a memory limit, and return the storages that it allocated."""
        split = shape.splits[0]
        labels = [f"device {index}" for index in range(len(split))]
        tracker = Tracker(labels, [None] * len(split), accounts=True, draws=self.trainee.draws)

        def look(phase: str) -> None:
            if phase == "update":
                self._gradients.note(self.trainee)
            for kind, tensors in self.trainee.held().items():
                for tensor in tensors:
                    tracker.classify(tensor, kind)

        gc.collect(1)
        self.steps += 1
        with preserved_rng():
            run_placed(self.trainee, shape, tracker, look)
        return CountedStep.of(split, tracker.entries())

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a step under the tracker and return each device's peak, in bytes."""
        assert self._few, "the optimizer has its state, and memory is steady"
        return self._tracked(shape)

    def measure(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Time a step without the tracker, for up to `budget_s`. Only `peaks` enforces memory budgets."""
        trainee = self.trainee
        sizes = [sum(split) for split in shape.splits]
        with preserved_rng():
            models = trainee.wrapped(wrapper_for(trainee.workload, shape.splits[0]))
            batches = trainee.batches(sizes)

            def run(mark: Callable[[str], None]) -> None:
                self.steps += 1
                if shape.arrangement == "eval":
                    trainee.evaluate(models, batches[0])
                else:
                    trainee.step(models, batches, sizes, mark, updates=shape.updates)

            try:
                return timed(run, budget_s)
            finally:
                for wrapper in models.modules:
                    wrapper.zero_grad(set_to_none=True)  # see run_placed

    def _tracked(self, shape: StepShape) -> tuple[int, ...]:
        places, short = _places(shape), _short(shape)
        tracker = Tracker(
            [self.devices[index].label for index in places],
            [self.capacities_bytes[index] if self.devices[index].budgeted else None for index in places],
            draws=self.trainee.draws,
        )
        self.steps += 1
        gc.collect(1)  # free tensors in reference cycles of an earlier step now, not while this step is timed
        message = None
        try:
            with preserved_rng():
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


def _places(shape: StepShape) -> list[int]:
    return [index for index, samples in enumerate(shape.splits[0]) if samples or not shape.alone]


def _short(shape: StepShape) -> StepShape:
    """Return the step on the devices that take part in it."""
    places = _places(shape)
    splits = tuple(tuple(split[index] for index in places) for split in shape.splits)
    return StepShape(splits, shape.arrangement, shape.num_ranks)
