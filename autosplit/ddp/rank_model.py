"""The wrapper that `Context.wrap` returns: DistributedDataParallel that a single rank can evaluate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class RankModel(DistributedDataParallel):
    """DistributedDataParallel whose forward in `eval()` and without gradients runs no collective.

    DDP broadcasts rank 0's buffers in the first forward after a training step, also in `eval()`. A rank that evaluates
    alone would wait for the others. So the broadcast waits for the next training forward.

    Attributes:
        trained: The ids of the parameters that DDP synchronises. Parameters that are unfrozen, added or replaced later
            are not synchronised.
    """

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.trained = frozenset(id(one) for one in module.parameters() if one.requires_grad)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model. Synchronise the ranks, unless the model only evaluates."""
        if self.module.training or torch.is_grad_enabled():  # the user may call `eval` of the inner model only
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        synchronises, self.require_forward_param_sync = self.require_forward_param_sync, False
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.require_forward_param_sync = synchronises
