"""Starts one process's part of a DDP job: the plan, the process group, and the agreement on one plan."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from torch import distributed as dist

from autosplit.accelerators import backend, is_accelerator
from autosplit.ddp.context import Context
from autosplit.ddp.device import agreed_backend, device_for
from autosplit.ddp.failure import TOLD_AFTER_S, Watch, abort_group, group_sockets, open_sockets, told_if_long
from autosplit.ddp.find_plan import plan_for_job
from autosplit.ddp.rendezvous import (
    Place,
    explain_loopback,
    explain_taken_port,
    meeting_place,
    place_here,
)
from autosplit.ddp.unequal_gathers import unequal_gathers_refused
from autosplit.errors import PlanError
from autosplit.plan.plan import Plan
from autosplit.plan.torchrun import PLAN_VARIABLE


@contextmanager
def setup(profile: Plan | str | os.PathLike[str] | None = None) -> Iterator[Context]:
    """Join the job as the rank that torchrun or Slurm made this process, with a plan's settings for it.

        with autosplit.ddp.setup("plan.json") as ctx:  # torchrun --nproc-per-node 2 train.py
            model = ctx.wrap(model)

    Started without either, it is a job of one process. The device is the very card that the plan means, whatever
    CUDA_VISIBLE_DEVICES says; the backend is torch's own for the devices (nccl on GPUs of NVIDIA and AMD), and gloo on
    processors, where torch was built without it, and where two ranks share a card. A process group that is already
    there is used, and left as it is; one that is made here is destroyed on leaving.
    Wrapped models then go on as what they wrap: `module`, `state_dict`, and forwards in `eval()` or without gradients.

    A rank that leaves by an exception (a `sys.exit(0)` is none) tells the others, and one that is killed is missed by
    them at once, one whose machine or network went down after 15 s. What they wait for is then broken off, and they
    raise RankFailedError; a process that has not left within 10 s is ended, with the reason on stderr and exit code 1.
    For that, ranks keep a connection to rank 0, on a port that the system chooses. It watches until rank 0 leaves.
    A rank that is stopped (SIGSTOP) is named on stderr after 12 s, one that never comes after 15 s; both are waited
    for.
    A group that was there before is watched as well, but where it is gloo's, and the rank that failed lives on, what
    the others wait for can't be broken off: they are ended.

    Args:
        profile: A plan, or the file that `Plan.save` wrote; None for the file that the environment variable
            AUTOSPLIT_PROFILE names, or else the only remembered plan that this machine and this job can use.

    Yields:
        The context: `device`, `wrap`, `shard`, `batch_sampler`, `steps`, `all_gather`, `save_checkpoint`,
        `load_checkpoint`, `save_sharded`, `load_sharded`.

    Raises:
        PlanError: There is no plan, it can't be read, it has no rank for each process, or the ranks have different
            ones.
        DeviceError: The plan is for simulated cards, or this rank's device is not there.
        InputError: What torchrun or Slurm should have set is missing or wrong: the rank, the number of ranks, or the
            address of rank 0. Or a machine knows itself by an address at which no other one reaches it.
        RankFailedError: Another rank failed; on leaving.

    Warns:
        UnwatchedWarning: Rank 0 was not reached beside the process group.
    """
    place = place_here()
    plan, _ = plan_for_job(profile, place.world_size)
    if place.world_size != len(plan.ddp.ranks):
        count = len(plan.ddp.ranks)
        raise PlanError(
            f"the plan has {count} rank{'s' * (count > 1)}, but the job has {place.world_size}; expected a process for "
            f"each rank; start it with torchrun --nproc-per-node {count}, or tune for the devices of this job",
            code="world-size",
        )
    device = device_for(plan, place)
    if is_accelerator(device.type):
        backend(device.type).set_device(device)  # NCCL sends from the current device
    watch = Watch(place.rank, place.world_size)
    ctx = Context(plan, place.rank, device)
    try:
        with _process_group(place, watch, ctx) as sockets:
            watch.begin(sockets)
            with watch.telling(), unequal_gathers_refused():
                agree_on(plan, place.rank)
                yield ctx
    finally:
        watch.end()


@contextmanager
def _process_group(place: Place, watch: Watch, ctx: Context) -> Iterator[Mapping[int, str]]:
    """Make the process group with its `group_sockets`, and destroy it at the end; do neither where there is one."""
    if dist.is_initialized():
        yield {}
        return
    try:
        with told_if_long(
            f"rank {place.rank} of {place.world_size} has waited {TOLD_AFTER_S:.0f} s in autosplit.ddp.setup, and not "
            "all ranks have come; expected each of them; look for the error of the one that is missing: it may have "
            "ended before setup"
        ):
            store = meeting_place(place)
            chosen = agreed_backend(store, place, ctx.device, ctx.plan)
            before = open_sockets()
            dist.init_process_group(chosen, store=store, rank=place.rank, world_size=place.world_size)
    except RuntimeError as error:
        explain_loopback(error, place)
        explain_taken_port(error, place)
        raise
    try:
        yield group_sockets(before)
    finally:
        ctx.part_from_group()
        if watch.failed:
            with suppress(Exception):  # what failed is what has to be heard of
                abort_group(dist.group.WORLD)
                dist.destroy_process_group()
        else:
            dist.destroy_process_group()


def agree_on(plan: Plan, rank: int) -> None:
    """Compare the ranks' plans; all of them refuse where one is different.

    Notes and explanations are left out: of the ranks of a job one keeps these.
    """
    digest = hashlib.sha256(plan.bare().to_json().encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    others = [str(other) for other, found in enumerate(digests) if found != digests[0]]
    if others:
        raise PlanError(
            f"rank {rank} of {len(digests)} stops: the plan of rank {', '.join(others)} is not that of rank 0; "
            f"expected one plan for the whole job; give every rank the same file ({PLAN_VARIABLE})",
            code="ranks-plans-differ",
        )
