"""Run one rank's part of real DDP steps: first without the other ranks, then with them if the step fits on all.

dry pass   forward, backward, update; nothing is sent | every rank reports whether the step fits
timed      blocks of whole steps; the last backward of each step all-reduces the gradients

If a rank fails while the others wait for its gradients, all ranks abort NCCL's all-reduce. gloo's times out.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.accelerators import backend, is_accelerator
from autosplit.ddp.failure import abort_group
from autosplit.ddp.group_end import keep_backend
from autosplit.oom import OutOfMemoryError, is_oom
from autosplit.rng import preserved_rng
from autosplit.runtime.accelerator import pinned
from autosplit.runtime.model_copy import training_copy
from autosplit.runtime.protocol import Measurement, StepShape, Worker
from autosplit.runtime.timing import is_enough, median_error
from autosplit.runtime.trainee import Trainee
from autosplit.tuning.peers import Failure, Peers
from autosplit.workload.models import Models
from autosplit.workload.tree import map_tensors
from autosplit.workload.workload import Workload

BLOCK_S = 0.1
"""Length of a timed block of steps in seconds. The ranks exchange messages between blocks, which are not timed."""

WARMUPS = 3
"""Number of untimed steps. DDP rebuilds its buckets before its second step, so only later steps are typical."""

LEAST_TIMEOUT_S = 15.0
"""Shortest timeout of a collective in seconds. The timeout is longer if `TIMEOUT_STEPS` dry passes take longer.

After the timeout, gloo raises an error. Other back ends kill the process.
"""

TIMEOUT_STEPS = 10

BUCKET_BYTES = 25 * 2**20
"""DDP's default bucket size (its `bucket_cap_mb`)."""

LEAST_BUCKET_BYTES = 4
REDUCES = 6
"""Number of all-reduces to run. The first is not counted."""


