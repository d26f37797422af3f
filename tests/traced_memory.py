"""The memory of a traced step's tensors, without the gaps of an allocator."""

from __future__ import annotations

from autosplit.runtime.protocol import StepShape
from autosplit.sim.allocator_settings import AllocatorSettings
from autosplit.sim.replay import Traces, source_of, tracers_of
from autosplit.sim.simulated import NOTHING
from autosplit.solve.memory import MemoryParts

EXACT = AllocatorSettings(caches=False)
"""An allocator that reserves exactly the tensors."""


def traced_parts(tracer: Traces, shape: StepShape) -> tuple[MemoryParts, ...]:
    """Return the parts of each device's peak. Their sum is the result of `traced_peaks`."""
    found = source_of(tracers_of(tracer, shape, ()), shape).devices()
    return tuple(NOTHING if traced is None else traced.parts(EXACT, None) for traced in found)
