"""Compare a loader's optimizer steps with the plan's effective batch size, without a plan's batch sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autosplit.errors import warn_user

if TYPE_CHECKING:
    from autosplit.parallel.optimizer_steps import OptimizerStep


class EffectiveBatchWarning(UserWarning):
    """The size of the loader's optimizer steps differs from the plan's effective batch size."""


def compared(made: Iterator[OptimizerStep], expected: int) -> Iterator[OptimizerStep]:
    """Yield the steps. Warn once if a step's size differs from the plan's effective batch size.

    The last step of an epoch may be smaller.
    """
    before: float | None = None
    for step in made:
        found = step.num_samples if step.num_samples > expected else before
        before = step.num_samples
        if found is not None and found != expected:
            warn_user(
                f"The optimizer steps have {found} samples, but the plan's have {expected}. Use "
                "plan.loader(dataset) or ctx.loader(dataset), or choose a different batch size in the loader. To train "
                f"with {found}, tune with effective_batch_size={found}.",
                EffectiveBatchWarning,
            )
            yield step
            break
        yield step
    yield from made
