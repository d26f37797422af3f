"""Define the plan that `tune` returns: its record, and the methods that use it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from autosplit.accelerators import is_accelerator, moved
from autosplit.addons import addon
from autosplit.errors import DeviceError
from autosplit.plan.explanation import ASSUMED_LOSS, Explanation
from autosplit.plan.record import (
    PlanRecord,
    add_note_to_file,
    count_of,
    loader_keywords,
    reduce_of,
    required_lengths,
)
from autosplit.text import counted_text

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import nn
    from torch.utils.data import DataLoader

    from autosplit.integrations.exported import Export
    from autosplit.parallel.balanced import BalancedDataParallel
    from autosplit.parallel.batch_sampler import ScheduledBatchSampler
    from autosplit.parallel.epoch_steps import Steps
    from autosplit.parallel.step_listener import NoiseEstimate
    from autosplit.plan.split_comparison import SplitComparison
    from autosplit.runtime.memory_tracker import Tracker
    from autosplit.tools.goodput import Goodput
    from autosplit.tools.token_sampler import TokenBatchSampler


@dataclass(frozen=True, repr=False)
class Plan(PlanRecord):
    """Split, batch size and accumulation steps for training a workload on some devices.

    `record.PlanRecord` documents the attributes.
    """

    def __hash__(self) -> int:
        """Hash only the plan's numbers, because its dict fields have no hash."""
        return hash((self.split, self.accumulation_steps, self.effective_batch_size, self.samples_per_s))

    def __str__(self) -> str:
        assumed = ASSUMED_LOSS if self.loss_rule == "mean" else ""
        return ". ".join(text.rstrip(".") for text in (super().__str__(), assumed, chosen_step_text(self)) if text)

    def _repr_html_(self) -> str:
        from autosplit.plan.rows import rows_of
        from autosplit.text import table_html

        rows = rows_of(self)
        numbers = {**rows.numbers, **({"strategy": rows.strategy} if rows.strategy else {})}
        remarks = [] if self.complete else ["interrupted: the best plan so far"]
        remarks += ["simulated: predicted for GPUs that this machine does not have"] if self.simulated else []
        return table_html("autosplit plan", [*numbers.items()], rows.columns, rows.devices, remarks)

    def explain(self) -> Explanation:
        """Explain the plan: its bounds, the alternatives, and the quality of its fit.

        No training step is run, so this also works for a loaded plan. For many devices it takes seconds.

        Returns:
            The explanation as numbers. `str()` returns it as text.
        """
        from autosplit.plan.compute_explanation import explanation_of

        return explanation_of(self)

    def compare_with(self, split: int | Sequence[int], accumulation_steps: int = 1) -> SplitComparison:
        """Predict the samples/s and the memory of another configuration, and compare them with the plan.

        No training step is run, so this also works for a loaded plan. `autosplit.measure` runs a configuration.

        Args:
            split: Samples per device in one forward. If the plan is for DDP only (``strategy="ddp"``), samples per
                rank.
            accumulation_steps: Forwards per optimizer step, each with the whole split.

        Returns:
            The comparison as numbers. `str()` returns it as text.

        Raises:
            InputError: The split does not have one number for each device, or a device gets too few samples to train.
            PlanError: The plan has no fit.
        """
        from autosplit.plan.split_comparison import compared_split

        return compared_split(self, split, accumulation_steps)

    def goodput(self, noise_scale: NoiseEstimate | float) -> Goodput:
        """Recommend the effective batch size that trains fastest: samples/s times the training progress per sample.

            goodput = plan.goodput(noise_scale)
            goodput.plot().savefig("goodput.pdf")

        No training step is run. The plan's fit predicts the samples/s of its split.

        Args:
            noise_scale: The `autosplit.NoiseScale` of a training run, or a number of samples. If a noise scale counts
                tokens, divide it by the tokens of a sample.

        Returns:
            The recommendation as numbers. `str()` returns it as one line of text.

        Raises:
            InputError: The noise scale is not finite, because it has too few steps or the gradients are mostly noise.
            PlanError: The plan has no fit.
        """
        return addon("goodput_of")(self, noise_scale)  # type: ignore[no-any-return]

    def plot(self) -> Figure:
        """Draw the plan for a notebook or a paper: the memory of each device, and samples/s by batch size.

            plan.plot().savefig("plan.pdf")

        `autosplit report` shows the same figures. The curve is the predicted throughput of each batch's fastest split.
        A plan without a fit has no curve.

        Returns:
            A matplotlib figure, 9 inches wide, which notebooks display automatically. pyplot is not used.

        Raises:
            InputError: matplotlib is not installed (the extra ``plot``).
        """
        return addon("figure_of")(self)  # type: ignore[no-any-return]

    def export(self, to: str, *, path: str | os.PathLike[str] | None = None) -> Export:
        """Convert the plan into the settings of another tool.

            print(plan.export("transformers"))
            arguments = TrainingArguments(**plan.export("transformers").settings["TrainingArguments"])

        transformers, accelerate and Lightning give all ranks one batch size. For these tools, autosplit computes the
        nearest plan with equal batch sizes. Its notes list what is lost.

        Args:
            to: ``"transformers"``, ``"accelerate"``, ``"lightning"``, ``"torchrun"``, ``"slurm"``, ``"trainjob"``,
                ``"skypilot"``, ``"env"`` or ``"json"``.
            path: Path of the plan's file for formats that name it. Default: the plan's `path`.

        Returns:
            An export with `settings`, `text`, `exact` and `notes`. Its `str()` is the text to paste.

        Raises:
            InputError: The format is unknown.
            PlanError: The tool runs DDP, and the plan has no ranks. Or the tool can't start the plan's machines.
            DeviceError: A format that starts a job was requested for simulated GPUs.
        """
        return addon("export")(self, to, path=path)  # type: ignore[no-any-return]

    # Training with the plan

    def devices_here(self) -> tuple[torch.device, ...]:
        """Find the plan's devices in this process: GPUs with the same UUIDs, or on another machine with the same names.

        Raises:
            DeviceError: A device is not visible.
        """
        import torch

        from autosplit.devices.accelerator import Visible, indices_here, visible_devices

        kind = self.devices[0].kind
        if not is_accelerator(kind):
            return tuple(torch.device("cpu") for _ in self.devices)
        here = visible_devices(kind)
        found = indices_here([Visible(device.name, device.uuid) for device in self.devices], here)
        indices = [index for index in found if index is not None]
        if len(indices) < len(found):
            wanted = ", ".join(f"{device.label} {device.name}" for device in self.devices)
            seen = ", ".join(f"{kind}:{index} {device.name}" for index, device in enumerate(here)) or "none"
            raise DeviceError(
                f"the plan's devices are {wanted}, but the visible devices are {seen}. Set CUDA_VISIBLE_DEVICES to the "
                "value that it had when the plan was made, or tune here.",
            )
        return tuple(torch.device(kind, index) for index in indices)

    def wrap(self, model: nn.Module) -> BalancedDataParallel:
        """Wrap a model so that each forward is split according to the plan.

        Args:
            model: The model. It is moved to the first device. If the plan checkpoints layers, they are checkpointed
                from now on.

        Returns:
            The wrapper. `wrapper.module` is the model.

        Raises:
            DeviceError: The plan is for simulated GPUs, or its GPUs are not visible.
            InputError: This process is one of several ranks. Or the model is wrapped already. Or moving the model
                replaced parameters that an optimizer refers to.
            PlanError: The model lacks a layer that the plan checkpoints.

        Warns:
            OtherModelWarning: The model and the plan's model have different numbers of parameters.
        """
        from autosplit.parallel.balanced import BalancedDataParallel
        from autosplit.parallel.checkpointed import checkpoint_layers
        from autosplit.plan.other_model import refuse_wrapped, warn_of_other_model
        from autosplit.plan.torchrun import refuse_several_processes, refuse_simulated

        refuse_simulated(self, "wrap a model")
        refuse_several_processes()
        refuse_wrapped(model)
        warn_of_other_model(self, model)
        devices = self.devices_here()
        model = moved(model, devices[0])
        checkpoint_layers(model, self.checkpointed)
        return BalancedDataParallel(
            self.gpu0_bsz,
            model,
            devices,
            dim=self.batch_dim,
            split=self.split,
            ceilings=self.ceilings,
            reduce=reduce_of(self),
        )

    def batch_sampler(
        self, num_samples: int | Sized, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> ScheduledBatchSampler:
        """Return a batch sampler for the plan's micro-batches, with `effective_batch_size` samples per optimizer step.

        Args:
            num_samples: The dataset, or its length.
            shuffle: Draw a new order in each epoch. `steps` counts the epochs, or `set_epoch` sets the epoch.
            seed: Seed of the order.
            drop_last: Leave out the last step of an epoch if it is incomplete.

        Raises:
            InputError: The short last forward has too few samples for the model's BatchNorm layers.
        """
        return self._sampler(num_samples, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def _sampler(self, num_samples: int | Sized, **options: Any) -> ScheduledBatchSampler:
        from autosplit.parallel.batch_sampler import ScheduledBatchSampler

        made = ScheduledBatchSampler(num_samples, self.batch_size, self.effective_batch_size, **options)
        made.refuse_single_samples(self.split, self.main.least_batch)
        return made

    def token_sampler(self, lengths: Any, *, shuffle: bool = False, seed: int = 0) -> TokenBatchSampler:
        """Return a batch sampler that groups samples of similar length, with as many samples per batch as fit.

            sampler = plan.token_sampler([len(sample) for sample in dataset], shuffle=True)
            loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
            for step in plan.steps(loader):
                ...

        With an effective batch size, each step has exactly this many samples, in the order of `batch_sampler`. Without
        an effective batch size, each batch is a step. `steps` reads each batch's split and gives all samples the same
        weight. Training can be resumed as with `batch_sampler`. Without an effective batch size, resuming needs the
        same lengths and the same plan.

        Args:
            lengths: Length of each sample, as in `tune`: a list, an array or a tensor.
            shuffle: Draw a new order in each epoch. `steps` counts the epochs, or `set_epoch` sets the epoch.
            seed: Seed of the order.

        Raises:
            PlanError: The plan was not tuned for lengths.
            InputError: A length is greater than the plan's, or not a whole number of 1 or more. Or the model has
                BatchNorm layers, which need more than one sample and include padding.
        """
        made: TokenBatchSampler = addon("token_sampler")(
            required_lengths(self),
            lengths,
            self.split,
            self.effective_batch_size,
            keeps_effective=self.effective_batch_sizes is not None,
            shuffle=shuffle,
            seed=seed,
        )
        made.refuse_single_samples(self.split, self.main.least_batch)
        return made

    @property
    def max_tokens(self) -> tuple[int, ...]:
        """Number of tokens, with padding, that fit on each device at every length. For trainers that need one number.

        The numbers hold for batches that are padded to at least the shortest measured length (`lengths.points`).

        Raises:
            PlanError: The plan was not tuned for lengths.
        """
        plan = required_lengths(self)
        return tuple(map(plan.tokens_of, self.split))

    def loader(
        self,
        data: Any,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a DataLoader for the plan's micro-batches.

            loader = plan.loader(loader)  # the same dataset, order, collate_fn and workers

        If `fit_to_loader` found faster settings, the DataLoader has them.

        Args:
            data: A DataLoader, whose dataset, order and settings are used. Or a dataset with `__getitem__` and
                `__len__`.
            shuffle: Draw a new order in each epoch. `steps` counts the epochs, or ``loader.batch_sampler.set_epoch``
                sets the epoch. Default: the given DataLoader's setting; False for a dataset.
            seed: Seed of the order.
            drop_last: Leave out the last step of an epoch if it is incomplete. Default: the given DataLoader's setting;
                False for a dataset.
            **options: Arguments of ``torch.utils.data.DataLoader``, which override all other settings.

        Raises:
            InputError: The short last forward has too few samples for the model's BatchNorm layers. Or the given
                DataLoader has an iterable dataset, or a sampler that repeats or skips samples.
        """
        from autosplit.parallel.rebuilt_loader import loader_around

        order: Any = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        return loader_around(data, self._sampler, loader_keywords(self), **order, options=options)

    def steps(
        self,
        loader: Iterable[Any],
        *,
        count: Callable[[Any], float | torch.Tensor] | None = None,
        on_oom: Literal["raise", "cut"] = "raise",
        noise_scale: NoiseEstimate | None = None,
        device: torch.device | str | int | None = None,
    ) -> Steps:
        """Group the batches of a loader into optimizer steps. Each step is an iterable of its micro-batches.

            for step in plan.steps(loader):
                for inputs, targets in step:
                    step.backward(loss_fn(model(inputs), targets.to(model.output_device)))
                optimizer.step()
                optimizer.zero_grad()

        The wrapped model moves its inputs to the devices. If the loop uses tensors outside the model and the loss
        function, pass ``device=model.output_device``. Then `steps` moves every tensor of a micro-batch to the first
        device.

        Args:
            loader: A DataLoader with the plan's `batch_sampler`, or any iterable of other batches. For a progress bar,
                write ``tqdm(plan.steps(loader))``, because tqdm(loader) hides the sampler.
            count: Function that returns the divisor of a batch's mean loss, if it is not the number of samples.
                Example: the number of labels that are not padding, or a tensor with the sum of the labels' class
                weights. A batch with a count of 0 contributes nothing.
            on_oom: ``"cut"``: if a micro-batch runs out of memory within ``with step.attempt():``, run it again in two
                parts, see `OptimizerStep.attempt`. After three such micro-batches, later micro-batches of that size
                from this loader are cut before they run, and the plan's file gets a note. Values other than tensors are
                passed to both parts unchanged.
            noise_scale: An `autosplit.NoiseScale`, which estimates the gradient noise scale from the norm of each
                micro-batch's gradient. Pass the same object in every epoch, and then to `goodput`. The replicas are
                copied again for each micro-batch, because persistent replicas would add up gradients.
            device: The device to move every micro-batch to before the loop gets it, see `autosplit.to_device`. With
                several devices, the inputs of all devices then occupy memory on this device. Default: batches are not
                moved.

        Returns:
            The optimizer steps. `len()` returns their number if the loader has the plan's `batch_sampler`.

        Raises:
            InputError: While iterating: the loader hides a plan's batch sampler. With `noise_scale`: the first step
                has a single micro-batch, or reentrant checkpointing hides parameters.

        Warns:
            CutWarning: A micro-batch was cut for the first time. The warning has the reason and advice.
            EffectiveBatchWarning: The size of an optimizer step differs from the plan's effective batch size.
            UnevenLossWarning: There is no `count`, but the plan's gradient check found that the loss needs one.
        """
        from autosplit.parallel.batch_counts import warn_of_missing_count
        from autosplit.parallel.batch_sampler import ScheduledBatchSampler
        from autosplit.parallel.epoch_steps import Steps, compared, steps
        from autosplit.parallel.parts import cuts_of

        if self.accumulation_steps > 1:
            warn_of_missing_count(count, count_of(self))
        note = partial(add_note_to_file, self)
        cuts = cuts_of(loader, on_oom, dim=self.batch_dim, least=self.main.least_batch, count=count, note=note)
        made = steps(
            loader,
            batch_size=self.batch_size,
            effective_batch_size=self.effective_batch_size,
            count=count,
            cuts=cuts,
            noise_scale=noise_scale,
            device=device,
        )
        # If `count` is given, the batches may have no tensor whose samples can be compared. With a
        # ScheduledBatchSampler, `steps` already compares the sizes.
        if count is not None or isinstance(getattr(loader, "batch_sampler", None), ScheduledBatchSampler):
            return made
        return Steps(compared(made, self.effective_batch_size), None)

    @contextmanager
    def budgets(self) -> Iterator[Tracker]:
        """Enforce the memory budgets of the plan's `cpu` devices while the caller trains the wrapped model.

        Yields:
            The tracker, with `live_bytes` and `peak_bytes` per device.

        Raises:
            DeviceError: The plan's devices have no budgets.
            OutOfMemoryError: The output of an operation does not fit. The error names the device.
        """
        from autosplit.runtime.memory_tracker import Tracker
        from autosplit.runtime.tracked_step import adopting_optimizers

        if not all(device.kind == "cpu" and device.budgeted for device in self.devices):
            raise DeviceError(
                f"the plan's devices are {', '.join(device.label for device in self.devices)}, but budgets need cpu "
                "devices with a memory budget. Tune with devices='cpu:2GiB,cpu:1GiB'.",
            )
        tracker = Tracker([device.label for device in self.devices], [device.capacity_bytes for device in self.devices])
        with tracker, adopting_optimizers(tracker):
            yield tracker


def chosen_step_text(plan: PlanRecord) -> str:
    """Return a sentence if the caller did not choose the samples per optimizer step. Otherwise an empty string."""
    if plan.effective_batch_sizes is not None:
        return ""
    sample = f" (your sample batch has {plan.sample_batch_size})" if plan.sample_batch_size else ""
    step = counted_text(plan.effective_batch_size, "sample")
    return f"autosplit chose {step} per optimizer step{sample}. To keep your own, pass effective_batch_size"
