"""Detect whether an optimizer of the same class wrote an optimizer state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

_PER_PARAMETER = {
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adafactor": ("step",),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "ASGD": ("step", "eta", "mu", "ax"),
    "Muon": ("momentum_buffer",),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SparseAdam": ("step", "exp_avg", "exp_avg_sq"),
}
"""Names of the values that each class of torch.optim always stores for a parameter after a step."""

_NEWER = frozenset(("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"))
"""Options that newer torch versions added to several optimizers. Older states do not have them."""


def missing_in_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return, for each group of a state, the missing options that the optimizer needs for its next step.

    `__setstate__` of an optimizer fills in options that older versions did not have. It runs on a copy first.
    """
    filled = [{**group} for group in groups]
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__)
    stand_in.defaults = copy.copy(optimizer.defaults)
    stand_in.__setstate__({"state": {}, "param_groups": filled})
    return [[key for key in optimizer.defaults if key not in {*group, *_NEWER}] for group in stand_in.param_groups]


def foreign_in_group(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return the options in a group that belong to other classes of torch.optim. Return [] for other packages."""
    if not _is_torchs(optimizer):
        return []
    own = {*inspect.signature(type(optimizer)).parameters}
    others = {key for name in _PER_PARAMETER for key in _options_of(name)}
    found = [key for key in group if key in others - own - _NEWER - {"params"}]
    key = "decoupled_weight_decay"
    mine = {bool(one.get(key)) for one in optimizer.param_groups}
    if key in group and key in optimizer.param_groups[0] and {bool(group[key])} != mine and group.get("weight_decay"):
        found.append(f"{key}={group[key]!r}")
    return found


def per_parameter_keys(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of the values that a torch optimizer stores per parameter. Return () for other packages."""
    return _PER_PARAMETER.get(type(optimizer).__name__, ()) if _is_torchs(optimizer) else ()


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _options_of(name: str) -> list[str]:
    kind = getattr(torch.optim, name, None)
    return [] if kind is None else [*inspect.signature(kind).parameters]
