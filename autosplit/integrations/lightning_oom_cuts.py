"""Run a LightningModule's training step in parts if it runs out of memory.

    class Model(CutMixin, lightning.LightningModule): ...
    trainer = lightning.Trainer(callbacks=[Shares(on_oom="cut")], ...)

Lightning calls the training step and then its backward, and offers no hook to run both again. So this training step
also runs the backward, in parts if necessary. The processes average their gradients after the last micro-batch of an
optimizer step. Lightning would clear gradients after the training step and so delete the new ones. So gradients are
cleared before the first micro-batch of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autosplit.ddp.gradient_average import apart, average_gradients, refuse_meeting
from autosplit.errors import InputError
from autosplit.integrations.weighted_backward import Weighed
from autosplit.parallel.batch_counts import count_samples, counted
from autosplit.parallel.parts import Part
from autosplit.tools.oom_cuts import Attempt, Cuts, run_in_parts


class CutSteps:
    """Run the training steps of a LightningModule with their backwards, and cut steps that run out of memory.

    Attributes:
        sums: Whether the loss is a sum, so parts keep the whole weight.
        has_run: Whether the micro-batch's backward has run. Lightning's backward then has no effect.
    """

    def __init__(self, cuts: Cuts) -> None:
        self.cuts, self.sums = cuts, False
        self.at: Weighed | None = None
        self.has_run = self.is_running = False
        self.was_cut = False
        self._wrapped: DistributedDataParallel | None = None
        self._apart = ExitStack()

    def begin(self, model: nn.Module, at: Weighed) -> None:
        """Begin a micro-batch, and disable DDP's synchronisation in its forward and backward."""
        self.at, self.has_run, self.was_cut = at, False, False
        self._wrapped = model if isinstance(model, DistributedDataParallel) else None
        if self._wrapped is not None:
            refuse_meeting(self._wrapped)
            self._apart.enter_context(apart(self._wrapped))

    def end(self) -> None:
        """End a micro-batch, and enable DDP's synchronisation again."""
        self._apart.close()

    def run(self, module: Any, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a training step with its backward. If it runs out of memory, run it in two parts."""
        at, trainer = self.at, module.trainer
        assert at is not None, "a micro-batch sets it"
        if at.position == 0:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)
        size = counted(self.cuts.count or count_samples, batch) if at.weight else 0

        def run(part: Part, attempt: Attempt) -> Tensor:
            loss = _loss_of(step(part.batch, *args, **kwargs))
            share = part.size / size if size and not self.sums else 1.0
            scaled = loss * share / trainer.accumulate_grad_batches
            with torch.autocast(loss.device.type, enabled=False):  # Lightning uses autocast only in the step
                attempt.backward(partial(trainer.strategy.backward, scaled, None), loss)
            return loss.detach() * share

        self.is_running = True
        try:
            losses = run_in_parts(self.cuts, batch, size, run)
        finally:
            self.is_running = False
        self.has_run, self.was_cut = True, len(losses) > 1
        if self._wrapped is not None and at.ends_step:
            average_gradients(self._wrapped)
        return torch.stack(losses).sum().requires_grad_()


def _loss_of(outputs: Any) -> Tensor:
    loss: Any = outputs["loss"] if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        raise InputError(
            f"training_step returned a {type(outputs).__name__}. Expected its loss, or a dict with the loss, "
            "because on_oom='cut' must run every micro-batch. Return a loss, or leave on_oom out.",
        )
    return loss


class CutMixin:
    """Let a LightningModule's training step run in parts, with `Shares(on_oom="cut")`. Put this class first."""

    autosplit_cuts: CutSteps | None = None

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, in parts if it runs out of memory."""
        step = super().training_step  # type: ignore[misc]
        if self.autosplit_cuts is None:
            return step(batch, *args, **kwargs)
        return self.autosplit_cuts.run(self, step, batch, *args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Do nothing, because `CutSteps.run` clears the gradients and has already computed new ones."""
        if self.autosplit_cuts is None:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)  # type: ignore[misc]


def refuse_no_mixin(module: Any) -> None:
    """Raise InputError if a module is not a `CutMixin`, so its training step cannot run in parts."""
    if not isinstance(module, CutMixin):
        name = type(module).__name__
        raise InputError(
            f"on_oom is 'cut', but the training step of {name} can't run in parts. Declare it as class "
            f"{name}(CutMixin, lightning.LightningModule), or leave on_oom out.",
        )
