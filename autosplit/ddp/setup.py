"""Set up one process of a DDP job: find the plan, join the process group, and compare the ranks' plans."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from autosplit.accelerators import backend, is_accelerator
from autosplit.addons import addon
from autosplit.ddp.context import Context
from autosplit.ddp.device import agreed_backend, device_for, told_by_all
from autosplit.ddp.failure import TOLD_AFTER_S, Watch, abort_group, group_sockets, open_sockets, told_if_long
from autosplit.ddp.find_plan import names_plan, plan_for_job
from autosplit.ddp.progress import Progress
from autosplit.ddp.rendezvous import (
    Place,
    explain_loopback,
    explain_taken_port,
    meeting_place,
    place_here,
)
from autosplit.ddp.user_collectives import user_collectives
from autosplit.errors import InputError, PlanError
from autosplit.launcher import end_with_launcher
from autosplit.plan.plan import Plan
from autosplit.plan.record import without_notes
from autosplit.plan.torchrun import PLAN_VARIABLE


@contextmanager
def setup(
    profile: Plan | str | os.PathLike[str] | None = None, *, elastic: bool = False, timeout_s: float = 600.0
) -> Iterator[Context]:
    """Join the DDP job as the rank that torchrun or Slurm gave this process, with the plan's settings.

        with autosplit.ddp.setup("plan.json") as ctx:  # torchrun --nproc-per-node 2 train.py
            model = ctx.wrap(model)

    Without torchrun or Slurm, the job has one process. The device is the GPU that the plan names, for any value of
    CUDA_VISIBLE_DEVICES. The backend is torch's default for the devices (nccl on GPUs of NVIDIA and AMD). It is gloo on
    CPUs, if two ranks share a GPU, or if torch lacks the default. An existing process group is not destroyed. A new
    group is destroyed at the end of the block. After that, wrapped models still have their `module` and `state_dict`,
    and run forwards in `eval()` or without gradients.

    If an exception other than `sys.exit(0)` ends a rank's block, the rank notifies the others. They detect a killed
    rank at once, and a machine or network that went down after 15 s. Their collectives are then aborted and they raise
    RankFailedError. A process that has not left within 10 s is killed, with exit code 1. A message on stderr names a
    stopped rank (SIGSTOP) after 12 s, and a rank that never joins after 15 s. If an existing group uses gloo and the
    failed rank is alive, the other ranks' collectives cannot be aborted, so these ranks are killed. On Linux, a rank
    ends with the torchrun or `autosplit launch` that started it, even if that process is killed.

    Args:
        profile: A plan, or a file that `Plan.save` wrote. Default: the file in the environment variable
            AUTOSPLIT_PROFILE, or else the newest saved plan that fits this machine and this job.
        elastic: Whether the job may have other devices than the plan. If it has, the plan is solved again from its
            measured times for the devices that are there, with the same samples per optimizer step. Every kind of
            device must be in the plan. `ctx.plan` is the plan in use. See `torchrun --nnodes 1:4`.
        timeout_s: The longest time in seconds that a rank waits for the others in a collective. Then its error names
            the place of each rank, and the job ends. Increase it if one rank works alone for longer, for example in
            an evaluation. It does not apply to a process group that exists already.

    Yields:
        The rank's `Context`.

    Raises:
        PlanError: There is no plan, the plan cannot be read, its number of ranks is not the number of processes, or
            the ranks have different plans. With `elastic`: the plan did not measure a rank's kind of device, or the
            optimizer step does not fit the devices.
        DeviceError: The plan is for simulated GPUs, or this rank's device does not exist.
        InputError: A variable of torchrun or Slurm is missing or wrong. Or a machine resolves its own name to an
            address that the other machines cannot reach.
        RankFailedError: Another rank failed, or a collective timed out. Raised at the end of the block.

    Warns:
        UnwatchedWarning: The separate connection to rank 0 failed, so failures of ranks are not detected.
    """
    if not timeout_s > 0:
        raise InputError(
            f"timeout_s is {timeout_s!r}. Expected seconds above 0. Leave timeout_s out for 600.", code="timeout-range"
        )
    end_with_launcher()
    place = place_here()
    plan, _ = plan_for_job(profile, None if elastic else place.world_size)
    store = None
    if elastic:
        store = None if dist.is_initialized() else _joined_store(place)
        plan = addon("plan_for_job_devices")(plan, place, store)
    if place.world_size != len(plan.ddp.ranks):
        count = len(plan.ddp.ranks)
        raise PlanError(
            f"The plan has {count} rank{'s' * (count > 1)}, but the job has {place.world_size}. Expected one "
            f"process per rank. Start the job with autosplit launch SCRIPT or torchrun --nproc-per-node {count} "
            "SCRIPT, or tune for the devices of this job. If machines come and go, pass elastic=True to setup.",
            code="world-size",
        )
    device = device_for(plan, place)
    if is_accelerator(device.type):
        backend(device.type).set_device(device)  # NCCL sends from the current device
    watch = Watch(place.rank, place.world_size)
    progress = Progress(place.rank, place.world_size, timeout_s)
    watch.on_sign = progress.print_if_late
    ctx = Context(plan, place.rank, device, progress, is_named=names_plan(profile))
    try:
        with _process_group(place, watch, ctx, store, progress, timeout_s) as sockets:
            watch.begin(sockets)
            with watch.telling(), progress.explained(), user_collectives(compares=True):
                agree_on(plan, place.rank)
                yield ctx
    finally:
        watch.end()


@contextmanager
def _process_group(
    place: Place, watch: Watch, ctx: Context, store: Any, progress: Progress, timeout_s: float
) -> Iterator[Mapping[int, str]]:
    if dist.is_initialized():
        yield {}
        return
    store = store or _joined_store(place)
    with _joining(place):
        chosen = agreed_backend(store, place, ctx.device, ctx.plan)
        before = open_sockets()
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(chosen, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    progress.store = dist.PrefixStore("autosplit/progress", store) if place.world_size > 1 else None  # type: ignore[attr-defined]
    try:
        yield group_sockets(before)
    finally:
        progress.store = None  # a reference would keep the store's thread alive
        ctx.part_from_group()
        if watch.failed:
            with suppress(Exception):  # an error here must not hide the failure of the rank
                abort_group(dist.group.WORLD)
                dist.destroy_process_group()
        else:
            dist.destroy_process_group()


@contextmanager
def _joining(place: Place) -> Iterator[None]:
    try:
        with told_if_long(
            f"Rank {place.rank} of {place.world_size} has waited {TOLD_AFTER_S:.0f} s in autosplit.ddp.setup, but "
            "some ranks are missing. A missing rank may have ended before setup. Look for its error."
        ):
            yield
    except RuntimeError as error:
        explain_loopback(error, place)
        explain_taken_port(error, place)
        raise


def _joined_store(place: Place) -> Any:
    with _joining(place):
        return meeting_place(place)


def agree_on(plan: Plan, rank: int) -> None:
    """Raise PlanError on all ranks if their plans differ. Ignore notes, which only one rank keeps."""
    digest = hashlib.sha256(without_notes(plan).to_json().encode()).hexdigest()
    digests = told_by_all(digest)
    others = [str(other) for other, found in enumerate(digests) if found != digests[0]]
    if others:
        raise PlanError(
            f"Rank {rank} of {len(digests)} stops: the plan of rank {', '.join(others)} differs from rank 0's. All "
            f"ranks need the same plan. Give every rank the same file ({PLAN_VARIABLE}).",
            code="ranks-plans-differ",
        )
