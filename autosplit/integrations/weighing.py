"""The backward of a micro-batch by its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["weighted_backward"]


def weighted_backward(
    backward: Callable[..., Any], loss: torch.Tensor, weight: float, models: Iterable[nn.Module], **kwargs: Any
) -> None:
    """Run a backward on a weighted loss.

    One of weight 0 sends zeros, whatever its loss is: a mean over no labels is 0/0, and 0 times that is no zero. It has
    to run all the same, because the processes' gradients meet in it.

    Args:
        backward: The tool's.
        loss: The mean loss of the micro-batch.
        weight: What it counts for.
        models: Whose parameters get gradients.
        **kwargs: For the tool's backward.
    """
    if weight:
        backward(loss * weight, **kwargs)
        return
    parameters = [one for model in models for one in model.parameters() if one.requires_grad]
    handles = [parameter.register_hook(torch.zeros_like) for parameter in parameters]
    try:
        backward(loss * 0.0, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
