"""An optimizer of accelerate that steps at the end of a plan's optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from autosplit.errors import InputError
from autosplit.integrations.loop_position import LoopPosition
from autosplit.integrations.weighted_backward import Weighed


class SharesOptimizer(AcceleratedOptimizer):
    """accelerate's optimizer, but it steps only at the end of the plan's optimizer steps.

    Args:
        compare: Compares the gradients of an optimizer over the processes, before its update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        position: LoopPosition,
        compare: Callable[[torch.optim.Optimizer], None],
        **options: Any,
    ) -> None:
        super().__init__(optimizer, **options)
        self._position, self._compare = position, compare
        self._stepped_at: Weighed | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters if an optimizer step of the plan ends here. Otherwise do nothing.

        Raises:
            InputError: A closure would run only the last of several micro-batches.
        """
        at = self._position.at
        if closure is not None and at is not None and at.length > 1:
            raise InputError(
                f"optimizer.step got a closure, but the plan's step has {at.length} micro-batches, and a closure runs "
                "one. Use an optimizer without a closure, or a plan with accumulation_steps=1.",
            )
        self._position.step(runs=closure is not None)
        self._stepped_at = at = self._position.at
        if at is not None and at.ends_step:
            self._compare(self.optimizer)
        super().step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, except within an optimizer step of the plan."""
        if self._stepped_at is not self._position.at:
            self._position.clear_early()
        if self._position.begins_step:  # accelerate would not clear here, but the loop may call zero_grad only here
            self.optimizer.zero_grad(set_to_none is not False)
        elif not self._position.keeps_gradients:
            super().zero_grad(set_to_none)
