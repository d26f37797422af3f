"""Make a tracer that replays values, and compare its steps with real steps. See Note [Replayed values]."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from autosplit.runtime.op_cost import Work
from autosplit.runtime.protocol import StepShape
from autosplit.runtime.sample_values import SampleValues

_log = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_OF_PEAK, LEAST_OF_GROWTH = 0.98, 0.9
"""Minimum peak of a replayed step, and growth of that peak with the batch, as fractions of real steps.

Optimizer steps in between change the rows that a router selects. A tiny Mixtral was 0.2% off.
"""


def replayed(trace: Callable[..., T], shape: StepShape, *, like_gpu: bool = True) -> T | None:
    """Return a tracer of fake tensors that replays recorded values, or None if its steps differ from real steps.

    Args:
        trace: Function that makes a `Tracer` and traces `shape` with it. It gets ``fake``, ``like_gpu`` and ``values``.
        like_gpu: As for `Tracer`. The compared steps always run the CPU's operators.
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
        if not _agrees([found.trace(one) for one in (shape, twice)], expected):
            _log.info("steps with replayed values differ from real steps: not using the values")
            return None
        return trace(fake=True, like_gpu=True, values=values) if like_gpu else found
    except Exception as error:  # noqa: BLE001  # the caller has another tracer, or reports the failure
        _log.info("can't trace a step with replayed values: %s: %s", type(error).__name__, error)
        return None


def _agrees(fakes: Sequence[Any], reals: Sequence[Any]) -> bool:
    """Return whether fake steps have the same matrix products as real steps, in order, and need as much memory.

    Both sequences contain traces of the sample batch and of twice that batch.
    """
    if [_products(one) for one in fakes] != [_products(one) for one in reals]:
        return False
    fake_bytes, real_bytes = ([sum(one.peak_bytes) for one in traces] for traces in (fakes, reals))
    growth = (fake_bytes[1] - fake_bytes[0], real_bytes[1] - real_bytes[0])
    is_enough = [fake >= LEAST_OF_PEAK * real for fake, real in zip(fake_bytes, real_bytes, strict=True)]
    return all(is_enough) and growth[0] >= LEAST_OF_GROWTH * growth[1]


def _products(trace: Any) -> list[tuple[str, str]]:
    """Return the kind and the dtype of each kernel with arithmetic.

    For fake tensors, torch runs some composite operators without arithmetic differently.
    """
    works = [event for event in (*trace.micro, *trace.update) if isinstance(event, Work)]
    return [label[:2] for work in works for label, flops in zip(work.labels, work.numbers[0], strict=True) if flops]
