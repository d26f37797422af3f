"""Detect training without DistributedDataParallel: no wrapper, ``wrapper.module(...)``, or a method of the model.

DDP synchronises the gradients of a backward only if the wrapper ran the forward. Otherwise the ranks' weights drift
apart.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import InputError, warn_user
from autosplit.parallel.step_listener import StepListener
from autosplit.torch_versions import private


class BypassWatch(StepListener):
    """Raise InputError at the end of a step if a model has gradients and the last micro-batch bypassed its wrapper.

    DDP sets `require_forward_param_sync` to a bool in every forward. This class sets it to an int. If it is still an
    int after the step, the wrapper's forward did not run.
    """

    def __init__(self, wrapped: Iterable[DistributedDataParallel]) -> None:
        self._watched = [model for model in wrapped if _is_usual(model) and not _has_gradients(model)]

    def draw(self, is_last: bool) -> None:
        """Mark the wrappers before the last micro-batch."""
        if is_last:
            for model in self._watched:
                flag: Any = int(model.require_forward_param_sync)
                model.require_forward_param_sync = flag

    def finish(self, num_samples: float) -> None:  # noqa: ARG002
        """Raise InputError if a wrapper is still marked."""
        for model in self._watched:
            if not isinstance(model.require_forward_param_sync, bool) and _has_gradients(model):
                _refuse(model)


def _is_usual(model: DistributedDataParallel) -> bool:
    return not (private(model, "_use_python_reducer") or private(model, "_delay_all_reduce_all_params"))


def _has_gradients(model: DistributedDataParallel) -> bool:
    return any(parameter.grad is not None for parameter in model.module.parameters())


def _refuse(model: DistributedDataParallel) -> None:
    name = type(model.module).__name__
    raise InputError(
        f"The ranks did not synchronise the gradients of {name}, so their weights would drift apart. The last "
        "micro-batch's loss did not come from the wrapper's forward. Call the wrapper that ctx.wrap returned, not "
        f"wrapper.module or its methods. To train with a method of {name}, call it from {name}.forward.",
        code="wrapper-bypassed",
    )


class UnwrappedWarning(UserWarning):
    """The ranks of a job train models that do not synchronise their gradients."""


def warn_of_unwrapped() -> None:
    """Warn if no model synchronises its gradients. Models that the user wrapped in DDP or FSDP2 count."""
    kinds = (type(one) for one in gc.get_objects())
    if any(
        kind.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel") or kind.__name__.startswith("FSDP")
        for kind in kinds
    ):
        return
    warn_user(
        "No model was wrapped with ctx.wrap or ctx.shard, so each rank trains a separate model. Call model = "
        "ctx.wrap(model) before the loop, and train what it returns.",
        UnwrappedWarning,
    )
