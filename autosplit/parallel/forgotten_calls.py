"""Warn once if a training loop forgets `optimizer.step()` or `zero_grad()`, or divides the loss itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autosplit.autograd_graph import graph_leaves
from autosplit.errors import warn_user
from autosplit.parallel.awaited_update import AwaitedUpdate, StepsWarning
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.parallel.step_listener import StepListener

ROUNDING = 1e-6
"""Largest relative difference between a factor of the loss and the factor of `step.backward`."""


class ForgottenCalls(StepListener):
    """Listen to the first two steps of a loop, and warn of mistakes that change the training.

    A loop may clear the gradients at the end of a step, at its beginning, or before its only micro-batch. Optimizers
    may take turns. So a gradient was forgotten only if the second step begins with it, and its first backward adds to
    it.
    """

    def __init__(self) -> None:
        # Keep no step: it holds its loss, and plans count the memory of only one loss.
        self._steps: list[_Step] = []
        self._has_drawn = self._has_looked = self._is_left = False
        self._nearest: Tensor | None = None

    def watch(self, step: OptimizerStep) -> None:
        """Listen to a step, if it is one of the first two."""
        if len(self._steps) < 2:
            self._steps.append(_Step(step.index, len(step), step.num_ranks, step.awaited))
            step.listeners.append(self)

    def draw(self, is_last: bool) -> None:  # noqa: ARG002
        """Look whether the second step begins with a gradient of the first step."""
        if len(self._steps) == 2 and not self._has_drawn:
            self._has_drawn = True
            self._is_left = _has_gradient(self._nearest)

    def first_loss(self, loss: Tensor, samples: int, weight: float) -> None:  # noqa: ARG002
        """Warn if the loop divides the loss of the first step itself, as `step.backward` does."""
        step, factor = self._steps[-1], outer_factor(loss)
        divisors = [number for number in (step.micro_steps, step.num_ranks, 1 / weight) if number > 1]
        if len(self._steps) == 1 and factor and any(abs(factor * number - 1) < ROUNDING for number in divisors):
            warn_user(
                f"The loss is multiplied by {factor:.3g}, but step.backward(loss) weights each of the "
                f"{step.micro_steps} micro-batches and {step.num_ranks} ranks itself. Pass the mean loss of the "
                "micro-batch.",
                StepsWarning,
            )

    def begin_backward(self, loss: Tensor) -> None:
        """In the second step, look for an update and for cleared gradients."""
        nearest = next(graph_leaves(loss), None)
        if len(self._steps) < 2:
            self._nearest = nearest
        elif not self._has_looked:
            self._has_looked = True
            first, is_added = self._steps[0], self._is_left and nearest is self._nearest and _has_gradient(nearest)
            self._nearest = None
            if first.awaited.is_missing():
                warn_user(
                    f"No optimizer has stepped since optimizer step {first.index}, so the parameters did not change. "
                    "Expected one update per step. Call optimizer.step() and optimizer.zero_grad() after the inner "
                    "loop.",
                    StepsWarning,
                )
            elif is_added:
                warn_user(
                    f"Optimizer step {self._steps[1].index} adds its gradient to the gradient of step {first.index}, "
                    "which was not cleared. Expected cleared gradients. Call optimizer.zero_grad() after "
                    "optimizer.step().",
                    StepsWarning,
                )


@dataclass(frozen=True)
class _Step:
    index: int
    micro_steps: int
    num_ranks: int
    awaited: AwaitedUpdate


def outer_factor(loss: Tensor) -> float | None:
    """Return the last factor of a loss. None if there is no factor, or if the loss is a sum of losses."""
    node = loss.grad_fn
    name, *inner = (
        type(one).__name__.partition("Backward")[0]
        for one in (node, *(child for child, _ in getattr(node, "next_functions", ()) if child is not None))
    )
    other = getattr(node, "_saved_other", None)
    if name not in ("Mul", "Div") or len(inner) != 1 or inner[0] in ("Add", "Sum", "Stack"):
        return None
    if not isinstance(other, Tensor) or other.numel() != 1 or other.device.type != "cpu" or not float(other):
        return None
    return float(other) if name == "Mul" else 1 / float(other)


def _has_gradient(parameter: Tensor | None) -> bool:
    grad = None if parameter is None else parameter.grad
    return type(grad) is Tensor and grad.layout == torch.strided and bool(grad.count_nonzero())
