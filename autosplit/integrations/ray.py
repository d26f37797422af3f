"""Tune and train with Ray Train (version 2) on nodes with different devices.

    from autosplit.integrations import ray as autosplit_ray

    def train(config):
        with autosplit_ray.setup(config["plan"]) as ctx:  # the batch size of this worker's device
            model = ctx.wrap(Net())  # from here on as with autosplit.ddp
            ...

    plan = autosplit_ray.tune(workload, scaling_config=ScalingConfig(num_workers=2, use_gpu=True))
    TorchTrainer(train, train_loop_config={"plan": plan}, scaling_config=autosplit_ray.scaling_config(plan)).fit()

Ray starts the workers, creates the process group and chooses each worker's device. Ray may renumber the workers after
a failure. So autosplit finds a worker's batch size by its device, not by its rank.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
from ray.train import Checkpoint, ScalingConfig, TrainingFailedError
from torch import distributed as dist

from autosplit.ddp.context import Context
from autosplit.ddp.device import gathered_objects
from autosplit.ddp.find_plan import plan_for_job
from autosplit.ddp.setup import setup as join
from autosplit.devices.accelerator import visible_devices
from autosplit.errors import AutosplitError, DeviceError, InputError, RankFailedError
from autosplit.plan.layout import PlanDevice
from autosplit.plan.plan import Plan
from autosplit.text import parse_bytes
from autosplit.tools.other_devices import RankDevice, plan_for_devices
from autosplit.tuning import tune as tuning

MEMORY_LABEL = "autosplit/memory"
"""Label of a Ray node without GPUs: the memory budget of each of its workers, such as ``"2GiB"``."""

GPU_LABEL = "ray.io/accelerator-type"
"""Label that Ray gives to a node with GPUs."""

_FILE = "autosplit.pt"


@contextmanager
def setup(plan: Plan | str | os.PathLike[str]) -> Iterator[Context]:
    """Give a Ray Train worker the batch size of its device. Call it in `train_loop_per_worker`.

    The context is that of `autosplit.ddp.setup`, in Ray's process group and on Ray's device. If an elastic job has more
    or fewer devices than the plan, the plan is solved again from its measured times and ceilings. The effective batch
    size stays the same. `ctx.plan` is the plan of this job.

    Args:
        plan: A plan with DDP ranks, or its file, which every node must have.

    Yields:
        The worker's `Context`.

    Raises:
        InputError: There is no process group, because the function was not started by a `TorchTrainer`.
        DeviceError: A worker has a device of a kind that the plan lacks.
        PlanError: The plan has no ranks. Or its optimizer step does not fit on the workers' devices.
        RankFailedError: Another worker failed.
    """
    _require_worker("setup")
    found = plan_for_devices(plan_for_job(plan)[0], gathered_objects(_device_here()))
    with join(found) as ctx:
        yield ctx


def report(ctx: Context, metrics: Mapping[str, Any] | None = None, **parts: Any) -> None:
    """Save a checkpoint and report it with `ray.train.report`. Every worker must call this.

        autosplit_ray.report(ctx, {"loss": step.loss}, model=model, optimizer=optimizer, sampler=loader.batch_sampler)

    Call it after `optimizer.step()`. With the sampler among the parts, a resumed run continues at the next sample.

    Args:
        metrics: See `ray.train.report`.
        **parts: See `Context.save_checkpoint`.

    Raises:
        CheckpointError: The checkpoint was not written. Raised on rank 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        ctx.save_checkpoint(Path(folder) / _FILE, **parts)
        checkpoint = Checkpoint.from_directory(folder) if ctx.rank == 0 else None
        ray.train.report(dict(metrics or {}), checkpoint=checkpoint)


