"""Detect training that bypasses DistributedDataParallel: ``wrapper.module(...)`` or a method of the wrapped model.

DDP synchronises the gradients of a backward only if the wrapper ran the forward before it. Otherwise every rank keeps
the gradient of its own samples, and the weights of the ranks drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from autosplit.errors import InputError
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.torch_versions import private


def watch_for_bypass(step: OptimizerStep, wrapped: Iterable[DistributedDataParallel]) -> None:
    """Raise InputError at the end of a step if a model has gradients and the last micro-batch bypassed its wrapper.

    DDP sets `require_forward_param_sync` to a bool in every forward. This function sets it to an int. If it is still an
    int after the step, the wrapper's forward did not run.
    """
    watched = [model for model in wrapped if _is_usual(model) and not _has_gradients(model)]
    draw, end = step.on_draw, step.on_end

    def begin(is_last: bool) -> bool:
        meets = is_last if draw is None else draw(is_last)
        if is_last:
            for model in watched:
                flag: Any = int(model.require_forward_param_sync)
                model.require_forward_param_sync = flag
        return meets

    def check() -> None:
        for model in watched:
            if not isinstance(model.require_forward_param_sync, bool) and _has_gradients(model):
                _refuse(model)
        if end is not None:
            end()

    step.on_draw, step.on_end = begin, check


def _is_usual(model: DistributedDataParallel) -> bool:
    """Return whether DDP itself synchronises this model. With some options, other code does."""
    return not (private(model, "_use_python_reducer") or private(model, "_delay_all_reduce_all_params"))


def _has_gradients(model: DistributedDataParallel) -> bool:
    return any(parameter.grad is not None for parameter in model.module.parameters())


def _refuse(model: DistributedDataParallel) -> None:
    name = type(model.module).__name__
    raise InputError(
        f"The ranks did not synchronise the gradients of {name}: the loss of the last micro-batch does not come from "
        "the wrapper's forward, so the ranks' weights would drift apart. Call the wrapper that ctx.wrap returned, not "
        f"wrapper.module or its methods. To train with a method of {name}, call it from {name}.forward.",
        code="wrapper-bypassed",
    )
