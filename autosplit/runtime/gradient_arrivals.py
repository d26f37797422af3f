"""Tell from a plain step of one device what one that accumulates holds and does, and a DDP rank's.

They differ where gradients arrive. In a plain step a gradient stays where autograd made it, or is copied where that is
needed elsewhere. One that is added to the gradient of earlier micro-steps is read, and goes; one that moves into DDP's
buckets is copied, and goes. See torch's `AccumulateGrad` (csrc/autograd/functions/accumulate_grad.h).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from autosplit.runtime.memory_tracker import Arrival, Entry, Kind, Tracker
from autosplit.runtime.op_calls import OpCall

aten = torch.ops.aten

Way = Literal["plain", "accumulating", "bucketed"]
"""What becomes of a gradient that arrives: it stays, is added to an earlier one, or moves into a bucket."""


@dataclass(frozen=True)
class ArrivalCall:
    """The call of an op by which a gradient arrives on its parameter: a view of what autograd made, or a copy."""

    call: OpCall

    def calls(self, way: Way) -> tuple[OpCall, ...]:
        """Return what is called in its place."""
        call, kept = self.call, self.call.outputs
        if way == "accumulating":
            made = call.args[1] if call.func is aten.copy_.default else call.args[0]
            return (replace(call, func=aten.add_.Tensor, args=(kept, made), kwargs=()),)
        if way == "bucketed":
            lies = replace(kept, stride=torch.empty(kept.shape, device="meta").stride())
            return call, replace(call, func=aten.copy_.default, args=(lies, kept), kwargs=(), outputs=lies)
        return (call,)


def entries_of(tracker: Tracker, way: Way, begun_at: int = 0, bucket_bytes: int = 0) -> tuple[Entry, ...]:
    """Return the storages that come and go in a step of one device, or would in a step of another way, in order.

    Workspaces come first. Storages that only go at the end are left out, because they do not change the peak.

    Args:
        begun_at: Entries before the first op, where DDP has its buckets already.
    """
    if way == "plain":
        entries = list(tracker.entries())
    else:
        entries = list(_entries(tracker, way))
        if way == "bucketed":
            entries.insert(begun_at, Entry("gradients", 0, bucket_bytes))
    while entries and entries[-1].nbytes <= 0:
        entries.pop()
    return (*tracker.workspaces(), *entries)


def _entries(tracker: Tracker, way: Way) -> Iterator[Entry]:
    arrivals = {id(arrival.gradient): arrival for arrival in tracker.arrivals}  # of views of one storage the last
    going, beside = defaultdict(list), defaultdict(list)
    for arrival in arrivals.values():
        if way == "bucketed" or not arrival.is_copy:
            going[arrival.at].append(arrival.gradient.exact_bytes)
    for arrival in tracker.arrivals if way == "accumulating" else []:
        beside[id(arrival.parameter)].append(arrival.nbytes)
    for at, (held, device, _, exact_bytes) in enumerate(tracker.account):
        yield from (Entry("activations", 0, -nbytes) for nbytes in going[at])
        kind = _kind(way, arrivals.get(id(held)), held.kind, goes=exact_bytes < 0)
        if kind is not None:
            yield Entry(kind, device, exact_bytes, held.limits)
        yield from (Entry("gradients", 0, nbytes) for nbytes in beside.pop(id(held), []))


def _kind(way: Way, arrival: Arrival | None, kind: Kind, *, goes: bool) -> Kind | None:
    """Return what a storage is for in a step of another way, None where it is not there."""
    if arrival is None:
        return kind
    if goes:  # in the end, as the gradients of earlier micro-steps do
        return "gradients" if way == "accumulating" else None
    return "activations" if way == "bucketed" or not arrival.is_copy else None
