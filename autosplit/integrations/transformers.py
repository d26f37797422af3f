"""A transformers Trainer that follows a plan: its batch sizes per process and its accumulation steps.

    from autosplit.integrations.transformers import Trainer  # replaces transformers' Trainer

For your own Trainer class, write ``class MyTrainer(SharesMixin, TheirTrainer)``.

    torchrun, N ranks   the Trainer's DDP; each rank loads its part of every micro-batch
    plain python        `BalancedDataParallel` instead of nn.DataParallel
    no plan             the unchanged Trainer, and a NoPlanWarning

Each micro-batch's loss is weighted by its divisor: the labels that are not ignored (shifted or not), their class
weights, or the samples. If the loss is a sum, the weight is 1. The Trainer infers the divisor by running the loss on a
few samples (`autosplit.integrations.loss_mean`), unless `count` returns it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import broadcast_object_list
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autosplit import ddp
from autosplit.ddp.gradient_average import apart, average_gradients, refuse_meeting
from autosplit.ddp.group_end import release_group_last
from autosplit.ddp.user_collectives import LossCollectives
from autosplit.errors import InputError
from autosplit.integrations.gradient_norms import RunNorms, refuse_sum
from autosplit.integrations.loss_mean import SUM, TOLERANCE, Finding, Samples, count_by, examine_others, warn_of_finding
from autosplit.integrations.own_loss import warn_of_router_loss
from autosplit.integrations.process_share import NoPlanWarning, Share, find_share, warn_of_no_plan
from autosplit.integrations.share_loader import MarkingCollate, loader_options, taken_mark
from autosplit.integrations.trained_gradients import TrainedGradients
from autosplit.integrations.transformers_workload import workload
from autosplit.integrations.weighted_backward import weighted_backward
from autosplit.parallel.batch_counts import Count, counted
from autosplit.parallel.forgotten_calls import ROUNDING, outer_factor
from autosplit.parallel.loss_weights import IGNORED_LABEL, UnevenLossWarning
from autosplit.parallel.parts import OnOom, Part
from autosplit.parallel.rank_scope import (
    LossScope,
    checked_scope,
    normalised_over_ranks,
    refuse_combined_scope,
    refuse_ranks_without_samples,
    refuse_uncounted_scope,
)
from autosplit.parallel.step_listener import NoiseEstimate
from autosplit.plan.other_model import parameters_in
from autosplit.plan.plan import Plan
from autosplit.rng import preserved_rng
from autosplit.tools.oom_cuts import Attempt, CutWarning, cuts_for, run_in_parts

if TYPE_CHECKING:
    from transformers import Trainer as Mixed
else:
    Mixed = object  # the subclass adds its Trainer. A Trainer base class here would precede the user's Trainer.

__all__ = ["CutWarning", "NoPlanWarning", "SharesMixin", "Trainer", "UnevenLossWarning", "apply", "workload"]


_ITEMS = "items"
"""The rule of a loss that itself divides by the whole step's items. See `autosplit.integrations.loss_mean.RULES`."""


