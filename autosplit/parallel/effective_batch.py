"""Compare a loader's optimizer steps with the plan's effective batch size, without a plan's batch sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autosplit.errors import warn_user
from autosplit.text import counted_text

if TYPE_CHECKING:
    from autosplit.parallel.optimizer_steps import OptimizerStep


class EffectiveBatchWarning(UserWarning):
    """The size of the loader's optimizer steps differs from the plan's effective batch size."""


def warn_of_short_dataset(num_samples: int, expected: int) -> None:
    """Warn if a data set has fewer samples than the plan's effective batch size."""
    if num_samples < expected:
        found = counted_text(num_samples, "sample")
        warn_user(
            f"The data set has {found}, but the plan has {expected} per optimizer step. So each epoch is one step of "
            f"{found}. To train as planned, tune with effective_batch_size={num_samples} or less.",
            EffectiveBatchWarning,
        )


def compared(made: Iterator[OptimizerStep], expected: int) -> Iterator[OptimizerStep]:
    """Yield the steps. Warn once if a step's size differs from the plan's effective batch size.

    The last step of an epoch may be smaller, unless it is the only one.
    """
    before: float | None = None
    has_warned = False
    for step in made:
        found = step.num_samples if before is None or step.num_samples > expected else before
        before = step.num_samples
        if not has_warned and found != expected:
            has_warned = True
            warn_user(
                f"The optimizer steps have {found} samples, but the plan's have {expected}. Use "
                "plan.loader(dataset) or ctx.loader(dataset), or choose a different batch size in the loader. To train "
                f"with {found}, tune with effective_batch_size={found}.",
                EffectiveBatchWarning,
            )
        yield step
