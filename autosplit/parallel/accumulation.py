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


@dataclass(frozen=True, eq=False)
class WatchedParameter:
    """The parameter nearest to a loss as its backward left it: by it a change before the next one is seen.

    A ``fused=True`` optimizer's update is not, since torch counts no version of what it changes.
    """

    parameter: Tensor
    version: int
    has_gradient: bool

    @classmethod
    def of(cls, loss: Tensor) -> WatchedParameter | None:
        """Take note of the parameter that is the fewest operations away; None where it is too far to look for."""
        nodes: list[Any] = [loss.grad_fn]
        for node in itertools.islice(nodes, 200):  # it grows on the way: breadth first
            if type(node).__name__ == "AccumulateGrad":
                parameter = node.variable
                return cls(parameter, parameter._version, parameter.grad is not None)  # noqa: SLF001  # none is public
            nodes += [other for other, _ in getattr(node, "next_functions", ())]
        return None

    def change(self) -> str:
        """Say what became of it since; empty for nothing."""
        if self.parameter._version != self.version:  # noqa: SLF001
            return "parameters were changed"
        return "gradients were thrown away" if self.has_gradient and self.parameter.grad is None else ""
