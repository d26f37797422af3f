"""Which micro-step of an optimizer step is running: who walks the step says so, and wrappers that keep replicas ask.

The walk (`plan.steps`) knows no model, so it meets the wrapper here. It is named for as long as its loop body runs: an
exception or a `break` in it ends the naming, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autosplit.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


class Accumulation:
    """One optimizer step as wrappers see it.

    Attributes:
        is_last: The running micro-step is its last: gradients have to come home in its backward.
        split: Samples per device of the running micro-batch, where they are not in the wrapper's proportions.
    """

    def __init__(self) -> None:
        self.is_last = False
        self.split: tuple[int, ...] | None = None
        self._keepers: dict[Any, None] = {}

    def join(self, keeper: Any) -> None:
        """Let a wrapper be told when the step is over, by its `synchronize`."""
        self._keepers[keeper] = None

    def finish(self) -> None:
        """Bring home what the last micro-step left elsewhere: a wrapper need not have run, or not on every device."""
        for keeper in self._keepers:
            keeper.synchronize()
        self._keepers.clear()

    @contextmanager
    def running(self, *, is_last: bool) -> Iterator[None]:
        """Name this step's micro-step as the one that runs."""
        self.is_last = is_last
        _running.set((*_running.get(), self))
        try:
            yield
        finally:
            # Not by a token, and not whatever was there before: two walks side by side do not end in reverse order,
            # and a generator may be closed in another context than the one it was started in.
            _running.set(tuple(other for other in _running.get() if other is not self))


_running: ContextVar[tuple[Accumulation, ...]] = ContextVar("autosplit_accumulation", default=())


def current_accumulation() -> Accumulation | None:
    """Return the optimizer step whose micro-step runs now; None outside of one."""
    running = _running.get()
    return running[-1] if running else None


@dataclass(eq=False)
class WatchedParameter:
    """The parameter nearest to a loss. Its version and gradient show whether somebody changed it.

    An update by a ``fused=True`` optimizer is not detected, because torch counts no version for it.
    """

    parameter: Tensor
    version: int
    has_gradient: bool = False

    @classmethod
    def of(cls, loss: Tensor) -> WatchedParameter | None:
        """Find the parameter that is the fewest operations away from the loss; None if it is more than 200 away."""
        nodes: list[Any] = [loss.grad_fn]
        for node in itertools.islice(nodes, 200):  # the list grows meanwhile: breadth first
            if type(node).__name__ == "AccumulateGrad":
                return cls(node.variable, node.variable._version)  # noqa: SLF001  # none is public
            nodes += [other for other, _ in getattr(node, "next_functions", ())]
        return None

    def is_changed(self) -> bool:
        """Return whether the parameter was changed in place."""
        return self.parameter._version != self.version  # noqa: SLF001

    def end_backward(self, place: str, *, may_update: bool) -> None:
        """Remember whether the parameter has a gradient now, and refuse an update within the backward.

        Args:
            place: The micro-batch, for the message.
            may_update: It is the last micro-batch of the step, so the update is that of the whole step.
        """
        if self.is_changed() and not may_update:
            raise InputError(
                f"Parameters were changed in the backward of {place}, for example by an optimizer that steps in a "
                "gradient hook. Each micro-batch would be an update of its own. Step after the inner loop, or train "
                "with accumulation_steps=1.",
                code="update-inside-backward",
            )
        self.has_gradient = self.parameter.grad is not None

    def change(self) -> str:
        """Describe what happened since `end_backward`; empty for nothing."""
        if self.is_changed():
            return "parameters were changed"
        return "gradients were thrown away" if self.has_gradient and self.parameter.grad is None else ""
