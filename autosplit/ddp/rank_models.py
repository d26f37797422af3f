"""The wrapped and sharded models of a rank: the wrapper of `Context.wrap`, and their synchronisation in `steps`."""

from __future__ import annotations

import gc
import inspect
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.batchnorms import silenced, uncounted
from autosplit.ddp.gradient_average import average_gradients, has_graph_to_learn
from autosplit.errors import InputError
from autosplit.parallel.step_listener import StepListener
from autosplit.torch_versions import private


class RankModel(DistributedDataParallel):
    """DistributedDataParallel whose forward in `eval()` and without gradients runs no collective.

    DDP broadcasts rank 0's buffers in the first forward after a training step, also in `eval()`. A rank that evaluates
    alone would wait for the others. So `Context.steps` broadcasts them after each optimizer step's last backward.
    Outside of `Context.steps`, the next training forward does.

    Attributes:
        trained: The ids of the parameters that DDP synchronises. Parameters that are unfrozen, added or replaced later
            are not synchronised.
        calls: One number, of the training forwards that torch.compile did not compile. A rank may evaluate alone.
    """

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self._has_run = False
        self.calls = [0]  # a list, because setting an attribute of a module is slow
        self.trained = frozenset(id(one) for one in module.parameters() if one.requires_grad)

    def share_buffers(self) -> None:
        """Send rank 0's buffers to the other ranks now, instead of in the next forward. All ranks must call this."""
        if self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            private(self, "_sync_buffers")()
            self.require_forward_param_sync = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model. Synchronise the ranks, unless the model only evaluates."""
        if not self._has_run and not torch.compiler.is_compiling():
            self._has_run = True
            self._refuse_outer()
        if self.module.training or torch.is_grad_enabled():  # the user may call `eval` of the inner model only
            if not torch.compiler.is_compiling():
                self.calls[0] += 1
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        synchronises, self.require_forward_param_sync = self.require_forward_param_sync, False
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_forward_param_sync = synchronises

    def _refuse_outer(self) -> None:
        """Raise InputError if another DistributedDataParallel runs this model. It would average the gradients again."""
        code = DistributedDataParallel.forward.__code__
        frames = (frame for frame, _ in traceback.walk_stack(inspect.currentframe()) if frame.f_code is code)
        # Before Python 3.13, reading `f_locals` keeps all variables of a frame alive until its function returns.
        runners = (frame.f_locals.get("self") for frame in frames)
        if any(isinstance(one, DistributedDataParallel) and one is not self for one in runners):
            raise InputError(
                "The model that ctx.wrap returned is in another DistributedDataParallel, which averages the gradients "
                "of each micro-batch again. Expected one wrapper. Use the result of ctx.wrap itself.",
            )


def refuse_options(options: Iterable[str], call: Callable[..., Any], not_taken: Collection[str]) -> None:
    """Raise InputError for options that `call` lacks in this torch version, or that are in `not_taken`."""
    known = [name for name in inspect.signature(call).parameters if name not in not_taken]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(
            f"{call.__name__} of torch {torch.__version__} has no option {', '.join(unknown)}. Expected one of: "
            f"{', '.join(known)}. Leave unknown options out.",
        )


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

    def forget_unused(self) -> None:
        """Free the models that only reference cycles hold. Otherwise some ranks would free them later than others."""
        if len(self.wrapped) > 1:
            gc.collect()

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
                average_gradients(wrapped, wrapped.trained)
            else:
                wrapped.share_buffers()
