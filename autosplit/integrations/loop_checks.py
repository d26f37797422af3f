"""Check what an accelerate loop does between the micro-batches of a plan's optimizer step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autosplit.errors import InputError, warn_user
from autosplit.integrations.weighted_backward import Weighed
from autosplit.parallel.accumulation import WatchedParameter
from autosplit.parallel.awaited_update import StepsWarning


class LoopChecks:
    """Detect cleared gradients, updated parameters and changed learning rates within an optimizer step."""

    def __init__(self) -> None:
        self._watched: WatchedParameter | None = None
        self._rates: list[float] | None = None
        self._has_warned = False

    def end_backward(self, watched: WatchedParameter | None, one: Weighed, optimizers: Iterable[Any]) -> None:
        """Record the gradient and the learning rates after a backward.

        Args:
            watched: A parameter of the loss, or None to watch no gradient.
        """
        if watched is not None and not one.ends_step:
            watched.end_backward("a micro-batch", may_update=False)
        self._watched = None if one.ends_step else watched
        if one.position == 0 and not self._has_warned:
            self._rates = _rates_of(optimizers)

    def check(self, one: Weighed, optimizers: Iterable[Any]) -> None:
        """Check a micro-batch before its backward.

        Raises:
            InputError: The gradients of earlier micro-batches of the step were cleared, or parameters were updated.

        Warns:
            StepsWarning: A learning rate changed within the step.
        """
        if one.position == 0:
            return
        watched, self._watched = self._watched, None
        change = "" if watched is None else watched.change()
        if watched is not None and watched.is_zeroed():
            change = "gradients were set to zero"
        if change:
            raise InputError(
                f"{change} before micro-batch {one.position + 1} of {one.length} in the plan's step. Call "
                "optimizer.zero_grad() of the prepared optimizer, which keeps the gradients within a step.",
            )
        if not self._has_warned and _rates_of(optimizers) != self._rates:
            self._has_warned = True
            warn_user(
                f"The learning rate changed between micro-batches of the plan's step, which has {one.length}. Pass "
                "the scheduler to accelerator.prepare, which steps it once per optimizer step.",
                StepsWarning,
            )


def _rates_of(optimizers: Iterable[Any]) -> list[float]:
    return [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
