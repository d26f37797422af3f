"""Let other code follow an `OptimizerStep`: synchronise ranks, record gradient norms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from autosplit.errors import InputError
from autosplit.parallel.awaited_update import AwaitedUpdate
from autosplit.parallel.batch_sampler import ScheduledBatchSampler


class StepListener:
    """Follow one optimizer step. Override the methods that you need. An `OptimizerStep` calls them in this order.

    Attributes:
        needs_gradients: Whether each micro-batch must reduce its gradients to device 0.
    """

    needs_gradients = False

    def draw(self, is_last: bool) -> bool | None:  # noqa: ARG002
        """Prepare a micro-batch. Return whether the ranks synchronise in its backward, or None for no opinion."""
        return None

    def uncounted(self, stands_in: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Run a micro-batch of weight 0 in this context. `stands_in`: whether its samples are another rank's."""
        return nullcontext()

    def first_loss(self, loss: Tensor, samples: int, weight: float) -> None:
        """Examine the first loss of the step that has a weight, before its backward."""

    def begin_backward(self, loss: Tensor) -> None:
        """Act before the backward of a micro-batch. `loss` is the weighted and scaled loss."""

    def silenced(self) -> AbstractContextManager[None]:
        """Run a backward of weight 0 in this context. It runs only because the other ranks wait for it."""
        return nullcontext()

    def recorded(
        self,
        scaled: Tensor,  # noqa: ARG002
        size: float,  # noqa: ARG002
        weight: float,  # noqa: ARG002
        scale: float | Tensor = 1.0,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Run the backward of the loss `scaled` in this context: a mean over `size`, times `weight` and `scale`."""
        return nullcontext()

    def spoil(self) -> None:
        """Record that a micro-batch ran out of memory and will run again in two parts."""

    def finish(self, count: float) -> None:
        """Act after the last backward, before the optimizer steps. `count` is the step's, over all ranks."""


@dataclass(eq=False)
class Consumption(StepListener):
    """Count the samples of an optimizer step in its sampler when the optimizer has updated the parameters."""

    sampler: ScheduledBatchSampler
    samples: int
    awaited: AwaitedUpdate

    def finish(self, count: float) -> None:  # noqa: ARG002
        """Let the sampler count the step after the update."""
        self.sampler.consume(self.samples, self.awaited.has_come)


Sums = tuple[float, float, float]
"""Three numbers of a step: the sum of n_i |g_i|^2, the number of micro-batches, and |g|^2. See `NoiseScale`."""


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

    def begin_step(self, over_ranks: Callable[[Sums], Sums] | None) -> StepListener:
        """Begin an optimizer step. `over_ranks` adds up the ranks' sums. It is None in a single process."""


def checked_estimate(noise_scale: object) -> None:
    """Raise InputError if the argument `noise_scale` is neither an estimate nor None."""
    if noise_scale is not None and not hasattr(type(noise_scale), "begin_step"):
        raise InputError(
            f"noise_scale is {noise_scale!r}. Expected an autosplit.NoiseScale(). Make one for the whole training run.",
        )
