"""Detect a loss that uses collectives. Such a loss may already be normalised over the ranks, as in DETR."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import torch

from autosplit.autograd_graph import graph_nodes
from autosplit.ddp.user_collectives import collectives_so_far, user_collectives
from autosplit.errors import InputError
from autosplit.parallel.step_listener import StepListener


class LossCollectives(StepListener):
    """Count the collectives that the user's code runs between the draw of a micro-batch and its backward.

    Args:
        counts: Whether to count them here, because `autosplit.ddp.setup` does not.
    """

    def __init__(self, *, counts: bool = False) -> None:
        self._is_done = False
        self._counting = ExitStack()
        if counts:
            self._counting.enter_context(user_collectives(compares=False))
        self.begin()

    def begin(self) -> None:
        """Start to count the collectives of a micro-batch that was just drawn."""
        self._before = collectives_so_far()

    def draw(self, is_last: bool) -> None:  # noqa: ARG002
        """Start to count the collectives of a micro-batch."""
        self.begin()

    def first_loss(self, loss: torch.Tensor, samples: int, weight: float) -> None:  # noqa: ARG002
        """Examine the first loss of a step of `ctx.steps`."""
        self.refuse(loss, weight, "ctx.steps")

    def refuse(self, loss: torch.Tensor, weight: float, where: str) -> None:
        """Raise InputError if the first loss ran a collective, unless its weight is 1 or it gathers with gradients.

        Args:
            where: The function with `loss_scope=`, for the message.

        Raises:
            InputError: The loss may be normalised over the ranks already.
        """
        is_done, self._is_done = self._is_done, True
        self._counting.close()
        if not is_done and collectives_so_far() > self._before and abs(weight - 1) > 1e-9 and not _gathers(loss):
            raise InputError(
                "The ranks ran a collective before the backward of a micro-batch's loss. A loss may divide by a sum "
                f"over the ranks, such as the boxes in DETR. Then its weight of {weight:.3g} would normalise it "
                f"twice. Pass loss_scope='ranks' to {where}. If the loss is this rank's own mean, pass "
                "loss_scope='sample'.",
            )


def _gathers(loss: torch.Tensor) -> bool:
    for node in itertools.islice(graph_nodes(loss.grad_fn), 200):
        name = type(node).__name__.lower()
        if ("gather" in name and not name.startswith("gatherbackward")) or "allreduce" in name:
            return True
    return False
