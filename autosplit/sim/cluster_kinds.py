"""Measure each kind of GPU of a cluster as a DDP rank, and collect its gradients in DDP's buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autosplit.devices.catalog import GpuSpec
from autosplit.devices.device import Device
from autosplit.notes import Note
from autosplit.solve.step_time import BACKWARD_SHARE, TimeCurve

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""Sizes of DDP's first bucket and of its other buckets (torch 2.13, `_DEFAULT_FIRST_BUCKET_BYTES`, `bucket_cap_mb`)."""


@dataclass(frozen=True)
class RankKind:
    """The measurements of one kind of GPU as a DDP rank.

    Attributes:
        name: Name of the GPU.
        ceiling: Largest batch size that fits.
        curve: Time of a forward and a backward in seconds, by number of samples.
        update_s: Time of the optimizer, in seconds.
        buckets: DDP's buckets in order. Each is a pair: when its last gradient arrives, as a fraction of the forward
            and backward, and its bytes.
    """

    name: str
    ceiling: int
    curve: TimeCurve
    update_s: float
    buckets: tuple[tuple[float, int], ...]

    @property
    def samples_per_s(self) -> float:
        """The highest samples/s of one GPU that never waits for other ranks."""
        sizes = {self.ceiling, *(samples for samples, _ in self.curve.points if samples <= self.ceiling)}
        return max(size / self.curve(size) for size in sizes)


def measured_kinds(
    model_or_workload: Any,
    sample_batch: Any,
    devices: Sequence[Device],
    *,
    progress: Callable[[Any], None] | None = None,
    time_limit_s: float | None = None,
    reserve: str | float | None = None,
    **described: Any,
) -> tuple[dict[Device, RankKind], dict[str, Any], tuple[Note, ...]]:
    """Trace a workload once, and measure each kind of GPU as a DDP rank.

    Returns:
        The measurements by kind, the keywords of `predicted` that depend on the workload, and notes.
    """
    from autosplit.devices.spec import parse_devices
    from autosplit.probe.request import checked_request
    from autosplit.runtime.prepare import workload_source
    from autosplit.tuning.process import drive
    from autosplit.tuning.tune import process_for, quiet, users_code_named

    placed = parse_devices([*devices] * (1 if len(devices) > 1 else 2))  # a single rank has no buckets
    request = checked_request(devices=placed, strategy="ddp", reserve=reserve, time_limit_s=time_limit_s)

    def source_of(_number: int) -> Any:
        return workload_source(model_or_workload, sample_batch, described)

    with process_for(request, source_of, isolate=False) as process, users_code_named():
        found, limits, notes = drive(process, lambda processes: _examined(processes, progress or quiet))
    return dict(zip(devices, found, strict=False)), limits, notes


def _examined(processes: Any, listen: Callable[[Any], None]) -> tuple[list[RankKind], dict[str, Any], tuple[Note, ...]]:
    from autosplit.profiles.key import ProfileKey
    from autosplit.sim.gpu_kernels import GpuKernels
    from autosplit.sim.simulated import SimulatedWorker
    from autosplit.tuning.process import Process
    from autosplit.tuning.run import POINT_BUDGET_S, Run
    from autosplit.tuning.tune import measure_and_search

    processes.ask(Process.build)
    key = ProfileKey(processes.job.machine, processes.own.description(), {})
    request, notes = processes.prepare(processes.job.request, key)
    run = Run.of(processes, request, key, listen, notes)
    plan = measure_and_search(run)
    layout = plan.main
    assert layout.cost is not None, "a plan for simulated ranks has a cost model"
    prober, worker, kinds = run.prober, run.prober.worker, []
    assert isinstance(worker, SimulatedWorker), "a cluster has simulated GPUs"
    for index, seat in enumerate(layout.seats):
        spec = request.devices[index].spec
        assert spec is not None, "a cluster has simulated GPUs"
        step = prober.measured(prober.shapes(index, "rank", (), False)(seat.samples), budget_s=POINT_BUDGET_S)
        traces = worker.tracer.for_kernels(GpuKernels.of(spec.compute_capability))
        nbytes = prober.facts.gradient_bytes
        arrived = _arrivals(traces, spec, seat.samples, nbytes) if worker.tracer.fake else ()
        buckets = buckets_of(arrived or even_arrivals(nbytes))
        curve = layout.cost.step_time.curves[index]
        kinds.append(RankKind(request.devices[index].name, seat.ceiling.batch_size, curve, step.update_s, buckets))
    return kinds, {"least_batch": layout.least_batch, "accumulates": run.may_accumulate}, plan.notes


def _arrivals(traces: Any, spec: GpuSpec, samples: int, nbytes: int) -> list[tuple[float, int]]:
    """Return when each gradient arrives, as a fraction of the forward and backward, and its bytes.

    A rank's trace is a plain trace with one more kernel for each gradient, which copies the gradient into its bucket.
    The bytes of these kernels are in proportion to the gradients. All gradients have `nbytes`.
    """
    from autosplit.runtime.protocol import StepShape
    from autosplit.sim.kernel_time import kernel_seconds
    from autosplit.sim.op_cost import Work

    def kernels(shape: StepShape) -> tuple[Any, Any]:
        works = [event for event in traces.trace(shape).micro if isinstance(event, Work)]
        numbers = np.concatenate([work.numbers for work in works], axis=1)
        return numbers, np.concatenate([work.codes for work in works], axis=1)

    plain, plain_codes = kernels(StepShape(((samples,),)))
    numbers, codes = kernels(StepShape(((samples,),), "rank", num_ranks=2))
    ends_s = np.cumsum(kernel_seconds(numbers, codes, spec))
    arrived, matched = [], 0
    for at in range(numbers.shape[1]):
        alike = matched < plain.shape[1] and (plain_codes[:, matched] == codes[:, at]).all()
        if alike and np.allclose(plain[:, matched], numbers[:, at], rtol=1e-6):
            matched += 1
        else:
            arrived.append((float(ends_s[at] / ends_s[-1]), float(numbers[1, at])))
    moved = sum(copied for _, copied in arrived)
    return [(share, round(copied / moved * nbytes)) for share, copied in arrived]


def even_arrivals(nbytes: int) -> list[tuple[float, int]]:
    """Return arrivals that are spread evenly over the backward, for a model that only real tensors can trace."""
    count = -(-nbytes // BUCKET_BYTES)
    return [(1 - BACKWARD_SHARE * (1 - (at + 1) / count), -(-nbytes // count)) for at in range(count)]


def buckets_of(arrived: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Collect gradients in DDP's buckets. A bucket is full when it has at least `BUCKET_BYTES`."""
    buckets: list[tuple[float, int]] = []
    held = 0
    for at, nbytes in arrived:
        held += nbytes
        if held >= (BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES):
            buckets.append((at, held))
            held = 0
    return (*buckets, *([(arrived[-1][0], held)] if held else []))
