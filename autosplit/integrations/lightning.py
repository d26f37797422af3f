"""A Lightning callback that makes a Trainer follow a plan: its batch sizes per process and its accumulation steps.

    shares = Shares()                                   # the plan of autosplit launch; or Shares("plan.json")
    trainer = lightning.Trainer(callbacks=[shares], ...)  # the plan sets accumulate_grad_batches
    trainer.fit(model, shares.loader(train_loader))     # or shares.data(datamodule)

The callback supports one device per process (the DDP strategy, or a single device) and automatic optimization. Each
micro-batch's loss is weighted by its divisor: the samples, the labels that are not ignored, or their class weights. A
sum has the weight 1. The divisor is inferred by running the training step on a few samples, unless `count` returns it.
Without a plan nothing changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import lightning.pytorch
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from autosplit.accelerators import accelerator_kind
from autosplit.ddp.batchnorms import silenced
from autosplit.ddp.group_end import release_group_last
from autosplit.ddp.setup import agree_on
from autosplit.ddp.user_collectives import LossCollectives
from autosplit.errors import InputError, PlanError, warn_user
from autosplit.integrations.gradient_norms import RunNorms, refuse_sum
from autosplit.integrations.lightning_oom_cuts import CutMixin, CutSteps, refuse_no_mixin
from autosplit.integrations.lightning_workload import PRECISIONS, asked_loss, workload
from autosplit.integrations.loss_mean import SUM, Finding, Samples, examine_others, warn_of_finding
from autosplit.integrations.process_share import MarkingBatchSampler, NoPlanWarning, Share, find_share, warn_of_no_plan
from autosplit.integrations.share_loader import loader_options
from autosplit.integrations.trained_gradients import TrainedGradients
from autosplit.integrations.weighted_backward import Weighed, batches_of, weighed
from autosplit.parallel.awaited_update import StepsWarning
from autosplit.parallel.batch_counts import Count
from autosplit.parallel.loss_weights import UnevenLossWarning
from autosplit.parallel.parts import OnOom
from autosplit.parallel.rank_scope import LossScope, checked_scope, refuse_combined_scope
from autosplit.parallel.step_listener import NoiseEstimate
from autosplit.plan.other_model import parameters_in
from autosplit.plan.plan import Plan
from autosplit.tools.oom_cuts import CutWarning, cuts_for

__all__ = ["CutMixin", "CutWarning", "NoPlanWarning", "Shares", "SharesLoader", "UnevenLossWarning", "workload"]


class _EpochTeller(SequentialSampler):
    """Pass the epoch from Lightning to the batch sampler.

    Lightning replaces any other sampler than a SequentialSampler if `overfit_batches` is set.
    """

    def __init__(self, batch_sampler: MarkingBatchSampler) -> None:
        super().__init__(range(batch_sampler.num_samples))
        self.set_epoch = batch_sampler.set_epoch


class SharesLoader:
    """Yield this process's part of every micro-batch, and record the weights.

    This class is not a DataLoader, because Lightning would replace the sampler of a DataLoader.
    """

    def __init__(
        self, loader: DataLoader[Any], share: Share, count: Count | None, *, spans_ranks: bool = False
    ) -> None:
        sampler = loader.batch_sampler
        assert isinstance(sampler, MarkingBatchSampler), sampler
        self.batch_sampler = sampler
        self.sampler = _EpochTeller(sampler)
        self.dataset = loader.dataset
        self.walked: dict[int, Weighed] = {}
        self._loader = loader
        self._share = share
        self._count = count
        self._spans_ranks = spans_ranks
        self._sums = False
        self._end: int | None = None
        self._progress: Any = None
        self._resumes = False

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def weigh_by(self, finding: Finding) -> None:
        """Weight the micro-batches by the rule in `finding`."""
        self._sums = finding.rule == SUM
        self._count = None if finding.rule in (SUM, "samples") else finding.counts

    def some_samples(self) -> Samples:
        """Return a few samples of the data set."""
        return Samples.in_data_set(self.dataset, self._loader.collate_fn)

    def watch(self, trainer: lightning.pytorch.Trainer) -> None:
        """Read the Trainer's limits on micro-batches, and its position in the epoch."""
        self._progress = trainer.fit_loop.epoch_loop.batch_progress
        self._end = int(trainer.num_training_batches)
        if trainer.overfit_batches > 0:
            self.batch_sampler.shuffle = False  # Lightning also draws the same samples in every epoch

    def __iter__(self) -> Iterator[Any]:
        begin = self._begin()
        self.walked = {}
        walked = weighed(
            self._loader,
            self.batch_sampler,
            count=self._count,
            sums=self._sums,
            spans_ranks=self._spans_ranks,
            over_processes=partial(self._share.over_processes, device=torch.device(accelerator_kind() or "cpu")),
            begin=begin,
            end=self._end,
        )
        for one in walked:
            self.walked[one.number] = one._replace(batch=None)
            yield one.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, in whole optimizer steps. Lightning saves it in its checkpoints."""
        done = 0 if self._progress is None else self._progress.current.processed
        schedule = self.batch_sampler.schedule
        ends = accumulate(len(step.micro_batch_sizes) for step in schedule)
        consumed = sum(step.num_samples for step, end in zip(schedule, ends, strict=True) if end <= done)
        return {**self.batch_sampler.state_dict(), "samples_consumed": consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at the position of another loader's state."""
        self.batch_sampler.load_state_dict(state)
        self._resumes = True

    def _begin(self) -> int:
        """Return the index of the micro-batch at which Lightning continues.

        If this is inside an optimizer step, the gradients of the step's earlier micro-batches are lost.
        """
        start = self.batch_sampler.start_step
        first, after = batches_of(self.batch_sampler, start), batches_of(self.batch_sampler, start + 1)
        if self._progress is None:
            return first
        begin: int = self._progress.current.ready
        resumes, self._resumes = self._resumes, False
        if (begin and not resumes) or not first <= begin < max(after, first + 1):
            raise InputError(
                f"Lightning resumes after {begin} micro-batches of the epoch, but the loader resumes after "
                f"{first}, because the checkpoint is not from this plan. Resume from a checkpoint of the same plan "
                "or from the end of an epoch, or load only the weights.",
            )
        return begin


