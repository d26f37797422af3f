"""Detect whether the parameters were updated since the last backward of an optimizer step."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from autosplit.parallel.accumulation import WatchedParameter

_updates = 0


def _count_update(*_: Any) -> None:
    global _updates  # noqa: PLW0603  # torch calls this after each step of any optimizer
    _updates += 1


@functools.cache
def _begin_to_count() -> None:
    register_optimizer_step_post_hook(_count_update)


def updates_so_far() -> int:
    """Return the number of steps by any optimizer of this process since the first call of this function."""
    _begin_to_count()
    return _updates


class AwaitedUpdate:
    """Detect the update that should follow the last backward of an optimizer step.

    The version of a parameter is not enough. ``fused=True`` optimizers do not increase it. A GradScaler that found
    infinities skips the update, and then the loop clears the gradients.
    """

    def __init__(self) -> None:
        self.expect(updates_so_far(), None)

    def expect(self, before: int, watched: WatchedParameter | None) -> None:
        """Begin to watch for the update that follows a backward.

        Args:
            before: `updates_so_far` before the backward, because an optimizer may step in a hook of the backward.
            watched: The parameter nearest to the loss, or None if it was not found.
        """
        self._before, self._watched = before, watched

    def has_come(self) -> bool:
        """Return whether an optimizer made a step, or the watched parameter or its gradient has changed."""
        if self._before != _updates:
            return True
        return bool(self._watched.change()) if self._watched is not None else not _updates
