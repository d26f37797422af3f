"""Real steps on real GPUs: kernels, the caching allocator's reserved peak, and the clock with every device idle.

What a device may hold is set as the allocator's own limit while a step runs, so that the reserve stays free, and so
that running over it raises even where the driver would spill into host memory (Windows, WSL).
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from autosplit.balanced import BalancedDataParallel
from autosplit.devices import Device
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.rng import kept_rng
from autosplit.runtime.measurement import Measurement, StepShape
from autosplit.runtime.placed import bucket_bytes
from autosplit.runtime.timing import timed
from autosplit.trainee import Trainee, training_copy
from autosplit.workload import Workload, modules_of

__all__ = ["CONFIRMING_STEPS", "CudaRuntime"]

T = TypeVar("T")

CONFIRMING_STEPS = 3
"""The optimizer's state appears in the first step, DDP's buckets are rebuilt before the second, the third is steady."""

CLIFF = 4.0
"""A step that takes so many times as long for each sample as a smaller one did is no step to train with."""


class CudaRuntime:
    """A training step on GPUs.

    Args:
        devices: GPUs.
        capacities_bytes: What each may hold.
        workload: What is trained; copies of it go where they are needed.
    """

    simulated = False
    shares_processor = False

    def __init__(self, devices: tuple[Device, ...], capacities_bytes: tuple[int, ...], workload: Workload) -> None:
        self.devices = devices
        self.capacities_bytes = capacities_bytes
        self.workload = workload
        self._gpus = [torch.device("cuda", device.index) for device in devices]
        self._trainee: Trainee | None = None
        self._home: torch.device | None = None
        self._has_run = False
        self._paces_s: dict[tuple[str, tuple[bool, ...]], float] = {}

    def peaks(self, shape: StepShape) -> tuple[int, ...]:
        """Run a few steps and return the most that the allocator reserved on each GPU, in bytes.

        Raises:
            OutOfMemoryError: A GPU ran out of memory, or is so near to it that steps no longer run as they should:
                the allocator has to give back what it kept in each of them, or they are suddenly many times slower
                for each sample (memory that spills to the host). It is named.
        """
        return self._watched(shape, lambda run: self._confirm(run, shape))[1]

    def _confirm(self, run: _Run, shape: StepShape) -> None:
        retries, seconds = [self._retries()], []
        for _ in range(CONFIRMING_STEPS):
            start_s = time.perf_counter()
            run(lambda _phase: None)
            seconds.append(time.perf_counter() - start_s)
            retries.append(self._retries())
        for index, gpu in enumerate(self._gpus):
            if retries[-3][index] < retries[-2][index] < retries[-1][index]:
                raise OutOfMemoryError(
                    f"the allocator of {gpu} had to give back memory in two steps one after the other", device=str(gpu)
                )
        pace_s = min(seconds[-2:]) / shape.num_samples
        kind = shape.arrangement, tuple(samples > 0 for samples in shape.splits[0])
        best_s = self._paces_s.setdefault(kind, pace_s)
        if pace_s > CLIFF * best_s:
            fullest = max(range(len(self._gpus)), key=lambda index: shape.splits[0][index])
            raise OutOfMemoryError(
                f"a step takes {pace_s / best_s:.0f} times as long for each sample as a smaller one did, as it does "
                "where memory spills to the host",
                device=str(self._gpus[fullest]),
            )
        self._paces_s[kind] = min(best_s, pace_s)

    def _retries(self) -> list[int]:
        """Return how often each GPU's allocator found nothing and had to give back what it kept."""
        return [int(torch.cuda.memory_stats(gpu).get("num_alloc_retries", 0)) for gpu in self._gpus]

    def measure(self, shape: StepShape, *, budget_s: float) -> Measurement:
        """Run a step repeatedly for its time and peaks.

        Args:
            shape: The step.
            budget_s: Stop repeating after this long.

        Raises:
            OutOfMemoryError: A GPU ran out of memory; it is named.
        """
        measured, peaks = self._watched(shape, lambda run: timed(run, budget_s, warmups=CONFIRMING_STEPS - 1))
        return replace(measured, peak_bytes=peaks)

    def _watched(self, shape: StepShape, use: Callable[[_Run], T]) -> tuple[T, tuple[int, ...]]:
        """Use a step that is ready to run, and read off what the allocator reserved on each GPU meanwhile."""
        with self._bounded(), kept_rng():
            for gpu in self._gpus:
                torch.cuda.reset_peak_memory_stats(gpu)
            result = self._guarded(lambda: use(self._prepared(shape)), shape)
            return result, tuple(torch.cuda.max_memory_reserved(gpu) for gpu in self._gpus)

    def close(self) -> None:
        """Give the copies' memory back."""
        self._drop_trainee()

    def _prepared(self, shape: StepShape) -> _Run:
        """Put a copy of the workload on the step's first GPU, and the batches in pinned or plain host memory."""
        active = [index for index, samples in enumerate(shape.splits[0]) if samples]
        alone = shape.arrangement != "balanced"
        trainee = self._trainee_on(self._gpus[active[0] if alone else 0])
        sizes = [sum(split) for split in shape.splits]
        made = {size: trainee.batch(size) for size in dict.fromkeys(sizes)}
        gpus = [self._gpus[active[0]]] if alone else self._gpus
        split = (sizes[0],) if alone else shape.splits[0]
        buckets = None
        if alone and shape.num_ranks > 1:
            buckets = torch.empty(bucket_bytes(trainee), dtype=torch.uint8, device=gpus[0])
        return _Run(trainee, shape, [made[size] for size in sizes], gpus, split, buckets)

    def _trainee_on(self, gpu: torch.device) -> Trainee:
        if self._trainee is None or self._home != gpu:
            self._drop_trainee()  # the old copy's memory, before the new one's
            self._trainee, self._home = training_copy(self.workload, device=gpu), gpu
        return self._trainee

    def _drop_trainee(self) -> None:
        if self._trainee is not None:
            self._trainee.restore()
        self._trainee = self._home = None
        self._release()

    def _guarded(self, run: Callable[[], T], shape: StepShape) -> T:
        """Run, and name the GPU that ran out of memory.

        It recovers outside the except block, whose traceback pins tensors.
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
        for module in modules_of(self._trainee.models) if self._trainee is not None else []:
            module.zero_grad(set_to_none=True)
        self._release()
        where = "a GPU" if index is None else f"{self.devices[index].label} ({self.devices[index].name})"
        raise OutOfMemoryError(
            f"{where} is out of memory with the samples {shape.splits[0]}; give it fewer. {message.splitlines()[0]}",
            device=None if index is None else self.devices[index].label,
            device_index=index,
            capacity_bytes=0 if index is None else self.capacities_bytes[index],
        )

    def _release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Let the allocator of each GPU hold no more than the GPU's capacity, and start from an empty cache."""
        self._release()
        before = [torch.cuda.get_per_process_memory_fraction(gpu) for gpu in self._gpus]
        for gpu, capacity_bytes in zip(self._gpus, self.capacities_bytes, strict=True):
            total_bytes = torch.cuda.get_device_properties(gpu).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, capacity_bytes / total_bytes), gpu)
        try:
            yield
        finally:
            for gpu, share in zip(self._gpus, before, strict=True):
                torch.cuda.set_per_process_memory_fraction(share, gpu)
            self._release()


