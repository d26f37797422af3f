"""Doubt a model that is not of the size of the one that a plan was made for."""

from __future__ import annotations

import warnings
from typing import Any

from autosplit.accelerators import checked_module
from autosplit.errors import InputError
from autosplit.plan.record import PlanRecord
from autosplit.text import printable


class OtherModelWarning(UserWarning):
    """A model is not the one that the plan was made for."""


def parameters_in(model: Any) -> int | None:
    """Count a model's parameters; None where there is no model, or they have no size yet."""
    try:
        return sum(int(parameter.numel()) for parameter in model.parameters())
    except (AttributeError, TypeError, RuntimeError, ValueError):  # what makes it; torch's lazy parameters
        return None


def refuse_wrapped(model: Any) -> None:
    """Refuse what is no model, or one in a wrapper already, which would cut each share again; raise InputError."""
    from torch import nn

    if isinstance(checked_module(model), (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise InputError(
            f"model is in a {type(model).__name__} already; expected the model within; pass model.module, or use the "
            "wrapper that it has",
            code="model-wrapped",
        )


def warn_of_other_model(plan: PlanRecord, model: Any, *, stacklevel: int) -> None:
    """Warn where a model has not as many parameters as the one that a plan was made for.

    Args:
        stacklevel: Of the warning, as seen from the caller.
    """
    name, wanted = plan.workload.get("model"), plan.workload.get("parameters")
    if not isinstance(wanted, int) or (isinstance(name, str) and ", " in name):
        return  # of several models this may be any
    given = parameters_in(model)
    if given not in (None, wanted):
        warnings.warn(
            f"the plan is for {printable(str(name or 'a model'), longest=100)} with {wanted:,} parameters, and this "
            f"{type(model).__name__} has {given:,}: its batch sizes may not fit, or be far too small; tune for this "
            "model, and pass that plan",
            OtherModelWarning,
            stacklevel=stacklevel + 1,
        )
