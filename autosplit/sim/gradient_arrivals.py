"""Derive the memory and work of an accumulating step and of a DDP rank's step from a plain one-device step.

The three variants differ only when a gradient arrives on its parameter. In a plain step, the gradient stays in
autograd's tensor, or is copied if that tensor is needed elsewhere. In an accumulating step, it is added to the earlier
gradient and then freed. In a DDP rank, it is copied into DDP's buckets and then freed. See torch's `AccumulateGrad`
(csrc/autograd/functions/accumulate_grad.h).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from autosplit.runtime.memory_tracker import Kind
from autosplit.sim.op_calls import OpCall
from autosplit.sim.trace_tracker import Arrival, BoundedEntry, Stage, TraceTracker, limits_of

aten = torch.ops.aten

Variant = Literal["plain", "accumulating", "bucketed"]
"""Variant of the step: an arriving gradient stays, is added to an earlier gradient, or moves into a bucket."""


@dataclass(frozen=True)
class ArrivalCall:
    """The op call through which a gradient arrives on its parameter: a view of autograd's tensor, or a copy."""

    call: OpCall

    def calls(self, variant: Variant) -> tuple[OpCall, ...]:
        """Return the op calls that replace this call in a variant of the step."""
        call, saved = self.call, self.call.outputs
        if variant == "accumulating":
            made = call.args[1] if call.func is aten.copy_.default else call.args[0]
            return (replace(call, func=aten.add_.Tensor, args=(saved, made), kwargs=()),)
        if variant == "bucketed":
            lies = replace(saved, stride=torch.empty(saved.shape, device="meta").stride())
            return call, replace(call, func=aten.copy_.default, args=(lies, saved), kwargs=(), outputs=lies)
        return (call,)


def entries_of(
    tracker: TraceTracker, variant: Variant, stages: tuple[int, int], bucket_bytes: int = 0
) -> tuple[BoundedEntry, ...]:
    """Return the storages that are allocated and freed in a variant of a one-device step, in order.

    Workspaces come first. Storages freed at the end are omitted, because they do not change the peak.

    Args:
        stages: Number of entries before the first op, and before the update. DDP's buckets exist from the first op on.
    """
    account = list(enumerate(tracker.bounded_entries()) if variant == "plain" else _entries(tracker, variant))
    if variant == "bucketed":
        before = sum(at < stages[0] for at, _ in account)
        account.insert(before, (stages[0] - 1, BoundedEntry("gradients", 0, bucket_bytes)))
    numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)
    entries = [one._replace(stage=one.stage or _stage_of(at, stages), block=numbers[one.block]) for at, one in account]
    while entries and entries[-1].nbytes <= 0:
        entries.pop()
    return (*tracker.workspaces(), *entries)


def _stage_of(at: int, stages: tuple[int, int]) -> Stage:
    begin, update = stages
    return "before" if at < begin else "step" if at < update else "update"


def _entries(tracker: TraceTracker, variant: Variant) -> Iterator[tuple[int, BoundedEntry]]:
    """Yield the entries of a variant, each with its place in the traced account."""
    # Several arrivals may be views of one storage. The dictionary keeps the last of them.
    arrivals = {id(arrival.gradient): arrival for arrival in tracker.arrivals}
    going, copies = defaultdict(list), defaultdict(list)
    for arrival in arrivals.values():
        if variant == "bucketed" or not arrival.is_copy:
            going[arrival.at].append(arrival.gradient)
    for arrival in tracker.arrivals if variant == "accumulating" else []:
        copies[id(arrival.parameter)].append(arrival)
    for at, (held, device, _, exact_bytes) in enumerate(tracker.account):
        for gone in going[at]:
            yield at, BoundedEntry("activations", 0, -gone.exact_bytes, block=id(gone))
        own, goes = arrivals.get(id(held)), exact_bytes < 0
        kind = _kind(variant, own, held.kind, goes=goes)
        if kind is not None:
            block = id(own) if own is not None and goes else id(held)  # the earlier micro-steps' gradient goes last
            yield at, BoundedEntry(kind, device, exact_bytes, limits_of(held), block)
        for arrival in copies.pop(id(held), []):
            yield at, BoundedEntry("gradients", 0, arrival.nbytes, block=id(arrival), stage="kept")


def _kind(variant: Variant, arrival: Arrival | None, kind: Kind, *, goes: bool) -> Kind | None:
    """Return the kind of a storage in a variant of the step, or None if the variant does not allocate it."""
    if arrival is None:
        return kind
    if goes:  # freed at the end, like the gradients of earlier micro-steps
        return "gradients" if variant == "accumulating" else None
    return "activations" if variant == "bucketed" or not arrival.is_copy else None
