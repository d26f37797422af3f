"""Compare the gradients of a tool's optimizers over the processes. See `autosplit.ddp.equal_gradients`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autosplit.ddp.equal_gradients import UNUSED, Described, GradientComparison, described, described_in


class TrainedGradients:
    """Raise InputError if the processes train different models, because DDP does not synchronise a parameter.

    Args:
        models: The wrapped models.
        rewrap: How to wrap a model again, or how to freeze layers so that this is not needed.
    """

    def __init__(self, models: Iterable[nn.Module], rewrap: str) -> None:
        self._models = [*models]
        self._trained = {id(one) for model in self._models for one in model.parameters() if one.requires_grad}
        outside = "DDP does not synchronise it. Make it a part of the model before the model is wrapped."
        self._comparison = GradientComparison(
            {
                "unwrapped": outside,
                "outside": outside,
                "late": f"It was frozen or missing when the model was wrapped. {rewrap}",
                "unused": f"{UNUSED} Enable find_unused_parameters.",
                "wrapped": "Its model was not called through the wrapper. Call the wrapper, not its `module`.",
            }
        )

    def compare(self, optimizers: Iterable[Any], step: str, device: torch.device) -> None:
        """Compare the gradients after the last backward of a step, before they are clipped. All processes call this."""
        parameters = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]

        def describe(found: list[Tensor]) -> list[Described | None]:
            known: dict[int, Described | None] = {}
            for number, model in enumerate(self._models):
                known |= described_in(model, self._trained, f"model {number}: " if number else "")
            return described(found, known, "outside")

        self._comparison.compare(parameters, describe, step, device)
