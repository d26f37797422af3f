"""Replay the traces of a step on the clocks of simulated GPUs.

Note [Composed steps]
~~~~~~~~~~~~~~~~~~~~~
Tracing eight GPUs takes eight times as long as tracing one. So a step of many devices is composed of two-device traces.
For the split (8, 4, 2), device 0 comes from a trace of (8, 6), and device 2 from a trace of (2, 2).

In a shorter last micro-step, some devices may be idle. Its trace is the first micro-step's trace without the work of
idle devices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autosplit.devices.device import Device
from autosplit.devices.transfer import HOST
from autosplit.runtime.memory_tracker import rounded
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.tracked_step import bucket_bytes, gradients_are_views
from autosplit.sim.affine_traces import AffineTraces
from autosplit.sim.allocator_settings import AllocatorSettings
from autosplit.sim.clocks import Clocks
from autosplit.sim.fake_trainee import FakeTrainee
from autosplit.sim.gpu_kernels import GpuKernels
from autosplit.sim.kernel_time import Part
from autosplit.sim.op_cost import Move, OpCost, Work
from autosplit.sim.op_recorder import Event
from autosplit.sim.tracer import Phase, Trace, Tracer
from autosplit.solve.memory import MemoryParts

Traces = Tracer | AffineTraces
"""A source of traces. `Tracer` runs each step, and `AffineTraces` predicts most of them."""

_BALANCED_PHASES: tuple[Phase, ...] = ("broadcast", "micro", "reduce")
"""The phases with work on several devices."""

_Played = Phase | Literal["first"]
"""The part of a step to replay. ``first`` is the first micro-step including the broadcast."""


@dataclass(frozen=True)
class TracedDevice:
    """A device's place in a trace.

    Attributes:
        bucket_bytes: DDP's buckets, if the trace does not contain them.
    """

    trace: Trace
    index: int
    bucket_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Peak of the tensors, in bytes."""
        return self.trace.peak_bytes[self.index] + self.bucket_bytes

    def parts(self, settings: AllocatorSettings, capacity_bytes: int | None) -> MemoryParts:
        """Return the parts of the peak. `untraced_bytes` is memory that the allocator reserves for no tensor."""
        parts, room_bytes = self.trace.parts[self.index], capacity_bytes
        if room_bytes is not None:
            room_bytes -= self.bucket_bytes
        reserved_bytes = self.trace.reserved_bytes(self.index, settings, room_bytes)
        return replace(
            parts,
            gradients_bytes=parts.gradients_bytes + self.bucket_bytes,
            untraced_bytes=reserved_bytes - parts.total_bytes,
        )


def active(split: tuple[int, ...]) -> list[int]:
    """Return the devices that have samples."""
    return [index for index, samples in enumerate(split) if samples]


def tracers_of(tracer: Traces, shape: StepShape, devices: Sequence[Device]) -> list[Traces]:
    """Return the traces for the kernels of each device."""
    specs = [device.spec for device in devices] or [None] * len(shape.splits[0])
    return [tracer if spec is None else tracer.for_kernels(GpuKernels.of(spec.compute_capability)) for spec in specs]


def source_of(tracers: Sequence[Traces], shape: StepShape) -> WholeStep | ComposedStep:
    """Return the step to replay: one trace of the whole step, or a composition of two-device traces."""
    placed = {0, *active(shape.splits[0])}
    # If two devices run the same kernels, one trace gives the whole step.
    if shape.arrangement == "balanced" and (len(placed) > 2 or len({id(tracers[index]) for index in placed}) > 1):
        composed = ComposedStep(tracers, shape)
        if composed.fits_together():
            return composed
    return WholeStep(tracers, shape)


def _as_traced(shape: StepShape, split: tuple[int, ...], *, in_buckets: bool = False) -> StepShape:
    """Return the micro-step to trace. If a step has several, each adds to the gradients of earlier micro-steps."""
    accumulates = shape.accumulates or len(shape.splits) > 1
    if in_buckets:
        return StepShape((split,), "rank", num_ranks=2)  # the number of ranks does not change a trace
    # A rank is a model on one device. Callers add its buckets, which exist during the whole step.
    arrangement = "balanced" if shape.arrangement == "rank" else shape.arrangement
    return StepShape((split,), arrangement, accumulates=accumulates)


