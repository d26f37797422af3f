"""Record the ops and copies of a step, and convert them to other batch sizes or variants of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autosplit.sim.fake_results import KnownCall
from autosplit.sim.gradient_arrivals import ArrivalCall, Variant
from autosplit.sim.op_calls import OpCall
from autosplit.sim.op_cost import Move, OpCost, Work, is_free, op_cost, running_part
from autosplit.sim.recurrent_calls import RecurrentCalls, RecurrentOp, recurrent_costs
from autosplit.sim.trace_tracker import Arrivals
from autosplit.torch_versions import aten_ops

aten = torch.ops.aten

# torch.nn.functional rejects one value per channel for these ops. Instance norms also run as batch norm ops.
_NORMS_OVER_SAMPLES = aten_ops(
    "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update "
    "cudnn_batch_norm miopen_batch_norm native_group_norm"
)

Event = Work | Move


Op = OpCall | ArrivalCall | RecurrentOp | tuple[OpCost, ...]
"""An op's call, or its costs if shapes do not determine them."""


@dataclass(frozen=True)
class Ops:
    """The ops of a device between two transfers."""

    device: int
    ops: tuple[Op, ...]


Recorded = Ops | Move


class OpRecorder:
    """Collect ops between transfers.

    Attributes:
        norms_over_samples: Whether a recorded op may reject a batch of 1.
    """

    def __init__(self, samples: int, *, keeps_calls: bool) -> None:
        self.norms_over_samples = False
        self.recurrent = RecurrentCalls()
        self._phases: list[tuple[str, list[Recorded]]] = []
        self._samples = samples
        self._keeps_calls = keeps_calls
        self._arrivals = Arrivals()
        self._ops: dict[Op, Op] = {}  # one object for equal ops, because `phases` finds their costs by identity
        self._open: dict[int, list[Op]] = {}
        self.mark("start")

    def mark(self, phase: str) -> None:
        """End the running operators, and begin a phase."""
        self._close(*list(self._open))
        self._phases.append((phase, []))

    def on_op(
        self,
        device: int,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: Any,
        known: KnownCall | None = None,
    ) -> None:
        """Add an op to its device's list."""
        if getattr(func, "overloadpacket", None) in _NORMS_OVER_SAMPLES:
            self.norms_over_samples |= _values_per_channel(func, args) <= self._samples
        arrives = self._keeps_calls and self._arrivals.parameter_of(func) is not None
        if is_free(func) and not arrives:
            return
        op: Op
        part = running_part()
        call = None if known is None else known.facts.get(part)
        try:
            if call is None:
                call = OpCall.of(func, args, kwargs, outputs, part)
            if known is not None:
                known.facts[part] = call
            op = ArrivalCall(call) if arrives else self.recurrent.op(call)
            op = self._ops.setdefault(op, op)
        except NotImplementedError:
            if self._keeps_calls:
                raise
            op = op_cost(func, args, kwargs, outputs, part)
        self._open.setdefault(device, []).append(op)

    def on_transfer(self, source: int, destination: int, nbytes: int, purpose: str) -> None:
        """End the current `Work` of both devices, and record the transfer."""
        # Gradients are reduced when all devices have finished, so first close all their earlier work.
        self._close(*(list(self._open) if purpose == "gradient" else (source, destination)))
        self._phases[-1][1].append(Move(source, destination, nbytes, purpose))

    def phase(self) -> tuple[Recorded, ...]:
        """Return the events of the current phase."""
        self._close(*list(self._open))
        return tuple(self._phases[-1][1])

    def repeat(self, events: Sequence[Recorded]) -> None:
        """Add previously recorded events to the current phase."""
        self._close(*list(self._open))
        self._phases[-1][1].extend(events)

    def phases(self, resized: Callable[[int], int] = int, variant: Variant = "plain") -> list[tuple[str, list[Event]]]:
        """Return the events for a different batch size or variant of the step. The update is always the same."""
        self._close(*list(self._open))
        found = []
        for name, events in self._phases:
            size = int if name == "update" else resized
            works = functools.partial(_work_of, {}, functools.partial(_costs, variant=variant, resized=size))
            made = [replace(one, nbytes=size(one.nbytes)) if isinstance(one, Move) else works(one) for one in events]
            found.append((name, [event for event in made if isinstance(event, Move) or event.labels]))
        return found

    def _close(self, *devices: int) -> None:
        for device in devices:
            ops = self._open.pop(device, None)
            if ops:
                self._phases[-1][1].append(Ops(device, tuple(ops)))


def _work_of(known: dict[Any, Any], costs: Callable[[Op], tuple[OpCost, ...]], event: Ops) -> Work:
    """Return the work of ops. Many layers are identical, so `known` has the costs and works of the same objects."""
    place = event.device, *map(id, event.ops)
    if place not in known:
        for op in event.ops:
            if id(op) not in known:
                known[id(op)] = costs(op)
        known[place] = Work.of(event.device, [cost for op in event.ops for cost in known[id(op)]])
    work: Work = known[place]
    return replace(work)  # clocks distinguish works by their identity


def _costs(op: Op, *, variant: Variant, resized: Callable[[int], int]) -> tuple[OpCost, ...]:
    if isinstance(op, tuple):
        return op
    if isinstance(op, RecurrentOp):
        return tuple(recurrent_costs(op, op.call.costs(resized)))
    calls = op.calls(variant) if isinstance(op, ArrivalCall) else (op,)
    return tuple(cost for call in calls for cost in call.costs(resized))


def _values_per_channel(func: Any, args: Sequence[Any]) -> int:
    """Return how many values a norm averages per channel. If each sample has several, a batch of 1 works."""
    values: Tensor = args[0]
    channels = args[6] if func.overloadpacket is aten.native_group_norm else values.shape[1]
    return values.numel() // max(1, channels)
