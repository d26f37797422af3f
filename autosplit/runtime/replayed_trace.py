"""Make a tracer that replays values, and compare its steps with real ones. See Note [Replayed values]."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from autosplit.runtime.op_cost import Work
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.sample_values import SampleValues

_log = logging.getLogger(__name__)

T = TypeVar("T")


def replayed(trace: Callable[..., T], shape: StepShape, *, like_gpu: bool) -> T | None:
    """Return a tracer of fake tensors that replays values, or None if its steps differ from real ones.

    Args:
        trace: Makes a `Tracer` that has traced `shape`. Takes the arguments ``fake``, ``like_gpu`` and ``values``.
        like_gpu: As `Tracer` has it. The comparison is between steps of the CPU's own operators.
    """
    values = SampleValues()
    twice = StepShape(tuple(tuple(2 * samples for samples in split) for split in shape.splits))
    try:
        real: Any = trace(fake=False, like_gpu=False, values=values)
        values.phase = "twice"
        try:
            expected = [real.trace(one) for one in (shape, twice)]
        finally:
            real.trainee.restore()
        values.phase = "replay"
        found: Any = trace(fake=True, like_gpu=False, values=values)
        if not all(_agrees(found.trace(one), other) for one, other in zip((shape, twice), expected, strict=True)):
            _log.info("steps with replayed values differ from real steps: the values are not used")
            return None
        return trace(fake=True, like_gpu=True, values=values) if like_gpu else found
    except Exception as error:  # noqa: BLE001  # the caller has another tracer, or reports the failure of its own
        _log.info("a step can't be traced with replayed values: %s: %s", type(error).__name__, error)
        return None


def _agrees(fake: Any, real: Any) -> bool:
    """Return whether a fake step has the products of a real one, in order, and at least its peaks."""
    holds_enough = all(one >= other for one, other in zip(fake.peak_bytes, real.peak_bytes, strict=True))
    return holds_enough and _products(fake) == _products(real)


def _products(trace: Any) -> list[tuple[str, str]]:
    """Return the kind and the dtype of each kernel with arithmetic.

    Others are left out: torch runs some composite operators in other small steps for fake tensors.
    """
    works = [event for event in (*trace.micro, *trace.update) if isinstance(event, Work)]
    return [label[:2] for work in works for label, flops in zip(work.labels, work.numbers[0], strict=True) if flops]