def _events(trace: Trace, phase: _Played) -> Sequence[Event]:
    """Return the events to replay. Parameters are sent after the inputs, which hide the launches of these copies."""
    events = trace.events("micro" if phase == "first" else phase)
    if phase == "first":
        from_host = (isinstance(event, Move) and event.source == HOST for event in events)
        inputs = next((index for index, is_input in enumerate(from_host) if not is_input), len(events))
        events = (*events[:inputs], *trace.broadcast, *events[inputs:])
    return _reduced(events) if len(trace.peak_bytes) > 2 else events


def _reduced(events: Sequence[Event]) -> list[Event]:
    """Keep only the last sum of each gradient, because a reduce adds gradients while it sends them."""
    remaining: list[Event] = []
    for event, following in itertools.zip_longest(events, events[1:]):
        sources = [
            end.source if isinstance(end, Move) and end.purpose == "gradient" else HOST
            for end in (remaining[-1] if remaining else None, following)
        ]
        if not (isinstance(event, Work) and HOST < sources[0] < sources[1]):
            remaining.append(event)
    return remaining


def _works(events: Sequence[Event], device: int) -> Iterator[Work]:
    return (event for event in events if isinstance(event, Work) and event.device == device)


def _play(clocks: Clocks, events: Sequence[Event], place: Sequence[int]) -> None:
    for device, card in enumerate(place):
        clocks.foresee(card, _works(events, device))
    for event in events:
        if isinstance(event, Work):
            clocks.work(place[event.device], event)
        else:
            ends = [HOST if end == HOST else place[end] for end in (event.source, event.destination)]
            clocks.move(ends[0], ends[1], event.nbytes, event.purpose)


def _micro_step(
    tracer: Traces, shape: StepShape, split: tuple[int, ...], first: tuple[int, ...], phase: _Played, others: int
) -> Sequence[Event]:
    """Return the events of a micro-step, derived from the first micro-step's trace. See Note [Composed steps].

    `others` is the number of devices with samples except device 0, including devices that a stand-in represents.
    """
    lone = split != first and not any(split[1:])
    own, like = (_as_traced(shape, one[:1] if lone else one) for one in (split, first))
    events = _events(tracer.trace(own, like), phase)
    return events if lone or split == first else _without_idle(events, split, first, others)


def _without_idle(events: Sequence[Event], split: tuple[int, ...], first: tuple[int, ...], others: int) -> list[Event]:
    """Remove the work of devices that had samples in the first micro-step but have none in this micro-step.

    If device 0 is idle, keep its loss: the work between the first output that arrives and the last output gradient that
    it sends. If replicas compute the loss, remove the work for one loss (see `_joining`), and the weighting if one loss
    is left.
    """
    idle = {device for device, samples in enumerate(split) if first[device] and not samples}
    remaining = [event for event in events if _devices_of(event) == {0} or idle.isdisjoint(_devices_of(event))]
    if 0 not in idle:
        return remaining
    moved = {i: event.purpose for i, event in enumerate(remaining) if isinstance(event, Move)}
    turns = [i for i, purpose in moved.items() if purpose in ("output", "scalar")]
    loss = range(turns[0], turns[-1]) if turns else range(0)
    left = [event for i, event in enumerate(remaining) if i in loss or _devices_of(event) != {0}]
    if len(left) == len(remaining) or "scalar" not in moved.values():
        return left
    forward, backward = (2, 1) if others > 1 else (3, 2)
    return [event.inner(forward, backward) if isinstance(event, Work) and not event.device else event for event in left]


def _devices_of(event: Event) -> set[int]:
    """Return the device of an event. Transfers between device 0 and another device belong to the other device."""
    if isinstance(event, Work):
        return {event.device}
    return {event.source, event.destination} - {HOST, 0} or {0}


