"""Find tensors that a module's forward stores in attributes, for a loss that is computed elsewhere.

On several devices each replica stores its own tensor. A loss that uses the module's attribute then has the wrong
gradient.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from autosplit.errors import warn_user
from autosplit.parallel.loss_graph import graph_nodes
from autosplit.parallel.loss_weights import ReduceWarning
from autosplit.workload.tree import tensors_of

ADVICE = (
    "Each device overwrites it, so a loss that uses it has the wrong gradient. Return it from forward(), and compute "
    "the loss from the model's outputs."
)

_looked_at: WeakSet[nn.Module] = WeakSet()
"""Modules that were examined."""


def kept_tensors(module: nn.Module, ran: nn.Module | None = None) -> list[tuple[str, Tensor]]:
    """Return the tensors with a graph in a module's attributes, with their names. Leave out parameters.

    Args:
        ran: The replica that ran instead of the module.
    """
    replicas = dict((module if ran is None else ran).named_modules())
    return [
        (f"{name} of {type(part).__name__}{f' at {path}' if path else ''}", value)
        for path, part in module.named_modules()
        for name, value in vars(replicas.get(path, part)).items()
        if isinstance(value, Tensor)
        and value.grad_fn is not None
        and name not in dict(part.named_parameters(recurse=False))
    ]


def examine_no_more(module: nn.Module) -> None:
    """Suppress the warning for a module, because the gradient check compares its gradients and reports more."""
    _looked_at.add(module)


def warn_of_side_outputs(module: nn.Module, ran: nn.Module, outputs: Any) -> None:
    """Warn once if a split forward stores a tensor in an attribute, and the outputs do not depend on the tensor.

    The tensor is probably a loss, but it may be an activation that the user inspects.
    """
    if module in _looked_at or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    _looked_at.add(module)
    kept = kept_tensors(module, ran)
    if not kept:
        return
    inside = set(graph_nodes(*(tensor.grad_fn for tensor in tensors_of(outputs))))
    names = [name for name, tensor in kept if tensor.grad_fn not in inside]
    if names:
        warn_user(
            f"The forward keeps a tensor with a gradient in the attribute {names[0]}. {ADVICE}",
            ReduceWarning,
        )
