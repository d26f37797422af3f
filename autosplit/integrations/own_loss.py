"""Infer the divisor of the loss in an accelerate loop, at its first backward.

If the model returned the loss, the model runs again on a few samples. Otherwise the loop's code computed the loss, and
only the plan's gradient check can examine it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autosplit.errors import InputError, WorkloadError, warn_user
from autosplit.integrations.loss_mean import SUM, TOLERANCE, Finding, Samples, examine_others, warn_of_finding
from autosplit.integrations.process_share import Share
from autosplit.parallel.loss_weights import IGNORED_LABEL, UnevenLossWarning
from autosplit.rng import preserved_rng
from autosplit.workload.tree import map_tensors


class OwnLoss:
    """Record the arguments and the loss of a model's last forward, until the first backward."""

    def __init__(self, model: nn.Module) -> None:
        self._last_call: tuple[dict[str, Any], weakref.ref[torch.Tensor]] | None = None
        self._hook = model.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            own = output.get("loss") if isinstance(output, Mapping) else None
            # Keep a weak reference, because a loss keeps its graph in memory.
            self._last_call = None if args or not isinstance(own, torch.Tensor) else (kwargs, weakref.ref(own))

    def end(self) -> None:
        """Remove the hook. Raise InputError if the loop weights its losses."""
        self._hook.remove()
        if self._last_call is not None and "num_items_in_batch" in self._last_call[0]:
            raise InputError(
                "The model gets num_items_in_batch, so the loop weights its losses itself, but "
                "accelerator.backward weights them by the plan's split. Compute the loss without "
                "num_items_in_batch, and pass count= to the Accelerator.",
            )

    def examine(self, loss: torch.Tensor, model: nn.Module, loader: Any, *, is_checked: bool) -> str:
        """Return the reason why a loss cannot be weighted by samples. Return "" if it can, or if this is unknown.

        Args:
            is_checked: Whether the plan has the results of the gradient check.

        Warns:
            UnevenLossWarning: The loss could not be examined, or it fits no rule.
        """
        finding = self.finding(loss, model, loader)
        if finding is not None:
            warn_of_finding(finding, where="the Accelerator")
            if finding.rule == "samples" or not finding.error <= TOLERANCE:
                return ""
            return f"The model's loss is {finding}. {_cure(finding)}"
        if not is_checked:
            warn_user(
                "autosplit can't infer the divisor of the loss, because the model did not compute it, and the plan has "
                "no gradient check. autosplit treats the loss as a mean over samples. If that is wrong, pass count= to "
                "the Accelerator, a function that returns the divisor of a batch's loss.",
                UnevenLossWarning,
            )
        return ""

    def finding(self, loss: torch.Tensor, model: nn.Module, loader: Any) -> Finding | None:
        """Infer the divisor of the loss by running the unwrapped model on samples of its last batch.

        Args:
            loader: The loader of the batch. If the batch cannot be cut, the loader's collator makes smaller batches.

        Returns:
            The finding, or None if the model did not compute the loss.
        """
        last = self._last_call
        if last is None or last[1]() is not loss:
            return None
        modes = [(part, part.training) for part in model.modules()]
        model.eval()
        try:
            with torch.no_grad(), preserved_rng():
                samples = _samples(last[0], loader)
                return examine_others(lambda rows: model(**_moved(rows, loss))["loss"], samples, otherwise="samples")
        finally:
            for part, mode in modes:
                part.training = mode


def _samples(kwargs: dict[str, Any], loader: Any) -> Samples | dict[str, Any]:
    try:
        found = Samples.in_batch(kwargs)
    except WorkloadError:
        found = None
    if found is not None and found.number > 1:
        return found

    def collated(samples: list[Any]) -> dict[str, Any]:
        batch = loader.collate_fn(samples)
        if not isinstance(batch, Mapping) or not kwargs.keys() <= batch.keys():
            raise WorkloadError(
                "The model's arguments can't be cut, and the loader's collator does not return them",
            )
        return {name: batch[name] for name in kwargs}

    return Samples.in_data_set(loader.dataset, collated)


def _moved(rows: dict[str, Any], loss: torch.Tensor) -> Any:
    return map_tensors(lambda tensor: tensor.to(loss.device), rows)


_WEIGHTS = "count=lambda batch: float(class_weights[labels].sum()), with the labels of the batch"
_LABELS = "a function that counts those labels in a batch"


def _cure(finding: Finding) -> str:
    if finding.rule == SUM:
        return "Tune with loss_reduction='sum'."
    if finding.counter is not None:
        weighted = finding.counter.weights is not None
        return f"Pass count= to the Accelerator: {_WEIGHTS if weighted else _LABELS}."
    labels = 'batch["labels"][:, 1:]' if finding.rule == "shifted labels" else 'batch["labels"]'
    return f"Pass count=lambda batch: int(({labels} != {IGNORED_LABEL}).sum()) to the Accelerator."


def warn_of_router_loss(model: Any, share: Share) -> None:
    """Warn if a mixture-of-experts model of transformers adds its router's auxiliary loss, and batches are split.

    The loss multiplies two means over the tokens of one forward, so it is no mean over samples.
    """
    config = getattr(model, "config", None)
    coefficient = getattr(config, "router_aux_loss_coef", 0)
    splits = share.wraps or share.num_processes > 1 or share.accumulation_steps > 1
    if coefficient and getattr(config, "output_router_logits", False) and splits:
        warn_user(
            f"The model adds its router's auxiliary loss (router_aux_loss_coef={coefficient}), which depends on the "
            "whole batch. Each device computes it for each micro-batch, and their average is trained, so the gradient "
            "depends on the split. To leave it out, set model.config.output_router_logits = False.",
            UnevenLossWarning,
        )