class Shares(lightning.pytorch.Callback):
    """Make a Lightning Trainer follow a plan.

    Args:
        plan: A plan, or the file of a plan. Default: the file that AUTOSPLIT_PROFILE names (`autosplit launch` sets
            it). Otherwise, if `model` is given: the newest saved plan for this machine, this number of processes and a
            model of this size.
        model: The model to train. Without it, no saved plan is used.
        count: Returns the divisor of a batch's mean loss, an int or a float, such as the sum of its samples' weights.
            Default: inferred by running the training step on a few samples.
        loss_scope: ``"ranks"`` if the loss divides by a number summed over all processes, see `Context.steps`. With
            several micro-batches per step pass `count`, too.
        noise_scale: In every process an `autosplit.NoiseScale`, see `Plan.steps`.
        on_oom: With ``"cut"``, a micro-batch that runs out of memory is run in parts, see `Plan.steps`. The module must
            then have `CutMixin` among its bases.

    Attributes:
        share: This process's part of the plan. None without a plan.

    Raises:
        PlanError: The plan cannot be read, or is for a different number of processes.
        DeviceError: The plan is for simulated GPUs.

    Warns:
        NoPlanWarning: There is no plan.
        OtherModelWarning: In `fit`: the plan is for a model of a different size.
        UnevenLossWarning: In `fit`: the loss is neither a mean over samples or labels nor a sum, or it could not be
            examined.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str] | None = None,
        *,
        model: nn.Module | None = None,
        count: Count | None = None,
        loss_scope: LossScope | None = None,
        noise_scale: NoiseEstimate | None = None,
        on_oom: OnOom = "raise",
    ) -> None:
        self.share = find_share(plan, parameters=parameters_in(model))
        self._norms = RunNorms.of_share(self.share, noise_scale)
        self.noise_scale = None if self._norms is None else self._norms.noise_scale
        self._count, self._scope = count, loss_scope
        if checked_scope(loss_scope):
            refuse_combined_scope(on_oom=on_oom, noise_scale=noise_scale is not None)
        self._collectives: LossCollectives | None = None
        self._gradients: TrainedGradients | None = None
        self._loader: SharesLoader | None = None
        self._finding: Finding | None = None
        self._at: Weighed | None = None
        self._ran: Weighed | None = None  # the micro-batch of the last backward
        self._backward = ExitStack()
        cuts = None if self.share is None else cuts_for(self, on_oom, **self.share.cut_options)
        self._cut = None if cuts is None else CutSteps(cuts)
        if self.share is None:
            warn_of_no_plan()
        elif self.share.wraps:
            raise PlanError(
                f"The plan splits a batch over {len(self.share.plan.devices)} devices of one process, and Lightning "
                "has no strategy for that. Expected a plan for one device, or one process per device. Tune with "
                "strategy='ddp' and start the script with autosplit launch.",
            )

    def loader(self, loader: Any, *, shuffle: bool | None = None, seed: int = 0, drop_last: bool | None = None) -> Any:
        """Return a training loader of this process's part of every micro-batch. Without a plan, return `loader`.

        Args:
            loader: A DataLoader of PyTorch.
            shuffle: Whether to draw a new order each epoch. Default: the same as the loader.
            seed: The seed of that order.
            drop_last: Whether to drop the epoch's last step if it has fewer samples. Default: the loader's `drop_last`.

        Raises:
            InputError: `loader` is not a DataLoader, its data set is iterable, or its sampler leaves samples out or
                repeats some.
        """
        if self.share is None:
            return loader
        options = loader_options(loader, self.share, shuffle=shuffle, seed=seed, drop_last=drop_last)
        return SharesLoader(DataLoader(**options), self.share, self._count, spans_ranks=self._scope == "ranks")

    def data(self, datamodule: lightning.pytorch.LightningDataModule, **options: Any) -> Any:
        """Make a data module's training loader yield this process's part of every micro-batch.

        Args:
            **options: The options of `loader`.
        """
        made: Any = datamodule.train_dataloader
        datamodule.train_dataloader = lambda: self.loader(made(), **options)
        return datamodule

    def setup(self, trainer: lightning.pytorch.Trainer, pl_module: Any, stage: str) -> None:
        """Check the model, the precision and the processes against the plan, and set `accumulate_grad_batches`."""
        if self.share is None or stage != "fit":
            return
        if self._cut is not None:
            refuse_no_mixin(pl_module)
        self.share.check_model(pl_module)
        wanted = next(named for named, ours in PRECISIONS.items() if ours == self.share.plan.precision)
        if trainer.precision in PRECISIONS:  # with other precisions, Lightning converts the module
            self.share.warn_of_other_precision(PRECISIONS[str(trainer.precision)], f"precision={wanted!r}")
        self.share.checkpoint(pl_module)
        self.share.refuse_other_job(trainer.world_size, trainer.strategy.root_device, "Lightning")
        if self.share.num_processes > 1:
            agree_on(self.share.plan, trainer.global_rank)
        trainer.accumulate_grad_batches = self.share.accumulation_steps

    def on_train_start(self, trainer: lightning.pytorch.Trainer, pl_module: Any) -> None:
        """Find the `SharesLoader` of the Trainer, and infer the divisor of the loss."""
        if self.share is None:
            return
        if not pl_module.automatic_optimization:
            raise InputError(
                "automatic_optimization is False. Expected True, because Lightning does not report the end of an "
                "optimizer step otherwise. Set it to True, or write the training loop with autosplit.ddp.",
            )
        _warn_of_frequencies(trainer, self.share.accumulation_steps)
        release_group_last(trainer.strategy.model)
        self._find_loader(trainer)
        assert self._loader is not None, "`setup` sets it"
        self.share.refuse_uncounted_batchnorms(pl_module, self._loader.batch_sampler)
        if self._count is None and self._scope != "ranks":
            self._finding = self._agreed_finding(trainer, pl_module)
            if self._norms is not None:
                refuse_sum(self._finding.rule == SUM)
            self._find_loader(trainer)
        if self._scope is None and self.share.num_processes > 1:
            self._collectives = LossCollectives(counts=True)
        if self.share.num_processes > 1:
            again = "Freeze layers in on_train_start, and pass strategy='ddp_find_unused_parameters_true'."
            self._gradients = TrainedGradients([trainer.strategy.model], again)
        if self._cut is not None:
            self._cut.cuts.count = self._count or (None if self._finding is None else self._finding.counts)
            self._cut.sums = self._finding is not None and self._finding.rule == SUM
            pl_module.autosplit_cuts = self._cut

    def on_train_epoch_start(self, trainer: lightning.pytorch.Trainer, pl_module: Any) -> None:
        """Find the loader again, because each epoch may have another."""
        del pl_module
        if self.share is not None:
            self._find_loader(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Look up the weight of the micro-batch."""
        del pl_module, batch
        if self._loader is None or self.share is None:
            return
        if trainer.accumulate_grad_batches != self.share.accumulation_steps:
            raise InputError(
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches}. Expected the plan's "
                f"{self.share.accumulation_steps} in every epoch. Remove the code that sets it, such as a "
                "GradientAccumulationScheduler.",
            )
        self._at = self._loader.walked.get(batch_idx)
        if self._at is None:
            raise InputError(
                "training_step takes dataloader_iter, so it draws the batches itself. Expected a training_step with "
                "batch, because each batch has a weight of the plan. Take batch instead.",
            )
        if self._collectives is not None:
            self._collectives.begin()
        if self._norms is not None and self._at.position == 0:
            self._norms.begin()
        if self._cut is not None:
            self._cut.begin(trainer.strategy.model, self._at)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Compare the gradients over the processes, before they are clipped."""
        del pl_module, optimizer
        if self._gradients is not None:
            place = f"optimizer step {trainer.global_step}"
            self._gradients.compare(trainer.optimizers, place, trainer.strategy.root_device)

    def on_train_batch_end(self, *_: Any) -> None:
        """Enable DDP's synchronisation again, after "cut" disabled it."""
        if self._cut is not None:
            self._cut.end()

    def on_exception(self, *_: Any) -> None:
        """End the micro-batch, as `on_train_batch_end` does."""
        self.on_train_batch_end()

    def on_fit_end(self, trainer: lightning.pytorch.Trainer, pl_module: Any) -> None:
        """Stop cutting the module's micro-batches that run out of memory."""
        del trainer
        if self._cut is not None:
            pl_module.autosplit_cuts = None

    def _find_loader(self, trainer: lightning.pytorch.Trainer) -> None:
        loader = trainer.train_dataloader
        if not isinstance(loader, SharesLoader):
            raise InputError(
                f"The training loader is a {type(loader).__name__}. Expected a loader that splits batches by the "
                "plan. Pass shares.loader(loader), or shares.data(datamodule).",
            )
        loader.watch(trainer)
        if self._finding is not None:
            loader.weigh_by(self._finding)
        self._loader = loader

    def _agreed_finding(self, trainer: Any, pl_module: Any) -> Finding:
        assert self._loader is not None, "`setup` sets it"
        assert self.share is not None, "without a plan, losses are not weighted"
        otherwise = SUM if self.share.plan.loss_reduction == "sum" else "samples"

        def loss_of(rows: Any) -> torch.Tensor:
            return asked_loss(pl_module, trainer.strategy.batch_to_device(rows, pl_module.device, 0))

        with trainer.precision_plugin.train_step_context():
            finding = examine_others(loss_of, self._loader.some_samples(), otherwise=otherwise)
        if trainer.is_global_zero:
            warn_of_finding(finding, where="Shares")
        agreed: Finding = trainer.strategy.broadcast(finding)
        return agreed

    def on_before_backward(self, trainer: Any, pl_module: nn.Module, loss: torch.Tensor) -> None:
        """Multiply the gradient by the weight. Undo Lightning's division by the accumulation steps."""
        if self._loader is None or self._at is None or (self._cut is not None and self._cut.has_run):
            return
        if self._cut is None and self._ran is self._at and self._at.length > 1:
            raise InputError(
                f"A second backward ran for a micro-batch, but the plan's step has {self._at.length} micro-batches. An "
                "optimizer that runs its closure twice (SAM, LBFGS) would add up their gradients. Use another "
                "optimizer, or a plan with accumulation_steps=1.",
            )
        self._ran = self._at
        if self._collectives is not None:
            self._collectives.refuse(loss, self._at.weight, "Shares")
        weight = self._at.weight * trainer.accumulate_grad_batches
        loss.register_hook(lambda gradient: gradient * weight)
        if self._norms is not None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            models = [trainer.strategy.model]
            recorded = self._norms.recorded(loss, self._at.weight, self._at.total, scaler, models)
            self._backward.enter_context(recorded)
        if not weight:  # a mean over no labels is NaN (0/0), and 0 * NaN is NaN
            self._backward.enter_context(silenced([pl_module]))

    def on_after_backward(self, trainer: Any, pl_module: nn.Module) -> None:
        """Remove the hooks of `on_before_backward`, and add a finished step to the noise scale."""
        del trainer, pl_module
        self._backward.close()
        if self._norms is None or self._at is None or (self._cut is not None and self._cut.is_running):
            return
        if self._cut is not None and self._cut.was_cut:
            self._norms.spoil()
        if self._at.ends_step:
            self._norms.finish(self._at.total)


def _warn_of_frequencies(trainer: Any, accumulation_steps: int) -> None:
    frequencies = [one.frequency for one in trainer.lr_scheduler_configs if one.interval == "step"]
    if accumulation_steps > 1 and max(frequencies, default=1) > 1:
        warn_user(
            f"A scheduler has interval 'step' and frequency {max(frequencies)}. Lightning counts micro-batches, "
            f"and the plan's step has {accumulation_steps}. Use frequency 1, and let the scheduler count.",
            StepsWarning,
        )
