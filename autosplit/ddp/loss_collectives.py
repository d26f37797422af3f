"""Detect a loss that uses collectives. Such a loss may already be normalised over the ranks, as in DETR.

A process group numbers its collectives. Between the draw of a micro-batch and its backward, DistributedDataParallel may
run collectives around the model's forward (it broadcasts buffers). All other collectives belong to the loss, which the
loop or the model computes.

    draw    sum the boxes    DDP: buffers    model    log the loss    backward
    17      18               19              19       20              -         found: (18 - 17) + (20 - 19) = 2
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.batchnorms import has_synchronised
from autosplit.errors import InputError
from autosplit.parallel.loss_graph import graph_nodes
from autosplit.parallel.step_listener import StepListener
from autosplit.torch_versions import private


class LossCollectives(StepListener):
    """Count the collectives that the ranks run for a loss."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._found = 0
        self._since = _number()
        self._hooks = [hook for model in models for hook in self._hooks_on(model)]

    def _hooks_on(self, model: nn.Module) -> list[Any]:
        hooks = [model.register_forward_pre_hook(self._pause), model.register_forward_hook(self._go_on)]
        if isinstance(model, DistributedDataParallel) and not has_synchronised(model):
            inner = model.module
            hooks += [inner.register_forward_pre_hook(self._go_on), inner.register_forward_hook(self._pause)]
        return hooks

    def _pause(self, *_: Any) -> None:
        number = _number()
        self._found, self._since = self._found + number - self._since, number

    def _go_on(self, *_: Any) -> None:
        self._since = _number()

    def begin(self) -> None:
        """Start to count the collectives of a micro-batch that was just drawn."""
        self._found = 0
        self._go_on()

    def draw(self, is_last: bool) -> None:  # noqa: ARG002
        """Start to count the collectives of a micro-batch."""
        self.begin()

    def first_loss(self, loss: torch.Tensor, samples: int, weight: float) -> None:  # noqa: ARG002
        """Examine the first loss of a step of `ctx.steps`."""
        self.refuse(loss, weight, "ctx.steps")

    def end(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def refuse(self, loss: torch.Tensor, weight: float, where: str) -> None:
        """Raise InputError if a loss ran a collective, unless its weight is 1 or it gathers with gradients.

        Args:
            where: The function with `loss_scope=`, for the message.

        Raises:
            InputError: The loss may be normalised over the ranks already.
        """
        self._pause()
        found = self._found
        if self._hooks and found > 0 and abs(weight - 1) > 1e-9 and not _gathers(loss):
            raise InputError(
                "The ranks ran a collective before the backward of a micro-batch's loss. A loss may divide by a sum "
                f"over the ranks, such as the boxes in DETR. Then its weight of {weight:.3g} would normalise it "
                f"twice. Pass loss_scope='ranks' to {where}. If the loss is this rank's own mean, pass "
                "loss_scope='sample'.",
                code="loss-collective",
            )


def _number() -> int:
    try:
        count: int = private(dist.group.WORLD, "_get_sequence_number_for_group")()
    except RuntimeError:
        return 0
    return count


def _gathers(loss: torch.Tensor) -> bool:
    for node in itertools.islice(graph_nodes(loss.grad_fn), 200):
        name = type(node).__name__.lower()
        if ("gather" in name and not name.startswith("gatherbackward")) or "allreduce" in name:
            return True
    return False
