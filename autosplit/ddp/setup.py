"""Set up one process of a DDP job: find the plan, join the process group, and compare the ranks' plans."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from autosplit.accelerators import backend, is_accelerator
from autosplit.addons import addon
from autosplit.ddp.context import Context
from autosplit.ddp.device import agreed_backend, device_for, gathered_objects
from autosplit.ddp.failure import abort_group, is_failure, recorded
from autosplit.ddp.find_plan import names_plan, plan_for_job
from autosplit.ddp.group_end import keep_backend
from autosplit.ddp.progress import Progress
from autosplit.ddp.rendezvous import Place, meeting_place, place_here, store_of_group
from autosplit.ddp.user_collectives import user_collectives
from autosplit.errors import InputError, PlanError
from autosplit.launcher import end_with_launcher
from autosplit.plan.plan import Plan
from autosplit.plan.record import without_notes
from autosplit.plan.torchrun import PLAN_VARIABLE, trainable_ranks

_JOINS = itertools.count()
"""Counts the calls of `setup`, because a process group may serve several. The numbers agree on all ranks."""


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

    If an exception other than `sys.exit(0)` ends a rank's block, the rank writes it into torchrun's error file, and
    torchrun's report shows it. torchrun, ``srun --kill-on-bad-exit=1`` and Ray end the other ranks. If another rank's
    failure breaks a collective first, the waiting rank raises RankFailedError with the cause. On Linux, a rank ends
    with the torchrun or `autosplit launch` that started it, even if that process is killed.

    Args:
        profile: A plan, or a file that `Plan.save` wrote. Default: the file in the environment variable
            AUTOSPLIT_PROFILE, or else the newest saved plan that fits this machine and this job.
        elastic: Whether the job may have other devices than the plan. If it has, the plan is solved again from its
            measured times for the devices that are there, with the same samples per optimizer step. Every kind of
            device must be in the plan. `ctx.plan` is the plan in use. See `torchrun --nnodes 1:4`.
        timeout_s: The longest time in seconds that a rank waits for the others in a collective. Then its error names
            the place of each rank, and the job ends. NCCL ends the process without an error, so the rank prints the
            places after 80% of the time. Increase it if one rank works alone for longer, for example in an
            evaluation. It does not apply to a process group that exists already.

    Yields:
        The rank's `Context`.

    Raises:
        PlanError: There is no plan, the plan cannot be read, its number of ranks is not the number of processes, or
            the ranks have different plans. With `elastic`: the plan did not measure a rank's kind of device, or the
            optimizer step does not fit the devices.
        DeviceError: The plan is for simulated GPUs, or this rank's device does not exist.
        InputError: A variable of torchrun or Slurm is missing, or rank 0 does not answer.
        RankFailedError: Another rank failed, or a collective timed out. Raised at the end of the block.
    """
    if not timeout_s > 0:
        raise InputError(f"timeout_s is {timeout_s!r}. Expected seconds above 0. Leave timeout_s out for 600.")
    with recorded(), _context_of_job(profile, elastic, timeout_s) as ctx:
        yield ctx


@contextmanager
def _context_of_job(
    profile: Plan | str | os.PathLike[str] | None, elastic: bool, timeout_s: float
) -> Iterator[Context]:
    """Find the plan, join the other processes, and leave them at the end."""
    end_with_launcher()
    place = place_here()
    plan, _ = plan_for_job(profile, None if elastic else place.world_size)  # an elastic job has any number
    store = None
    if elastic:
        store = None if dist.is_initialized() else meeting_place(place)
        plan = addon("plan_for_job_devices")(plan, place, store)
    count = len(trainable_ranks(plan).seats)
    if place.world_size != count:
        raise PlanError(
            f"The plan has {count} rank{'s' * (count > 1)}, but the job has {place.world_size}. Expected one "
            f"process per rank. Start the job with autosplit launch SCRIPT or torchrun --nproc-per-node {count} "
            "SCRIPT, or tune for the devices of this job. If machines come and go, pass elastic=True to setup.",
            code="world-size",
        )
    device = device_for(plan, place)
    if is_accelerator(device.type):
        backend(device.type).set_device(device)  # NCCL sends from the current device
    progress = Progress(place.rank, place.world_size, timeout_s)
    ctx = Context(plan, place.rank, device, progress, is_named=names_plan(profile))
    with (
        _process_group(place, ctx, store, timeout_s) as progress_store,
        progress.published(progress_store),
        user_collectives(compares=True),
    ):
        agree_on(plan, place.rank)
        yield ctx


@contextmanager
def _process_group(place: Place, ctx: Context, store: Any, timeout_s: float) -> Iterator[Any]:
    """Create the process group, if there is none, and destroy it at the end. Yield the store of the progress."""
    if dist.is_initialized():
        yield _progress_store(store_of_group(), place)
        return
    store = store or meeting_place(place)
    chosen = agreed_backend(store, place, ctx.device, ctx.plan)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(chosen, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    has_failed = False
    try:
        yield _progress_store(store, place)
    except BaseException as error:
        has_failed = is_failure(error)
        raise
    finally:
        ctx.part_from_group()
        with suppress(Exception) if has_failed else nullcontext():  # a second error must not hide the first
            if has_failed:
                abort_group(dist.group.WORLD)
            dist.destroy_process_group()


def _progress_store(store: Any, place: Place) -> Any:
    """Return the part of the store that has the ranks' progress, or None without other ranks."""
    if store is None or place.world_size == 1:
        return None
    return dist.PrefixStore(f"autosplit/progress/{next(_JOINS)}", store)  # type: ignore[attr-defined]


def agree_on(plan: Plan, rank: int) -> None:
    """Raise PlanError on all ranks if their plans differ. Ignore notes, which only one rank keeps."""
    keep_backend(dist.group.WORLD)
    digest = hashlib.sha256(without_notes(plan).to_json().encode()).hexdigest()
    digests = gathered_objects(digest)
    others = [str(other) for other, found in enumerate(digests) if found != digests[0]]
    if others:
        raise PlanError(
            f"Rank {rank} of {len(digests)} stops: the plan of rank {', '.join(others)} differs from rank 0's. All "
            f"ranks need the same plan. Give every rank the same file ({PLAN_VARIABLE}).",
            code="ranks-plans-differ",
        )
