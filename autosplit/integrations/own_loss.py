"""Ask what the loss that a model returns by itself is a mean over, when it is trained with for the first time."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autosplit.errors import InputError
from autosplit.probe.loss_mean import TOLERANCE, asked_rule, tell_of_uneven_loss
from autosplit.rng import kept_rng


class OwnLoss:
    """Watches a model's forwards until the first backward."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: tuple[dict[str, Any], weakref.ref[torch.Tensor]] | None = None
        self._hook = model.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            own = output.get("loss") if isinstance(output, Mapping) else None
            # Weakly: a loss holds what its backward needs.
            self._kept = None if args or not isinstance(own, torch.Tensor) else (kwargs, weakref.ref(own))

    def end(self) -> None:
        """Watch no more; refuse a loop that weights its losses itself."""
        self._hook.remove()
        if self._kept is not None and "num_items_in_batch" in self._kept[0]:
            raise InputError(
                "the model is given num_items_in_batch, by which the loop weights its losses itself, and "
                "accelerator.backward does so by the plan's shares; expected one of them; leave it out, with the "
                "factors of the loss that go with it, and pass count= to the Accelerator"
            )

    def rule(self, loss: torch.Tensor, model: nn.Module) -> str | None:
        """Ask the model, without what wraps it, about samples of its last batch; return what the loss is a mean over.

        None where the model did not make the loss or its batch does not tell; with a warning, where the loss is neither
        a mean over samples or labels nor a sum.
        """
        kept = self._kept
        if kept is None or kept[1]() is not loss:
            return None
        modes = [(part, part.training) for part in model.modules()]
        model.eval()
        try:
            with torch.no_grad(), kept_rng():
                rule, error = asked_rule(lambda rows: float(model(**rows)["loss"]), kept[0], otherwise="samples")
        finally:
            for part, mode in modes:
                part.training = mode
        if error > TOLERANCE:
            tell_of_uneven_loss(error)
        return rule if error <= TOLERANCE else None  # nor where it is NaN
