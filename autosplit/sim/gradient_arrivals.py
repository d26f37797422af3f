"""Derive the memory and work of an accumulating step and of a DDP rank's step from a plain one-device step.

The three variants differ only when a gradient arrives on its parameter. In a plain step, the gradient stays in
autograd's tensor, or is copied if that tensor is needed elsewhere. In an accumulating step, it is added to the earlier
gradient and then freed. In a DDP rank, it is copied into DDP's buckets and then freed. See torch's `AccumulateGrad`
(csrc/autograd/functions/accumulate_grad.h).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from autosplit.runtime.memory_tracker import Kind
from autosplit.sim.op_calls import OpCall
from autosplit.sim.trace_tracker import Arrival, BoundedEntry, TraceTracker, limits_of

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
    tracker: TraceTracker, variant: Variant, begun_at: int = 0, bucket_bytes: int = 0
) -> tuple[BoundedEntry, ...]:
    """Return the storages that are allocated and freed in a variant of a one-device step, in order.

    Workspaces come first. Storages freed at the end are omitted, because they do not change the peak.

    Args:
        begun_at: Number of entries before the first op. DDP's buckets exist from then on.
    """
    if variant == "plain":
        entries = list(tracker.bounded_entries())
    else:
        entries = list(_entries(tracker, variant))
        if variant == "bucketed":
            entries.insert(begun_at, BoundedEntry("gradients", 0, bucket_bytes))
    while entries and entries[-1].nbytes <= 0:
        entries.pop()
    return (*tracker.workspaces(), *entries)


def _entries(tracker: TraceTracker, variant: Variant) -> Iterator[BoundedEntry]:
    # Several arrivals may be views of one storage. The dictionary keeps the last of them.
    arrivals = {id(arrival.gradient): arrival for arrival in tracker.arrivals}
    going, copies = defaultdict(list), defaultdict(list)
    for arrival in arrivals.values():
        if variant == "bucketed" or not arrival.is_copy:
            going[arrival.at].append(arrival.gradient.exact_bytes)
    for arrival in tracker.arrivals if variant == "accumulating" else []:
        copies[id(arrival.parameter)].append(arrival.nbytes)
    for at, (held, device, _, exact_bytes) in enumerate(tracker.account):
        yield from (BoundedEntry("activations", 0, -nbytes) for nbytes in going[at])
        kind = _kind(variant, arrivals.get(id(held)), held.kind, goes=exact_bytes < 0)
        if kind is not None:
            yield BoundedEntry(kind, device, exact_bytes, limits_of(held))
        yield from (BoundedEntry("gradients", 0, nbytes) for nbytes in copies.pop(id(held), []))


def _kind(variant: Variant, arrival: Arrival | None, kind: Kind, *, goes: bool) -> Kind | None:
    """Return the kind of a storage in a variant of the step, or None if the variant does not allocate it."""
    if arrival is None:
        return kind
    if goes:  # freed at the end, like the gradients of earlier micro-steps
        return "gradients" if variant == "accumulating" else None
    return "activations" if variant == "bucketed" or not arrival.is_copy else None
