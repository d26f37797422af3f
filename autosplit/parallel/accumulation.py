"""Store the running optimizer step, so that wrappers know which micro-step is running.

`plan.steps` does not get the model, so it stores the running optimizer step here. A wrapper that keeps replicas reads
this value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autosplit.autograd_graph import graph_leaves
from autosplit.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


class Accumulation:
    """Describe the running optimizer step to wrappers.

    Attributes:
        is_last: Whether the running micro-step is the last. Its backward must reduce the gradients to device 0.
        split: Samples per device of the running micro-batch. None if the wrapper's proportions apply.
    """

    def __init__(self) -> None:
        self.is_last = False
        self.split: tuple[int, ...] | None = None
        self._keepers: dict[Any, None] = {}

    def join(self, keeper: Any) -> None:
        """Register a wrapper, whose `synchronize()` is called by `finish`."""
        self._keepers[keeper] = None

    def finish(self) -> None:
        """Reduce the gradients that still wait on other devices."""
        for keeper in self._keepers:
            keeper.synchronize()
        self._keepers.clear()

    @contextmanager
    def running(self, *, is_last: bool) -> Iterator[None]:
        """Make this the current optimizer step inside the `with` block, so that wrappers can read it."""
        self.is_last = is_last
        _running.set((*_running.get(), self))
        try:
            yield
        finally:
            # Remove only this step. Resetting to the old value, even with a token, would fail if two interleaved loops
            # do not end in reverse order, or if a generator starts in one context and is closed in another.
            _running.set(tuple(other for other in _running.get() if other is not self))


_running: ContextVar[tuple[Accumulation, ...]] = ContextVar("autosplit_accumulation", default=())


def current_accumulation() -> Accumulation | None:
    """Return the optimizer step whose micro-step is running, or None."""
    running = _running.get()
    return running[-1] if running else None


@dataclass(eq=False)
class WatchedParameter:
    """Watch the version and gradient of the parameter nearest to a loss, to detect updates.

    A ``fused=True`` optimizer does not increase the tensor's version, so its update is not detected.
    """

    parameter: Tensor
    version: int
    gradient_version: int | None = None

    @classmethod
    def of(cls, loss: Tensor) -> WatchedParameter | None:
        """Return the parameter nearest to the loss."""
        nearest = next(graph_leaves(loss), None)
        return None if nearest is None else cls(nearest, nearest._version)  # noqa: SLF001  # torch has no public version

    def is_changed(self) -> bool:
        """Return whether the parameter was changed in place."""
        return self.parameter._version != self.version  # noqa: SLF001

    def end_backward(self, place: str, *, may_update: bool) -> None:
        """Record the parameter's gradient. Raise InputError if the backward updated the parameter.

        Args:
            may_update: Whether this is the last micro-batch of the step, so an update uses the whole gradient.
        """
        if self.is_changed() and not may_update:
            raise InputError(
                f"Parameters changed in the backward of {place}, for example by an optimizer that steps in a "
                "gradient hook. Each micro-batch would be a separate update. Step after the inner loop, or train "
                "with accumulation_steps=1.",
            )
        self.gradient_version = None if self.parameter.grad is None else self.parameter.grad._version  # noqa: SLF001

    def change(self) -> str:
        """Describe the change since `end_backward`, or return ""."""
        if self.is_changed():
            return "parameters were changed"
        return "gradients were discarded" if self.gradient_version is not None and self.parameter.grad is None else ""

    def is_zeroed(self) -> bool:
        """Return whether the gradient was changed since `end_backward`, and is zero now.

        Other backward passes change the gradient's version, too. So also look at its values, but only if the version
        has changed, because that waits for the device.
        """
        grad = self.parameter.grad
        if grad is None or self.gradient_version in (None, grad._version) or grad.layout != torch.strided:  # noqa: SLF001
            return False
        return not grad.count_nonzero()
