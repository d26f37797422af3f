"""The interface between optimizer steps and an estimate of the gradient noise scale, `autosplit.NoiseScale`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from autosplit.errors import InputError

Sums = tuple[float, float, float]
"""Sums of one step: the sum of n_i |g_i|^2, the number of micro-batches, and |g|^2."""


class StepNorms(Protocol):
    """The gradient norms of one optimizer step."""

    @property
    def noise_scale(self) -> NoiseEstimate:
        """The estimate that will include the step."""

    def recorded(
        self, scaled: Tensor, size: float, weight: float, scale: float | Tensor = 1.0
    ) -> AbstractContextManager[None]:
        """Record the norm of a micro-batch's mean gradient in the backward of `scaled`, the scaled loss."""

    def spoil(self) -> None:
        """Exclude this step from the estimate, because a micro-batch was cut."""

    def finish(self, num_samples: float) -> None:
        """Add the step to the estimate. All ranks call this while the gradients are those of the whole step."""


class NoiseEstimate(Protocol):
    """The gradient noise scale of a training run."""

    def __len__(self) -> int:
        """Return the number of optimizer steps in the estimate."""

    @property
    def value(self) -> float:
        """The noise scale."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the noise scale."""

    def begin_step(self, over_ranks: Callable[[Sums], Sums] | None) -> StepNorms:
        """Begin an optimizer step. `over_ranks` adds up the ranks' sums. It is None in a single process."""


def checked_estimate(noise_scale: object) -> None:
    """Raise InputError if the argument `noise_scale` is neither an estimate nor None."""
    if noise_scale is not None and not hasattr(type(noise_scale), "begin_step"):
        raise InputError(
            f"noise_scale is {noise_scale!r}. Expected an autosplit.NoiseScale(). Make one for the whole training run.",
            code="noise-scale-type",
        )
