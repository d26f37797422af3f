"""The Trainer of transformers, with a plan's shares: each process its own, and the gradient that of the whole step.

    from autosplit.integrations.transformers import Trainer  # in place of transformers' own

A Trainer of your own takes them by ``class MyTrainer(SharesMixin, TheirTrainer)``.

    torchrun, N ranks   the Trainer's DDP; each rank loads its share of every micro-batch
    plain python        `BalancedDataParallel` in place of nn.DataParallel
    no plan             the Trainer as it is; a NoPlanWarning says so

Each micro-batch's loss is weighted by what it divides by: its labels that are not ignored, shifted or not, their class
weights, or its samples. A sum has the weight 1. Which of these it is, the Trainer finds by running the loss on a few
samples (`autosplit.probe.loss_mean`), unless `count` returns it.
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
from autosplit.ddp.group_end import let_go_of_group_last
from autosplit.ddp.loader_steps import totals_over_ranks
from autosplit.ddp.loss_collectives import LossCollectives
from autosplit.errors import InputError
from autosplit.integrations.gradient_norms import RunNorms, refuse_sum
from autosplit.integrations.process_share import NoPlanWarning, Share, find_share, tell_of_no_plan
from autosplit.integrations.share_loader import loader_options, taken_mark
from autosplit.integrations.transformers_workload import workload
from autosplit.integrations.weighted_backward import weighted_backward
from autosplit.parallel.batch_counts import Count, counted
from autosplit.parallel.loss_weights import IGNORED_LABEL
from autosplit.parallel.noise_estimate import NoiseEstimate
from autosplit.parallel.oom_cuts import Attempt, CutWarning, OnOom, Part, cuts_for, run_in_parts
from autosplit.parallel.rank_scope import (
    LossScope,
    checked_scope,
    normalised_over_ranks,
    refuse_combined_scope,
    refuse_ranks_without_samples,
    refuse_uncounted_scope,
)
from autosplit.plan.other_model import parameters_in
from autosplit.plan.plan import Plan
from autosplit.probe.loss_mean import (
    SUM,
    TOLERANCE,
    Finding,
    Samples,
    UnevenLossWarning,
    count_by,
    examine_others,
    warn_of_finding,
)
from autosplit.rng import kept_rng

if TYPE_CHECKING:
    from transformers import Trainer as Mixed
else:
    Mixed = object  # a Trainer comes by the class that mixes: as a base here, it would stand before somebody's own

__all__ = ["CutWarning", "NoPlanWarning", "SharesMixin", "Trainer", "UnevenLossWarning", "apply", "workload"]


_ITEMS = "items"
"""Of a loss that divides by the whole step's items itself, beside what a loss may be a mean over."""


