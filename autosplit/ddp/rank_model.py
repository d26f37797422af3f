"""The wrapper that `Context.wrap` returns: DistributedDataParallel that a single rank can evaluate."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import InputError
from autosplit.torch_versions import private


class RankModel(DistributedDataParallel):
    """DistributedDataParallel whose forward in `eval()` and without gradients runs no collective.

    DDP broadcasts rank 0's buffers in the first forward after a training step, also in `eval()`. A rank that evaluates
    alone would wait for the others. So `Context.steps` broadcasts them after each optimizer step's last backward.
    Outside of `Context.steps`, the next training forward does.

    Attributes:
        trained: The ids of the parameters that DDP synchronises. Parameters that are unfrozen, added or replaced later
            are not synchronised.
    """

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self._has_run = False
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
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        synchronises, self.require_forward_param_sync = self.require_forward_param_sync, False
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_forward_param_sync = synchronises

    def _refuse_outer(self) -> None:
        """Raise InputError if another DistributedDataParallel runs this model. It would average the gradients again."""
        runners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(inspect.currentframe()))
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