def resume(ctx: Context, **parts: Any) -> dict[str, Any]:
    """Load the last checkpoint that `report` saved, if there is one. Every worker must call this.

    The workers may have other devices and batch sizes than those that saved the checkpoint.

    Args:
        **parts: The same names as in `report`. See `Context.load_checkpoint`.

    Returns:
        The plain values of the checkpoint, such as a loss. Empty if there is no checkpoint.

    Raises:
        CheckpointError: The checkpoint is damaged, or is of another model or optimizer. Nothing was loaded.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return {}
    with checkpoint.as_directory() as folder:
        return ctx.load_checkpoint(Path(folder) / _FILE, **parts)


def scaling_config(
    plan: Plan,
    num_workers: int | tuple[int, int] | None = None,
    *,
    labels: Mapping[str, Mapping[str, str]] | None = None,
    **options: Any,
) -> ScalingConfig:
    """Return a `ScalingConfig` with a worker for each device of the plan, or with another number of workers.

    Each worker has a label selector for its kind of device: the accelerator type that Ray detects for NVIDIA GPUs, and
    `MEMORY_LABEL` for CPUs with a memory budget.

    Args:
        num_workers: Number of workers, or the smallest and the largest number of an elastic job. Each worker then may
            have any kind of device of the plan, and there may be more workers than devices in the plan. `setup` solves
            the plan again for them. Default: one worker for each device, with exactly the plan's devices.
        labels: Label selectors by the device's name in the plan (`plan.devices[0].name`), instead of the default ones.
        **options: Other arguments of `ScalingConfig`.

    Raises:
        DeviceError: The plan is for devices other than NVIDIA GPUs and CPUs, and `labels` lacks their name.
        PlanError: The plan can't be solved again for so many workers. For example, it is for a sharded model, or its
            optimizer step does not fit on so few workers.
    """
    selectors = [_selector(device, labels or {}) for device in plan.devices]
    options = {"use_gpu": plan.devices[0].kind == "cuda", **options}
    if num_workers is None:
        return ScalingConfig(num_workers=len(selectors), label_selector=selectors, **options)
    # Ray starts fewer workers with the first selectors of a list. So use one selector that all devices match.
    common = [key for key in selectors[0] if all(key in one for one in selectors)]
    kinds = {key: dict.fromkeys(one[key] for one in selectors) for key in common}
    any_kind = {key: f"in({','.join(values)})" for key, values in kinds.items()}
    config = ScalingConfig(num_workers=num_workers, label_selector=any_kind, **options)
    for count in {config.min_workers, config.max_workers} - {0}:
        plan_for_devices(plan, _largest_devices(plan, count))  # raises if the plan can't be solved again
    return config


def tune(
    model_or_workload: Any, *args: Any, scaling_config: ScalingConfig, run_config: Any = None, **options: Any
) -> Plan:
    """Tune DDP in a Ray Train job with one worker for each device, and return the plan to the driver.

    The workers measure their devices at the same time, rank 0 searches, and all workers run the trials together. Each
    node saves a copy of the plan.

    Args:
        model_or_workload: See `autosplit.tune`. A function that returns a `Workload` is called on every worker.
        *args: See `autosplit.tune`.
        scaling_config: The workers. `label_selector` chooses the nodes. Ray's device is used, or on a CPU node the
            memory budget in the node's `MEMORY_LABEL`.
        run_config: A `ray.train.RunConfig`.
        **options: Keyword arguments of `autosplit.tune`, except `devices` and `strategy`.

    Raises:
        InputError: `devices` or `strategy` is given.
        AutosplitError: The tuning failed on a worker. See `autosplit.tune`.
        ray.train.TrainingFailedError: Ray failed, for example because a node was lost.
    """
    given = sorted({"devices", "strategy"} & options.keys())
    if given:
        raise InputError(
            f"{given[0]}={options[given[0]]!r} was passed. Ray chooses the devices, and the strategy is 'ddp'. Leave "
            "the argument out, and choose nodes by ScalingConfig(label_selector=...).",
        )
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        _tune_on_worker,
        train_loop_config={"args": (model_or_workload, *args), "options": options},
        scaling_config=scaling_config,
        run_config=run_config,
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        failures = [*getattr(error, "worker_failures", {}).values()]
        own = [failure for failure in failures if isinstance(failure, AutosplitError)]
        own.sort(key=lambda failure: isinstance(failure, RankFailedError))  # the cause before its consequences
        if own:
            raise own[0] from error
        raise
    return Plan.from_json(result.return_value, source="the result of Ray's rank 0")


def _tune_on_worker(config: dict[str, Any]) -> str:
    _require_worker("tune")
    device = _device_here()
    workers = gathered_objects(f"{device} on node {ray.util.get_node_ip_address()}")
    spec = device.label if device.budget_bytes is None else f"{device.label}:{device.budget_bytes}B"
    # `autosplit.tune` expects a CPU for each rank of this machine, and takes the one at its local rank.
    count = int(os.environ["LOCAL_WORLD_SIZE"]) if device.budget_bytes is not None else 1
    try:
        plan = tuning.tune(*config["args"], devices=",".join([spec] * count), strategy="ddp", **config["options"])
    except AutosplitError as error:
        # The message names a rank or its device, and the user needs the node.
        ranks = ", ".join(f"{rank} is {worker}" for rank, worker in enumerate(workers))
        error.args = (f"{error}\nReported by rank {dist.get_rank()}. Ranks: {ranks}.",)
        raise
    return plan.to_json()


def _largest_devices(plan: Plan, count: int) -> list[RankDevice]:
    largest_first = [
        one.device for one in sorted(plan.main.seats, key=lambda one: one.ceiling.batch_size, reverse=True)
    ]
    return [
        RankDevice(device.label, device.name, budget_bytes=device.memory_bytes if device.budgeted else None)
        for device in islice(cycle(largest_first), count)
    ]


def _require_worker(what: str) -> None:
    if not dist.is_initialized():
        raise InputError(
            f"autosplit.integrations.ray.{what} found no process group. Expected a worker of "
            "ray.train.torch.TorchTrainer. Call it in train_loop_per_worker.",
        )


def _device_here() -> RankDevice:
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        memory = ray.get_runtime_context().get_node_labels().get(MEMORY_LABEL)
        return RankDevice("cpu", "cpu", budget_bytes=None if memory is None else _budget(str(memory)))
    own = visible_devices(device.type)[device.index]
    return RankDevice(str(device), own.name, own.uuid)


def _budget(memory: str) -> int:
    """Return the bytes of a node's label. Refuse a label that differs from the selector of `scaling_config`."""
    nbytes = parse_bytes(memory)
    if memory != _size(nbytes):
        raise InputError(
            f"The label {MEMORY_LABEL} of node {ray.util.get_node_ip_address()} is {memory}. Expected "
            f"{_size(nbytes)}, because Ray compares text. Start the node with --labels={MEMORY_LABEL}={_size(nbytes)}.",
        )
    return nbytes


def _selector(device: PlanDevice, labels: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    if device.name in labels:
        return dict(labels[device.name])
    if device.kind == "cpu":
        return {MEMORY_LABEL: _size(device.memory_bytes)} if device.budgeted else {}
    if device.kind != "cuda":
        raise DeviceError(
            f"The plan's device is {device.name}, whose label in Ray is unknown. Expected an NVIDIA GPU or a CPU. Pass "
            f"the label of its nodes as labels={{{device.name!r}: {{'KEY': 'VALUE'}}}}.",
        )
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    # Ray's detection calls this function for the driver's name of the GPU.
    return {GPU_LABEL: NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(device.name)}


def _size(nbytes: int) -> str:
    unit, factor = next(
        (unit, factor)
        for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
        if nbytes % factor == 0
    )
    return f"{nbytes // factor}{unit}"
