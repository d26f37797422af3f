"""Detect a model that is already wrapped, or whose size differs from the model of the plan."""

from __future__ import annotations

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
        )


def difference(plan: PlanRecord, model: Any) -> str:
    """Describe how a model differs from the plan's model in its number of parameters. Return "" if it does not."""
    name, wanted = plan.workload.get("model"), plan.workload.get("parameters")
    if not isinstance(wanted, int) or (isinstance(name, str) and ", " in name):
        return ""  # the model may be any of several
    given = parameters_in(model)
    if given is None or given == wanted:
        return ""
    return (
        f"the plan is for {printable(str(name or 'a model'), longest=100)} with {wanted:,} parameters, but this "
        f"{type(model).__name__} has {given:,}."
    )


def warn_of_other_model(plan: PlanRecord, model: Any, *, hint: str = "") -> None:
    """Warn if a model and the plan's model have different numbers of parameters.

    Args:
        hint: Advice on finding a plan for this model.
    """
    if found := difference(plan, model):
        warn_user(
            f"{found} The plan's batch sizes may not fit, or may be far too small. "
            f"{hint or 'Tune for this model, and pass the new plan.'}",
            OtherModelWarning,
        )
