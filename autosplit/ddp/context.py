"""`Context`: one rank's device, wrapped model, part of the epoch, and optimizer steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from autosplit.accelerators import is_accelerator, moved
from autosplit.addons import addon, found_addon
from autosplit.ddp.batchnorms import doubt_batchnorms, has_synchronised
from autosplit.ddp.checkpoint import CheckpointMethods
from autosplit.ddp.equal_gradients import EqualGradients
from autosplit.ddp.find_plan import check_model
from autosplit.ddp.gradient_average import refuse_meeting
from autosplit.ddp.group_end import part_from_group, release_group_last
from autosplit.ddp.loader_steps import (
    Settings,
    foreign_steps,
    refuse_hook,
    refuse_unplanned,
    require_equal_settings,
    settings_of,
    sums_over_ranks,
    totals_over_ranks,
)
from autosplit.ddp.progress import Progress
from autosplit.ddp.rank_gather import Gathered, gather_rows
from autosplit.ddp.rank_models import RankModel, RankModels, Ranks, refuse_options
from autosplit.ddp.sharded_tensors import begin_step
from autosplit.ddp.user_collectives import LossCollectives
from autosplit.errors import InputError
from autosplit.parallel.batch_counts import Count, warn_of_missing_count
from autosplit.parallel.batch_sampler import RankSlice, ScheduledBatchSampler
from autosplit.parallel.checkpointed import checkpoint_layers
from autosplit.parallel.epoch_steps import Steps, checked, compared, steps
from autosplit.parallel.optimizer_steps import OptimizerStep
from autosplit.parallel.parts import cuts_of
from autosplit.parallel.rank_scope import LossScope, checked_scope, refuse_combined_scope, refuse_ranks_without_samples
from autosplit.parallel.rebuilt_loader import loader_around
from autosplit.parallel.step_listener import NoiseEstimate, StepListener, checked_estimate
from autosplit.plan.other_model import refuse_wrapped
from autosplit.plan.plan import Plan
from autosplit.plan.record import add_note_to_file, count_of, loader_keywords, required_lengths
from autosplit.plan.torchrun import required_ranks

if TYPE_CHECKING:
    from autosplit.tools.fsdp import Layers
    from autosplit.tools.token_sampler import TokenBatchSampler


class Context(CheckpointMethods):
    """Give one rank its part of a plan. `autosplit.ddp.setup` creates the context.

    Args:
        plan: The plan of the whole job.
        rank: The rank of this process, from 0.
        device: The device of this rank.
        progress: Records the rank's place, for errors. Only `autosplit.ddp.setup` passes it.

    Attributes:
        plan: The plan of the whole job.
        rank: The rank of this process.
        device: The device of this rank.
        world_size: The number of processes of the job.
        layout: The plan's layout for DDP.
        seat: The samples, the ceiling and the memory of this rank.
        batch_size: Samples per forward over all ranks.
        effective_batch_size: Samples per optimizer step over all ranks.
    """

    def __init__(
        self, plan: Plan, rank: int, device: torch.device, progress: Progress | None = None, *, is_named: bool = True
    ) -> None:
        self.rank, self._is_named = rank, is_named
        layout = required_ranks(plan)
        self.world_size = len(layout.seats)
        self.device = device
        self._progress = progress or Progress(rank, self.world_size, math.inf)
        self.plan = plan
        self.layout = layout
        self.seat = layout.seats[rank]
        self._slice = RankSlice(rank, layout.split)
        self.batch_size = self._slice.batch_size
        self.effective_batch_size = layout.effective_batch_size
        slow_ranks = None if self.world_size == 1 else found_addon("slow_ranks")
        self._slow_ranks = None if slow_ranks is None else slow_ranks(rank, self.world_size, device)
        self._models = RankModels()
        self._loop: object = None
        self._equal_gradients = EqualGradients(self._models, device)
        self._step: weakref.ref[OptimizerStep] | None = None

    def wrap(self, model: nn.Module, *, sync_batchnorm: bool = False, **kwargs: Any) -> DistributedDataParallel:
        """Move a model to this rank's device and wrap it in DistributedDataParallel.

        Args:
            model: The same model on every rank. DDP sends rank 0's weights to the other ranks.
            sync_batchnorm: Whether BatchNorms normalise over the samples of all ranks. Only GPUs support this.
            **kwargs: Options of DistributedDataParallel that replace the plan's options (`layout.options`). The plan
                sets `gradient_as_bucket_view`, which saves the memory of one copy of the gradients. The
                plan's ceilings rely on it. It sets `find_unused_parameters` if a parameter had no gradient.

        Returns:
            The wrapper. `wrapper.module` is the model.

        Raises:
            InputError: `model` is not a module, or is already wrapped. `kwargs` has an option that this version of
                DistributedDataParallel lacks. Rank 0 has no samples, but its running statistics would be used. Moving
                the model replaced parameters that an optimizer has. The plan is for a sharded model
                (`autosplit.tune_sharded`), or is the newest and for another model.
            PlanError: The model lacks a layer that the plan checkpoints.

        Warns:
            BatchNormWarning: Only rank 0's running statistics are used, and another rank has more samples.
            OtherModelWarning: The named plan was made for a model of a different size.
        """
        refuse_options(kwargs, DistributedDataParallel, ("module",))
        refuse_wrapped(model)
        if self.layout.shard_size is not None:
            raise InputError(
                "ctx.wrap was called with a plan for a sharded model, whose batch sizes may not fit a whole model on "
                "each rank. Call ctx.shard, or pass setup the plan that tune returned.",
            )
        check_model(self.plan, model, is_named=self._is_named, rank=self.rank)
        if sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        checkpoint_layers(model, self.plan.checkpointed)
        doubt_batchnorms(model, self.rank, self._slice.batch_sizes)
        if is_accelerator(self.device.type):
            kwargs.setdefault("device_ids", [self.device.index])
        kwargs = {**self.layout.options.keywords(), **kwargs}
        wrapped = RankModel(moved(model, self.device), **kwargs)
        release_group_last(wrapped)
        self._models.wrapped.add(wrapped)
        self._models.meet_always |= has_synchronised(model)
        return wrapped

    def shard(self, model: nn.Module, *, layers: Layers | None = None, **kwargs: Any) -> nn.Module:
        """Shard a model's parameters, gradients and optimizer state over the ranks, with FSDP2.

            model = ctx.shard(model, layers=TransformerBlock)
            optimizer = torch.optim.AdamW(model.parameters())  # after shard(), which replaces the parameters

        The model is changed in place, permanently: its modules get other classes, and its parameters become DTensors.
        `save_checkpoint` writes the state of a plain model. Every rank must run every forward, even in evaluation. A
        rank without samples runs the loss with weight 0, so the loss must be finite even if no label counts.

        Buffers are not synchronised after this call. Each rank computes BatchNorm statistics from its own samples, and
        checkpoints contain rank 0's. The batch sizes of a plan from `tune` assume unsharded models, so a sharded model
        leaves memory free. `autosplit.tune_sharded` finds larger batch sizes, and the number of ranks per shard
        group. Each group then has a copy of the model, and the groups all-reduce their gradients.

        Args:
            model: The same model on every rank. Rank 0's weights and buffers are first sent to the other ranks.
                Initialise a model on the meta device after this call, with `to_empty`. The values must be equal on all
                ranks.
            layers: The modules whose parameters are gathered together: a class, a tuple of classes, or a function that
                returns True for them. The other parameters form one more group. Default: one group.
            **kwargs: Options of fully_shard, such as `mp_policy`, `offload_policy`, `reshard_after_forward`, `mesh`.

        Returns:
            The same model object.

        Raises:
            InputError: `kwargs` has an option that this version of fully_shard lacks. `layers` selects no module. The
                model is wrapped, already sharded, or differs from rank 0's. Rank 0 has no samples, but its running
                statistics would be used.

        Warns:
            BatchNormWarning: Checkpoints have rank 0's running statistics, and another rank has more samples.
            OtherModelWarning: The named plan was made for a model of a different size.
        """
        check_model(self.plan, model, is_named=self._is_named, rank=self.rank)
        sizes = self._slice.batch_sizes
        doubt_batchnorms(model, self.rank, sizes, "in checkpoints are", "Convert them with nn.SyncBatchNorm (GPUs)")
        checkpoint_layers(model, self.plan.checkpointed)
        shard_size = self.layout.shard_size
        addon("shard")(model, device=self.device, layers=layers, shard_size=shard_size, options=kwargs)
        self._models.sharded.add(model)
        self._models.meet_always = True  # every forward and backward gathers parameters
        return model

    def loader(
        self, data: Any, *, shuffle: bool | None = None, seed: int = 0, drop_last: bool | None = None, **options: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader for this rank's part of every micro-batch. See `Plan.loader` and `batch_sampler`.

        Args:
            data: The same data set on every rank, or a DataLoader whose data set, order and settings are used.
            shuffle: For this and the other arguments, see `Plan.loader`.
        """
        order: Any = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        return loader_around(data, self._sampler, loader_keywords(self.plan), **order, options=options)

    def batch_sampler(
        self, num_samples: int | Sized, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> ScheduledBatchSampler:
        """Return a batch sampler that yields this rank's part of every micro-batch.

        All ranks draw the same order. Every sample is yielded once per epoch. Every rank gets the same number of
        micro-batches. A smaller last step is split in nearly the same proportions. The split avoids single samples on a
        rank if possible, because BatchNorms cannot train on one. A rank without samples runs one or two samples with
        weight 0, which do not change BatchNorm statistics.

        Args:
            num_samples: The dataset or its length.
            shuffle: Whether to draw a new order each epoch. `steps` counts the epochs. To choose an epoch, call
                `set_epoch` on every rank.
            seed: The seed of the order, the same on every rank.
            drop_last: Whether to drop the epoch's last step if it has fewer samples.

        Raises:
            InputError: `num_samples` is below 1, or a number is not an integer. The plan's model has BatchNorms that
                would get one sample in the epoch's last forward.
        """
        return self._sampler(num_samples, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def _sampler(self, num_samples: int | Sized, **options: Any) -> ScheduledBatchSampler:
        made = ScheduledBatchSampler(
            num_samples, self.batch_size, self.effective_batch_size, rank_slice=self._slice, **options
        )
        made.refuse_single_samples(self._slice.batch_sizes, self.layout.least_batch)
        return made

    def token_sampler(self, lengths: Any, *, shuffle: bool = False, seed: int = 0) -> TokenBatchSampler:
        """Return a batch sampler that yields this rank's part of batches of similar length.

        Each rank gets as many samples of a batch as fit on its device at that length. See `Plan.token_sampler` and
        `batch_sampler`.

        Args:
            lengths: The length of each sample of the data set, the same on every rank.
            shuffle: See `batch_sampler`.
            seed: See `batch_sampler`.

        Raises:
            PlanError: The plan was not tuned for lengths.
            InputError: See `Plan.token_sampler`.
        """
        made: TokenBatchSampler = addon("token_sampler")(
            required_lengths(self.plan),
            lengths,
            self._slice.batch_sizes,
            self.effective_batch_size,
            keeps_effective=self.plan.effective_batch_sizes is not None,
            shuffle=shuffle,
            seed=seed,
            rank=self.rank,
        )
        made.refuse_single_samples(self._slice.batch_sizes, self.layout.least_batch)
        return made

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens, with padding, that fits on this rank's device. See `Plan.max_tokens`."""
        return required_lengths(self.plan).tokens_of(self.seat.samples)

    def steps(
        self,
        loader: Iterable[Any],
        *,
        count: Count | None = None,
        loss_scope: LossScope | None = None,
        on_oom: Literal["raise", "cut"] = "raise",
        noise_scale: NoiseEstimate | None = None,
        device: torch.device | str | int | None = None,
    ) -> Steps:
        """Return the optimizer steps of one epoch of this rank's loader.

            for step in ctx.steps(loader, device=ctx.device):
                for inputs, targets in step:
                    step.backward(loss_fn(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

        `step.backward` multiplies the mean loss of this rank's micro-batch by its weight. The result is the gradient of
        the mean over all ranks' samples. The ranks synchronise gradients only in the last micro-batch. If the loop left
        a step early, your `zero_grad` clears its gradients. With FSDP2, the next step clears the remaining gradients.

        Args:
            loader: A ``DataLoader`` with this context's `batch_sampler`. Its batches are not examined. For a progress
                bar, write ``tqdm(ctx.steps(loader))``, because tqdm(loader) hides the sampler. Or another loader of
                this rank's own batches, such as an iterable data set that is cut by rank. The micro-batches of a step
                are then buffered until the ranks exchange their numbers of samples. All ranks end with the shortest
                loader.
            count: Returns the divisor of a batch's mean loss, if the divisor is not the number of samples: an int
                (labels without padding) or a float (the sum of the class weights of its labels).
            loss_scope: ``"ranks"`` if the loss divides by a number summed over all ranks, as in DETR. With several
                micro-batches per step also pass `count`, which returns that number. ``"sample"`` if the loss is the
                rank's own mean. Default: ``"sample"``, but raise InputError if the ranks run a collective between the
                forward and the first backward.
            on_oom: Pass ``"cut"`` on every rank to run a micro-batch again in two parts if it runs out of memory in
                ``with step.attempt():``. The other ranks wait. See `Plan.steps`.
            noise_scale: On every rank an `autosplit.NoiseScale`, which estimates the gradient noise scale from the
                micro-batches of all ranks. See `Plan.steps`.
            device: The device to which every micro-batch is moved, usually `device` of this context. Default: batches
                stay where the loader created them.

        Returns:
            The optimizer steps. Iterate each to its end. `len()` returns their number if the loader has this
            context's `batch_sampler`.

        Raises:
            InputError: The batch sampler belongs to another rank or plan, or is hidden in another iterable. The loader
                draws the whole data set on each rank. ``"cut"`` does not support models that synchronise in the forward
                (SyncBatchNorm, `shard`). `noise_scale` does not support models that are sharded or have a communication
                hook. While iterating: the ranks' settings or gradients differ, a step was left unfinished, or a batch
                has no tensor to count.

        Warns:
            CutWarning: This rank cut a micro-batch for the first time. The message has the cause and advice.
            EffectiveBatchWarning: The size of an optimizer step differs from the plan's effective batch size.
            SlowRankWarning: The other ranks wait for one rank for more than 10% of a step. Only rank 0 warns.
        """
        plan = self.plan
        note = partial(add_note_to_file, plan)
        cuts = cuts_of(loader, on_oom, dim=plan.batch_dim, least=self.layout.least_batch, count=count, note=note)
        checked_estimate(noise_scale)
        self._refuse_unsuited_models(cuts=cuts is not None, noise_scale=noise_scale is not None)
        estimate: Any = {"noise_scale": noise_scale, "sums_over_ranks": partial(sums_over_ranks, device=self.device)}
        estimate["device"] = device
        options: dict[str, Any] = {
            "count=": count is not None,
            "on_oom=": on_oom,
            "noise_scale=": noise_scale is not None,
        }
        settings = partial(settings_of, loader, **options, **{"loss_scope=": loss_scope})
        sampler = getattr(loader, "batch_sampler", None)
        spans_ranks = checked_scope(loss_scope)
        if not spans_ranks and (self.world_size > 1 or self.plan.accumulation_steps > 1):
            warn_of_missing_count(count, count_of(self.plan))
        if spans_ranks:
            refuse_combined_scope(on_oom=on_oom, noise_scale=noise_scale is not None)
            refuse_ranks_without_samples(self._slice.batch_sizes.count(0))
        if not isinstance(sampler, ScheduledBatchSampler):
            made = self._foreign_steps(loader, count=count, spans_ranks=spans_ranks)
            made = checked(made, cuts, **estimate)
            return Steps(self._synchronised(made, settings, watches=loss_scope is None), None)
        if sampler.rank_slice != self._slice:
            raise InputError(
                f"The loader's batch sampler is a {type(sampler).__name__} for another rank or plan. Expected rank "
                f"{self.rank}'s sampler, because all ranks must take the same number of micro-batches. "
                "Create the loader with batch_sampler=ctx.batch_sampler(len(dataset)).",
            )
        over_ranks = partial(totals_over_ranks, device=self.device)
        given: Any = {"over_ranks": over_ranks, "spans_ranks": spans_ranks, "cuts": cuts, **estimate}
        sizes: Any = {"batch_size": self.batch_size, "effective_batch_size": self.effective_batch_size}
        made = steps(loader, **sizes, count=count, **given)
        made = self._synchronised(made, settings, watches=loss_scope is None)
        return Steps(made, sampler)

    def _foreign_steps(self, loader: Any, *, count: Count | None, spans_ranks: bool) -> Iterator[OptimizerStep]:
        refuse_unplanned(loader, self.rank, self._slice.batch_sizes)
        accumulation_steps, has_share = self.layout.accumulation_steps, self.seat.samples > 0
        options: Any = {"device": self.device, "count": count, "has_share": has_share, "spans_ranks": spans_ranks}
        made = foreign_steps(loader, accumulation_steps, **options)
        return made if count is not None else compared(made, self.effective_batch_size)

    def _refuse_unsuited_models(self, *, cuts: bool, noise_scale: bool) -> None:
        if cuts and self._models.sharded:
            raise InputError(
                "on_oom is 'cut', and the model is sharded (ctx.shard), so its forward runs collectives. Expected a "
                "model with which each rank can run its own number of forwards. Use ctx.wrap, or leave on_oom out.",
            )
        if noise_scale and self._models.sharded:
            raise InputError(
                "noise_scale is given, and the model is sharded (ctx.shard). Expected a model that every rank has "
                "completely, because the estimate needs each rank's own gradient. Use ctx.wrap, or leave noise_scale "
                "out.",
            )
        for wrapped in self._models.wrapped:
            if cuts:
                refuse_meeting(wrapped)
            if noise_scale:
                refuse_hook(wrapped)

    def all_gather(self, tensor: torch.Tensor) -> Gathered:
        """Gather the rows of a tensor from all ranks, with gradients, for a loss that compares samples across ranks.

            for step in ctx.steps(loader):
                for (images,) in step:
                    z = F.normalize(model(images), dim=1)
                    everyone = ctx.all_gather(z)
                    own = everyone.offset + torch.arange(len(z), device=z.device)
                    step.backward(F.cross_entropy(z @ everyone.tensor.T / 0.1, own))

        Every rank must call `all_gather` the same number of times, and use the result in its loss. Ranks may have
        unequal numbers of rows. The loss must be the mean over this rank's own samples, or one loss over all samples
        that is equal on every rank. The gradient is then the same as in one process with the whole micro-batch. Samples
        are compared only within a micro-batch.

        A rank without samples in a micro-batch runs other ranks' samples with weight 0. On that rank only, their rows
        are at the end of `Gathered.tensor`, where `offset` points.

        Raises:
            InputError: The ranks' rows have unequal shapes or dtypes. Or `steps` has ``on_oom="cut"``, because ranks
                then run unequal numbers of forwards.
        """
        step = self._step() if self._step is not None else None
        if step is not None and step.cuts is not None and step.is_open:
            raise InputError(
                "all_gather was called with on_oom='cut', where each rank runs its own number of forwards. "
                "Expected the same number on all ranks. Leave on_oom out.",
            )
        found = gather_rows(tensor, counts=step is None or step.counts_here)
        if step is not None and found.tensor.requires_grad:
            step.expect_gather()
        return found

    def part_from_group(self) -> None:
        """Remove all references to the process group. `autosplit.ddp.setup` calls this at the end of its block.

        Wrapped models can still run forwards without gradients or in `eval`. The backward of an earlier forward gives
        the gradients of this rank only.
        """
        for wrapped in list(self._models.wrapped):
            part_from_group(wrapped)
        self._models.wrapped.clear()
        if self._slow_ranks is not None:
            self._slow_ranks.store = None

    def _synchronised(
        self,
        made: Iterator[OptimizerStep],
        settings: Callable[[], Settings],
        *,
        watches: bool,
    ) -> Iterator[OptimizerStep]:
        """Synchronise gradients in the last micro-batch of each step, and anywhere outside the loop.

        The ranks compare their settings before the first step, because the user may call `set_epoch` after `steps`.
        Do not use DDP's `no_sync`. After an exception it would stay open, so no later step would be synchronised.
        """
        self._progress.begin_loop()
        self._models.forget_unused()
        require_equal_settings(settings())
        self._loop = loop = object()
        slow_ranks = self._slow_ranks
        if slow_ranks is not None:
            slow_ranks.begin_loop()
        self._equal_gradients.begin_loop()
        try:
            for step in made:
                self._models.synchronise(True)
                for model in self._models.sharded:
                    begin_step(model)
                mine: list[StepListener] = [Ranks(self._models, apart=step.cuts is not None)]
                if self.world_size > 1:
                    mine += [self._equal_gradients, self._progress]
                    self._progress.begin_step(step.index)
                if slow_ranks is not None:
                    mine.append(slow_ranks)
                if watches:
                    watches = False
                    mine.append(LossCollectives())
                step.listeners[:0] = mine
                self._step = weakref.ref(step)
                self._equal_gradients.begin_step(step.index)
                if slow_ranks is not None:
                    slow_ranks.begin_step()
                yield step
                if slow_ranks is not None:
                    slow_ranks.end_step(self.plan, self.effective_batch_size)
        finally:
            # If this generator is closed late, a newer loop may already run. Do not change the newer loop's flag.
            if self._loop is loop:
                self._models.synchronise(True)
