"""Detect a model whose size differs from the model of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autosplit.accelerators import checked_module
from autosplit.errors import InputError, warn_user
from autosplit.plan.record import PlanRecord
from autosplit.text import printable


class OtherModelWarning(UserWarning):
    """The model and the plan's model have different numbers of parameters."""


def parameters_in(model: Any) -> int | None:
    """Count a model's parameters. Return None for a function that makes a model, and for lazy parameters."""
    try:
        return sum(int(parameter.numel()) for parameter in model.parameters())
    except (AttributeError, TypeError, RuntimeError, ValueError):  # the model is a function, or has lazy parameters
        return None


def refuse_wrapped(model: Any) -> None:
    """Raise InputError if the model is not a module, or is already wrapped.

    A second wrapper would split each part again.
    """
    from torch import nn

    if isinstance(checked_module(model), (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise InputError(
            f"model is already in a {type(model).__name__}. Pass model.module, or use the existing wrapper.",
            code="model-wrapped",
        )


def warn_of_other_model(plan: PlanRecord, model: Any, *, hint: Callable[[int], str] = lambda _: "") -> None:
    """Warn if a model and the plan's model have different numbers of parameters.

    Args:
        hint: Function that returns advice on finding a plan for this number of parameters, or an empty string.
    """
    name, wanted = plan.workload.get("model"), plan.workload.get("parameters")
    if not isinstance(wanted, int) or (isinstance(name, str) and ", " in name):
        return  # the model may be any of several
    given = parameters_in(model)
    if given is not None and given != wanted:
        warn_user(
            f"the plan is for {printable(str(name or 'a model'), longest=100)} with {wanted:,} parameters, but "
            f"this {type(model).__name__} has {given:,}. The plan's batch sizes may not fit, or may be far too "
            f"small. {hint(given) or 'Tune for this model, and pass the new plan.'}",
            OtherModelWarning,
        )
