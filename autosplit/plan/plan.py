"""The plan: what `tune` returns, its record with what one does with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from autosplit.accelerators import is_accelerator, moved
from autosplit.errors import DeviceError
from autosplit.plan.explanation import Explained, Explanation
from autosplit.plan.record import PlanRecord

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from torch import nn
    from torch.utils.data import DataLoader

    from autosplit.parallel.balanced import BalancedDataParallel
    from autosplit.parallel.batch_sampler import ScheduledBatchSampler
    from autosplit.parallel.noise_estimate import NoiseEstimate
    from autosplit.parallel.optimizer_steps import OptimizerStep
    from autosplit.parallel.token_sampler import TokenBatchSampler
    from autosplit.plan.exported import Export
    from autosplit.plan.goodput import Goodput
    from autosplit.plan.split_comparison import SplitComparison
    from autosplit.runtime.memory_tracker import Tracker


@dataclass(frozen=True, repr=False)
class Plan(PlanRecord):
    """How much of the batch goes on which device, how big it may be, and how many accumulation steps.

    Its attributes are those of `record.PlanRecord`.
    """

    def __hash__(self) -> int:
        """Hash the numbers of the plan, so that it may be a key: equal plans have equal hashes.

        Some of the other fields are dicts, which have no hash.
        """
        return hash((self.split, self.accumulation_steps, self.effective_batch_size, self.samples_per_s))

    def _repr_html_(self) -> str:
        """Return the plan as a table, which notebooks show in its place."""
        from autosplit.text import rate_text, size_text, table_html

        several = len(self.devices) > 1
        facts = [("split", str(self.split)), ("gpu0_bsz", str(self.gpu0_bsz))] if several else []
        facts += [
            ("batch_size", f"{self.batch_size:,}"),
            ("accumulation_steps", f"{self.accumulation_steps:,}"),
            ("effective_batch_size", f"{self.effective_batch_size:,}"),
            ("throughput", rate_text(self.samples_per_s) + (" (simulated)" if self.simulated else "")),
        ]
        rows = [
            (
                device.label if device.kind == "cpu" else f"{device.label} {device.name}",
                f"{device.share:,}",
                f"{size_text(device.peak_bytes)} of {size_text(device.capacity_bytes)}",
                f"{ceiling:,}",
            )
            for device, ceiling in zip(self.devices, self.ceilings, strict=True)
        ]
        remarks = [] if self.complete else ["interrupted: the best so far"]
        remarks += ["simulated: predicted for cards that are not here"] if self.simulated else []
        return table_html("autosplit plan", facts, ("device", "share", "memory", "ceiling"), rows, remarks)

    def explain(self) -> Explanation:
        """Say why the plan is what it is: what bounds it, what else there is, how good its fit was.

        It works on a loaded plan, too: from the stored numbers, running nothing. For many devices it takes seconds,
        unless it is kept in the plan: see `with_explanation`.

        Returns:
            Plain numbers; `str()` of them is the text for people.
        """
        kept = self.explained
        if kept is not None and kept.of == self.digest():
            told = kept.explanation  # whoever changes the file can write its digest, too
            if all(getattr(told, name) == value for name, value in self.repeated().items()):
                return told
        from autosplit.plan.explain import explanation_of

        return explanation_of(self)

    def with_explanation(self) -> Plan:
        """Return the plan with its explanation in it, so that who reads it from a file has it at once."""
        return replace(self, explained=Explained(self.digest(), self.explain())).kept_at(self.path)

    def compare_with(self, split: int | Sequence[int], accumulation_steps: int = 1) -> SplitComparison:
        """Hold another configuration against the plan: its samples/s and its memory, predicted by the plan's fits.

        Nothing is run, so that a loaded plan answers, too; `autosplit.measure` runs a configuration.

        Args:
            split: Samples per device in one forward; of DDP alone (``strategy="ddp"``), each rank's.
            accumulation_steps: Forwards per optimizer step, each of the whole split.

        Returns:
            Plain numbers; `str()` of them is the text for people.

        Raises:
            InputError: Not a number for each device, or shares that nothing trains on.
            PlanError: The plan holds no fit.
        """
        from autosplit.plan.split_comparison import compared_split

        return compared_split(self, split, accumulation_steps)

    def goodput(self, noise_scale: NoiseEstimate | float) -> Goodput:
        """Recommend the effective batch that trains fastest: samples/s times what a sample still brings.

            goodput = plan.goodput(noise_scale)
            goodput.plot().savefig("goodput.pdf")

        Nothing is run; the samples/s are those that the plan's fit predicts of its own split.

        Args:
            noise_scale: The `autosplit.NoiseScale` of a training run, or a number of samples. Divide a noise scale
                that counts tokens by the tokens of a sample.

        Returns:
            Plain numbers; `str()` of them is a line for people.

        Raises:
            InputError: The noise scale is not finite: too few steps, or no gradient stands out of the noise.
            PlanError: The plan holds no fit.
        """
        from autosplit.plan.goodput import goodput_of

        return goodput_of(self, noise_scale)

    def plot(self) -> Figure:
        """Draw the plan for a notebook or a paper: the memory of each device, and samples/s over the batch.

            plan.plot().savefig("plan.pdf")

        The charts are those of `autosplit report`; the curve is what the plan's fit predicts of the fastest split of
        each batch, and is left out where the plan holds no fit.

        Returns:
            A figure of matplotlib, 9 inches wide, which notebooks show by itself; pyplot is not touched.

        Raises:
            InputError: matplotlib is not installed (the extra ``plot``).
        """
        from autosplit.plan.charts import figure_of

        return figure_of(self)

    def export(self, to: str, *, path: str | os.PathLike[str] | None = None) -> Export:
        """Turn the plan into the settings of another tool.

            print(plan.export("transformers"))
            arguments = TrainingArguments(**plan.export("transformers").settings["TrainingArguments"])

        transformers, accelerate and Lightning give all ranks one batch size: the nearest even plan is computed for
        them, and its notes say what is lost.

        Args:
            to: ``"transformers"``, ``"accelerate"``, ``"lightning"``, ``"torchrun"``, ``"env"`` or ``"json"``.
            path: The plan's file, which ``"torchrun"`` and ``"env"`` name. Default: its own, `path`.

        Returns:
            `settings`, `text`, `exact` and `notes`; `str()` of it is the text to paste.

        Raises:
            InputError: There is no such format.
            PlanError: The tool runs DDP, and the plan has no ranks.
            DeviceError: ``"torchrun"`` for simulated cards.
        """
        from autosplit.plan.export import export

        return export(self, to, path=path)

    # Down to the wrappers

    def devices_here(self) -> tuple[torch.device, ...]:
        """Return where this process finds the plan's devices: by their UUIDs, on a twin of the machine by their names.

        Raises:
            DeviceError: One is not here.
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
                f"the plan's devices are {wanted}, and those that are visible are: {seen}; expected the same cards, or "
                "cards of the same names in the same order; set CUDA_VISIBLE_DEVICES as it was when the plan was made, "
                "or tune here",
                code="plan-devices-absent",
            )
        return tuple(torch.device(kind, index) for index in indices)

    def wrap(self, model: nn.Module) -> BalancedDataParallel:
        """Wrap a model so that each device gets its share.

        Args:
            model: It is moved to the first device; layers that the plan checkpoints are checkpointed from then on.

        Returns:
            The wrapper; `wrapper.module` is the model.

        Raises:
            DeviceError: The plan is for simulated cards, or its cards are not here.
            InputError: The model is wrapped already, or moving it gave it new parameters and an optimizer has the old.
            PlanError: The model lacks a layer that the plan checkpoints.

        Warns:
            OtherModelWarning: The plan was made for a model of another size.
        """
        from autosplit.parallel.balanced import BalancedDataParallel
        from autosplit.parallel.checkpointed import checkpoint_layers
        from autosplit.plan.other_model import refuse_wrapped, warn_of_other_model
        from autosplit.plan.torchrun import refuse_simulated

        refuse_simulated(self, "wrap a model")
        refuse_wrapped(model)
        warn_of_other_model(self, model, stacklevel=2)
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
            reduce=self.reduce,
        )

    @property
    def reduce(self) -> Literal["samples", "tokens", "next tokens", "sum"] | None:
        """How `wrap` combines scalar outputs of the devices, as the checks found it; None where they did not."""
        if self.loss_reduction == "sum":
            return "sum"
        return next((check.reduce for check in self.checks if check.reduce is not None), None)

    def batch_sampler(
        self, num_samples: int, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> ScheduledBatchSampler:
        """Return a batch sampler that hands out the plan's micro-batches, `effective_batch_size` samples a step.

        Args:
            num_samples: Length of the data set.
            shuffle: Draw in a new order each epoch: `steps` counts them, or `set_epoch` chooses one.
            seed: Of that order.
            drop_last: Leave out the epoch's last step where it is short of samples.

        Raises:
            InputError: The short last forward has a sample too few for the model's BatchNorms.
        """
        from autosplit.parallel.batch_sampler import ScheduledBatchSampler

        made = ScheduledBatchSampler(
            num_samples, self.batch_size, self.effective_batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        made.refuse_single_samples(self.split, 1 if self.region is None else self.region.least_share)
        return made

    def token_sampler(self, lengths: Any, *, shuffle: bool = False, seed: int = 0) -> TokenBatchSampler:
        """Return a batch sampler of samples that differ in length: batches of like length, as many samples as fit.

            sampler = plan.token_sampler([len(sample) for sample in dataset], shuffle=True)
            loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=pad)
            for step in plan.steps(loader):
                ...

        Where an effective batch was asked for, each step has exactly as many samples, drawn as `batch_sampler` draws
        them. Otherwise each batch is a step. `steps` knows each batch's split, and weights samples alike. Resuming is
        as with `batch_sampler`; without an effective batch, with the same lengths and the same plan only.

        Args:
            lengths: Of each sample, as `tune` was given them: a list, an array or a tensor.
            shuffle: Draw in a new order each epoch: `steps` counts them, or `set_epoch` chooses one.
            seed: Of that order.

        Raises:
            PlanError: The plan was not tuned for lengths.
            InputError: A length is above those that it was tuned for, or no whole number of 1 or more; or the model
                has BatchNorms, which need more than one sample and count padding.
        """
        from autosplit.parallel.token_sampler import TokenBatchSampler

        made = TokenBatchSampler(
            self.required_lengths(),
            lengths,
            self.split,
            self.effective_batch_size,
            keeps_effective=self.effective_batch_sizes is not None,
            shuffle=shuffle,
            seed=seed,
        )
        made.refuse_single_samples(self.split, 1 if self.region is None else self.region.least_share)
        return made

    @property
    def max_tokens(self) -> tuple[int, ...]:
        """The tokens, padding included, that each device holds at any length: for trainers that want one number.

        It holds for batches padded to the shortest length that was looked at (`lengths.points`) or more.

        Raises:
            PlanError: The plan was not tuned for lengths.
        """
        plan = self.required_lengths()
        return tuple(map(plan.tokens_of, self.split))

    def loader(
        self, dataset: Any, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False, **options: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader of the plan's micro-batches, with the settings found where `tune` was given a loader.

        Args:
            dataset: With an index and a length.
            shuffle: Draw in a new order each epoch: `steps` counts them, or ``loader.batch_sampler.set_epoch``.
            seed: Of that order.
            drop_last: Leave out the epoch's last step where it is short of samples.
            **options: Of ``torch.utils.data.DataLoader``, in place of what was found.

        Raises:
            InputError: The short last forward has a sample too few for the model's BatchNorms.
        """
        from torch.utils.data import DataLoader

        sampler = self.batch_sampler(len(dataset), shuffle=shuffle, seed=seed, drop_last=drop_last)
        return DataLoader(dataset, batch_sampler=sampler, **{**self.loader_keywords, **options})

    def steps(
        self,
        loader: Iterable[Any],
        *,
        count: Callable[[Any], float | torch.Tensor] | None = None,
        on_oom: Literal["raise", "cut"] = "raise",
        noise_scale: NoiseEstimate | None = None,
    ) -> Iterator[OptimizerStep]:
        """Cut a loader into optimizer steps, each an iterable of its micro-batches.

            for step in plan.steps(loader):
                for inputs, targets in step:
                    step.backward(loss_fn(model(inputs), targets.to(model.output_device)))
                optimizer.step()
                optimizer.zero_grad()

        Args:
            loader: A DataLoader with the plan's `batch_sampler`, or any iterable of batches.
            count: Return what the mean loss of a batch divides by, if that is not its samples: an int (labels that are
                no padding), a float, or a tensor of one element (the sum of the class weights of its labels). A batch
                that counts 0 contributes nothing.
            on_oom: ``"cut"`` runs a micro-batch that runs out of memory within ``with step.attempt():`` again in two
                parts, see `OptimizerStep.attempt`. Three of them, and for as long as the loader lives those of their
                size are cut before they run; the plan's file gets a note of it. What is not a tensor of the batch
                goes whole into each part.
            noise_scale: An `autosplit.NoiseScale`, which estimates the gradient noise scale from one norm of each
                micro-batch's gradient. Pass the same object in every epoch, and hand it to `goodput`. Replicas are
                then copied again for each micro-batch, because kept replicas add up gradients.

        Raises:
            InputError: While iterating, with `noise_scale`: the first step has a single micro-batch, or reentrant
                checkpointing hides parameters.

        Warns:
            CutWarning: The first time that a micro-batch is cut: why, and what to change.
            EffectiveBatchWarning: The loader's batches add up to steps of another size than the plan's effective batch.
        """
        from autosplit.parallel.batch_sampler import ScheduledBatchSampler
        from autosplit.parallel.effective_batch import compared
        from autosplit.parallel.oom_cuts import cuts_for
        from autosplit.parallel.optimizer_steps import steps

        least = 1 if self.region is None else self.region.least_share
        cuts = cuts_for(loader, on_oom, dim=self.batch_dim, least=least, count=count, note=self.note)
        made = steps(
            loader,
            batch_size=self.batch_size,
            effective_batch_size=self.effective_batch_size,
            count=count,
            cuts=cuts,
            noise_scale=noise_scale,
        )
        # A count is in other units, and `steps` has compared the sizes of a plan's own sampler.
        if count is not None or isinstance(getattr(loader, "batch_sampler", None), ScheduledBatchSampler):
            return made
        return compared(made, self.effective_batch_size, stacklevel=1)

    @contextmanager
    def budgets(self) -> Iterator[Tracker]:
        """Enforce the budgets of the plan's `cpu` devices around training of one's own with the wrapped model.

        Yields:
            The tracker, with `live_bytes` and `peak_bytes` per device.

        Raises:
            DeviceError: The plan's devices have no budgets.
            OutOfMemoryError: From the op whose output no longer fits; it names the device.
        """
        from autosplit.runtime.memory_tracker import Tracker
        from autosplit.runtime.tracked_step import adopting_optimizers

        if not all(device.kind == "cpu" and device.budgeted for device in self.devices):
            raise DeviceError(
                f"the plan's devices are {', '.join(device.label for device in self.devices)}; expected cpu devices "
                "with budgets; tune with devices='cpu:2GiB,cpu:1GiB'",
                code="plan-without-budgets",
            )
        tracker = Tracker([device.label for device in self.devices], [device.capacity_bytes for device in self.devices])
        with tracker, adopting_optimizers(tracker):
            yield tracker
