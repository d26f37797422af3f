"""Run real steps on accelerators, and measure their time and the caching allocator's memory.

During a step, the allocator's limit is the device's capacity. A step above the limit raises an error even if the driver
would spill into host memory (Windows, WSL). The allocator reserves more bytes than a step allocates, because it caches
and splits blocks. A step fits if the allocator does not have to release cached blocks in every step.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from autosplit.accelerators import backend, bounded, own_limit_bytes
from autosplit.devices.accelerator import with_free_memory
from autosplit.devices.device import Device
from autosplit.devices.host_memory import available_host_bytes
from autosplit.notes import Note
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.rng import preserved_rng
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import Facts, Measurement, StepMemory, StepShape
from autosplit.runtime.small_steps import GradientsSeen, facts_of, few_samples, least_batch_of, small_step
from autosplit.runtime.timing import timed
from autosplit.runtime.tracked_step import bucket_bytes, gradients_are_views, move_gradients_into, wrapper_for
from autosplit.runtime.trainee import Trainee
from autosplit.solve.memory import MemoryParts
from autosplit.workload.tree import map_tensors
from autosplit.workload.workload import Workload, modules_of

T = TypeVar("T")

_Step = Callable[[Callable[[str], None]], None]
"""One optimizer step. It calls its argument when a phase begins, and returns once all work is launched."""

ROOMY = 0.9
"""A step that reserves at most this fraction of the limit needs no second run to detect repeated releases."""

RELEASING_BLOCKS = 3
"""A step that makes the allocator release cached memory in so many consecutive blocks does not fit.

With 2 blocks, an H200 refused batches whose third step released nothing. The ceiling of BERT in 8 GiB was 61, and is 63
with 3 blocks. A plain loop trains 62 to 64 (``benchmarks/results/gpu/h200_before.json`` and ``h200.json``).
"""

MOST_STEPS = 32
"""Maximum steps in a timed block. Short steps then give several blocks for the median."""

UPDATES_TIMED = 2
"""Number of timed runs of the optimizer. They are separate, because they synchronise before the update."""

CLIFF = 4.0
"""If the time per sample grows by this factor over a smaller step, the step may be using host memory."""

TWINS_WITHIN = 0.01
"""Maximum relative difference in memory at which GPUs of one model get the smallest of their capacities."""

SPILLING = 1 / 32
"""Fraction of a device's memory. If more is free in the driver, no memory spilled to the host."""


