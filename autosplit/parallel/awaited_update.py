"""Count the updates of optimizers, to detect missing and superfluous updates."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autosplit.errors import warn_user
from autosplit.parallel.accumulation import WatchedParameter

_updates = 0
_updates_of: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
_last_update_of: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


class StepsWarning(UserWarning):
    """A training loop does not call the optimizer once per step: `step()` or `zero_grad()` is missing, or repeated."""


def _count_update(optimizer: Optimizer, *_: Any) -> None:
    global _updates  # noqa: PLW0603  # torch calls this after each step of any optimizer
    _updates += 1
    _updates_of[optimizer] = _updates_of.get(optimizer, 0) + 1
    _last_update_of[optimizer] = _updates


@functools.cache
def _begin_to_count() -> None:
    register_optimizer_step_post_hook(_count_update)


def updates_so_far() -> int:
    """Return the number of steps by any optimizer since the first call of this function."""
    _begin_to_count()
    return _updates


def updates_by_optimizer() -> Counter[int]:
    """Return the number of steps of each optimizer so far, by the optimizer's id."""
    _begin_to_count()
    return Counter({id(optimizer): count for optimizer, count in _updates_of.items()})


def optimizers_since(before: Counter[int]) -> list[Optimizer]:
    """Return the optimizers that have stepped once since `updates_by_optimizer` returned `before`."""
    return [optimizer for optimizer, count in _updates_of.items() if count - before[id(optimizer)] == 1]


def parameters_updated_since(before: int) -> Iterator[Tensor]:
    """Yield the parameters of optimizers that have stepped since `updates_so_far` returned `before`."""
    if before != _updates:
        for optimizer, last in _last_update_of.items():
            if last > before:
                yield from (parameter for group in optimizer.param_groups for parameter in group["params"])


class AwaitedUpdate:
    """Detect the update that should follow the last backward of an optimizer step.

    The version of a parameter is not enough. ``fused=True`` optimizers do not increase it. A GradScaler that found
    infinities skips the update, and then the loop clears the gradients.
    """

    def __init__(self) -> None:
        self.expect(updates_so_far(), None)

    def expect(self, before: int, watched: WatchedParameter | None, *, may_skip: bool = False) -> None:
        """Begin to watch for the update that follows a backward.

        Args:
            before: `updates_so_far` before the backward, because an optimizer may step in a hook of the backward.
            may_skip: Whether a GradScaler may skip the update.
        """
        self._before, self._watched, self._may_skip = before, watched, may_skip

    def is_missing(self) -> bool:
        """Return whether no optimizer has stepped, and the watched parameter did not change."""
        if self._watched is None or self._may_skip:
            return False
        return self._before == _updates and not self._watched.is_changed()

    def has_come(self) -> bool:
        """Return whether an optimizer has stepped, or the watched parameter or its gradient has changed."""
        if self._before != _updates:
            return True
        return bool(self._watched.change()) if self._watched is not None else not _updates


class LoopWithoutSteps:
    """Watch a loop over a plan's batch sampler that does not use `plan.steps`.

    An update after each micro-batch uses the micro-batch's size instead of the effective batch size. So the number of
    updates must not exceed the number of optimizer steps that have begun. A plain loop gives all micro-batches equal
    weights, and DDP gives all ranks equal weights. So no update is right if their numbers of samples differ.

    Args:
        unequal: The unequal parts for the message, such as "The ranks have 7, 1". Empty if all parts are equal.
    """

    def __init__(self, unequal: str = "") -> None:
        self._before = updates_by_optimizer()
        self._unequal = unequal
        self.steps_begun = 0

    def is_wrong(self, accumulation_steps: int) -> bool:
        """Warn, and return True, if an optimizer has made more updates than are right."""
        updates = max((count - self._before[id(optimizer)] for optimizer, count in _updates_of.items()), default=0)
        found = ""
        if updates > self.steps_begun:
            found = (
                f"The optimizer stepped after each micro-batch, but the plan has {accumulation_steps} micro-batches "
                "per optimizer step. So each update had too few samples."
            )
        elif updates and self._unequal and self.steps_begun > 1:  # by then, too many updates would have been found
            found = (
                f"{self._unequal} samples, but their mean losses have equal weights without plan.steps. So the "
                "gradient is not the mean over the samples."
            )
        if found:
            warn_user(
                f"{found} Loop with `for step in plan.steps(loader):` and `for batch in step:`, and call "
                "step.backward(loss) there and optimizer.step() after the inner loop. In a DDP job, use "
                "ctx.steps(loader).",
                StepsWarning,
            )
        return bool(found)