class SharesMixin(Mixed):
    """Gives a Trainer a plan's shares; it stands before the Trainer among the bases.

    Args:
        plan: A plan, or the file of one. Default: the file that AUTOSPLIT_PROFILE names (`autosplit launch` sets it),
            or else the only plan remembered for this machine, this number of processes and a model of this size.
        count: Return what the mean loss of a batch divides by, an int or a float, such as the sum of its samples'
            weights. Default: what running the loss on a few samples shows.
        loss_scope: ``"ranks"`` if the loss divides by a number summed over all processes, see `Context.steps`; with
            several micro-batches per step pass `count`, too.
        on_oom: ``"cut"``, the same in every process, runs a micro-batch that runs out of memory again in two parts, see
            `Plan.steps`; the processes' gradients then meet after the last backward, not in it.
        noise_scale: In every process an `autosplit.NoiseScale`, which is then estimated, see `Plan.steps`.
        **kwargs: The Trainer's. Of `args`, per_device_train_batch_size, gradient_accumulation_steps,
            average_tokens_across_devices and, where the plan's devices are processors, use_cpu are set by the plan, in
            place.

    Attributes:
        share: What this process does of the plan; None without one.
        noise_scale: The estimate that was passed. None without a plan.

    Raises:
        PlanError: The plan can't be read, or is for another number of processes than this job has or transformers runs,
            or several could be meant.
        DeviceError: It is for simulated cards, or for other GPUs.
        InputError: The arguments ask for what a plan can't be combined with; `on_oom` is neither ``"raise"`` nor
            ``"cut"``, or the model is one that can't be cut (SyncBatchNorm, a communication hook).

    Warns:
        NoPlanWarning: There is none.
        OtherModelWarning: The plan is for a model of another size.
        CutWarning: The first time that this process cuts a micro-batch: why, and what to change.
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
        self._weights: deque[float] = deque()
        self._items: deque[float] = deque()
        self._total: float = 0
        self._norms = RunNorms.of_share(self.share, noise_scale)
        self.noise_scale = None if self._norms is None else self._norms.noise_scale
        self._finding: Finding | None = None
        self._cuts = None if self.share is None else cuts_for(self, on_oom, **self.share.cut_options)
        if self.share is None:
            tell_of_no_plan()
        elif training_args is None:
            raise InputError(
                "args is not given; expected TrainingArguments, which the plan's numbers go into; pass args=",
                code="trainer-arguments-missing",
            )
        else:
            apply(self.share.plan, training_args, share=self.share)
            self.share.tell_of_other_model(given)
        super().__init__(*args, **kwargs)
        if self.share is not None:
            self.share.checkpoint(self.model)
        if self.share is not None and self.accelerator.ddp_handler is not None:
            # No argument is for it, and the plan's batch sizes fit the memory of a step that was run with it.
            self.accelerator.ddp_handler.gradient_as_bucket_view = self.share.plan.ddp.options.gradient_as_bucket_view

    # What the Trainer asks for

    def get_train_dataloader(self) -> Any:
        """Return this process's loader: the Trainer's own, around the plan's batch sampler."""
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
        """Take an optimizer step's micro-batches, and weigh them."""
        if self.share is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = list(islice(epoch_iterator, num_batches))
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
        total = self._over_processes([sum(items)])[0]
        self._weights = deque(number * self.share.num_processes / total if total else 0.0 for number in items)
        self._items, self._total = deque(items), total
        return batches, None

    @property
    def _rule(self) -> str | None:
        return None if self._finding is None else self._finding.rule

    def _count_of(self, batch: Any, samples: int | None) -> float:
        """Return what the loss of a batch divides by.

        Args:
            samples: Of the batch; None if nobody knows, 0 if it counts nothing.
        """
        if samples == 0:
            return 0
        own = self._count or (None if self._finding is None else self._finding.counter)
        if own is not None:
            return counted(own, batch)
        return count_by(self._rule or "samples", batch, samples)

    def _over_processes(self, numbers: list[float]) -> list[float]:
        assert self.share is not None, "without a plan nothing is counted"
        return numbers if self.share.num_processes == 1 else totals_over_ranks(numbers, self.args.device)

    def _weights_over_ranks(self, batches: list[Any], samples: list[int | None]) -> list[float]:
        """Return the weights of micro-batches whose losses are normalised over the processes."""
        refuse_uncounted_scope(len(batches), self._count)
        zeros = sum(number == 0 for number in samples)
        items = [self._count_of(one, number) for one, number in zip(batches, samples, strict=True)]
        without, *everyones = self._over_processes([zeros, *items])
        refuse_ranks_without_samples(without)
        sizes, total = normalised_over_ranks(everyones, 1)
        return [size / total if total else 0.0 for size in sizes]

    def _weighted_by_items(self, batches: list[Any], samples: list[int | None], device: Any) -> Any:
        """Weight each micro-batch by 1, and return the items of the step, by which the loss divides itself."""
        self._weights = deque(float(number != 0) for number in samples)
        ignoring = [one if number != 0 else _ignored(one) for one, number in zip(batches, samples, strict=True)]
        step_items = self._get_num_items_in_batch(ignoring, device)
        if self._norms is not None:
            rule = "shifted labels" if self._loss_shifts_labels else "labels"
            self._items, self._total = deque(count_by(rule, one) for one in ignoring), int(step_items)
        return step_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a micro-batch, its loss weighted."""
        if self.share is None:
            return super().training_step(model, inputs, num_items_in_batch)
        let_go_of_group_last(model)
        weight = self._weights.popleft()
        self.current_gradient_accumulation_steps = 1  # or the Trainer would divide what is weighted already
        items = self._items.popleft() if self._norms is not None else 0
        if self._scope is None and self._collectives is None and self.share.num_processes > 1:
            self._collectives = LossCollectives([model])
        if self._collectives is not None:
            self._collectives.begin()
        if self._cuts is not None:
            loss = self._run_in_parts(model, inputs, weight, num_items_in_batch, items)
        else:
            with self._weighted(weight, model, items):
                loss = super().training_step(model, inputs, num_items_in_batch)
            loss = loss * weight if weight else torch.zeros_like(loss)
        if self._norms is not None and self.accelerator.sync_gradients:
            self._norms.finish(self._total)
        return loss

    def _run_in_parts(
        self, model: nn.Module, inputs: Any, weight: float, num_items_in_batch: Any, items: float
    ) -> torch.Tensor:
        assert self._cuts is not None, "without it nothing is cut"
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
            # An evaluation before has put autocast around the model's own forward, which replicas would share.
            if "_original_forward" in vars(model):
                del model._original_forward, model.forward
            model = self.share.plan.wrap(model)
        if not any(known is model for known in self.accelerator._models):
            self.accelerator._models.append(model)  # or an evaluation would do so again
        return model

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return the arguments' autocast, where no model is prepared by accelerate, which has it around the forward."""
        if self.share is None or not self.share.wraps:
            return super().autocast_smart_context_manager(cache_enabled)
        return self.accelerator.autocast()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; the processes make sure first that they have one plan, and hear of each other's failures."""
        if self.share is None or self.share.num_processes == 1:
            return super().train(*args, **kwargs)
        with ddp.setup(self.share.plan):
            return super().train(*args, **kwargs)

    # How it is done

    @contextmanager
    def _weighted(
        self, weight: float, model: nn.Module, items: float, attempt: Attempt | None = None
    ) -> Iterator[None]:
        """Let the accelerator's backward, which every Trainer's step ends in, run on the weighted loss."""
        accelerator = self.accelerator
        backward = accelerator.backward

        def weighted(loss: torch.Tensor, **options: Any) -> None:
            if self._collectives is not None:
                self._collectives.refuse(loss, weight, "the Trainer")
                self._collectives.end()
            run = partial(weighted_backward, backward, loss, weight, [model], **options)
            with self._recorded(loss, items, model):
                run() if attempt is None else attempt.backward(run, loss)

        accelerator.backward = weighted
        try:
            yield
        finally:
            del accelerator.backward  # the class's own shows again

    def _recorded(self, loss: torch.Tensor, items: float, model: nn.Module) -> AbstractContextManager[None]:
        if self._norms is None or not items:
            return nullcontext()
        assert self.share is not None, "without a plan no norm is taken"
        weight = items * self.share.num_processes / self._total
        return self._norms.recorded(loss, weight, self._total, self.accelerator.scaler, [model])

    def _agreed_finding(self) -> Finding:
        """Find what the model's loss is a mean over; every process takes what the first process finds."""
        assert self.share is not None, "without a plan nothing is weighed"
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
            with torch.no_grad(), kept_rng(), self.compute_loss_context_manager():
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
        """Tell whether a loss of one's own makes use of the step's items, which it is given: some take a mean."""
        if self.compute_loss_func is None or "labels" not in batch:
            return False
        first, second = (
            float(
                self.compute_loss(
                    self.model, self._prepare_inputs(batch), num_items_in_batch=torch.tensor(items).to(self.args.device)
                )
            )
            for items in (8, 16)
        )
        return abs(first - 2 * second) <= TOLERANCE * abs(first)