class _Run:
    """One optimizer step, ready to be called; it returns when every GPU is idle."""

    def __init__(
        self,
        trainee: Trainee,
        shape: StepShape,
        batches: Sequence[object],
        gpus: list[torch.device],
        split: tuple[int, ...],
        buckets: Tensor | None,
    ) -> None:
        self._trainee, self._shape, self._batches, self._gpus, self._buckets = trainee, shape, batches, gpus, buckets
        self._sizes = [sum(micro) for micro in shape.splits]
        self._models = trainee.compiled() if shape.compiled else trainee.wrapped(lambda m: self._wrapped(m, split))

    def __call__(self, mark: Callable[[str], None]) -> None:
        def wait_and_mark(phase: str) -> None:
            if phase == "update":
                self._wait()
            mark(phase)

        if self._shape.arrangement == "eval":
            self._trainee.evaluate(self._models, self._batches[0])
        else:
            try:
                updates = int(self._shape.updates)
                self._trainee.step(self._models, self._batches, self._sizes, wait_and_mark, updates=updates)
            except BaseException:
                for wrapper in modules_of(self._models):
                    wrapper.zero_grad(set_to_none=True)  # what waits elsewhere, and what follows it, too
                raise
        self._wait()

    def _wait(self) -> None:
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def _wrapped(self, module: nn.Module, split: tuple[int, ...]) -> nn.Module:
        workload = self._trainee.workload
        reduce = "sum" if workload.loss_reduction == "sum" else None
        return BalancedDataParallel(None, module, self._gpus, dim=workload.batch_dim, split=split, reduce=reduce)  # type: ignore[arg-type]


def _failed_gpu(error: BaseException, gpus: list[torch.device]) -> int | None:
    """Find which GPU an out-of-memory error is about: ours says so, CUDA's allocator writes "GPU 1"."""
    if isinstance(error, OutOfMemoryError) and error.device is not None:
        names = [str(gpu) for gpu in gpus]
        return names.index(error.device) if error.device in names else None
    found = re.search(r"GPU (\d+)", str(error))
    ordinals = [gpu.index for gpu in gpus]
    return ordinals.index(int(found[1])) if found and int(found[1]) in ordinals else None