class SharesMixin(Mixed):
    """Make a Trainer follow a plan. Put this class before the Trainer in the list of bases.

    Args:
        plan: A plan, or the file of a plan. Default: the file that AUTOSPLIT_PROFILE names (`autosplit launch` sets
            it), or else the newest saved plan for this machine, this number of processes and a model of this size.
        count: Returns the divisor of a batch's mean loss, an int or a float, such as the sum of its samples' weights.
            Default: inferred by running the loss on a few samples.
        loss_scope: ``"ranks"`` if the loss divides by a number summed over all processes, see `Context.steps`. With
            several micro-batches per step pass `count`, too.
        on_oom: With ``"cut"`` in every process, a micro-batch that runs out of memory is run again in two parts, see
            `Plan.steps`.
        noise_scale: In every process an `autosplit.NoiseScale`, see `Plan.steps`.
        **kwargs: The Trainer's arguments. The plan sets these attributes of `args` in place:
            per_device_train_batch_size, gradient_accumulation_steps, average_tokens_across_devices and, if the plan is
            for CPUs, use_cpu.

    Attributes:
        share: This process's part of the plan. None without a plan.

    Raises:
        PlanError: The plan cannot be read, or its number of processes differs from this job's or transformers'.
        DeviceError: The plan is for simulated GPUs, or for other GPUs.
        InputError: An argument cannot be combined with a plan. `on_oom` is neither ``"raise"`` nor ``"cut"``, or the
            model does not support ``"cut"`` (SyncBatchNorm, a communication hook).

    Warns:
        NoPlanWarning: There is no plan.
        OtherModelWarning: The plan is for a model of a different size.
        CutWarning: This process cut a micro-batch for the first time. The message has the cause and advice.
        UnevenLossWarning: The gradient depends on the split, because of the loss or a router's auxiliary loss.
    """

    share: Share | None

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | os.PathLike[str] | None = None,
        count: Count | None = None,
        loss_scope: LossScope | None = None,
        on_oom: OnOom = "raise",
        noise_scale: NoiseEstimate | None = None,
        **kwargs: Any,
    ) -> None:
        given = _argument("model", 0, args, kwargs)
        training_args = _argument("args", 1, args, kwargs)
        self.share = find_share(plan, parameters=parameters_in(given))
        self._count, self._scope = count, loss_scope
        if checked_scope(loss_scope):
            refuse_combined_scope(on_oom=on_oom, noise_scale=noise_scale is not None)
        self._collectives: LossCollectives | None = None
        self._gradients: TrainedGradients | None = None
        self._weights: deque[float] = deque()
        self._items: deque[float] = deque()
        self._total: float = 0
        self._num_drawn = 0
        self._items_weight = 1.0
        self._norms = RunNorms.of_share(self.share, noise_scale)
        self.noise_scale = None if self._norms is None else self._norms.noise_scale
        self._finding: Finding | None = None
        self._cuts = None if self.share is None else cuts_for(self, on_oom, **self.share.cut_options)
        if self.share is None:
            warn_of_no_plan()
        elif training_args is None:
            raise InputError(
                "args is not given. Expected TrainingArguments, because the plan sets some of them. Pass args=.",
            )
        else:
            apply(self.share.plan, training_args, share=self.share)
            self.share.check_model(given)
        super().__init__(*args, **kwargs)
        if self.share is not None:
            self.share.checkpoint(self.model)
            if self.is_world_process_zero():
                warn_of_router_loss(self.model, self.share)
        if self.share is not None and self.accelerator.ddp_handler is not None:
            # The Trainer has no argument for this option. The plan measured memory with this option.
            self.accelerator.ddp_handler.gradient_as_bucket_view = self.share.layout.options.gradient_as_bucket_view

    # Methods that the Trainer calls

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader for this process, rebuilt with the plan's batch sampler."""
        loader: Any = super().get_train_dataloader()
        if self.share is None:
            return loader
        options = loader_options(
            getattr(loader, "base_dataloader", loader),
            self.share,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            drop_last=self.args.dataloader_drop_last,
            marks=True,
        )
        non_blocking = bool(getattr(loader, "_non_blocking", False))
        made = DataLoaderShard(device=self.accelerator.device, _non_blocking=non_blocking, **options)
        self.share.refuse_uncounted_batchnorms(self.model, made.batch_sampler)
        known = self.accelerator._dataloaders
        known[:] = [made if one is loader else one for one in known]
        return made

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Draw the micro-batches of an optimizer step, and compute their weights."""
        if self.share is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        self._refuse_unused_weights()
        batches = list(islice(epoch_iterator, num_batches))
        self._num_drawn = len(batches)
        samples = [taken_mark(batch) for batch in batches]
        if self._scope == "ranks":
            self._weights = deque(self._weights_over_ranks(batches, samples))
            return batches, None
        if self._finding is None and self._count is None:
            self._finding = self._agreed_finding()
        if self._norms is not None:
            self._norms.begin()
            refuse_sum(self._rule == SUM)
        if self._rule == _ITEMS:
            return batches, self._weighted_by_items(batches, samples, device)
        if self._rule == SUM:
            self._weights = deque(float(self.share.num_processes * (number != 0)) for number in samples)
            return batches, None
        items = [self._count_of(one, number) for one, number in zip(batches, samples, strict=True)]
        total = self.share.over_processes([sum(items)], self.args.device)[0]
        self._weights = deque(number * self.share.num_processes / total if total else 0.0 for number in items)
        self._items, self._total = deque(items), total
        return batches, None

    def _refuse_unused_weights(self) -> None:
        """Raise InputError if the Trainer's own loader or training_step does not follow the plan."""
        if not isinstance(getattr(self.callback_handler.train_dataloader, "collate_fn", None), MarkingCollate):
            raise InputError(
                "The Trainer has its own get_train_dataloader, whose batches do not follow the plan. Expected the "
                "loader of SharesMixin. Change train_dataset or data_collator instead, or call "
                "super().get_train_dataloader().",
            )
        if self._weights and len(self._weights) == self._num_drawn:
            raise InputError(
                f"training_step used none of the {self._num_drawn} weights of an optimizer step, so micro-batches "
                "counted equally. Expected super().training_step. Put your class after SharesMixin, or change "
                "compute_loss instead.",
            )

    @property
    def _rule(self) -> str | None:
        return None if self._finding is None else self._finding.rule

    def _count_of(self, batch: Any, samples: int | None) -> float:
        """Return the divisor of a batch's loss.

        Args:
            samples: The batch's samples. None if unknown, 0 if the batch has weight 0.
        """
        if samples == 0:
            return 0
        own = self._count or (None if self._finding is None else self._finding.counter)
        if own is not None:
            return counted(own, batch)
        return count_by(self._rule or "samples", batch, samples)

    def _weights_over_ranks(self, batches: list[Any], samples: list[int | None]) -> list[float]:
        refuse_uncounted_scope(len(batches), self._count)
        zeros = sum(number == 0 for number in samples)
        items = [self._count_of(one, number) for one, number in zip(batches, samples, strict=True)]
        assert self.share is not None, "only called with a plan"
        without, *everyones = self.share.over_processes([zeros, *items], self.args.device)
        refuse_ranks_without_samples(without)
        sizes, total = normalised_over_ranks(everyones, 1)
        return [size / total if total else 0.0 for size in sizes]

    def _weighted_by_items(self, batches: list[Any], samples: list[int | None], device: Any) -> Any:
        self._weights = deque(self._items_weight * (number != 0) for number in samples)
        ignoring = [one if number != 0 else _ignored(one) for one, number in zip(batches, samples, strict=True)]
        step_items = self._get_num_items_in_batch(ignoring, device)
        if self._norms is not None:
            rule = "shifted labels" if self._loss_shifts_labels else "labels"
            self._items, self._total = deque(count_by(rule, one) for one in ignoring), int(step_items)
        return step_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run the forward and the weighted backward of a micro-batch."""
        if self.share is None:
            return super().training_step(model, inputs, num_items_in_batch)
        release_group_last(model)
        weight = self._weights.popleft()
        self.current_gradient_accumulation_steps = 1  # otherwise the Trainer would divide the weighted loss again
        items = self._items.popleft() if self._norms is not None else 0
        if self._scope is None and self._collectives is None and self.share.num_processes > 1:
            self._collectives = LossCollectives(counts=True)
        if self._collectives is not None:
            self._collectives.begin()
        if self._gradients is None and self.share.num_processes > 1:
            again = "Unfreeze and add layers before trainer.train()."
            self._gradients = TrainedGradients([model], again)
        if self._cuts is not None:
            loss = self._run_in_parts(model, inputs, weight, num_items_in_batch, items)
        else:
            with self._weighted(weight, model, items):
                loss = super().training_step(model, inputs, num_items_in_batch)
            loss = loss * weight if weight else torch.zeros_like(loss)
        if self._gradients is not None and self.accelerator.sync_gradients:
            self._gradients.compare([self.optimizer], f"optimizer step {self.state.global_step}", self.args.device)
        if self._norms is not None and self.accelerator.sync_gradients:
            self._norms.finish(self._total)
        return loss

    def _run_in_parts(
        self, model: nn.Module, inputs: Any, weight: float, num_items_in_batch: Any, items: float
    ) -> torch.Tensor:
        assert self._cuts is not None, "only called with on_oom='cut'"
        counts_whole = self._rule in (SUM, _ITEMS)
        self._cuts.count = partial(self._count_of, samples=None) if not counts_whole else partial(count_by, "samples")
        size = counted(self._cuts.count, inputs) if weight else 0

        def run(part: Part, attempt: Attempt) -> torch.Tensor:
            own = weight if counts_whole or not weight else weight * part.size / size
            with self._weighted(own, model, items, attempt):
                loss: torch.Tensor = super(SharesMixin, self).training_step(model, part.batch, num_items_in_batch)
            return loss * own if own else torch.zeros_like(loss)

        wrapped = next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)
        if wrapped is not None:
            refuse_meeting(wrapped)
        with nullcontext() if wrapped is None else apart(wrapped):
            losses = run_in_parts(self._cuts, inputs, size, run)
        if self._norms is not None and len(losses) > 1:
            self._norms.spoil()
        if wrapped is not None and self.accelerator.sync_gradients:
            average_gradients(wrapped)
        return torch.stack(losses).sum(0)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of an optimizer step, over all processes."""
        if self.share is None:
            return super().get_total_train_batch_size(args)
        return self.share.effective_batch_size

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        unwrapped = self.accelerator.unwrap_model(model, keep_torch_compile=False) is model
        if self.share is None or not self.share.wraps or not training:
            return super()._wrap_model(model, training, dataloader)
        if unwrapped:
            # An earlier evaluation wrapped the model's forward in autocast. Every replica would call that forward,
            # which runs the model on the first device. So remove it.
            if "_original_forward" in vars(model):
                del model._original_forward, model.forward
            model = self.share.plan.wrap(model)
        if not any(known is model for known in self.accelerator._models):
            self.accelerator._models.append(model)  # otherwise an evaluation would wrap the forward again
        return model

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return the accelerator's autocast context if the model is a `BalancedDataParallel`.

        accelerate does not prepare that model, so its forward has no autocast.
        """
        if self.share is None or not self.share.wraps:
            return super().autocast_smart_context_manager(cache_enabled)
        return self.accelerator.autocast()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train. With several processes, first compare their plans, and detect failures of other processes."""
        try:
            with nullcontext() if self.share is None or self.share.num_processes == 1 else ddp.setup(self.share.plan):
                return super().train(*args, **kwargs)
        finally:
            self.accelerator.__dict__.pop("backward", None)  # the class's method is then visible again
            self._weights.clear()

    # Implementation

    @contextmanager
    def _weighted(
        self, weight: float, model: nn.Module, items: float, attempt: Attempt | None = None
    ) -> Iterator[None]:
        """Weight the loss in the accelerator's backward, which every Trainer calls."""
        accelerator = self.accelerator
        accelerator.__dict__.pop("backward", None)  # of the micro-batch before
        backward = accelerator.backward

        def weighted(loss: torch.Tensor, **options: Any) -> None:
            self._refuse_division(loss)
            if self._collectives is not None:
                self._collectives.refuse(loss, weight, "the Trainer")
            run = partial(weighted_backward, backward, loss, weight, [model], **options)
            with self._recorded(loss, items, model):
                run() if attempt is None else attempt.backward(run, loss)

        # It remains until the next micro-batch, because adversarial training runs a second backward.
        accelerator.backward = weighted
        yield

    def _refuse_division(self, loss: torch.Tensor) -> None:
        assert self.share is not None, "only called with a plan"
        steps, factor = self.share.accumulation_steps, outer_factor(loss)
        if steps > 1 and factor and abs(factor * steps - 1) < ROUNDING:
            raise InputError(
                f"training_step divides the loss by {steps}, but the plan weights each of the {steps} micro-batches "
                "itself. Expected the mean loss. Leave the division out.",
            )

    def _recorded(self, loss: torch.Tensor, items: float, model: nn.Module) -> AbstractContextManager[None]:
        if self._norms is None or not items:
            return nullcontext()
        assert self.share is not None, "only called with a plan"
        weight = items * self.share.num_processes / self._total
        return self._norms.recorded(loss, weight, self._total, self.accelerator.scaler, [model])

    def _agreed_finding(self) -> Finding:
        assert self.share is not None, "only called with a plan"
        found = [self._found()]
        if self.share.num_processes > 1:
            broadcast_object_list(found)
        if self.is_world_process_zero():
            warn_of_finding(found[0], where="the Trainer")
        return found[0]

    def _found(self) -> Finding:
        loader = self.callback_handler.train_dataloader
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), preserved_rng(), self.compute_loss_context_manager():
                samples = Samples.in_data_set(loader.dataset, loader.collate_fn.collate)
                if self._divides_by_items(samples.batch_of(range(samples.number))):
                    return Finding(_ITEMS, 0.0)
                return examine_others(
                    lambda rows: self.compute_loss(self.model, self._prepare_inputs(rows)),
                    samples,
                    otherwise="shifted labels" if self._loss_shifts_labels else "labels",
                )
        finally:
            self.model.train(was_training)

    def _divides_by_items(self, batch: Any) -> bool:
        has_own = self.compute_loss_func is not None or type(self).compute_loss is not transformers.Trainer.compute_loss
        if not has_own or "labels" not in batch:
            return False
        first, second, own = self._loss_with(batch, 8), self._loss_with(batch, 16), 0.0
        divides = abs(first - 2 * second) <= TOLERANCE * abs(first)
        if divides and self.args.average_tokens_across_devices and first:
            # Trainer.compute_loss multiplies by the processes, because DDP averages. A method of one's own may not.
            self.args.average_tokens_across_devices = False
            try:
                own = self._loss_with(batch, 8)
            finally:
                self.args.average_tokens_across_devices = True
            assert self.share is not None, "only called with a plan"
            self._items_weight = float(round(self.share.num_processes * own / first))
        return divides

    def _loss_with(self, batch: Any, items: int) -> float:
        counted_items = torch.tensor(items).to(self.args.device)
        return float(self.compute_loss(self.model, self._prepare_inputs(batch), num_items_in_batch=counted_items))


