"""An Accelerator that follows a plan: its batch sizes per process and its accumulation steps.

    from autosplit.integrations.accelerate import Accelerator  # replaces accelerate's Accelerator

    accelerator = Accelerator()  # the plan sets gradient_accumulation_steps
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

`prepare` treats loaders that shuffle as training loaders, which yield this process's part of every micro-batch. Other
loaders are prepared by accelerate, and a backward of their batches raises InputError. The mean loss of each micro-batch
is weighted by its samples, or by `count`. A sum has the weight 1. A loop without accumulate() also gives the right
gradient (`autosplit.integrations.loop_position`). It is slower, because it synchronises in every micro-batch. Without a
plan, the Accelerator behaves as accelerate's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, send_to_device
from torch import nn
from torch.utils.data import DataLoader

from autosplit.ddp.group_end import release_group_last
from autosplit.ddp.setup import agree_on
from autosplit.ddp.user_collectives import LossCollectives
from autosplit.errors import InputError, warn_user
from autosplit.integrations.gradient_norms import RunNorms
from autosplit.integrations.loop_checks import LoopChecks
from autosplit.integrations.loop_position import LoopPosition
from autosplit.integrations.oom_halves import CutBatches, refuse_gathering
from autosplit.integrations.own_loss import OwnLoss, warn_of_router_loss
from autosplit.integrations.process_share import MarkingBatchSampler, NoPlanWarning, Share, find_share, warn_of_no_plan
from autosplit.integrations.share_loader import loader_options
from autosplit.integrations.shares_optimizer import SharesOptimizer
from autosplit.integrations.trained_gradients import TrainedGradients
from autosplit.integrations.uneven_gather import gather_uneven, without_rows
from autosplit.integrations.weighted_backward import weighed, weighted_backward
from autosplit.parallel.accumulation import WatchedParameter
from autosplit.parallel.batch_counts import Count
from autosplit.parallel.loss_weights import UnevenLossWarning
from autosplit.parallel.parts import OnOom
from autosplit.parallel.rank_scope import LossScope, checked_scope, refuse_combined_scope
from autosplit.parallel.rebuilt_loader import is_shuffled
from autosplit.parallel.step_listener import NoiseEstimate
from autosplit.plan.other_model import parameters_in
from autosplit.plan.plan import Plan
from autosplit.text import printable
from autosplit.tools.oom_cuts import CutWarning

__all__ = ["Accelerator", "CutWarning", "NoPlanWarning", "UnevenLossWarning"]


class SharesLoader(DataLoaderShard):
    """Yield this process's part of every micro-batch. `weight` is the weight of the last yielded batch's loss."""

    def __init__(self, accelerator: Accelerator, share: Share, **options: Any) -> None:
        device = accelerator.device if accelerator.device_placement else None
        super().__init__(device=device, _non_blocking=accelerator.non_blocking, **options)
        self.share = share
        self.weight = 0.0
        self._accelerator = accelerator
        self._consumed = 0

    def skipping(self, num_batches: int) -> SharesLoader:
        """Skip `num_batches` micro-batches in the next iteration.

        Raises:
            InputError: The micro-batches are not whole optimizer steps of an epoch.
        """
        schedule = self.sampler_of_shares.schedule
        ends = [0, *itertools.accumulate(len(step.micro_batch_sizes) for step in schedule)]
        if num_batches not in ends:
            raise InputError(
                f"num_batches is {num_batches}. Expected the end of an optimizer step. A step has "
                f"{self.share.accumulation_steps} micro-batches, and an epoch {ends[-1]}. Resume from the end of a "
                "step.",
            )
        self._consumed = sum(step.num_samples for step in schedule[: ends.index(num_batches)])
        return self

    @property
    def sampler_of_shares(self) -> MarkingBatchSampler:
        """Return the plan's batch sampler."""
        sampler: MarkingBatchSampler = self.base_dataloader.batch_sampler
        return sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which determines the order."""
        self.iteration = epoch
        self.sampler_of_shares.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def begin(self) -> None:
        """Begin the iteration. Set `remainder` to 0, because no sample is repeated in the last micro-batch.

        Otherwise `gather_for_metrics` would return only the first `remainder` samples.
        """
        super().begin()
        self.remainder = 0

    def __iter__(self) -> Iterator[Any]:
        position, cut = self._accelerator._position, self._accelerator._cut
        iteration = position.begin()
        self.begin()
        self.set_epoch(self.iteration)
        consumed, self._consumed = self._consumed, 0
        if consumed:
            self.sampler_of_shares.resume(consumed)
        walked = weighed(
            self.base_dataloader,
            self.sampler_of_shares,
            count=self._accelerator._count,
            sums=self.share.plan.loss_reduction == "sum",
            spans_ranks=self._accelerator._scope == "ranks",
            over_processes=partial(self.share.over_processes, device=self._accelerator.device),
        )
        for one in walked if cut is None else cut.walk(walked):
            self.weight, self.end_of_dataloader = one.weight, one.is_last
            if self.gradient_state.active_dataloader is not self:  # the loop body left another loader before its end
                self.gradient_state._remove_dataloader(self)
                self.gradient_state._add_dataloader(self)
            position.draw(one._replace(batch=None), iteration)
            if self._accelerator._collectives is not None:
                self._accelerator._collectives.begin()
            yield one.batch if self.device is None else send_to_device(one.batch, self.device, self._non_blocking)
        self.iteration += 1
        self.end()
        position.end()


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator that follows a plan.

    Args:
        plan: A plan, or the file of a plan. Default: the file that AUTOSPLIT_PROFILE names (`autosplit launch` sets
            it). Otherwise, if `model` is given: the newest saved plan for this machine, this number of processes and a
            model of this size.
        model: The model to train. Without it, no saved plan is used.
        count: Returns the divisor of a batch's mean loss, if the divisor is not the number of samples: an int (labels
            without padding) or a float (the sum of the class weights of its labels).
        loss_scope: ``"ranks"`` if the loss divides by a number summed over all processes, see `Context.steps`. With
            several micro-batches per step pass `count`, too.
        on_oom: With ``"cut"`` in every process, a micro-batch that runs out of memory in `accumulate` is yielded again
            in two parts, see `Plan.steps`.
        noise_scale: In every process an `autosplit.NoiseScale`, see `Plan.steps`.
        **kwargs: accelerate's arguments. The plan sets `gradient_accumulation_steps` (also in a plugin) and, if it is
            for CPUs, `cpu`. It also sets DistributedDataParallel's options, unless you pass a handler for them.

    Attributes:
        share: This process's part of the plan. None without a plan.

    Raises:
        PlanError: The plan cannot be read, or its number of processes differs from this job's or accelerate's.
        DeviceError: The plan is for simulated GPUs, or for other GPUs.
        InputError: The accumulation plugin would join an epoch's last optimizer step with the next. In the first
            backward: the loss is not a mean over samples, and there is no `count`.

    Warns:
        NoPlanWarning: There is no plan.
        OtherModelWarning: When a model is prepared: the plan is for a model of a different size.
        UnevenLossWarning: When a loader is prepared: the plan was tuned with a loss that is not a mean over samples,
            and there is no `count`. In the first backward: the divisor of the loss could not be inferred.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | os.PathLike[str] | None = None,
        model: nn.Module | None = None,
        count: Count | None = None,
        loss_scope: LossScope | None = None,
        on_oom: OnOom = "raise",
        noise_scale: NoiseEstimate | None = None,
        **kwargs: Any,
    ) -> None:
        self.share = find_share(plan, parameters=parameters_in(model))
        self._norms = RunNorms.of_share(self.share, noise_scale)
        self.noise_scale = None if self._norms is None else self._norms.noise_scale
        self._count, self._scope = count, loss_scope
        self._collectives: LossCollectives | None = None
        self._gradients: TrainedGradients | None = None
        if checked_scope(loss_scope):
            sums = self.share is not None and self.share.plan.loss_reduction == "sum"
            refuse_combined_scope(on_oom=on_oom, noise_scale=noise_scale is not None, sums=sums)
        self._own_loss: OwnLoss | None = None
        self._checks = LoopChecks()
        self._cut = None if self.share is None else CutBatches.of_share(self.share, on_oom, self, count)
        divides = False
        if self.share is None:
            warn_of_no_plan()
        else:
            divides = set_arguments(self.share, kwargs)
        self._position = LoopPosition(divides=divides, drop_gradients=self._drop_gradients)
        super().__init__(*args, **kwargs)
        if self.share is not None:
            self.share.refuse_other_job(self.num_processes, self.device, "accelerate")
            wanted = "no" if self.share.plan.precision == "none" else self.share.plan.precision
            trained = "none" if self.mixed_precision == "no" else self.mixed_precision
            self.share.warn_of_other_precision(trained, f"mixed_precision={wanted!r}")
            if self.share.num_processes > 1:
                agree_on(self.share.plan, self.share.place.rank)

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model. Wrap it in `BalancedDataParallel` if one process has several devices."""
        if self.share is not None and not self._models and not kwargs.get("evaluation_mode"):
            self.share.check_model(model)
            self.share.checkpoint(model)
        if self.share is not None and self.share.wraps and not kwargs.get("evaluation_mode"):
            # accelerate prepares the wrapper instead of the model, for example with autocast.
            return super().prepare_model(self.share.plan.wrap(model), device_placement=False, evaluation_mode=True)
        prepared = super().prepare_model(model, *args, **kwargs)
        release_group_last(prepared)
        if self.share is not None and self.num_processes > 1:
            again = "Unfreeze and add layers before accelerator.prepare(model)."
            self._gradients = TrainedGradients(self._models, again)
        if self.share is not None and len(self._models) == 1:
            self._own_loss = OwnLoss(prepared)
            if self._scope is None and self.num_processes > 1:
                self._collectives = LossCollectives(counts=True)
        if self._cut is not None:
            self._cut.watch(prepared)
        return prepared

    @property
    def _weighs_samples(self) -> bool:
        if self._count is not None or self._scope == "ranks" or self.share is None:
            return False
        return self.share.plan.loss_reduction == "mean"

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader. If it shuffles, it yields this process's part of every micro-batch.

        Use `shares_of` if a training loader does not shuffle.
        """
        if isinstance(data_loader, SharesLoader):
            return data_loader
        if self.share is None or not is_shuffled(data_loader):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        return self.shares_of(data_loader)

    def shares_of(
        self, loader: DataLoader[Any], *, shuffle: bool | None = None, seed: int = 0, drop_last: bool | None = None
    ) -> Any:
        """Return a loader of this process's part of every micro-batch. `prepare` does this for loaders that shuffle.

        Args:
            loader: A DataLoader of PyTorch.
            shuffle: Whether to draw a new order each epoch. Default: the same as the loader.
            seed: The seed of that order.
            drop_last: Whether to drop the epoch's last step if it has fewer samples. Default: the loader's `drop_last`.

        Raises:
            InputError: There is no plan, the data set is iterable, or the sampler leaves samples out or repeats some.
        """
        if self.share is None:
            raise InputError(
                "There is no plan, so there is no split of the batch. Pass plan= to the Accelerator.",
            )
        if self._weighs_samples:
            _warn_of_check(self.share.plan)
        options = loader_options(loader, self.share, shuffle=shuffle, seed=seed, drop_last=drop_last)
        made = SharesLoader(self, self.share, **options)
        self._dataloaders.append(made)
        return made

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer that steps at the end of the plan's optimizer steps."""
        if self.share is None or getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        placed = self.device_placement if device_placement is None else device_placement
        prepared = SharesOptimizer(
            optimizer, self._position, self._compare_gradients, device_placement=placed, scaler=self.scaler
        )
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that steps once per optimizer step. accelerate would step it once per process."""
        if self.share is None or getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        prepared = AcceleratedScheduler(
            scheduler,
            self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=True,  # a batch of the plan is already split over all processes
        )
        self._schedulers.append(prepared)
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Multiply a micro-batch's mean loss by its weight, and run the backward.

        Raises:
            InputError: The batch comes from a prepared loader that does not follow the plan, or the loop accumulates
                differently from the plan.
        """
        _refuse_without_shares(None if self.share is None else self.gradient_state.active_dataloader)
        one = self._position.run()
        if one is None:
            self._refuse_unprepared_loader()
            super().backward(loss, **kwargs)
            return
        self._position.refuse_early_clear(one)
        self._do_sync()
        self._checks.check(one, self._optimizers)
        if self._own_loss is not None:
            asked, self._own_loss = self._own_loss, None
            asked.end()
            assert self.share is not None, "a position belongs to a micro-batch"
            self.share.refuse_uncounted_batchnorms(self._models[0], self._shares_loader.sampler_of_shares)
            if self._collectives is not None:
                self._collectives.refuse(loss, one.weight, "the Accelerator")
            if self._weighs_samples:
                self._examine(asked, loss)
        watched = WatchedParameter.of(loss) if self._cut is None else None
        # accelerate divides the loss by the accumulation steps. Undo this, because the weights already add up to 1.
        weight = one.weight * self.gradient_accumulation_steps
        run = partial(weighted_backward, super().backward, loss, weight, self._models, **kwargs)
        norms = self._norms
        if norms is not None and one.position == 0:
            norms.begin()
        with nullcontext() if norms is None else norms.recorded(loss, one.weight, one.total, self.scaler, self._models):
            run() if self._cut is None else self._cut.backward(run, loss, ends_step=one.ends_step)
        self._checks.end_backward(watched, one, self._optimizers)
        if norms is not None and one.ends_step:
            norms.finish(one.total)

    def _refuse_unprepared_loader(self) -> None:
        if self.share is not None and self.share.accumulation_steps > 1 and not self._position.has_begun:
            raise InputError(
                f"The plan's step has {self.share.accumulation_steps} micro-batches, but no loader of the plan was "
                "used. Pass the training loader to accelerator.prepare, with shuffle=True, or to shares_of.",
            )

    def _compare_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if self._gradients is not None:
            self._gradients.compare([optimizer], "an optimizer step", self.device)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Accumulate the gradients of an optimizer step. Enter this context once per micro-batch."""
        cut = nullcontext() if self._cut is None else self._cut.running()
        with self._position.accumulating(), super().accumulate(*models), cut:
            yield
        if self._cut is not None and self._cut.has_failed:
            self.gradient_state._set_sync_gradients(False)  # unfinished: two parts of the micro-batch follow
            if self._norms is not None:
                self._norms.spoil()

    def _do_sync(self) -> None:
        """Synchronise gradients at the end of the plan's optimizer step, and not at every k-th micro-batch."""
        if self._position.at is None:
            super()._do_sync()
        else:
            self.gradient_state._set_sync_gradients(self._position.at.ends_step)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradient at the end of an optimizer step. Within a step, only return the norm."""
        if not self._position.is_in_mid_step:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return nn.utils.get_total_norm([one.grad for one in listed if one.grad is not None], norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the gradient at the end of an optimizer step. Within a step, do nothing."""
        if not self._position.is_in_mid_step:
            super().clip_grad_value_(parameters, clip_value)

    def _examine(self, asked: OwnLoss, loss: torch.Tensor) -> None:
        loader = self._shares_loader.base_dataloader
        model = self.unwrap_model(self._models[0])
        assert self.share is not None, "only called with a plan"
        reason = asked.examine(loss, model, loader, is_checked=bool(self.share.plan.checks))
        if self.is_main_process:
            warn_of_router_loss(model, self.share)
        is_other = torch.tensor([int(bool(reason))], device=self.device)
        if int(super().gather(is_other).max()):
            text = reason or "In another process the loss is not a mean over samples. Pass count= to the Accelerator."
            raise InputError(f"{text} Without it, micro-batches are weighted by their samples.")

    @property
    def _shares_loader(self) -> SharesLoader:
        """The loader of the running micro-batch. A loop over `list(loader)` has ended it already."""
        active = self.gradient_state.active_dataloader
        return active if active is not None else next(one for one in self._dataloaders if isinstance(one, SharesLoader))

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.optimizer.zero_grad()

    def gather(self, tensor: Any) -> Any:
        """Gather tensors from all processes, which may have different numbers of samples.

        Raises:
            InputError: The tensors differ in sizes other than the number of rows. All processes raise it. Or `on_oom`
                is "cut", and this is called within an optimizer step.
        """
        if self.share is None or self.num_processes == 1:
            return super().gather(tensor)
        if self._cut is not None and self._trains and not self.sync_gradients:
            refuse_gathering()
        return gather_uneven(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the outputs of a micro-batch. With a training loader, each sample is gathered once, in order.

        Raises:
            InputError: `on_oom` is "cut", and the batch comes from a training loader, so it may be cut into parts.
        """
        if self._cut is not None and self._trains:
            refuse_gathering()
        one = self._position.newest
        if self._trains and one is not None and not one.size:
            input_data = without_rows(input_data)
        return super().gather_for_metrics(input_data, use_gather_object)

    @property
    def _trains(self) -> bool:
        return isinstance(self.gradient_state.active_dataloader, SharesLoader)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip micro-batches to resume within an epoch. With a training loader, skip whole optimizer steps.

        Set the epoch yourself: ``loader.set_epoch(epoch)``.
        """
        if isinstance(dataloader, SharesLoader):
            return dataloader.skipping(num_batches)
        return super().skip_first_batches(dataloader, num_batches)


def set_arguments(share: Share, kwargs: dict[str, Any]) -> bool:
    """Set a plan's numbers in an Accelerator's arguments. Return whether the user set accumulation steps above 1."""
    # Use a plugin, because the environment variable of accelerate's launcher overrides the plain number.
    plugin = kwargs.get("gradient_accumulation_plugin") or GradientAccumulationPlugin()
    if not plugin.sync_with_dataloader:
        raise InputError(
            "The gradient_accumulation_plugin has sync_with_dataloader=False. Expected True, because the last "
            "optimizer step of an epoch ends with the epoch. Leave that setting out.",
        )
    launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")  # by `accelerate launch`
    given = int(launched) if launched.isdecimal() else 1, kwargs.pop("gradient_accumulation_steps", 1), plugin.num_steps
    kwargs["gradient_accumulation_plugin"] = replace(plugin, num_steps=share.accumulation_steps)
    if share.device.type == "cpu":
        kwargs["cpu"] = True  # otherwise each process would train a separate model if there is no GPU
    handlers = list(kwargs.get("kwargs_handlers") or [])
    if share.num_processes > 1 and not any(isinstance(one, DistributedDataParallelKwargs) for one in handlers):
        # The plan measured memory with these options.
        kwargs["kwargs_handlers"] = [*handlers, DistributedDataParallelKwargs(**share.layout.options.keywords())]
    return max(steps or 1 for steps in given) > 1


def _warn_of_check(plan: Plan) -> None:
    found = next((check for check in plan.checks if check.subject == "loss" and check.depends), None)
    if found is not None:
        advice = printable(found.advice, longest=300).rstrip(".")
        warn_user(
            f"The plan was made with a loss that is not a mean over samples ({advice}), but accelerate weights "
            "micro-batches by their samples. Pass count= to the Accelerator, or tune a sum with "
            "loss_reduction='sum'.",
            UnevenLossWarning,
        )


def _refuse_without_shares(loader: Any) -> None:
    if loader is None or isinstance(loader, SharesLoader):
        return
    inner = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    if isinstance(inner, MarkingBatchSampler):
        raise InputError(
            "accelerate.skip_first_batches made this loader, and does not split batches by the plan. Call "
            "accelerator.skip_first_batches(loader, n) instead.",
        )
    raise InputError(
        "The loss comes from a loader that does not shuffle. accelerate gives every process the same number of its "
        "samples, but the plan does not. Pass accelerator.shares_of(loader) to prepare.",
    )