class AcceleratorWorker:
    """A training step on accelerators of one kind.

    Args:
        capacities_bytes: Memory limit of each device, computed before this process had a context there.

    Attributes:
        steps: Number of steps so far.
    """

    exact = False
    notes: tuple[Note, ...] = ()

    def __init__(self, devices: tuple[Device, ...], capacities_bytes: tuple[int, ...], workload: Workload) -> None:
        self.devices = devices
        self._reserved_bytes = [
            device.capacity_bytes - most for device, most in zip(devices, capacities_bytes, strict=True)
        ]
        self._most_bytes = capacities_bytes
        self.workload = workload
        self._backend = backend(devices[0].kind)
        self._gpus = [torch.device(device.kind, device.index) for device in devices]
        self._trainee: Trainee | None = None
        self._home: torch.device | None = None
        self._has_run = False
        self.steps = 0
        self._held_bytes = _least_held_bytes(workload)
        self._paces_s: dict[tuple[str, tuple[bool, ...]], float] = {}

    @cached_property
    def capacities_bytes(self) -> tuple[int, ...]:
        """Memory limit of each device after this process created its contexts, which every step needs."""
        self.wait()
        now = [with_free_memory(device) for device in self.devices]
        rooms = [device.capacity_bytes - kept for device, kept in zip(now, self._reserved_bytes, strict=True)]
        own = [own_limit_bytes(self._backend, gpu) for gpu in self._gpus]
        return equalize_capacities(
            self.devices, [max(0, min(limits)) for limits in zip(self._most_bytes, rooms, own, strict=True)]
        )

    def ask(self, function: Callable[[Workload], T]) -> T:
        """Call a function on the workload."""
        return function(self.workload)

    def facts(self) -> Facts:
        """Return what a step of one or two samples shows. If it does not fit, only the layers are known."""
        gradients = GradientsSeen()

        def shape_of(samples: int) -> StepShape:
            shape = small_step(self.workload, samples)
            return replace(shape, splits=((samples, *(0 for _ in self.devices[1:])),))

        def look(phase: str) -> None:
            if phase == "update":
                gradients.note(self._copy(self._gpus[0]))

        def run(samples: int) -> None:
            self._within_bounds(shape_of(samples), lambda step: step(look))

        def on_copy(use: Callable[[Trainee], T]) -> T:
            own = shape_of(self.workload.sample_batch_size)
            with self._bounded(), self._backend.device(self._gpus[0]):
                return self._guarded(lambda: use(self._copy(self._gpus[0])), own)

        try:
            least = on_copy(partial(least_batch_of, run=run))
            samples = few_samples(self.workload, least, run)
            return on_copy(partial(facts_of, gradients=gradients, least_batch=least, samples=samples))
        except OutOfMemoryError:
            return Facts()

    def predicted(self, shape: StepShape) -> None:
        """Return None: what fits is known only from steps."""

    def prediction_holds(self, shape: StepShape) -> bool:  # noqa: ARG002  # the protocol's
        """Return True, because nothing is predicted."""
        return True

    def known_parts(self, shape: StepShape) -> tuple[MemoryParts, ...]:
        """Return the bytes of parameters, gradients and optimizer state on each device, of the last copy that ran."""
        if self._trainee is not None:
            held = self._trainee.held()
            self._held_bytes = {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in held.items()}
            self._held_bytes["gradients"] = bucket_bytes(self._trainee)
        known = self._held_bytes
        if shape.arrangement == "eval":
            return (MemoryParts(known["parameters"], 0, 0, 0, 0),) * len(self.devices)
        copies = 2 if shape.num_ranks > 1 and not gradients_are_views(shape) else 1  # gradients, and DDP's buckets
        first = MemoryParts(known["parameters"], copies * known["gradients"], known["optimizer"], 0, 0)
        others = first if shape.alone else replace(first, optimizer_bytes=0)
        return (first, *(others for _ in self.devices[1:]))

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Return the maximum bytes that a step allocates on each device. See `memory`."""
        return self.memory(shape).allocated_bytes

    def memory(self, shape: StepShape) -> StepMemory:
        """Run a step until it is steady, and return its memory.

        Raises:
            OutOfMemoryError: A device ran out of memory or is so close to its limit that steps become slow. The error
                names the device.
        """
        return self._within_bounds(shape, lambda run: self._confirm(run, shape))

    def _confirm(self, run: _Step, shape: StepShape) -> StepMemory:
        steady = _Steady(self, run)
        run(_unmarked)
        self.wait()
        self._begin_peaks()
        seconds: list[float] = []
        near_the_wall = False
        while not seconds or steady.releases or (len(seconds) < 2 and near_the_wall):
            start_s = time.perf_counter()
            steady.block(1)
            seconds.append(time.perf_counter() - start_s)
            filled = zip(self._reserved(), self.capacities_bytes, strict=True)
            near_the_wall = any(reserved > ROOMY * capacity for reserved, capacity in filled)
        self._refuse_cliff(min(seconds), shape)
        allocated = tuple(int(self._backend.max_memory_allocated(gpu)) for gpu in self._gpus)
        return StepMemory(allocated, self._reserved())

    def _reserved(self) -> tuple[int, ...]:
        return tuple(int(self._backend.max_memory_reserved(gpu)) for gpu in self._gpus)

    def _refuse_cliff(self, seconds: float, shape: StepShape) -> None:
        """Raise OutOfMemoryError if the time per sample jumps while the driver has no memory left."""
        pace_s = seconds / shape.num_samples
        kind = shape.arrangement, tuple(samples > 0 for samples in shape.splits[0])
        best_s = self._paces_s.setdefault(kind, pace_s)
        self._paces_s[kind] = min(best_s, pace_s)
        if pace_s <= CLIFF * best_s:
            return
        for device, gpu in zip(self.devices, self._gpus, strict=True):
            free_bytes, total_bytes = self._backend.mem_get_info(gpu)
            if device.integrated:  # the driver does not count memory that the system could reclaim
                free_bytes = available_host_bytes()
            if free_bytes < SPILLING * total_bytes:
                raise OutOfMemoryError(
                    f"The step takes {pace_s / best_s:.0f} times as long per sample as a smaller step. {gpu} has "
                    f"only {free_bytes} bytes left, so the driver probably moves memory to the host.",
                    device=str(gpu),
                )

    def retries(self) -> list[int]:
        """Return how often each device's allocator had to release cached blocks to find memory."""
        return [int(self._backend.memory_stats(gpu).get("num_alloc_retries", 0)) for gpu in self._gpus]

    def measure(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Return the time of a step in a loop, and the maximum bytes that the allocator reserves for it.

        Time a block of steps, and wait for the device only after the last step, as training loops do. With a wait after
        each step, an H100 seemed 1.03 to 1.6 times slower (benchmarks/results/gpu/h100_first.json).
        """

        def use(run: _Step) -> Measurement:
            run(_unmarked)
            self.wait()
            update_s = min(self._update_seconds(run) for _ in range(UPDATES_TIMED))
            self._begin_peaks()
            steady = _Steady(self, run)
            steady.block(1)
            start_s = time.perf_counter()
            steady.block(1)
            steps = block_of(time.perf_counter() - start_s, budget_s)
            # Do not mark phases: a wait before the optimizer would stop its launches from overlapping the backward.
            found = timed(lambda _mark: steady.block(steps), budget_s, warmups=0)
            seconds = found.seconds / steps
            return replace(
                found,
                seconds=seconds,
                error_s=found.error_s / steps,
                update_s=min(update_s, seconds),
                peak_bytes=self._reserved(),
                repeats=found.repeats * steps,
            )

        return self._within_bounds(shape, use)

    def _update_seconds(self, run: _Step) -> float:
        marks: dict[str, float] = {}

        def mark(phase: str) -> None:
            if phase == "update":
                self.wait()
                marks[phase] = time.perf_counter()

        run(mark)
        self.wait()
        end_s = time.perf_counter()
        return end_s - marks.get("update", end_s)

    def wait(self) -> None:
        """Wait until every device is idle."""
        for gpu in self._gpus:
            self._backend.synchronize(gpu)

    def _begin_peaks(self) -> None:
        """Reset peak memory after kernel selection, whose reserved blocks would remain otherwise."""
        self._release()
        for gpu in self._gpus:
            self._backend.reset_peak_memory_stats(gpu)

    def close(self) -> None:
        """Release the memory of the model copies."""
        self._drop_trainee()

    def _within_bounds(self, shape: StepShape, use: Callable[[_Step], T]) -> T:
        # A model's `device="cuda"` uses the current device. Restoring it with `set_device` would create a context.
        with self._bounded(), preserved_rng(), self._backend.device(self._alone_on(shape) or self._gpus[0]):
            return self._guarded(lambda: use(self._prepared(shape)), shape)

    def _alone_on(self, shape: StepShape) -> torch.device | None:
        active = [index for index, samples in enumerate(shape.splits[0]) if samples]
        return self._gpus[active[0]] if shape.alone else None

    def _prepared(self, shape: StepShape) -> _Step:
        alone = self._alone_on(shape)
        home = alone or self._gpus[0]
        trainee = self._copy(home)
        sizes = [sum(split) for split in shape.splits]
        made = {
            size: map_tensors(lambda tensor: pinned(tensor, home.type), trainee.batch(size))
            for size in dict.fromkeys(sizes)
        }
        batches = [made[size] for size in sizes]
        buckets = None
        if alone and shape.num_ranks > 1:
            buckets = torch.empty(bucket_bytes(trainee), dtype=torch.uint8, device=alone)
        gpus, split = (self._gpus, shape.splits[0]) if alone is None else ([alone], (sizes[0],))
        models = trainee.wrapped(wrapper_for(trainee.workload, split, gpus))

        def run(mark: Callable[[str], None]) -> None:
            self.steps += 1
            if shape.arrangement == "eval":
                trainee.begin_state()
                trainee.evaluate(models, batches[0])
            else:
                views = buckets is not None and gradients_are_views(shape)
                try:
                    with move_gradients_into(buckets, trainee) if views else nullcontext():  # type: ignore[arg-type]
                        trainee.step(models, batches, sizes, mark, updates=shape.updates)
                except BaseException:
                    for wrapper in models.modules:
                        wrapper.zero_grad(set_to_none=True)  # otherwise later steps add to these gradients
                    raise

        return run

    def _copy(self, home: torch.device) -> Trainee:
        if self._trainee is None or self._home != home:
            self._drop_trainee()  # free the old copy before making the new copy
            self._refuse_beyond(self._gpus.index(home))
            self._trainee, self._home = training_copy(self.workload, device=home), home
        return self._trainee

    def _refuse_beyond(self, index: int) -> None:
        """Do not copy a model that can't fit to a GPU that uses the host's memory. The host might stop responding."""
        device, most_bytes = self.devices[index], self.capacities_bytes[index]
        least_bytes = self._held_bytes["parameters"] + self._held_bytes["gradients"]
        if device.integrated and least_bytes > most_bytes:
            raise OutOfMemoryError(
                f"The parameters and their gradients take {least_bytes} bytes. {device.label} has {most_bytes}.",
                device=str(self._gpus[index]),
            )

    def _drop_trainee(self) -> None:
        if self._trainee is not None:
            self._trainee.restore()
        self._trainee = self._home = None
        self._release()

    def _guarded(self, run: Callable[[], T], shape: StepShape) -> T:
        """Run a function. If a device runs out of memory, raise an OutOfMemoryError that names it.

        Recovery happens outside the except block, because its traceback keeps tensors alive.
        """
        try:
            result = run()
        except Exception as error:
            if not is_oom(error, smaller_ran=self._has_run):
                raise
            message, index = str(error), _failed_gpu(error, self._gpus)
        else:
            self._has_run = True
            return result
        self._drop_trainee()  # if the first update ran out of memory, only half of the optimizer's state exists
        where = "a GPU" if index is None else f"{self.devices[index].label} ({self.devices[index].name})"
        raise OutOfMemoryError(
            f"{where} is out of memory with {shape.splits[0]} samples. Give it fewer. {message.splitlines()[0]}",
            device=None if index is None else self.devices[index].label,
            device_index=index,
            capacity_bytes=0 if index is None else self.capacities_bytes[index],
        )

    def _release(self) -> None:
        gc.collect()
        self._backend.empty_cache()

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        self._release()
        with ExitStack() as limits:
            limits.callback(self._release)
            for gpu, most_bytes in zip(self._gpus, self.capacities_bytes, strict=True):
                limits.enter_context(bounded(self._backend, gpu, most_bytes))
            yield


def pinned(tensor: Tensor, kind: str) -> Tensor:
    """Return a dense CPU tensor in pinned memory, like a loader with pin_memory. Other tensors are unchanged."""
    stays = tensor.device.type != "cpu" or tensor.layout is not torch.strided or kind in {"cpu", "mps"}
    return tensor if stays else tensor.pin_memory()


def equalize_capacities(devices: Sequence[Device], capacities_bytes: Sequence[int]) -> tuple[int, ...]:
    """Give GPUs of one model the smallest of their capacities if these differ by at most `TWINS_WITHIN`.

    Otherwise a GPU with a display would be probed separately.
    """
    found = list(capacities_bytes)
    for index in sorted(range(len(devices)), key=lambda index: capacities_bytes[index]):
        found[index] = min(
            least
            for device, least in zip(devices, found, strict=True)
            if device.name == devices[index].name and least <= found[index] <= least * (1 + TWINS_WITHIN)
        )
    return tuple(found)


def _least_held_bytes(workload: Workload) -> dict[str, int]:
    """Return the bytes of a model's parameters and gradients, before a step shows the optimizer's bytes."""
    modules = modules_of(workload)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    return {
        "parameters": sum(tensor.nbytes for tensor in (*parameters, *buffers)),
        "gradients": sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        "optimizer": 0,
    }


def _unmarked(_phase: str) -> None:
    """Ignore the phase."""


class _Steady:
    """A step that may not make the allocator release cached memory in `RELEASING_BLOCKS` consecutive blocks."""

    def __init__(self, worker: AcceleratorWorker, run: _Step) -> None:
        self._worker, self._run = worker, run
        self.releases: dict[int, int] = {}  # by device: how many consecutive blocks released memory

    def block(self, steps: int) -> None:
        """Run some steps, then wait for the devices.

        Raises:
            OutOfMemoryError: An allocator released cached memory in this block and in the blocks before it.
        """
        before = self._worker.retries()
        for _ in range(steps):
            self._run(_unmarked)
        self._worker.wait()
        after = self._worker.retries()
        self.releases = {
            index: self.releases.get(index, 0) + 1 for index, count in enumerate(after) if count > before[index]
        }
        for index, blocks in self.releases.items():
            if blocks == RELEASING_BLOCKS:
                label = self._worker.devices[index].label
                raise OutOfMemoryError(
                    f"The allocator of {label} had to release memory in {blocks} consecutive steps.", device=label
                )


def block_of(step_s: float, budget_s: float) -> int:
    """Return the number of steps in a timed block: an eighth of the budget, and at most `MOST_STEPS`."""
    return max(1, min(MOST_STEPS, int(budget_s / 8 / max(step_s, 1e-6))))


def _failed_gpu(error: BaseException, gpus: list[torch.device]) -> int | None:
    if isinstance(error, OutOfMemoryError) and error.device is not None:
        names = [str(gpu) for gpu in gpus]
        return names.index(error.device) if error.device in names else None
    found = re.search(rf"(?:GPU|device|{gpus[0].type.upper()}) (\d+)|{gpus[0].type}:(\d+)", str(error))
    ordinals = [gpu.index for gpu in gpus]
    ordinal = int(found[1] or found[2]) if found else None
    return ordinals.index(ordinal) if ordinal in ordinals else None