class WholeStep:
    """A step traced over device 0 and all devices with samples, or over a single device."""

    def __init__(self, tracers: Sequence[Traces], shape: StepShape) -> None:
        self._shape = shape
        self._num_devices = len(shape.splits[0])
        alone = shape.alone
        places = active(shape.splits[0])
        self._place = places if alone else sorted({0, *places})
        self._tracer = tracer = tracers[self._place[0]]
        # Tracing real tensors takes as long as a step. So trace one variant, and add the size of DDP's buckets to its
        # peak.
        self._in_buckets = (
            shape.arrangement == "rank" and gradients_are_views(shape) and isinstance(tracer.trainee, FakeTrainee)
        )

    def devices(self) -> list[TracedDevice | None]:
        """Return each device's place in a trace, or None for a device without samples."""
        trace, buckets = self._trace(self._shape.splits[0]), self._untraced_buckets()
        found: list[TracedDevice | None] = [None] * self._num_devices
        for place, index in enumerate(self._place):
            found[index] = TracedDevice(trace, place, buckets)
        return found

    def _untraced_buckets(self) -> int:
        beside = self._shape.num_ranks > 1 and not self._in_buckets
        return rounded(bucket_bytes(self._tracer.trainee)) if beside else 0

    def play(self, clocks: Clocks, split: tuple[int, ...], phase: _Played) -> None:
        """Replay a part of the step on the clocks."""
        if self._shape.alone:
            events = _events(self._trace(split), phase)
        else:
            own, first = self._own(split), self._own(self._shape.splits[0])
            events = _micro_step(self._tracer, self._shape, own, first, phase, len(active(split[1:])))
        _play(clocks, events, self._place)

    def _own(self, split: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(split[index] for index in self._place)

    def _trace(self, split: tuple[int, ...]) -> Trace:
        shares = self._own(self._shape.splits[0]), self._own(split)
        first, own = (_as_traced(self._shape, one, in_buckets=self._in_buckets) for one in shares)
        return self._tracer.trace(own, first)


@functools.lru_cache(maxsize=16)
def _joining(arrives: bool, nbytes: int) -> Work:
    """Return device 0's work for one additional loss: weight and add the loss, and weight its gradient."""
    part: Part = "forward" if arrives else "backward"
    return Work.of(0, [OpCost(0, 3 * nbytes, "float32", part=part)] * (2 if arrives else 1))


def _stand_ins(split: tuple[int, ...], num: int) -> tuple[int, ...]:
    """Return the split of the stand-ins, which represent all other devices in device 0's trace.

    One stand-in is enough, because device 0's memory depends only on the other devices' total samples. If device 0 has
    no samples, two are needed, because its sum of gradients then starts with the second stand-in.
    """
    rest = sum(split[1:])
    return (rest - rest // 2, rest // 2) if num == 2 else (rest,)


class ComposedStep:
    """A step composed of several traces. See Note [Composed steps].

    GPUs that run different operators have different tracers.
    """

    def __init__(self, tracers: Sequence[Traces], shape: StepShape) -> None:
        self._tracers = tracers
        self._shape = shape
        self._split = split = shape.splits[0]  # no later micro-step is larger
        self._num_stand_ins = 2 if split[0] == 0 and len(active(split)) > 1 else 1
        self._events: dict[tuple[int, int, _Played], list[Event]] = {}

    def fits_together(self) -> bool:
        """Return whether the two-device traces have the same transfers."""
        return all(
            len(_moves(self._replica_events(device, samples, phase))) == len(_moves(self._primary().events(phase)))
            for device, samples in self._different_replicas()
            for phase in _BALANCED_PHASES
        )

    def _different_replicas(self) -> list[tuple[int, int]]:
        found = {(id(self._tracers[d]), self._split[d]): d for d in active(self._split) if d}
        return [(device, samples) for (_, samples), device in found.items()]

    def devices(self) -> list[TracedDevice | None]:
        """Return each device's place in a trace, or None for a device without samples."""
        others = [TracedDevice(self._replica(d, n), 1) if n else None for d, n in enumerate(self._split[1:], 1)]
        return [TracedDevice(self._primary(), 0), *others]

    def play(self, clocks: Clocks, split: tuple[int, ...], phase: _Played) -> None:
        """Replay a part of the step on the clocks."""
        short = self._short(split)
        others = len(active(split[1:]))
        primary = _micro_step(self._tracers[0], self._shape, short, self._short(self._split), phase, others)
        if phase == "update":
            _play(clocks, primary, (0, 0, 0))
            return
        clocks.foresee(0, _works(primary, 0))
        replicas = {}
        for device, samples in enumerate(split[1:], 1):
            if samples:
                events = self._replica_events(device, samples, phase)
                clocks.foresee(device, _works(events, 1))
                replicas[device] = _played(clocks, device, events)
        for event in primary:
            if isinstance(event, Work):
                if event.device == 0:
                    clocks.work(0, event)
            elif {1, 2}.isdisjoint((event.source, event.destination)):
                _play(clocks, [event], (0,))
            else:
                _move_all(clocks, event, replicas, len(active(short[1:])))
        for replica in replicas.values():
            next(replica, None)

    def _replica_events(self, device: int, samples: int, phase: _Played) -> list[Event]:
        key = id(self._tracers[device]), samples, phase
        if key not in self._events:
            self._events[key] = [
                event
                for event in _events(self._replica(device, samples), phase)
                if (event.device == 1 if isinstance(event, Work) else 1 in (event.source, event.destination))
            ]
        return self._events[key]

    def _short(self, split: tuple[int, ...]) -> tuple[int, ...]:
        return (split[0], *_stand_ins(split, self._num_stand_ins))

    def _primary(self) -> Trace:
        return self._tracers[0].trace(_as_traced(self._shape, self._short(self._split)))

    def _replica(self, device: int, samples: int) -> Trace:
        """Return a two-device trace. The second device's memory and work do not depend on the first device."""
        others = self._split[1:]
        first, own = (_as_traced(self._shape, (share, share)) for share in (max(others), samples))
        return self._tracers[device].trace(own, own if samples in others else first)


def _move_all(clocks: Clocks, event: Move, replicas: dict[int, Iterator[Move]], num_stand_ins: int) -> None:
    """Replay a transfer between device 0 and a stand-in, once for each device that the stand-in represents.

    All but the last stand-in represent one device. Each loss is added to the sum before the next loss arrives. The
    trace already contains the addition of the last loss.
    """
    order, arrives = list(replicas.items()), event.destination == 0
    turn = event.source if arrives else event.destination
    if event.purpose == "scalar" and not arrives:
        order.reverse()  # autograd processes a sum of losses from the last to the first
        turn = num_stand_ins + 1 - turn
    own = order[turn - 1 :] if turn == num_stand_ins else order[turn - 1 : turn]
    if event.purpose == "buffer" and arrives:  # device 0 has no forward, so only the first replica sends its buffers
        replicas |= {device: itertools.chain([next(replica)], replica) for device, replica in order}
        clocks.move(order[0][0], 0, event.nbytes, event.purpose)
        return
    for device, replica in own:
        nbytes = next(replica).nbytes
        clocks.move(device if arrives else event.source, 0 if arrives else device, nbytes, event.purpose)
        if event.purpose == "scalar" and device != own[-1][0]:
            clocks.work(0, _joining(arrives, nbytes))


def _played(clocks: Clocks, device: int, events: Sequence[Event]) -> Iterator[Move]:
    for event in events:
        if isinstance(event, Work):
            clocks.work(device, event)
        else:
            yield event


def _moves(events: Sequence[Event]) -> list[Move]:
    moves = (event for event in events if isinstance(event, Move) and 1 in (event.source, event.destination))
    return [move for move in moves if (move.purpose, move.destination) != ("buffer", 0)]
