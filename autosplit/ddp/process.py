"""Starts one process's part of a DDP job: the plan, the process group, and the agreement on one plan."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import distributed as dist

from autosplit import profiles
from autosplit.ddp.context import Context
from autosplit.ddp.devices import backend_for, device_for
from autosplit.ddp.place import Place, meeting_place, place_here
from autosplit.errors import DeviceError, PlanError
from autosplit.plan import Plan

__all__ = ["setup"]

PLAN_VARIABLE = "AUTOSPLIT_PROFILE"

_SHOWN = 5
"""Of several plans that could be meant, so many are listed."""


@contextmanager
def setup(profile: Plan | str | os.PathLike[str] | None = None) -> Iterator[Context]:
    """Join the job as the rank that torchrun or Slurm made this process, with a plan's settings for it.

        with autosplit.ddp.setup("plan.json") as ctx:  # torchrun --nproc-per-node 2 train.py
            model = ctx.wrap(model)

    Started without either, it is a job of one process. The device is the very card that the plan means, whatever
    CUDA_VISIBLE_DEVICES says; the backend is nccl on GPUs, and gloo elsewhere or where two ranks share a card. A
    process group that is already there is used, and left as it is; one that is made here is destroyed on leaving.

    Args:
        profile: A plan, or the file that `Plan.save` wrote; None for the file that the environment variable
            AUTOSPLIT_PROFILE names, or else the only remembered plan that this machine and this job can use.

    Yields:
        The context: `device`, `wrap`, `batch_sampler`, `steps`.

    Raises:
        PlanError: There is no plan, it can't be read, it has no rank for each process, or the ranks have different
            ones.
        DeviceError: The plan is for simulated cards, or this rank's device is not there.
        InputError: What torchrun or Slurm should have set is missing or wrong: the rank, the number of ranks, or the
            address of rank 0.
    """
    place = place_here()
    plan = _plan_of(profile, place.world_size)
    _refuse_unfit(plan)
    if place.world_size != len(plan.ddp.ranks):
        count = len(plan.ddp.ranks)
        raise PlanError(
            f"the plan has {count} rank{'s' * (count > 1)}, but the job has {place.world_size}; expected a process for "
            f"each rank; start it with torchrun --nproc-per-node {count}, or tune for the devices of this job"
        )
    device = device_for(plan, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL sends from the current device
    with _process_group(place, backend_for(plan, place, device)):
        _agree_on(plan, place.rank)
        yield Context(plan, place.rank, device)


def _plan_of(profile: Plan | str | os.PathLike[str] | None, world_size: int) -> Plan:
    if isinstance(profile, Plan):
        return profile
    path = os.environ.get(PLAN_VARIABLE) if profile is None else profile
    return Plan.load(path) if path else _remembered_plan(profile, world_size)


def _remembered_plan(profile: object, world_size: int) -> Plan:
    """Return the only plan in the cache that this machine and this job can use."""
    usable = [(path, plan) for path, plan in profiles.usable_here() if len(plan.ddp.ranks) == world_size]
    if len(usable) == 1:
        return usable[0][1]
    job = f"{world_size} process{'es' * (world_size > 1)}"
    given = f"no plan is given: profile is {profile!r} and {PLAN_VARIABLE} is not set"
    if not usable:
        raise PlanError(
            f"{given}, and none that is remembered is for this machine and {job}; expected a plan, or the "
            f"file of one; call setup(plan), or set {PLAN_VARIABLE} to the file that plan.save(path) wrote"
        )
    listed = "; ".join(f"{path} ({_described(plan)})" for path, plan in usable[:_SHOWN])
    more = f"; and {len(usable) - _SHOWN} more" if len(usable) > _SHOWN else ""
    raise PlanError(
        f"{given}, and {len(usable)} that are remembered are for this machine and {job}: {listed}{more}; "
        f"expected one; set {PLAN_VARIABLE} to the file that is meant"
    )


def _described(plan: Plan) -> str:
    sizes = ", ".join(str(settings.batch_size) for settings in plan.ddp.ranks)
    return f"{plan.workload.get('model', 'a model')}, {sizes} samples x {plan.ddp.ranks[0].accumulation_steps}"


def _refuse_unfit(plan: Plan) -> None:
    """Refuse a plan that no job can be started with."""
    if plan.simulated:
        names = ", ".join(sorted({device.name for device in plan.devices}))
        raise DeviceError(
            f"the plan is for simulated cards ({names}); expected real devices to train on; tune on the machine that "
            "has them"
        )
    if not plan.ddp.ranks:
        raise PlanError(
            f"the plan has no DDP ranks: {plan.ddp.reason or 'it gives no reason'}; expected one for each device; "
            "tune for devices that each hold a rank, or use plan.wrap"
        )
    forwards = sorted({settings.accumulation_steps for settings in plan.ddp.ranks})
    if len(forwards) > 1 or forwards[0] < 1:
        raise PlanError(
            f"the plan's ranks have {forwards} accumulation steps; expected one number, 1 or more, for all of them; "
            "tune again"
        )


@contextmanager
def _process_group(place: Place, backend: str) -> Iterator[None]:
    """Make the process group, and destroy it at the end; do neither where there is one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(backend, store=meeting_place(place), rank=place.rank, world_size=place.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _agree_on(plan: Plan, rank: int) -> None:
    """Compare the ranks' plans; all of them refuse where one is different.

    Notes are left out: they tell how each process came by the plan.
    """
    digest = hashlib.sha256(replace(plan, notes=()).to_json().encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    others = [str(other) for other, found in enumerate(digests) if found != digests[0]]
    if others:
        raise PlanError(
            f"rank {rank} of {len(digests)} stops: the plan of rank {', '.join(others)} is not that of rank 0; "
            f"expected one plan for the whole job; give every rank the same file ({PLAN_VARIABLE})"
        )