class RankSteps:
    """Run and measure steps of all ranks together. Every rank makes the same calls in the same order.

    Args:
        worker: The worker of this rank's device. On a CPU it runs the dry pass, and its tracker counts the memory.
    """

    def __init__(
        self,
        workload: Workload,
        worker: Worker,
        device: torch.device,
        peers: Peers,
        *,
        backend: str,
        options: dict[str, Any],
    ) -> None:
        self.workload, self.worker, self.device, self.peers = workload, worker, device, peers
        self.backend, self.options = backend, options
        self.steps = self.ooms = 0
        self._slowest_dry_s = 0.0
        self._group: Any = None
        self._trainee: Trainee | None = None
        self._models: Models | None = None
        self._batches: dict[int, Any] = {}

    def measured(self, sizes: Sequence[int], *, budget_s: float) -> tuple[list[int], Measurement] | Failure:
        """Run a step of all ranks repeatedly. A rank without samples runs one sample, whose gradient has no weight.

        Returns:
            Every rank's peak in bytes and the time of a step. Or the failure of the rank that ran out of memory.
        """
        run = tuple(max(1, size) for size in sizes)
        self._batches.clear()
        with preserved_rng():
            # On a CPU, the tracker counts the memory of a step without DDP wrappers.
            unfit = None if self.device.type == "cpu" else self._prepared()
            peaks = unfit or self._try(lambda: self._dry_peak_bytes(run))
            if isinstance(peaks, Failure):
                return peaks
            measured = self._prepared() or self._timed(run, budget_s)
        if isinstance(measured, Failure):
            return measured
        later = self.peers.gathered(self._reserved_bytes())
        return [max(pair) for pair in zip(peaks, later, strict=True)], measured

    def all_reduce_seconds(self, nbytes: int) -> float:
        """Time an all-reduce of `nbytes` in DDP's buckets, without any computation at the same time."""
        self._meet()
        whole = max(LEAST_BUCKET_BYTES, min(nbytes, BUCKET_BYTES))
        buffer = torch.zeros(whole // 4, device=self.device)
        seconds = []
        for _ in range(REDUCES):
            self._wait()
            start_s = time.perf_counter()
            dist.all_reduce(buffer, group=self._group)
            self._wait()
            seconds.append(time.perf_counter() - start_s)
        return statistics.median(seconds[1:]) * nbytes / whole

    # The dry pass

    def _dry_peak_bytes(self, sizes: tuple[int, ...]) -> int:
        """Run this rank's step without the other ranks. Return its peak in bytes."""
        start_s = time.perf_counter()
        if self.device.type == "cpu":  # the worker's tracker counts the memory
            shape = StepShape(tuple((size,) for size in sizes), "rank", num_ranks=self.peers.world_size)
            peak_bytes = self.worker.peaks(shape)[0]
        else:
            peak_bytes = self._dry_peak_bytes_on_gpu(sizes)
        self._slowest_dry_s = max(self._slowest_dry_s, time.perf_counter() - start_s)
        return peak_bytes

    def _dry_peak_bytes_on_gpu(self, sizes: tuple[int, ...]) -> int:
        self._release()  # Otherwise the peak would include memory that an earlier step reserved.
        backend(self.device.type).reset_peak_memory_stats(self.device)
        for wrapper in self._wrappers():
            wrapper.require_forward_param_sync = False  # buffers are not sent either, the next step sends them
        for _ in range(2):  # the first step creates the optimizer state
            self._run(sizes, meets=False)
        self.steps += 2
        self._wait()
        return self._reserved_bytes()

    def _reserved_bytes(self) -> int:
        on_gpu = is_accelerator(self.device.type)
        return int(backend(self.device.type).max_memory_reserved(self.device)) if on_gpu else 0

    # Steps of all ranks

    def _timed(self, sizes: tuple[int, ...], budget_s: float) -> Measurement | Failure:
        """Time blocks of steps. Every rank decides from the same numbers how many blocks to run."""
        first = self._try(lambda: self._block(sizes, WARMUPS), together=True)
        if isinstance(first, Failure):
            return first
        count = max(1, math.ceil(BLOCK_S * WARMUPS / max(whole_s for whole_s, _ in first)))
        seconds: list[float] = []
        update_s: list[float] = []
        while not is_enough(seconds, sum(seconds) * count, budget_s):
            block = self._try(lambda: self._block(sizes, count), together=True)
            if isinstance(block, Failure):
                return block
            seconds.append(max(whole_s for whole_s, _ in block) / count)
            update_s.append(max(last_s for _, last_s in block))
        return Measurement(
            statistics.median(seconds),
            median_error(seconds),
            update_s=statistics.median(update_s),
            repeats=len(seconds) * count,
        )

    def _block(self, sizes: tuple[int, ...], count: int) -> tuple[float, float]:
        begun_s: list[float] = []

        def mark(phase: str) -> None:
            if phase == "update":
                self._wait()
                begun_s.append(time.perf_counter())

        self._wait()
        start_s = time.perf_counter()
        for _ in range(count):
            self._run(sizes, mark)
        self._wait()
        end_s = time.perf_counter()
        self.steps += count
        return end_s - start_s, end_s - (begun_s[-1] if begun_s else end_s)

    def _run(
        self, sizes: tuple[int, ...], mark: Callable[[str], None] = lambda _phase: None, *, meets: bool = True
    ) -> None:
        assert self._trainee is not None, "`_prepared` sets it"
        assert self._models is not None, "`_prepared` wraps the models"
        # Move the batch here, because a `loss_fn` does not move its targets.
        here = partial(torch.Tensor.to, device=self.device, non_blocking=True)
        there = {size: map_tensors(here, self._batch(self._trainee, size)) for size in dict.fromkeys(sizes)}
        position = 0

        def marked(phase: str) -> None:
            nonlocal position
            if phase == "micro":
                position += 1
                for wrapper in self._wrappers():
                    wrapper.require_backward_grad_sync = meets and position == len(sizes)
            mark(phase)

        self._trainee.step(self._models, [there[size] for size in sizes], sizes, marked)

    def _wrappers(self) -> list[DistributedDataParallel]:
        modules = () if self._models is None else self._models.modules
        return [wrapper for wrapper in modules if isinstance(wrapper, DistributedDataParallel)]

    def _batch(self, trainee: Trainee, size: int) -> Any:
        """Return a batch as a data loader returns it. Reuse it, because making a batch is not part of a step."""
        if size not in self._batches:
            self._batches[size] = map_tensors(partial(pinned, kind=self.device.type), trainee.batch(size))
        return self._batches[size]

    def _prepared(self) -> Failure | None:
        """Make this rank's copy, the process group, and the DDP wrappers, which broadcast rank 0's weights."""
        if self._models is not None:
            return None

        def copy() -> None:
            self._trainee = training_copy(self.workload, device=self.device)

        def wrap() -> None:
            assert self._trainee is not None, "`_prepared` copies it"
            self._models = self._trainee.wrapped(self._wrapped)

        copied = self._try(copy)  # not `together`: other ranks must not wait if this rank lacks memory
        if isinstance(copied, Failure):
            return copied
        self._meet()
        wrapped = self._try(wrap, together=True)
        return wrapped if isinstance(wrapped, Failure) else None

    def _meet(self) -> None:
        if self._group is None:
            # Only gloo raises an error after a timeout. Other back ends end the process.
            timeout = timedelta(seconds=self._patience_s) if self.backend == "gloo" else None
            self._group = dist.new_group(backend=self.backend, timeout=timeout)
            keep_backend(self._group)

    @property
    def _patience_s(self) -> float:
        return max(LEAST_TIMEOUT_S, TIMEOUT_STEPS * self._slowest_dry_s)

    def _wrapped(self, module: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module  # The module has no gradients to reduce, and DDP rejects it.
        ids = [self.device.index] if is_accelerator(self.device.type) else None
        return DistributedDataParallel(module, device_ids=ids, process_group=self._group, **self.options)

    def _wait(self) -> None:
        if is_accelerator(self.device.type):
            backend(self.device.type).synchronize(self.device)

    # Out of memory

    def _try(self, run: Callable[[], Any], *, together: bool = False) -> Any:
        """Call a function on every rank. If a rank runs out of memory, all ranks free their copies.

        Args:
            together: Whether the ranks wait for each other in the function.
        """
        result = self.peers.all_try(
            lambda: self._guarded(run), cut=(lambda: abort_group(self._group)) if together else None
        )
        if isinstance(result, Failure):
            self.ooms += 1
            self.close()
        return result

    def _guarded(self, run: Callable[[], Any]) -> Any:
        message = None
        try:
            return run()
        except OutOfMemoryError:
            raise
        except Exception as error:
            if not is_oom(error):
                raise
            message = str(error).splitlines()[0]
        # Raise outside of the except block, because the traceback would refer to tensors and keep them in memory.
        label = self.worker.devices[0].label
        raise OutOfMemoryError(f"{label} is out of memory. Give it fewer samples. {message}", device=label)

    def close(self) -> None:
        """Free the copies and the process group."""
        self._models = None
        if self._trainee is not None:
            self._trainee.restore()
        self._trainee = None
        self._release()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _release(self) -> None:
        gc.collect()
        if is_accelerator(self.device.type):
            backend(self.device.type).empty_cache()
