"""An accelerate loop with a plan's shares: each process its own, and the gradient that of the whole step.

    from autosplit.integrations.accelerate import Accelerator  # in place of accelerate's own

    accelerator = Accelerator()  # gradient_accumulation_steps are the plan's
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

A loader that shuffles is taken for one to train with and hands out shares; all others are accelerate's own, and a
backward of their batches is refused. The mean loss of each micro-batch is weighted by its samples, or by what `count`
returns; if the plan was tuned with loss_reduction="sum", its weight is 1. A loop without accumulate() is right, too
(`autosplit.integrations.loop_position`); its gradients meet at every micro-batch, which takes longer. Without a plan
the Accelerator is accelerate's own.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, send_to_device
from torch import nn
from torch.utils.data import DataLoader

from autosplit.ddp.group_end import let_go_of_group_last
from autosplit.ddp.loader_steps import totals_over_ranks
from autosplit.ddp.loss_collectives import LossCollectives
from autosplit.ddp.setup import agree_on
from autosplit.errors import InputError
from autosplit.integrations.gradient_norms import RunNorms
from autosplit.integrations.loop_position import LoopPosition
from autosplit.integrations.oom_halves import CutBatches, refuse_gathering
from autosplit.integrations.own_loss import OwnLoss, doubt_sum
from autosplit.integrations.process_share import MarkingBatchSampler, NoPlanWarning, Share, find_share, tell_of_no_plan
from autosplit.integrations.share_loader import is_shuffled, loader_options
from autosplit.integrations.uneven_gather import gather_uneven, without_rows
from autosplit.integrations.weighted_backward import weighed, weighted_backward
from autosplit.parallel.batch_counts import Count
from autosplit.parallel.noise_estimate import NoiseEstimate
from autosplit.parallel.oom_cuts import CutWarning, OnOom
from autosplit.parallel.rank_scope import LossScope, checked_scope, refuse_combined_scope
from autosplit.plan.other_model import parameters_in
from autosplit.plan.plan import Plan
from autosplit.probe.loss_mean import UnevenLossWarning
from autosplit.text import printable

__all__ = ["Accelerator", "CutWarning", "NoPlanWarning", "UnevenLossWarning"]


class SharesLoader(DataLoaderShard):
    """A loader that hands out this process's share; `weight` is what the batch that it gave last counts for."""

    def __init__(self, accelerator: Accelerator, share: Share, **options: Any) -> None:
        device = accelerator.device if accelerator.device_placement else None
        super().__init__(device=device, _non_blocking=accelerator.non_blocking, **options)
        self.share = share
        self.weight = 0.0
        self._accelerator = accelerator
        self._consumed = 0

    def skipping(self, num_batches: int) -> SharesLoader:
        """Let the next iteration, and only that one, begin after so many micro-batches, of whatever epoch it is.

        They have to be whole optimizer steps within the epoch.
        """
        schedule = self.sampler_of_shares.schedule
        ends = [0, *itertools.accumulate(len(step.micro_batch_sizes) for step in schedule)]
        if num_batches not in ends:
            raise InputError(
                f"num_batches is {num_batches}; expected the end of an optimizer step, of "
                f"{self.share.accumulation_steps} micro-batches each, and {ends[-1]} in an epoch; resume from one",
                code="skipped-batches",
            )
        self._consumed = sum(step.num_samples for step in schedule[: ends.index(num_batches)])
        return self

    @property
    def sampler_of_shares(self) -> MarkingBatchSampler:
        """The batch sampler."""
        sampler: MarkingBatchSampler = self.base_dataloader.batch_sampler
        return sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and with it the order; a data set that wants to know it is told."""
        self.iteration = epoch
        self.sampler_of_shares.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def begin(self) -> None:
        """Begin; `gather_for_metrics` is to cut nothing from the last micro-batch, in which no sample comes twice."""
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
            over_processes=self._accelerator._over_processes,
        )
        for one in walked if cut is None else cut.walk(walked):
            self.weight, self.end_of_dataloader = one.weight, one.is_last
            if self.gradient_state.active_dataloader is not self:  # one within it was left before its end, and stayed
                self.gradient_state._remove_dataloader(self)
                self.gradient_state._add_dataloader(self)
            position.draw(one._replace(batch=None), iteration)
            if self._accelerator._collectives is not None:
                self._accelerator._collectives.begin()
            yield one.batch if self.device is None else send_to_device(one.batch, self.device, self._non_blocking)
        self.iteration += 1
        self.end()
        position.end()


class SharesOptimizer(AcceleratedOptimizer):
    """accelerate's optimizer, which steps at the end of the plan's optimizer steps, whatever the loop looks like."""

    def __init__(self, optimizer: torch.optim.Optimizer, position: LoopPosition, **options: Any) -> None:
        super().__init__(optimizer, **options)
        self._position = position

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step, if an optimizer step of the plan ends here."""
        self._position.step(runs=closure is not None)
        super().step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, also at the beginning of a micro-batch: those of the ones before it in its step stay."""
        if self._position.begins_step:  # in mid-step accelerate clears nothing, and this may be the only call
            self.optimizer.zero_grad(set_to_none is not False)
        elif not self._position.keeps_gradients:
            super().zero_grad(set_to_none)


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator with a plan's shares.

    Args:
        plan: A plan, or the file of one. Default: the file that AUTOSPLIT_PROFILE names (`autosplit launch` sets it),
            or else, where `model` is given, the only plan remembered for this machine, this number of processes and a
            model of this size.
        model: What is to be trained: only by it is a remembered plan known to be for it.
        count: Return what the mean loss of a batch divides by, if that is not its samples: an int (labels that are no
            padding) or a float (the sum of the class weights of its labels). An optimizer step's micro-batches are then
            held back until all are counted.
        loss_scope: ``"ranks"`` if the loss divides by a number summed over all processes, see `Context.steps`; with
            several micro-batches per step pass `count`, too.
        on_oom: ``"cut"``, the same in every process, hands a micro-batch that runs out of memory within `accumulate`
            out again in two parts, see `Plan.steps`; gradients then meet after the last backward, not in it.
        noise_scale: In every process an `autosplit.NoiseScale`, which is then estimated, see `Plan.steps`.
        **kwargs: accelerate's; `gradient_accumulation_steps` is the plan's, also that of a plugin, and so are `cpu`
            where the plan's devices are processors, and what DistributedDataParallel is given, unless a handler for it
            is among them.

    Attributes:
        share: What this process does of the plan; None without one.
        noise_scale: The estimate that was passed. None without a plan.

    Raises:
        PlanError: The plan can't be read, or is for another number of processes than this job has or accelerate runs,
            or several could be meant.
        DeviceError: It is for simulated cards, or for other GPUs.
        InputError: The plugin for accumulation would join an epoch's last optimizer step with the next. In the first
            backward: the loss is no mean over samples, and there is no `count`. Or the processes run a collective
            between the forward and the backward, and there is no `loss_scope`.

    Warns:
        NoPlanWarning: There is none.
        OtherModelWarning: Once a model is prepared: the plan is for one of another size.
        UnevenLossWarning: Once a loader is prepared: the plan was tuned with a loss that is no mean over samples, and
            there is no `count`. In the first backward: nothing shows what the loss is a mean over.
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
        if checked_scope(loss_scope):
            sums = self.share is not None and self.share.plan.loss_reduction == "sum"
            refuse_combined_scope(on_oom=on_oom, noise_scale=noise_scale is not None, sums=sums)
        self._own_loss: OwnLoss | None = None
        self._cut = None if self.share is None else CutBatches.of_share(self.share, on_oom, self, count)
        divides = False
        if self.share is None:
            tell_of_no_plan()
        else:
            divides = set_arguments(self.share, kwargs)
        self._position = LoopPosition(divides=divides, drop_gradients=self._drop_gradients)
        super().__init__(*args, **kwargs)
        if self.share is not None:
            self.share.refuse_other_job(self.num_processes, self.device, "accelerate")
            wanted = "no" if self.share.plan.precision == "none" else self.share.plan.precision
            trained = "none" if self.mixed_precision == "no" else self.mixed_precision
            self.share.tell_of_other_precision(trained, f"mixed_precision={wanted!r}")
            if self.share.num_processes > 1:
                agree_on(self.share.plan, self.share.place.rank)

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model: on one process with several devices, by `BalancedDataParallel`."""
        if self.share is not None and not self._models and not kwargs.get("evaluation_mode"):
            self.share.tell_of_other_model(model, stacklevel=5)  # through prepare
            self.share.checkpoint(model)
        if self.share is not None and self.share.wraps and not kwargs.get("evaluation_mode"):
            # What is left to do of accelerate's own preparing, such as autocast, is around the wrapper.
            return super().prepare_model(self.share.plan.wrap(model), device_placement=False, evaluation_mode=True)
        prepared = super().prepare_model(model, *args, **kwargs)
        let_go_of_group_last(prepared)
        if self.share is not None and len(self._models) == 1:
            self._own_loss = OwnLoss(prepared)
            if self._scope is None and self.num_processes > 1:
                self._collectives = LossCollectives([prepared])
        if self._cut is not None:
            self._cut.watch(prepared)
        return prepared

    @property
    def _weighs_samples(self) -> bool:
        if self._count is not None or self._scope == "ranks" or self.share is None:
            return False
        return self.share.plan.loss_reduction == "mean"

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader: one that shuffles hands out shares; of others `shares_of` makes one that does."""
        if isinstance(data_loader, SharesLoader):
            return data_loader
        if self.share is None or not is_shuffled(data_loader):
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        return self.shares_of(data_loader)

    def shares_of(
        self, loader: DataLoader[Any], *, shuffle: bool | None = None, seed: int = 0, drop_last: bool | None = None
    ) -> Any:
        """Make a loader that hands out this process's share; what `prepare` does to loaders that shuffle.

        Args:
            loader: PyTorch's own; its batch size does not matter.
            shuffle: Draw in a new order each epoch. Default: as the loader does.
            seed: Of that order.
            drop_last: Leave out the epoch's last step where it is short of samples. Default: if the loader leaves out
                a batch that is.

        Raises:
            InputError: There is no plan, or the data set is iterable, or a sampler chooses the samples.
        """
        if self.share is None:
            raise InputError(
                "there is no plan; expected one whose shares are meant; pass plan= to the Accelerator",
                code="no-plan-given",
            )
        if self._weighs_samples:
            _tell_of_check(self.share.plan)
        options = loader_options(loader, self.share, shuffle=shuffle, seed=seed, drop_last=drop_last)
        made = SharesLoader(self, self.share, **options)
        self._dataloaders.append(made)
        return made

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer, which steps at the end of the plan's optimizer steps."""
        if self.share is None or getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        placed = self.device_placement if device_placement is None else device_placement
        prepared = SharesOptimizer(optimizer, self._position, device_placement=placed, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler, which steps once an optimizer step; accelerate's steps once for each process."""
        if self.share is None or getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        prepared = AcceleratedScheduler(
            scheduler,
            self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=True,  # the plan's batches are those of all processes
        )
        self._schedulers.append(prepared)
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of a micro-batch's mean loss, by its weight.

        Raises:
            InputError: The loss is of a prepared loader that hands out no shares, or the loop does not accumulate as
                the plan does.
        """
        _refuse_without_shares(None if self.share is None else self.gradient_state.active_dataloader)
        one = self._position.run()
        if one is None:
            super().backward(loss, **kwargs)
            return
        self._do_sync()
        if self._own_loss is not None:
            asked, self._own_loss = self._own_loss, None
            asked.end()
            assert self.share is not None, "or no micro-batch would be at"
            self.share.refuse_uncounted_batchnorms(
                self._models[0], self.gradient_state.active_dataloader.sampler_of_shares
            )
            if self._collectives is not None:
                self._collectives.refuse(loss, one.weight, "the Accelerator")
                self._collectives.end()
            if self._weighs_samples:
                doubt_sum(loss)
                self._examine(asked, loss, min(one.size, 1) if self._cut is not None else one.size)
        # accelerate divides by the steps: the weights add up to 1 over an optimizer step as they are.
        weight = one.weight * self.gradient_accumulation_steps
        run = partial(weighted_backward, super().backward, loss, weight, self._models, **kwargs)
        norms = self._norms
        if norms is not None and one.position == 0:
            norms.begin()
        with nullcontext() if norms is None else norms.recorded(loss, one.weight, one.total, self.scaler, self._models):
            run() if self._cut is None else self._cut.backward(run, loss, ends_step=one.ends_step)
        if norms is not None and one.ends_step:
            norms.finish(one.total)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Accumulate the gradients of an optimizer step: each entry is its next micro-batch."""
        cut = nullcontext() if self._cut is None else self._cut.running()
        with self._position.accumulating(), super().accumulate(*models), cut:
            yield
        if self._cut is not None and self._cut.has_failed:
            self.gradient_state._set_sync_gradients(False)  # what comes after the block is of no finished step
            if self._norms is not None:
                self._norms.spoil()

    def _do_sync(self) -> None:
        """Let gradients meet, and the optimizer step, at the end of the plan's step, in place of every k-th entry."""
        if self._position.at is None:
            super()._do_sync()
        else:
            self.gradient_state._set_sync_gradients(self._position.at.ends_step)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradient of an optimizer step; in mid-step, only return its norm."""
        if not self._position.is_in_mid_step:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return nn.utils.get_total_norm([one.grad for one in listed if one.grad is not None], norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the gradient of an optimizer step; in mid-step, leave it."""
        if not self._position.is_in_mid_step:
            super().clip_grad_value_(parameters, clip_value)

    def _examine(self, asked: OwnLoss, loss: torch.Tensor, samples: int) -> None:
        """Refuse a loss that is no mean over samples, in all processes if any of them finds it so."""
        loader = self.gradient_state.active_dataloader.base_dataloader
        reason = asked.examine(loss, self.unwrap_model(self._models[0]), loader, samples)
        is_other = torch.tensor([int(bool(reason))], device=self.device)
        if int(super().gather(is_other).max()):
            text = reason or "In another process the loss is no mean over samples. Pass count= to the Accelerator."
            raise InputError(f"{text} Without it, micro-batches are weighted by their samples.", code="loss-not-a-mean")

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.optimizer.zero_grad()

    def gather(self, tensor: Any) -> Any:
        """Gather tensors from all processes, each of which may have other numbers of samples.

        Raises:
            InputError: They differ in more than that; in every process. With `on_oom`, amid an optimizer step.
        """
        if self.share is None or self.num_processes == 1:
            return super().gather(tensor)
        if self._cut is not None and self._trains and not self.sync_gradients:
            refuse_gathering()
        return gather_uneven(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what was made of a micro-batch; of a loader of shares, every sample once and in order.

        Raises:
            InputError: With `on_oom`, of a loader of shares, whose micro-batches may come in parts.
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
        """Skip micro-batches to resume within an epoch; of a loader of shares, by whole optimizer steps.

        As ever with accelerate, the epoch is yours to say: ``loader.set_epoch(epoch)``.
        """
        if isinstance(dataloader, SharesLoader):
            return dataloader.skipping(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    def _over_processes(self, numbers: Sequence[float]) -> list[float]:
        return [*numbers] if self.num_processes == 1 else totals_over_ranks(numbers, self.device)


def set_arguments(share: Share, kwargs: dict[str, Any]) -> bool:
    """Put a plan's numbers into an Accelerator's arguments; tell whether it was given accumulation steps."""
    # As a plugin: of the number alone, accelerate takes what its launcher left in the environment instead.
    plugin = kwargs.get("gradient_accumulation_plugin") or GradientAccumulationPlugin()
    if not plugin.sync_with_dataloader:
        raise InputError(
            "the gradient_accumulation_plugin has sync_with_dataloader=False; expected True, because an epoch's last "
            "optimizer step ends with the epoch; leave it out",
            code="accelerate-sync-with-dataloader",
        )
    launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")  # by `accelerate launch`
    given = int(launched) if launched.isdecimal() else 1, kwargs.pop("gradient_accumulation_steps", 1), plugin.num_steps
    kwargs["gradient_accumulation_plugin"] = replace(plugin, num_steps=share.accumulation_steps)
    if share.device.type == "cpu":
        kwargs["cpu"] = True  # or each process trains alone, where there is no GPU
    handlers = list(kwargs.get("kwargs_handlers") or [])
    if share.num_processes > 1 and not any(isinstance(one, DistributedDataParallelKwargs) for one in handlers):
        # The plan's batch sizes fit a step that was run with these.
        kwargs["kwargs_handlers"] = [*handlers, DistributedDataParallelKwargs(**share.plan.ddp.options.keywords())]
    return max(steps or 1 for steps in given) > 1


def _tell_of_check(plan: Plan) -> None:
    """Warn of a loss of which is known, since it was tuned with, that it is no mean over samples."""
    found = next((check for check in plan.checks if check.subject == "loss" and check.depends), None)
    if found is not None:
        warnings.warn(
            f"the plan was made with a loss that is no mean over samples ({printable(found.advice, longest=300)}), and "
            "micro-batches are weighted by their samples; expected the same of both; pass count= to the Accelerator, "
            "or of a sum tune with loss_reduction='sum'",
            UnevenLossWarning,
            stacklevel=2,
        )


def _refuse_without_shares(loader: Any) -> None:
    """Refuse the loss of a loader that has no shares, or lost track of them."""
    if loader is None or isinstance(loader, SharesLoader):
        return
    inner = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    if isinstance(inner, MarkingBatchSampler):
        raise InputError(
            "the loader was made by accelerate.skip_first_batches, which knows no shares; expected the Accelerator's "
            "own; write accelerator.skip_first_batches(loader, n)",
            code="accelerate-skip-first-batches",
        )
    raise InputError(
        "the loss is of a loader that does not shuffle, of which accelerate gives every process as much; expected one "
        "that hands out the plan's shares; pass accelerator.shares_of(loader) to prepare",
        code="loader-without-split",
    )
