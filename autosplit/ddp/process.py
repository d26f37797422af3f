"""Starts one process's part of a DDP job: the plan, the process group, and the agreement on one plan."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from autosplit.ddp.context import Context
from autosplit.errors import DeviceError, InputError, PlanError
from autosplit.plan import Plan

__all__ = ["setup"]

PLAN_VARIABLE = "AUTOSPLIT_PROFILE"

_GROUPS = itertools.count()
"""Numbers the groups that this process made; every rank makes the same ones, so the numbers agree."""


@contextmanager
def setup(profile: Plan | str | os.PathLike[str] | None = None) -> Iterator[Context]:
    """Join the job as the rank that torchrun made this process, with a plan's settings for it.

        with autosplit.ddp.setup("plan.json") as ctx:  # torchrun --nproc-per-node 2 train.py
            model = ctx.wrap(model)

    Started without torchrun, it is a job of one process. A process group that is already there is used, and left as
    it is; one that is made here is destroyed on leaving.

    Args:
        profile: A plan, or the file that `Plan.save` wrote; None for the file that the environment variable
            AUTOSPLIT_PROFILE names.

    Yields:
        The context: `device`, `wrap`, `batch_sampler`, `steps`.

    Raises:
        PlanError: There is no plan, it can't be read, it has no rank for each process, or the ranks have different
            ones.
        DeviceError: The plan is for simulated cards, or this rank's device is not there.
        InputError: RANK, WORLD_SIZE or the address of rank 0 are missing or wrong.
    """
    plan = _plan_of(profile)
    _refuse_unfit(plan)
    place = _Place.of_group() if dist.is_initialized() else _Place.of_environment()
    if place.world_size != len(plan.ddp.ranks):
        count = len(plan.ddp.ranks)
        raise PlanError(
            f"the plan has {count} rank{'s' * (count > 1)}, but the job has {place.world_size}; expected a process for "
            f"each rank; start it with torchrun --nproc-per-node {count}, or tune for the devices of this job"
        )
    device = _device_of(plan.ddp.ranks[place.rank].device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL sends from the current device
    with _process_group(place, "nccl" if device.type == "cuda" else "gloo"):
        _agree_on(plan, place.rank)
        yield Context(plan, place.rank, device)


@dataclass(frozen=True)
class _Place:
    """Which process of the job this is."""

    rank: int
    world_size: int

    @classmethod
    def of_group(cls) -> _Place:
        """Ask the process group that is there."""
        return cls(dist.get_rank(), dist.get_world_size())

    @classmethod
    def of_environment(cls) -> _Place:
        """Read what torchrun set; without it, this is the only process."""
        rank, world_size = (_number_in(name) for name in ("RANK", "WORLD_SIZE"))
        if rank is None and world_size is None:
            return cls(0, 1)
        if rank is None or world_size is None or rank >= world_size:
            raise InputError(
                f"RANK is {os.environ.get('RANK')} and WORLD_SIZE is {os.environ.get('WORLD_SIZE')}; expected both, "
                "RANK the smaller; start the job with torchrun, or unset both for a single process"
            )
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing and world_size > 1:
            raise InputError(
                f"{' and '.join(missing)} is not set, but WORLD_SIZE is {world_size}; expected where rank 0 listens; "
                "start the job with torchrun, or set it"
            )
        return cls(rank, world_size)


def _number_in(name: str) -> int | None:
    """Read a whole number from the environment; None where the variable is not set."""
    text = os.environ.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise InputError(f"{name} is {text!r}; expected a whole number, 0 or more; start the job with torchrun")
    return int(text)


def _plan_of(profile: Plan | str | os.PathLike[str] | None) -> Plan:
    if isinstance(profile, Plan):
        return profile
    path = os.environ.get(PLAN_VARIABLE) if profile is None else profile
    if not path:
        raise PlanError(
            f"no plan is given: profile is {profile!r} and {PLAN_VARIABLE} is not set; expected a plan, or the file of "
            f"one; call setup(plan), or set {PLAN_VARIABLE} to the file that plan.save(path) wrote"
        )
    return Plan.load(path)


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


def _device_of(label: str) -> torch.device:
    """Turn a plan's label into the device: "cuda:1"; each "cpu:1" is this machine's processor."""
    kind, _, index = label.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or not index.isdigit():
        raise PlanError(f"the rank's device is {label!r}; expected 'cpu', 'cpu:0' or 'cuda:0'; tune again")
    visible = torch.cuda.device_count()
    if int(index) >= visible:
        raise DeviceError(
            f"the rank's device is {label}, but {visible} GPUs are visible; expected it among them; set "
            "CUDA_VISIBLE_DEVICES as it was when the plan was made, the same for every rank"
        )
    return torch.device("cuda", int(index))


@contextmanager
def _process_group(place: _Place, backend: str) -> Iterator[None]:
    """Make the process group, and destroy it at the end; do neither where there is one."""
    if dist.is_initialized():
        yield
        return
    store = _meeting_place(place.world_size)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meeting_place(world_size: int) -> Any:
    """Return the store through which the ranks find each other."""
    stores: Any = dist  # its stores are documented there, but not re-exported in the way that type checkers ask for
    if world_size == 1:  # nobody to meet, so neither address nor port is needed
        return stores.HashStore()
    store, _, _ = next(rendezvous("env://"))
    # Torchrun keeps one store for the whole job: what an earlier group left in it would mislead this one.
    return stores.PrefixStore(f"autosplit/{next(_GROUPS)}", store)


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
