"""Synchronise the wrapped and sharded models of a rank in the optimizer steps of `Context.steps`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from autosplit.ddp.batchnorms import silenced, uncounted
from autosplit.ddp.gradient_average import average_gradients, has_graph_to_learn
from autosplit.parallel.step_listener import StepListener


class WeakModels:
    """Models in the order of their creation, without keeping them in memory.

    A WeakKeyDictionary takes ten times as long to iterate, and each micro-batch iterates.
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []

    def add(self, model: Any) -> None:
        """Add a model."""
        self._references.append(weakref.ref(model, self._references.remove))

    def clear(self) -> None:
        """Remove all models."""
        self._references.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter([model for reference in self._references if (model := reference()) is not None])

    def __len__(self) -> int:
        return len(self._references)


@dataclass(eq=False)
class RankModels:
    """The models of a context, in the order of their creation.

    Attributes:
        meet_always: Whether every backward of a model has a collective.
    """

    wrapped: WeakModels = field(default_factory=WeakModels)
    sharded: WeakModels = field(default_factory=WeakModels)
    meet_always: bool = False

    def synchronise(self, meets: bool) -> bool:
        """Enable or disable gradient synchronisation. Return whether the ranks synchronise in any model's backward."""
        met = meets
        for wrapped in self.wrapped:
            wanted = meets or has_graph_to_learn(wrapped)
            if wrapped.require_backward_grad_sync != wanted:  # setting an attribute of a module is slow
                wrapped.require_backward_grad_sync = wanted
            met = met or wanted
        for model in self.sharded:
            model.set_requires_gradient_sync(meets)
        return met or self.meet_always


@dataclass(eq=False)
class Ranks(StepListener):
    """Synchronise the ranks in the last micro-batch of an optimizer step.

    Attributes:
        apart: Whether to average the gradients once, after the last backward. With ``on_oom="cut"``, ranks run
            different numbers of backwards.
    """

    models: RankModels
    apart: bool

    def draw(self, is_last: bool) -> bool:
        """Enable or disable the synchronisation of gradients."""
        if not self.apart:
            return self.models.synchronise(is_last)
        for wrapped in self.models.wrapped:
            wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = False
        return False

    def uncounted(self, stands_in: bool) -> AbstractContextManager[None]:
        """Keep a micro-batch of weight 0 out of BatchNorm statistics and gradients."""
        return uncounted([*self.models.wrapped, *self.models.sharded], stands_in=stands_in)

    def silenced(self) -> AbstractContextManager[None]:
        """Set the gradients of a backward of weight 0 to zero."""
        return silenced(self.models.wrapped)

    def finish(self, count: float) -> None:  # noqa: ARG002
        """Average the gradients, if no backward did, and give all ranks the buffers of rank 0."""
        for wrapped in self.models.wrapped:
            if self.apart:
                average_gradients(wrapped)
            else:
                wrapped.share_buffers()
