"""Checkpoint layers of a model in place. Parameters, names and the state dict do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autosplit.errors import PlanError
from autosplit.workload.checkpointing import is_transformers_layer


def checkpoint_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Enable activation checkpointing for the named layers of a model. Skip layers that already have it.

    Raises:
        PlanError: The model lacks a layer.
    """
    layers = dict(model.named_modules())
    lacking = [name for name in names if name not in layers]
    if lacking:
        raise PlanError(
            f"The plan checkpoints the layer {lacking[0]}, but {type(model).__name__} has no such layer. Expected "
            "the tuned model, not yet wrapped. Pass the tuned model, or tune again with this model.",
        )
    for name in names:
        checkpoint_layer(layers[name])


def checkpointed_in(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that `checkpoint_layer` changed."""
    return tuple(name for name, layer in model.named_modules() if _is_checkpointed(layer))


def checkpoint_layer(layer: nn.Module) -> Callable[[], None]:
    """Make a layer recompute its activations in the backward. Return a function that undoes the change.

    A layer of transformers gets transformers' checkpointing attributes, because it must also disable its cache. The
    class of any other layer is replaced by a subclass. If `forward` were set on the instance, all replicas would run
    the first replica's layer.
    """
    if _is_checkpointed(layer):
        return lambda: None
    if is_transformers_layer(layer):
        settings: dict[str, Any] = {
            "gradient_checkpointing": True,
            "_gradient_checkpointing_func": partial(checkpoint, use_reentrant=False),
        }
        vars(layer).update(settings)
        return partial(_forget, layer, settings)
    before: Any = type(layer)
    layer.__class__ = _checkpointing_class(before)
    return partial(setattr, layer, "__class__", before)


def _is_checkpointed(layer: nn.Module) -> bool:
    return hasattr(type(layer), "_checkpointed_class") or "_gradient_checkpointing_func" in vars(layer)


def _forget(layer: nn.Module, settings: Iterable[str]) -> None:
    for name in settings:
        vars(layer).pop(name, None)


@cache
def _checkpointing_class(kind: Any) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return kind.forward(self, *args, **kwargs)
        return checkpoint(partial(kind.forward, self, **kwargs), *args, use_reentrant=False)

    def reduced(self: nn.Module, _protocol: Any) -> Any:
        return _made_again, (kind,), vars(self)

    members = {"forward": forward, "__reduce_ex__": reduced, "_checkpointed_class": kind, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _made_again(kind: Any) -> nn.Module:
    made = _checkpointing_class(kind)
    layer: nn.Module = made.__new__(made)
    return layer
