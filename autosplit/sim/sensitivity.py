"""Simulate a plan's workload on machines that differ from the plan's machine in one property.

The traces of the tuning are used again. The time model, fitted to the simulations, chooses the next split to simulate.
Only simulated throughputs are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from autosplit.devices.catalog import GpuSpec
from autosplit.oom import OutOfMemoryError
from autosplit.plan.compute_explanation import base_of
from autosplit.plan.explanation import BINDING_SHARE, Changed, WhatIf
from autosplit.plan.measured_step import ChangedTime, faster_devices
from autosplit.plan.record import PlanRecord
from autosplit.plan.solve_again import problem_of
from autosplit.plan.what_ifs import FASTER, GIB, Relaxed, RemovableCost, relaxations, what_ifs_of
from autosplit.runtime.protocol import StepShape
from autosplit.sim.simulated import SimulatedWorker
from autosplit.solve.change import NO_LIMIT_BYTES, changed
from autosplit.solve.problem import Problem
from autosplit.solve.search_space import Configuration
from autosplit.solve.trial import Trial, configuration_of

MOST_NEW = 2
"""Largest number of new splits to simulate on a changed machine. Each split may need new traces."""

_FREE = {"copies": frozenset(("parameter", "buffer", "gradient")), "gather": frozenset(("output", "scalar"))}
"""The kinds of transfers that take no time, by the changed property."""

FILLED_SHARE = 0.9
"""Share of additional memory that larger splits are given. The rest may become gaps of the allocator."""

_MORE_BYTES = {"memory": NO_LIMIT_BYTES, "one_gib_more": GIB}

_SPECS: dict[str, Callable[[GpuSpec], GpuSpec]] = {
    "device": lambda spec: replace(  # The launch time stays, because it depends on the host.
        spec,
        peak_flops={rate: FASTER * flops for rate, flops in spec.peak_flops.items()},
        memory_bytes_per_s=FASTER * spec.memory_bytes_per_s,
    ),
    "link": lambda spec: replace(spec, link_bytes_per_s=FASTER * spec.link_bytes_per_s),
    "host": lambda spec: replace(spec, launch_s=0.0),
}


def simulated_what_ifs(
    plan: PlanRecord, worker: SimulatedWorker, *, deadline_s: float | None = None
) -> tuple[WhatIf, ...] | None:
    """Simulate machines that each lack one of the plan's bounds, and machines with a single device of each kind.

    Return None if the plan has no splits or no fit, or if the time limit ends before all machines are simulated.
    """
    layout = plan.main
    problem = problem_of(plan, layout)
    if problem is None or layout.region is None:
        return None
    base, trials = base_of(plan), [trial for trial in plan.trials if trial.samples_per_s is not None]

    def rate(relaxed: Relaxed) -> float:
        what, is_for_all = relaxed.what, relaxed.device is None
        full = all(layout.seats[index].ceiling.limited_by == "memory" for index in relaxed.indices)
        is_limit = what not in _MORE_BYTES or (full and len(relaxed.indices) > is_for_all)
        # On this machine, real tensors of larger forwards might not fit in memory.
        is_larger = what in _MORE_BYTES or what in ("max_batch_size", "effective_batch_size")
        found = 0.0
        if is_limit and (worker.tracer.fake or not is_larger):
            # Trials with a different effective batch size or other devices are not steps of the changed problem.
            has_trials = what not in ("effective_batch_size", "alone") and not (what == "memory" and is_for_all)
            change = relaxed.change
            if what == "one_gib_more":
                assert change.more_bytes is not None, "it adds memory"
                change = replace(change, more_bytes=tuple(int(FILLED_SHARE * more) for more in change.more_bytes))
            found = _best_rate(
                changed(problem, change),
                _machine(worker, what, relaxed.indices),
                what,
                trials if has_trials else (),
            )
        return found or base if what == "one_gib_more" else found

    costs: tuple[RemovableCost, ...] = ("link", "copies", "gather", "update") if len(plan.devices) > 1 else ("update",)
    found = []
    for what_if in what_ifs_of(relaxations(plan, layout, problem, costs), base, rate):
        if deadline_s is not None and time.monotonic() >= deadline_s:
            return None
        found.append(what_if)
    return tuple(found)


def simulated_without(worker: SimulatedWorker, shape: StepShape) -> Iterator[ChangedTime]:
    """Simulate one step on machines that each lack one time cost. The split stays the same."""
    measured = worker.measure(shape)
    labels = [device.label for device in worker.devices]

    def seconds(what: Changed, indices: Collection[int]) -> float:
        return _machine(worker, what, indices).measure(shape).seconds

    every = range(len(labels))
    yield from faster_devices(labels, measured.seconds, lambda indices: seconds("device", indices))
    if len(labels) > 1:
        yield "copies", None, seconds("copies", every)
        yield "gather", None, seconds("gather", every)
    yield "host", None, seconds("host", every)
    yield "update", None, measured.seconds - measured.update_s


def _machine(worker: SimulatedWorker, what: Changed, indices: Collection[int]) -> SimulatedWorker:
    devices, capacities = worker.devices, worker.capacities_bytes
    if what == "alone":
        devices, capacities = tuple(devices[i] for i in indices), tuple(capacities[i] for i in indices)
    elif what in _MORE_BYTES:
        capacities = tuple(most + _MORE_BYTES[what] * (index in indices) for index, most in enumerate(capacities))
    elif what in _SPECS:
        devices = tuple(
            replace(device, spec=_SPECS[what](device.spec)) if index in indices and device.spec is not None else device
            for index, device in enumerate(devices)
        )
    free = _FREE.get(what, frozenset())
    return SimulatedWorker(devices, capacities, worker.tracer, free=free, fused_share=worker.fused_share)


def _best_rate(problem: Problem, machine: SimulatedWorker, what: Changed, trials: Sequence[Trial]) -> float:
    """Return the samples/s of the fastest split that was simulated on a machine, or 0 if none was simulated.

    Args:
        trials: The plan's trials that are also steps of this problem.
    """
    solver = problem.solver()
    if solver is None:
        return 0.0

    def simulated(configuration: Configuration, known: Trial | None = None) -> Trial:
        splits = solver.splits_of(configuration, None if known is None else known.split)
        sizes = configuration.gpu0_bsz, configuration.batch_size, configuration.accumulation_steps
        try:
            measured = machine.measure(StepShape(splits))
        except OutOfMemoryError as error:
            return Trial(0, *sizes, splits[0], failure=str(error))
        seconds = measured.seconds - (measured.update_s if what == "update" else 0.0)
        return Trial(0, *sizes, splits[0], samples_per_s=sum(map(sum, splits)) / seconds)

    tried = {configuration_of(trial): simulated(configuration_of(trial), trial) for trial in trials}
    for _ in range(MOST_NEW):
        fitted = solver.refitted(tried.values())
        best = max((trial.samples_per_s or 0.0 for trial in tried.values()), default=0.0)
        following = max((c for c in fitted.ranked() if c not in tried), key=fitted.samples_per_s, default=None)
        if following is None or fitted.samples_per_s(following) <= best * (1 + BINDING_SHARE):
            break
        tried[following] = simulated(following)
    return max((trial.samples_per_s or 0.0 for trial in tried.values()), default=0.0)
