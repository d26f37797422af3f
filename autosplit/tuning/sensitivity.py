"""Simulate a plan's workload on machines that differ from the plan's machine in one property.

The gains show its bounds.

The traces of the tuning are used again. The time model, fitted to the simulations, chooses the next split to simulate.
Only simulated throughputs are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autosplit.devices.catalog import GpuSpec
from autosplit.oom import OutOfMemoryError
from autosplit.plan.explain import (
    FASTER,
    GIB,
    all_memory_relaxed,
    alone_of,
    base_of,
    fullest_of,
    kinds_of,
    memory_relaxed,
    problem_of,
    sizes_relaxed,
)
from autosplit.plan.explanation import BINDING_SHARE, Change, Changed
from autosplit.plan.measured_step import Without, faster_devices
from autosplit.plan.record import PlanRecord
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.simulated import SimulatedRuntime
from autosplit.solve.problem import NO_LIMIT_BYTES, Problem
from autosplit.solve.search_space import Configuration
from autosplit.solve.solver import Solver
from autosplit.solve.trial import Trial, configuration_of

MOST_NEW = 2
"""Most new splits to simulate on a changed machine. Each may need new traces."""

_COPIES = frozenset(("parameter", "buffer", "gradient"))
_OUTPUTS = frozenset(("output", "scalar"))


@dataclass(frozen=True)
class _Machine:
    """A machine, or a request, that differs from the plan's in one property.

    Attributes:
        what: The property that differs.
        device: The device that differs; None if it concerns no single device.
        runtime: Simulates the machine.
        problem: The problem on this machine.
        trials: The plan's trials that are also steps of this problem.
        updates: Whether the time of the optimizer counts.
    """

    what: Changed
    device: str | None
    runtime: SimulatedRuntime
    problem: Problem
    trials: tuple[Trial, ...] = ()
    updates: bool = True


def simulated_changes(
    plan: PlanRecord, runtime: SimulatedRuntime, *, deadline_s: float | None = None
) -> tuple[Change, ...] | None:
    """Simulate machines without the plan's bounds, one at a time, and other choices of devices.

    Return None if the plan has no splits or no fit, or if the time was not enough for all machines.
    """
    problem = problem_of(plan)
    if problem is None or plan.region is None:
        return None
    changes = []
    for machine in _machines(plan, problem, runtime):
        if deadline_s is not None and time.monotonic() >= deadline_s:
            return None
        rate = _best_rate(machine)
        if rate > 0:
            changes.append(Change(machine.what, machine.device, rate))
    base = base_of(plan)
    full = [index for index in range(len(plan.devices)) if _is_full(plan, index)]
    if not any(change.what == "one_gib_more" for change in changes):
        changes.append(Change("one_gib_more", plan.devices[fullest_of(plan)].label, base))
    binds = any(change.what == "memory" and change.samples_per_s > base * (1 + BINDING_SHARE) for change in changes)
    if len(full) > 1 and not binds and runtime.tracer.fake:
        everywhere = _with_memory(runtime, full, NO_LIMIT_BYTES)
        rate = _best_rate(_Machine("memory", None, everywhere, all_memory_relaxed(problem)))
        changes.append(Change("memory", None, max(base, rate)))
    return tuple(changes)


def simulated_without(runtime: SimulatedRuntime, shape: StepShape) -> Iterator[Without]:
    """Simulate one step with its split on machines that lack one time cost each."""
    measured = runtime.measure(shape)
    labels = [device.label for device in runtime.devices]

    def seconds(changed: SimulatedRuntime) -> float:
        return changed.measure(shape).seconds

    yield from faster_devices(labels, measured.seconds, lambda indices: seconds(_with_specs(runtime, indices, _faster)))
    everywhere = range(len(labels))
    if len(labels) > 1:
        own = runtime.devices, runtime.capacities_bytes, runtime.tracer
        yield "copies", None, seconds(SimulatedRuntime(*own, free=_COPIES))
        yield "gather", None, seconds(SimulatedRuntime(*own, free=_OUTPUTS))
    yield "host", None, seconds(_with_specs(runtime, everywhere, lambda spec: replace(spec, launch_s=0.0)))
    yield "update", None, measured.seconds - measured.update_s


def _machines(plan: PlanRecord, problem: Problem, runtime: SimulatedRuntime) -> Iterator[_Machine]:
    trials = tuple(trial for trial in plan.trials if trial.samples_per_s is not None)
    labels = [device.label for device in plan.devices]
    if runtime.tracer.fake:  # with real tensors, larger forwards might fill this machine
        yield from _larger(plan, problem, runtime, trials)
    for index in kinds_of(plan):
        faster = _with_specs(runtime, (index,), _faster)
        yield _Machine("device", labels[index], faster, problem.faster((index,), FASTER), trials)
    if len(labels) > 1:
        every = range(len(labels))
        linked = _with_specs(
            runtime, every, lambda spec: replace(spec, link_bytes_per_s=FASTER * spec.link_bytes_per_s)
        )
        yield _Machine("link", None, linked, problem.with_links(FASTER), trials)
        own = runtime.devices, runtime.capacities_bytes, runtime.tracer
        yield _Machine("copies", None, SimulatedRuntime(*own, free=_COPIES), problem.without("copies"), trials)
        yield _Machine("gather", None, SimulatedRuntime(*own, free=_OUTPUTS), problem.without("gather"), trials)
    yield _Machine("update", None, runtime, problem.without("update"), trials, updates=False)
    for index, ceiling in alone_of(plan) if len(labels) > 1 else ():
        one = slice(index, index + 1)
        alone = SimulatedRuntime(runtime.devices[one], runtime.capacities_bytes[one], runtime.tracer)
        yield _Machine("alone", labels[index], alone, problem.alone(index, ceiling))


def _larger(
    plan: PlanRecord, problem: Problem, runtime: SimulatedRuntime, trials: tuple[Trial, ...]
) -> Iterator[_Machine]:
    for index, (_, label, relaxed) in zip(kinds_of(plan), memory_relaxed(plan, problem), strict=True):
        if _is_full(plan, index):
            yield _Machine("memory", label, _with_memory(runtime, (index,), NO_LIMIT_BYTES), relaxed, trials)
    for what, _, relaxed in sizes_relaxed(plan, problem):
        # Trials with another effective batch size are no steps of this problem.
        yield _Machine(what, None, runtime, relaxed, trials if what == "max_batch_size" else ())
    index = fullest_of(plan)
    if _is_full(plan, index):
        more, label = problem.with_memory(index, GIB), plan.devices[index].label
        yield _Machine("one_gib_more", label, _with_memory(runtime, (index,), GIB), more, trials)


def _is_full(plan: PlanRecord, index: int) -> bool:
    return plan.devices[index].ceiling.limited_by == "memory"


# Machines


def _with_memory(runtime: SimulatedRuntime, indices: Sequence[int], more_bytes: int) -> SimulatedRuntime:
    capacities = [most + more_bytes * (index in indices) for index, most in enumerate(runtime.capacities_bytes)]
    return SimulatedRuntime(runtime.devices, tuple(capacities), runtime.tracer)


def _with_specs(
    runtime: SimulatedRuntime, indices: Sequence[int], change: Callable[[GpuSpec], GpuSpec]
) -> SimulatedRuntime:
    devices = tuple(
        replace(device, spec=change(device.spec)) if index in indices and device.spec is not None else device
        for index, device in enumerate(runtime.devices)
    )
    return SimulatedRuntime(devices, runtime.capacities_bytes, runtime.tracer)


def _faster(spec: GpuSpec) -> GpuSpec:
    """Return a GPU with higher speed of computation and memory.

    The launch time stays, because it depends on the host.
    """
    return replace(
        spec,
        peak_flops={rate: FASTER * flops for rate, flops in spec.peak_flops.items()},
        memory_bytes_per_s=FASTER * spec.memory_bytes_per_s,
    )


# Their rates


def _best_rate(machine: _Machine) -> float:
    """Return the samples/s of the fastest split that was simulated on a machine, or 0 if none was."""
    solver = machine.problem.solver()
    if solver is None:
        return 0.0
    tried = {
        configuration_of(trial): _trial(machine, solver, configuration_of(trial), trial) for trial in machine.trials
    }
    for _ in range(MOST_NEW):
        fitted = solver.refitted(tried.values())
        best = max((trial.samples_per_s or 0.0 for trial in tried.values()), default=0.0)
        following = max((c for c in fitted.answers() if c not in tried), key=fitted.samples_per_s, default=None)
        if following is None or fitted.samples_per_s(following) <= best * (1 + BINDING_SHARE):
            break
        tried[following] = _trial(machine, solver, following)
    return max((trial.samples_per_s or 0.0 for trial in tried.values()), default=0.0)


def _trial(machine: _Machine, solver: Solver, configuration: Configuration, known: Trial | None = None) -> Trial:
    """Simulate a configuration, with the split of its earlier trial if there is one."""
    splits = solver.splits_of(configuration, None if known is None else known.split)
    asked = configuration.gpu0_bsz, configuration.batch_size, configuration.accumulation_steps
    try:
        measured = machine.runtime.measure(StepShape(splits))
    except OutOfMemoryError as error:
        return Trial(0, *asked, splits[0], failure=str(error))
    seconds = measured.seconds if machine.updates else measured.seconds - measured.update_s
    return Trial(0, *asked, splits[0], samples_per_s=sum(map(sum, splits)) / seconds)
