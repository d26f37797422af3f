"""The context of one rank: its device, the wrapped model, its slice of the epoch, and the optimizer steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from autosplit.accelerators import is_accelerator, moved
from autosplit.ddp.agreement import require_equal_settings, settings_of
from autosplit.ddp.batchnorms import doubt_batchnorms, has_synchronised, silenced, uncounted
from autosplit.ddp.bypassed_wrappers import watch_for_bypass
from autosplit.ddp.checkpoint_methods import CheckpointMethods
from autosplit.ddp.fsdp import Layers, begin_step, refuse_options, shard
from autosplit.ddp.gradient_average import average_gradients, has_graph_to_learn, refuse_meeting
from autosplit.ddp.group_end import let_go_of_group_last, part_from_group
from autosplit.ddp.loader_steps import draws_everything, foreign_steps, refuse_hook, sums_over_ranks, totals_over_ranks
from autosplit.ddp.loss_collectives import LossCollectives
from autosplit.ddp.rank_gather import Gathered, gather_rows
from autosplit.errors import InputError
from autosplit.parallel.batch_counts import Count
from autosplit.parallel.batch_sampler import RankSlice, ScheduledBatchSampler
from autosplit.parallel.checkpointed import checkpoint_layers
from autosplit.parallel.effective_batch import compared
from autosplit.parallel.noise_estimate import NoiseEstimate, checked_estimate
from autosplit.parallel.oom_cuts import cuts_for
from autosplit.parallel.optimizer_steps import OptimizerStep, checked, steps
from autosplit.parallel.rank_scope import LossScope, checked_scope, refuse_combined_scope, refuse_ranks_without_samples
from autosplit.parallel.token_sampler import TokenBatchSampler
from autosplit.plan.other_model import refuse_wrapped, warn_of_other_model
from autosplit.plan.plan import Plan
from autosplit.plan.record import RankSettings
from autosplit.solve.split import accumulation_steps


class Context(CheckpointMethods):
    """A rank's side of a plan; `autosplit.ddp.setup` makes it. Its arguments are attributes, too.

    Args:
        plan: The plan of the whole job, with a rank for each process.
        rank: From 0.
        device: Where this rank computes.

    Attributes:
        world_size: The processes of the job.
        settings: What the plan says for this rank.
        batch_size: Samples per forward over all ranks.
        effective_batch_size: Samples per optimizer step over all ranks: the plan's, where its ranks were solved for
            it. A plan that was asked for no effective batch has the ranks' own, their batches times their
            accumulation steps.
    """

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        self.plan = plan
        self.rank = rank
        self.world_size = len(plan.ddp.ranks)
        self.device = device
        self.settings: RankSettings = plan.ddp.ranks[rank]
        self._slice = RankSlice(rank, tuple(settings.batch_size for settings in plan.ddp.ranks))
        self.batch_size = self._slice.batch_size
        self.effective_batch_size = _effective_batch_size(plan, self.batch_size)
        # In the order of creation, as on all ranks: the ranks average the gradients of one model after another.
        self._wrapped: weakref.WeakKeyDictionary[DistributedDataParallel, None] = weakref.WeakKeyDictionary()
        self._sharded: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        self._meets_always = False
        self._loop: object = None
        self._has_watched = False
        self._step: weakref.ref[OptimizerStep] | None = None

    def wrap(self, model: nn.Module, *, sync_batchnorm: bool = False, **kwargs: Any) -> DistributedDataParallel:
        """Move a model to this rank's device and wrap it.

        Args:
            model: The same on every rank; DDP sends rank 0's weights to the others.
            sync_batchnorm: Let BatchNorms normalise over all ranks' samples, as if they were one batch; GPUs only.
            **kwargs: For DistributedDataParallel, in place of the plan's own (`plan.ddp.options`):
                `gradient_as_bucket_view`, which saves as much memory as the gradients take (the plan's ceilings count
                with it), and `find_unused_parameters` where a parameter was seen to get no gradient.

        Returns:
            The wrapper; `wrapper.module` is the model.

        Raises:
            InputError: No module, or one that is wrapped already, an option that this version of
                DistributedDataParallel does not have, SyncBatchNorm on a processor, running statistics that are rank
                0's where that has no samples, or an optimizer's parameters that moving the model has replaced.
            PlanError: The model lacks a layer that the plan checkpoints.

        Warns:
            BatchNormWarning: Running statistics are rank 0's alone, and rank 0 has not the largest share.
            OtherModelWarning: The plan was made for a model of another size.
        """
        refuse_options(kwargs, DistributedDataParallel, ("module",))
        refuse_wrapped(model)
        if self.rank == 0:
            warn_of_other_model(self.plan, model, stacklevel=2)
        if sync_batchnorm:
            if not is_accelerator(self.device.type):
                raise InputError(
                    f"sync_batchnorm is True on {self.device}; expected a GPU, SyncBatchNorm runs nowhere else; leave "
                    "it out",
                    code="sync-batchnorm-needs-gpu",
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        checkpoint_layers(model, self.plan.checkpointed)
        doubt_batchnorms(model, self.rank, self._slice.batch_sizes)
        if is_accelerator(self.device.type):
            kwargs.setdefault("device_ids", [self.device.index])
        kwargs = {**self.plan.ddp.options.keywords(), **kwargs}
        wrapped = DistributedDataParallel(moved(model, self.device), **kwargs)
        let_go_of_group_last(wrapped)
        self._wrapped[wrapped] = None
        self._meets_always |= has_synchronised(model)
        return wrapped

    def shard(self, model: nn.Module, *, layers: Layers | None = None, **kwargs: Any) -> nn.Module:
        """Share a model's parameters, gradients and optimizer state out over the ranks, with FSDP2.

            model = ctx.shard(model, layers=TransformerBlock)
            optimizer = torch.optim.AdamW(model.parameters())  # after it: the parameters are others

        The loop is that of `wrap`, and so is the gradient. The model itself is changed: its modules get another class,
        its parameters become DTensors of which each rank holds a part, and it can't be made plain again;
        `save_checkpoint` writes it as a plain model's. Every rank has to run every forward, also in evaluation. A loss
        has to be a number also where nothing counts (`count`), because a rank without a share runs it, times 0.

        Buffers are each rank's own after this: what BatchNorms keep comes from a rank's own samples, and checkpoints
        have rank 0's. The plan's batch sizes were found for models that every rank holds whole: sharing one out leaves
        more memory.

        Args:
            model: The same on every rank; rank 0's weights and buffers are sent to the others first. Of a model on the
                meta device the shares are empty: fill them, alike, with `to_empty` and your own initialisation.
            layers: What comes together at once: the modules of a class, of one of several, or those that a function
                says; what is in none of them comes together with the model itself. Without any, the whole model does.
            **kwargs: For fully_shard: `mp_policy`, `offload_policy`, `reshard_after_forward`, `mesh` and so on.

        Returns:
            The very same model.

        Raises:
            InputError: An option that this version of fully_shard does not have, `layers` that mean no module, or a
                model that is wrapped, shared out already, or another one than rank 0's; running statistics that are
                rank 0's where that has no samples.

        Warns:
            BatchNormWarning: Checkpoints have rank 0's running statistics, and rank 0 has not the largest share.
            OtherModelWarning: The plan was made for a model of another size.
        """
        if self.rank == 0:
            warn_of_other_model(self.plan, model, stacklevel=2)
        sizes = self._slice.batch_sizes
        doubt_batchnorms(model, self.rank, sizes, "in checkpoints are", "convert them with nn.SyncBatchNorm (GPUs)")
        checkpoint_layers(model, self.plan.checkpointed)
        shard(model, device=self.device, layers=layers, options=kwargs)
        self._sharded[model] = None
        self._meets_always = True  # parameters come together in every forward and every backward
        return model

    def loader(
        self, dataset: Any, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False, **options: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader of this rank's part of every micro-batch; see `Plan.loader` and `batch_sampler`."""
        sampler = self.batch_sampler(len(dataset), shuffle=shuffle, seed=seed, drop_last=drop_last)
        return DataLoader(dataset, batch_sampler=sampler, **{**self.plan.loader_keywords, **options})

    def batch_sampler(
        self, num_samples: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> ScheduledBatchSampler:
        """Return a batch sampler that hands out this rank's part of every micro-batch.

        All ranks draw the same order. Every sample comes once an epoch, on one rank; every rank gets equally many
        micro-batches, and the short last step is split in the same proportions, as far as no rank gets a single
        sample that has more of a full one: a BatchNorm can't train on one. A rank without a share runs one or two
        samples that count for nothing, nor move a BatchNorm's statistics.

        Args:
            num_samples: Length of the data set, the same on every rank.
            shuffle: Draw in a new order each epoch: `steps` counts them, or `set_epoch` on every rank chooses one.
            seed: Of that order, the same on every rank.
            drop_last: Leave out the epoch's last step where it is short of samples.

        Raises:
            InputError: `num_samples` is below 1, or a number is not whole; or the model that the plan was made for
                can't train on the epoch's last forward: its BatchNorms would see one sample.
        """
        made = ScheduledBatchSampler(
            num_samples,
            self.batch_size,
            self.effective_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank_slice=self._slice,
        )
        made.refuse_single_samples(self._slice.batch_sizes, self.plan.ddp.least_batch)
        return made

    def token_sampler(self, lengths: Any, *, shuffle: bool = False, seed: int = 0) -> TokenBatchSampler:
        """Return a batch sampler of this rank's part of batches of like length.

        All ranks cut the epoch alike, and each gets as many samples of a batch as its device holds at that length; see
        `Plan.token_sampler` and `batch_sampler`.

        Args:
            lengths: Of each sample of the data set, the same on every rank.
            shuffle: Draw in a new order each epoch: `steps` counts them, or `set_epoch` on every rank chooses one.
            seed: Of that order, the same on every rank.

        Raises:
            PlanError: The plan was not tuned for lengths.
            InputError: As of `Plan.token_sampler`.
        """
        made = TokenBatchSampler(
            self.plan.required_lengths(),
            lengths,
            self._slice.batch_sizes,
            self.effective_batch_size,
            keeps_effective=self.plan.effective_batch_sizes is not None,
            shuffle=shuffle,
            seed=seed,
            rank=self.rank,
        )
        made.refuse_single_samples(self._slice.batch_sizes, self.plan.ddp.least_batch)
        return made

    @property
    def max_tokens(self) -> int:
        """The tokens, padding included, that this rank's device holds at any length; see `Plan.max_tokens`."""
        return self.plan.required_lengths().tokens_of(self.settings.batch_size)

    def steps(
        self,
        loader: Iterable[Any],
        *,
        count: Count | None = None,
        loss_scope: LossScope | None = None,
        on_oom: Literal["raise", "cut"] = "raise",
        noise_scale: NoiseEstimate | None = None,
    ) -> Iterator[OptimizerStep]:
        """Walk one epoch of this rank's loader, an optimizer step at a time.

            for step in ctx.steps(loader):
                for inputs, targets in step:
                    step.backward(loss_fn(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

        `step.backward` takes the mean loss of the rank's own micro-batch, and weights it so that the gradient is that
        of the mean over all ranks' samples. The ranks' gradients meet in the last micro-batch only. What a step that
        was left half-way has added to gradients is dropped by your `zero_grad`; where FSDP2 keeps it elsewhere, by the
        next step.

        Args:
            loader: A ``DataLoader`` with this context's `batch_sampler`, of which no batch is looked into. Or a loader
                of another kind, which gives this rank's own batches (an iterable data set cut by rank): a step's
                micro-batches are held back until the ranks have told each other how many samples theirs have. All
                ranks end when the first loader does. What the loader of a rank without a share gives is run, and
                counts for nothing.
            count: Return what the mean loss of a batch divides by, if that is not its samples: an int (the labels that
                are no padding) or a float (the sum of the class weights of its labels). Each step's micro-batches are
                held back until the ranks have exchanged their counts.
            loss_scope: ``"ranks"`` if the loss divides by a number summed over all ranks, as DETR's does, so that a
                step of one micro-batch has the weight 1. With several micro-batches pass `count`, too: what the loss
                divides by. ``"sample"`` if the loss is the rank's own mean. Default: ``"sample"``, and an error if the
                ranks run a collective between the forward and the first backward.
            on_oom: ``"cut"``, the same on every rank, lets a rank run a micro-batch that runs out of memory within
                ``with step.attempt():`` again in two parts, while the others wait; see `Plan.steps` and
                `OptimizerStep.attempt`. The ranks' gradients then meet after the last backward, not in it.
            noise_scale: On every rank an `autosplit.NoiseScale`, which estimates the gradient noise scale from the
                micro-batches of all ranks, see `Plan.steps`. The ranks exchange three numbers a step.

        Returns:
            The optimizer steps, each to be iterated to its end before the next is taken.

        The ranks compare the seed, epoch, sizes and options of the loop once, before its first step.

        Raises:
            InputError: While iterating, if the ranks' settings differ: the message names the values and the ranks.
                Or a step was left unfinished, or a batch holds no tensor to count. Before: the batch sampler belongs to
                another rank or plan, or the loader draws the whole data set on each rank. ``"cut"`` does not support
                models that synchronise in the forward (SyncBatchNorm, `shard`). `noise_scale` does not support models
                that are shared out or have a communication hook.

        Warns:
            CutWarning: The first time that this rank cuts a micro-batch: why, and what to change.
            EffectiveBatchWarning: The loaders' batches add up to steps of another size than the plan's effective batch.
        """
        cuts = cuts_for(
            loader,
            on_oom,
            dim=self.plan.batch_dim,
            least=self.plan.ddp.least_batch,
            count=count,
            note=self.plan.note,
        )
        checked_estimate(noise_scale)
        self._refuse_unsuited_models(cuts=cuts is not None, noise_scale=noise_scale is not None)
        estimate: Any = {
            "noise_scale": noise_scale,
            "sums_over_ranks": partial(sums_over_ranks, device=self.device),
        }
        options = {"count=": count is not None, "on_oom=": on_oom, "noise_scale=": noise_scale is not None}
        settings = partial(settings_of, loader, **options, **{"loss_scope=": loss_scope})
        sampler = getattr(loader, "batch_sampler", None)
        spans_ranks = checked_scope(loss_scope)
        if spans_ranks:
            refuse_combined_scope(on_oom=on_oom, noise_scale=noise_scale is not None)
            refuse_ranks_without_samples(self._slice.batch_sizes.count(0))
        if not isinstance(sampler, ScheduledBatchSampler):
            if self.world_size > 1 and draws_everything(loader):
                raise InputError(
                    f"the loader draws the whole data set on each of {self.world_size} ranks; expected rank "
                    f"{self.rank}'s own part; make it with batch_sampler=ctx.batch_sampler(len(dataset))",
                    code="loader-not-cut-by-rank",
                )
            made = foreign_steps(
                loader,
                self.settings.accumulation_steps,
                device=self.device,
                count=count,
                has_share=self.settings.batch_size > 0,
                spans_ranks=spans_ranks,
            )
            if count is None:
                made = compared(made, self.effective_batch_size, stacklevel=3)
            made = checked(made, cuts, **estimate, reads_loss=count is None and not spans_ranks)
            return self._synchronised(made, settings, watches=loss_scope is None)
        if sampler.rank_slice != self._slice:
            raise InputError(
                f"the loader's batch sampler is a {type(sampler).__name__} of another rank or plan; expected rank "
                f"{self.rank}'s own, so that all ranks take equally many micro-batches; make the loader with "
                "batch_sampler=ctx.batch_sampler(len(dataset))",
                code="batch-sampler-of-other-rank",
            )
        sizes: Any = {"batch_size": self.batch_size, "effective_batch_size": self.effective_batch_size}
        over_ranks = partial(totals_over_ranks, device=self.device)
        given: Any = {"over_ranks": over_ranks, "spans_ranks": spans_ranks, "cuts": cuts, **estimate}
        made = steps(loader, **sizes, count=count, **given)
        return self._synchronised(made, settings, watches=loss_scope is None)

    def _refuse_unsuited_models(self, *, cuts: bool, noise_scale: bool) -> None:
        """Refuse models that do not support the options of a loop."""
        if cuts:
            self._refuse(
                refuse_meeting,
                "on_oom is 'cut', and the model is shared out (ctx.shard), so that the ranks meet in its forward; "
                "expected one of which each rank may run as many forwards as it needs; wrap it with ctx.wrap, or leave "
                "on_oom out",
            )
        if noise_scale:
            self._refuse(
                refuse_hook,
                "noise_scale is given, and the model is shared out (ctx.shard); expected one that each rank holds "
                "whole, so that its own gradient is seen; wrap it with ctx.wrap, or leave noise_scale out",
            )

    def all_gather(self, tensor: torch.Tensor) -> Gathered:
        """Gather the rows of a tensor from all ranks, with gradients, for a loss that compares samples across ranks.

            for step in ctx.steps(loader):
                for (images,) in step:
                    z = F.normalize(model(images), dim=1)
                    everyone = ctx.all_gather(z)
                    own = everyone.offset + torch.arange(len(z), device=z.device)
                    step.backward(F.cross_entropy(z @ everyone.tensor.T / 0.1, own))

        Every rank must call it equally often, and use the result in its loss. Ranks may have unequal numbers of rows.
        The loss must be the mean over this rank's own samples, or one loss over all samples that is equal on every
        rank. The gradient is then that of one process with the whole micro-batch. Each micro-batch is compared with
        itself alone: with accumulation, one process computes the same from the same micro-batches.

        A rank without samples in a micro-batch runs other ranks' samples, which count for nothing. Its rows are not
        sent. On that rank alone, they are at the end of `Gathered.tensor`, where `offset` points.

        Without ``ctx.steps``, or under `torch.no_grad`, it gathers the rows of every rank.

        Raises:
            InputError: The tensor has no dimension, or the ranks' rows have unequal shapes or dtypes. Or `steps` has
                ``on_oom="cut"``: ranks then run unequal numbers of forwards.
        """
        step = self._step() if self._step is not None else None
        if step is not None and step.cuts is not None and step.is_open:
            raise InputError(
                "all_gather was called under on_oom='cut', and each rank runs as many forwards as it needs. Expected "
                "equally many on all ranks. Leave on_oom out.",
                code="gather-with-oom-cuts",
            )
        found = gather_rows(tensor, counts=step is None or step.counts_here)
        if step is not None and found.tensor.requires_grad:
            step.expect_gather()
        return found

    def part_from_group(self) -> None:
        """Let go of the process group; `autosplit.ddp.setup` does so on leaving.

        Wrapped models go on as what they wrap: their state, and forwards without gradients or in `eval`. Losses whose
        backward has not run by now would give this rank's own gradients.
        """
        for wrapped in list(self._wrapped):
            part_from_group(wrapped)
        self._wrapped.clear()

    def _synchronised(
        self, made: Iterator[OptimizerStep], settings: Callable[[], dict[str, Any]], *, watches: bool = False
    ) -> Iterator[OptimizerStep]:
        """Synchronise gradients in the last micro-batch of each step, and anywhere outside the loop.

        Before the first step the ranks compare their settings, which are read then: `set_epoch` may follow `steps`.

        Args:
            watches: Refuse a loss that runs a collective, in the first step.

        DDP's `no_sync` would have to stay open across a yield; an exception that leaves the loop and is caught would
        then leave every later step unsynchronised.
        """
        require_equal_settings(settings(), self.device)
        self._loop = loop = object()
        # FSDP2 gathers parameters in the forward: its collectives are not those of the loss.
        watched = LossCollectives(self._wrapped if watches and not self._sharded else ())
        try:
            for step in made:
                self._synchronise(True)
                for model in self._sharded:
                    begin_step(model)
                step.on_draw, step.uncounted = self._synchronise, self._uncounted
                if step.cuts is not None:
                    step.on_draw, step.on_end = self._part_ways, partial(self._meet_afterwards, step.on_end)
                step.silenced = partial(silenced, self._wrapped)
                if watches:
                    watches = False
                    watched.watch(step)
                self._step = weakref.ref(step)
                if step.cuts is None and self.world_size > 1 and not self._has_watched:
                    self._has_watched = True
                    watch_for_bypass(step, self._wrapped)
                yield step
                watched.end()
        finally:
            watched.end()
            # A loop that is collected late must not touch the flag within one that began after it.
            if self._loop is loop:
                self._synchronise(True)

    def _synchronise(self, meets: bool) -> bool:
        """Let gradients meet in what runs next, or not; tell whether the ranks do in any model's backward."""
        met = meets
        for wrapped in self._wrapped:
            wanted = meets or has_graph_to_learn(wrapped)
            if wrapped.require_backward_grad_sync != wanted:  # a module takes its time to set an attribute
                wrapped.require_backward_grad_sync = wanted
            met = met or wanted
        for model in self._sharded:
            model.set_requires_gradient_sync(meets)
        return met or self._meets_always

    def _refuse(self, refuse: Callable[[DistributedDataParallel], None], says: str) -> None:
        if self._sharded:
            raise InputError(says, code="sharded-model-option")
        for wrapped in self._wrapped:
            refuse(wrapped)

    def _part_ways(self, _is_last: bool) -> bool:
        """Let no gradients meet in what runs next, nor buffers, whichever micro-batch it is."""
        for wrapped in self._wrapped:
            wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = False
        return False

    def _meet_afterwards(self, on_end: Callable[[], None] | None) -> None:
        for wrapped in self._wrapped:
            average_gradients(wrapped)
        if on_end is not None:
            on_end()

    def _uncounted(self, stands_in: bool) -> AbstractContextManager[None]:
        """Keep a micro-batch that counts for nothing out of what BatchNorms compute over samples."""
        return uncounted([*self._wrapped, *self._sharded], stands_in=stands_in)


def _effective_batch_size(plan: Plan, batch_size: int) -> int:
    """Return the samples per optimizer step that the plan's ranks were solved for."""
    forwards = plan.ddp.ranks[0].accumulation_steps
    for effective in (plan.ddp.effective_batch_size, plan.effective_batch_size):
        if batch_size <= effective and accumulation_steps(effective, batch_size) == forwards:
            return effective
    return batch_size * forwards