class Trainer(SharesMixin, transformers.Trainer):
    """transformers' Trainer that follows a plan. See `SharesMixin`."""


def apply(plan: Plan, args: transformers.TrainingArguments, *, share: Share | None = None) -> Share:
    """Set a plan's numbers for this process in a Trainer's arguments.

    Args:
        args: The arguments, which are changed in place.

    Raises:
        PlanError: The plan's number of processes differs from this job's or transformers'.
        DeviceError: The plan is for simulated GPUs, or for other GPUs.
        InputError: An argument cannot be combined with a plan.
    """
    share = find_share(plan, parameters=None) if share is None else share
    assert share is not None, "a plan was given"
    _refuse_unfit(args)
    # The arguments exist already, so set the attributes in place. The Trainer reads them later.
    args.per_device_train_batch_size = max(1, share.batch_size)  # the Trainer's own loader does not accept 0
    args.gradient_accumulation_steps = share.accumulation_steps
    args.average_tokens_across_devices = True
    meets_on_cards = dist.is_initialized() and dist.get_backend() not in {"gloo", "undefined"}
    if share.device.type == "cpu" and not (args.use_cpu or meets_on_cards):
        args.use_cpu = True  # otherwise each process would train a separate model if there is no GPU
        vars(args).pop("_setup_devices", None)  # clear the cached device
    device = args.device  # this also creates the process group
    share.refuse_other_job(args.world_size, device, "transformers")
    if share.wraps:
        args._n_gpu = min(args._n_gpu, 1)  # with more, the Trainer would wrap the model in nn.DataParallel
    elif share.layout.options.find_unused_parameters and args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = True
    has = next((name for name in ("bf16", "fp16") if getattr(args, name)), "none")
    wants = f"{has}=False" if plan.precision == "none" else f"{plan.precision}=True"
    share.warn_of_other_precision(has, wants)
    return share


def _refuse_unfit(args: Any) -> None:
    asked = {
        "auto_find_batch_size": args.auto_find_batch_size,
        "deepspeed": args.deepspeed,
        "fsdp": args.fsdp,
        "parallelism_config": args.parallelism_config,
        "train_sampling_strategy": args.train_sampling_strategy == "batch_rebalance",
    }
    for name, value in asked.items():
        if value:
            raise InputError(
                f"{name} is {getattr(args, name)!r}. Expected it to be off, because the plan sets the batch sizes "
                f"and trains with DDP. Leave {name} out, or train without a plan.",
            )


def _ignored(batch: Mapping[str, Any]) -> dict[str, Any]:
    labels = {name: torch.full_like(batch[name], IGNORED_LABEL) for name in ("labels", "shift_labels") if name in batch}
    return {**batch, **labels}


def _argument(name: str, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else None)
