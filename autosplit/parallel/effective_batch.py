"""Compare the optimizer steps of a loader without a plan's batch sampler with the plan's effective batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Protocol, TypeVar


class _HasSamples(Protocol):
    @property
    def num_samples(self) -> float: ...


_Step = TypeVar("_Step", bound=_HasSamples)


class EffectiveBatchWarning(UserWarning):
    """The loader's batches add up to optimizer steps of another size than the plan's effective batch size."""


def compared(made: Iterator[_Step], effective_batch_size: int, *, stacklevel: int) -> Iterator[_Step]:
    """Yield the steps. Warn once if a step differs in size from the plan's effective batch size.

    The last step of an epoch may be smaller without a warning.

    Args:
        stacklevel: The number of generators between this one and the user's loop. The warning points at the loop.
    """
    before: float | None = None
    for step in made:
        found = step.num_samples if step.num_samples > effective_batch_size else before
        if found is not None and found != effective_batch_size:
            _warn(found, effective_batch_size, stacklevel + 1)
            yield step
            break
        before = step.num_samples
        yield step
    yield from made


def _warn(found: float, expected: int, stacklevel: int) -> None:
    warnings.warn(
        f"The optimizer steps have {found} samples, and the plan's have {expected}. Expected a loader whose batches "
        f"add up to {expected}: use plan.loader(dataset) or ctx.loader(dataset), or choose another batch size. To "
        f"train with {found}, tune with effective_batch_size={found}.",
        EffectiveBatchWarning,
        stacklevel=stacklevel + 1,
    )
