"""Estimate the gradient noise scale of a library's training loop from the gradient norms of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.loader_steps import refuse_hook, sums_over_ranks
from autosplit.errors import InputError
from autosplit.integrations.process_share import Share
from autosplit.parallel.step_listener import NoiseEstimate, checked_estimate


class RunNorms:
    """Record the gradient norms of a run's optimizer steps in the estimate `noise_scale`."""

    def __init__(self, share: Share, noise_scale: NoiseEstimate) -> None:
        self.noise_scale = noise_scale
        self._num_processes = share.num_processes
        self._over_ranks = partial(sums_over_ranks, device=share.device) if share.num_processes > 1 else None
        self.begin()
        self._has_looked = False

    @classmethod
    def of_share(cls, share: Share | None, noise_scale: NoiseEstimate | None) -> RunNorms | None:
        """Return an instance for a process, or None without an estimate or without a plan."""
        checked_estimate(noise_scale)
        if noise_scale is None or share is None:
            return None
        refuse_sum(share.plan.loss_reduction == "sum")
        return cls(share, noise_scale)

    def begin(self) -> None:
        """Begin an optimizer step. Discard the previous step if it is unfinished."""
        self._step = self.noise_scale.begin_step(self._over_ranks)

    def recorded(
        self, loss: torch.Tensor, weight: float, total: float, scaler: Any, models: Iterable[nn.Module]
    ) -> AbstractContextManager[None]:
        """Record the norm of a micro-batch's gradient. Run the backward inside the `with` block.

        Args:
            loss: The tensor on which the backward is called, or an earlier tensor of its graph.
            weight: The weight of the mean loss: its part of `total` times the number of processes. 0 without samples.
            models: The wrapped models.
        """
        if not weight:
            return nullcontext()
        if not self._has_looked:
            self._has_looked = True
            for part in (part for model in models for part in model.modules()):
                if isinstance(part, DistributedDataParallel):
                    refuse_hook(part)
        scale = 1.0 if scaler is None else scaler.scale(loss.detach().new_ones(()))
        size = weight * total / self._num_processes
        whole = round(size)
        return self._step.recorded(loss, whole if abs(size - whole) < 1e-6 else size, weight, scale)

    def spoil(self) -> None:
        """Exclude the optimizer step from the estimate, because one of its micro-batches was cut."""
        self._step.spoil()

    def finish(self, total: float) -> None:
        """Add the optimizer step to the estimate. All processes call this before the averaged gradients change."""
        self._step.finish(total)


def refuse_sum(is_sum: bool) -> None:
    """Raise InputError if the loss is a sum."""
    if is_sum:
        raise InputError(
            "noise_scale is given, but the loss is a sum. Expected a mean, because the noise scale is defined for "
            "its gradient. Tune and train with a mean, or leave noise_scale out.",
        )