class Trainer(SharesMixin, transformers.Trainer):
    """transformers' Trainer with a plan's shares; see `SharesMixin`."""


def apply(plan: Plan, args: transformers.TrainingArguments, *, share: Share | None = None) -> Share:
    """Put a plan's numbers for this process into a Trainer's arguments.

    Args:
        args: They are changed.
        share: Of this process, where it is known.

    Raises:
        PlanError: It is for another number of processes than this job has or transformers runs.
        DeviceError: It is for simulated cards, or for other GPUs.
        InputError: The arguments ask for what a plan can't be combined with.
    """
    share = find_share(plan, parameters=None) if share is None else share
    assert share is not None, "a plan was given"
    _refuse_unfit(args)
    # Some of them can't be set from outside once they are there, and none is looked at again before training.
    args.per_device_train_batch_size = max(1, share.batch_size)  # of the Trainer's own loader, which takes no 0
    args.gradient_accumulation_steps = share.accumulation_steps
    args.average_tokens_across_devices = True
    meets_on_cards = dist.is_initialized() and dist.get_backend() not in {"gloo", "undefined"}
    if share.device.type == "cpu" and not (args.use_cpu or meets_on_cards):
        args.use_cpu = True  # or each process would train alone where there is no GPU
        vars(args).pop("_setup_devices", None)  # they have chosen a device already, and choose again when asked
    device = args.device  # by which the processes meet
    share.refuse_other_job(args.world_size, device, "transformers")
    if share.wraps:
        args._n_gpu = min(args._n_gpu, 1)  # or the Trainer would wrap the model in nn.DataParallel
    elif plan.ddp.options.find_unused_parameters and args.ddp_find_unused_parameters is None:
        args.ddp_find_unused_parameters = True
    has = next((name for name in ("bf16", "fp16") if getattr(args, name)), "none")
    wants = f"{has}=False" if plan.precision == "none" else f"{plan.precision}=True"
    share.tell_of_other_precision(has, wants, stacklevel=4)
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
                f"{name} is {getattr(args, name)!r}; expected it off, because a plan's shares are drawn from one order "
                "of all samples and trained by DDP; leave it out, or train without a plan",
                code="trainer-option",
            )


def _ignored(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch whose labels are all left out by the loss."""
    labels = {name: torch.full_like(batch[name], IGNORED_LABEL) for name in ("labels", "shift_labels") if name in batch}
    return {**batch, **labels}


def _argument(name: str, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else None)
