"""Find the part of a plan that one process runs in a library's training loop: its batch size and its steps.

                      processes   samples per process      split of a process's samples over devices
torchrun, N ranks     N           the rank's batch size    none: one device per process
plain python          1           the whole batch          BalancedDataParallel, if there are several devices
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autosplit.ddp.device import device_for
from autosplit.ddp.find_plan import check_model, described, is_newest, print_newest
from autosplit.ddp.loader_steps import totals_over_ranks
from autosplit.ddp.rendezvous import Place, place_here
from autosplit.errors import DeviceError, InputError, PlanError, warn_user
from autosplit.parallel.batch_sampler import RankSlice, ScheduledBatchSampler
from autosplit.parallel.checkpointed import checkpoint_layers
from autosplit.plan.layout import Layout
from autosplit.plan.plan import Plan
from autosplit.plan.record import add_note_to_file, without_notes
from autosplit.plan.torchrun import PLAN_VARIABLE, refuse_simulated, trainable_ranks
from autosplit.profiles.validity import usable_here
from autosplit.solve.split import micro_batch_sizes, short_split
from autosplit.torch_versions import BATCH_NORMS


class NoPlanWarning(UserWarning):
    """There is no plan for this training, so the library trains as it would without autosplit."""


class Uncounted(list[int]):
    """Indices for a process without samples in a micro-batch. The process runs them with weight 0."""


class MarkingBatchSampler(ScheduledBatchSampler):
    """A `ScheduledBatchSampler` that yields `Uncounted` indices if this process has no samples in a micro-batch."""

    has_weights = True

    def __iter__(self) -> Iterator[list[int]]:
        sizes = [size for step in self.schedule[self.start_step :] for size in step.micro_batch_sizes]
        for batch, size in zip(super().__iter__(), sizes, strict=True):
            yield batch if size else Uncounted(batch)


@dataclass(frozen=True)
class Share:
    """Describe this process's part of a plan.

    Attributes:
        batch_sizes: Each process's samples of a full micro-batch.
        accumulation_steps: The number of micro-batches in a full optimizer step.
    """

    plan: Plan
    layout: Layout
    place: Place
    batch_sizes: tuple[int, ...]
    accumulation_steps: int
    effective_batch_size: int

    @property
    def batch_size(self) -> int:
        """This process's samples of a full micro-batch."""
        return self.batch_sizes[self.place.rank]

    @property
    def num_processes(self) -> int:
        """The number of processes of the job."""
        return len(self.batch_sizes)

    @property
    def wraps(self) -> bool:
        """Whether this process splits its samples over several devices."""
        return self.num_processes == 1 and len(self.plan.devices) > 1

    @property
    def cut_options(self) -> dict[str, Any]:
        """The arguments of `autosplit.tools.oom_cuts.Cuts` for this process's micro-batches."""
        return {
            "dim": self.plan.batch_dim,
            "least": self.layout.least_batch,
            "note": partial(add_note_to_file, self.plan),
        }

    def __str__(self) -> str:
        sizes = " + ".join(str(size) for size in (self.plan.split if self.wraps else self.batch_sizes))
        return (
            f"{sizes} samples per forward, {self.accumulation_steps} forwards per optimizer step of "
            f"{self.effective_batch_size}"
        )

    def batch_sampler(self, num_samples: int, **options: Any) -> MarkingBatchSampler:
        """Return a batch sampler that yields this process's part of every micro-batch.

        Args:
            **options: Options of `ScheduledBatchSampler`.
        """
        part = RankSlice(self.place.rank, self.batch_sizes)
        effective = self.effective_batch_size
        made = MarkingBatchSampler(num_samples, part.batch_size, effective, rank_slice=part, **options)
        if self.num_processes > 1:
            made.refuse_single_samples(self.batch_sizes, self.layout.least_batch)
        elif self.wraps:
            made.refuse_single_samples(self.layout.split, self.layout.least_batch)
        return made

    def refuse_uncounted_batchnorms(self, model: nn.Module, sampler: ScheduledBatchSampler) -> None:
        """Raise InputError if the model has BatchNorms and a process has no samples in some micro-batch.

        That process runs another process's sample. The loss has weight 0, but BatchNorms count the sample.
        """
        if not any(isinstance(part, BATCH_NORMS) for part in model.modules()):
            return
        for step in (*sampler.schedule[:1], *sampler.schedule[-1:]):
            last = micro_batch_sizes(step.num_samples, sampler.batch_size)[-1]
            shares = short_split(last, self.batch_sizes)
            if 0 in shares:
                raise InputError(
                    f"An optimizer step of {step.num_samples} samples ends with a micro-batch of {last}, split "
                    f"{shares}. A process without samples runs a sample of another process, and the model's "
                    "BatchNorms would count this sample. Drop a short last step (drop_last), tune for another "
                    "effective batch size, or train with autosplit.ddp, where BatchNorms do not count such samples.",
                )

    def check_model(self, model: Any) -> None:
        """Warn if the plan is for another model. Raise InputError if the user did not name the plan."""
        if not self.wraps:  # otherwise `Plan.wrap` warns
            is_named = not is_newest(self.plan)
            check_model(self.plan, model, is_named=is_named, rank=self.place.rank)

    def warn_of_other_precision(self, precision: str, setting: str) -> None:
        """Warn if the library's precision is not the plan's.

        Args:
            setting: The setting of the library that selects the plan's precision, for the message.
        """
        if precision != self.plan.precision:
            warn_user(
                f"The plan is for precision {self.plan.precision!r}, but the arguments set {precision}. The plan's "
                f"batch sizes may not fit, or may be slow. Set {setting}, or tune with the precision of the "
                "arguments.",
            )

    def checkpoint(self, model: nn.Module) -> None:
        """Checkpoint the plan's layers of a model, or raise PlanError if it lacks a layer."""
        if not self.wraps:  # otherwise `Plan.wrap` checkpoints them
            checkpoint_layers(model, self.plan.checkpointed)

    @property
    def device(self) -> torch.device:
        """The plan's device for this process."""
        return device_for(self.plan, self.place) if self.num_processes > 1 else self.plan.devices_here()[0]

    def over_processes(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """Return the sums of the numbers over the processes. All processes call this."""
        return [*numbers] if self.num_processes == 1 else totals_over_ranks(numbers, device)

    def refuse_other_job(self, num_processes: int, device: torch.device, tool: str) -> None:
        """Raise an error if the library's number of processes or its device differs from the plan's.

        Raises:
            PlanError: The numbers of processes differ. Each process would then train a separate model.
            DeviceError: The devices differ.
        """
        if num_processes != self.num_processes:
            raise PlanError(
                f"{tool} runs {_processes(num_processes)}, but the plan is for {_processes(self.num_processes)}. "
                "With a different number, each process would train a separate model. Start the script with autosplit "
                f"launch, which sets the number. With Lightning, also pass devices={self.num_processes}. With "
                "accelerate, create no PartialState before the Accelerator.",
            )
        wanted = self.device
        same_index = None in {wanted.index, device.index} or wanted.index == device.index
        if wanted.type != device.type or not same_index:
            raise DeviceError(
                f"{tool} uses {device} in process {self.place.rank}, but the plan's {self.batch_size} samples of "
                f"this process are for {wanted}. Set CUDA_VISIBLE_DEVICES to the plan's GPUs in the plan's order, "
                "or tune for the devices of this machine.",
            )


def share_of(plan: Plan, place: Place) -> Share:
    """Return a process's part of a plan. Raise PlanError for a different number of processes or a sharded model."""
    if place.world_size > 1:
        layout = trainable_ranks(plan)
        if layout.shard_size is not None:
            raise PlanError(
                "The plan is for a sharded model, but this library trains a whole model on each rank. The plan's batch "
                "sizes may not fit. Pass a plan from autosplit.tune, or train with autosplit.ddp and ctx.shard.",
            )
        count = len(layout.seats)
        if count != place.world_size:
            raise PlanError(
                f"The plan has {count} rank{'s' * (count > 1)}, but the job has {place.world_size}. Expected one "
                f"process per rank. Start the job with autosplit launch SCRIPT or torchrun --nproc-per-node {count} "
                "SCRIPT, or tune for the devices of this job.",
                code="world-size",
            )
        return Share(plan, layout, place, layout.split, layout.accumulation_steps, layout.effective_batch_size)
    refuse_simulated(plan, "train on")
    layout = plan.main
    if layout.strategy == "ddp" and len(layout.seats) > 1:
        raise PlanError(
            f"The plan is for {len(plan.devices)} processes, but there is only this one. Start the script with "
            "autosplit launch, or tune with strategy='balanced'.",
        )
    return Share(plan, layout, place, (layout.batch_size,), layout.accumulation_steps, layout.effective_batch_size)


def find_share(profile: Plan | str | os.PathLike[str] | None, *, parameters: int | None) -> Share | None:
    """Find the plan, and return this process's part of it. Return None if there is no plan.

    Args:
        profile: A plan, or the file of a plan. None for the file that AUTOSPLIT_PROFILE names, or else for the newest
            saved plan for this machine, this number of processes and a model of this size.
        parameters: The number of parameters of the model. None to ignore saved plans.
    """
    place = place_here()
    given = os.environ.get(PLAN_VARIABLE) if profile is None else profile
    if given:
        return share_of(given if isinstance(given, Plan) else Plan.load(given), place)
    if profile is not None:
        raise InputError(
            f"plan is {profile!r}. Expected a plan or a plan file. Leave plan out to use the saved plan.",
        )
    if parameters is None:
        return None
    of_size = ((path, plan) for path, plan in usable_here() if plan.workload.get("parameters") == parameters)
    usable = [*itertools.islice((one for one in of_size if _is_for(one[1], place)), 2)]
    if not usable:
        return None
    path, newest = usable[0]
    if place.rank == 0 and len({without_notes(plan).to_json() for _, plan in usable}) > 1:
        print_newest(described(newest) if newest.ddp is not None else str(newest), path)
    return share_of(newest, place)


def warn_of_no_plan() -> None:
    """Warn that there is no plan."""
    warn_user(
        "autosplit found no plan, so all devices get equal batches. Run autosplit tune FILE, or pass plan=. With "
        "model=, autosplit looks for a saved plan of that model.",
        NoPlanWarning,
    )


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def _is_for(plan: Plan, place: Place) -> bool:
    if place.world_size > 1:
        return plan.ddp is not None and len(plan.devices) == place.world_size
    return plan.balanced is not None or len(plan.devices) == 1
