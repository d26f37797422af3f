"""Read this process's rank from the environment of torchrun or Slurm, and connect the ranks of the job.

          rank          world size              local rank     local world size           address of rank 0
torchrun  RANK          WORLD_SIZE              LOCAL_RANK     LOCAL_WORLD_SIZE           MASTER_ADDR, MASTER_PORT
srun      SLURM_PROCID  SLURM_STEP_NUM_TASKS    SLURM_LOCALID  SLURM_STEP_TASKS_PER_NODE  the same (optional on one
                                                                                          node)
"""

from __future__ import annotations

import itertools
import os
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

# Import this before a group exists. Its default arguments refer to the group at import time, which would keep the group
# and its threads alive until the process ends. DDP imports it with the first model (torch 2.13).
import torch.distributed.nn.functional  # noqa: F401
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from autosplit.errors import InputError

_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
"""Slurm's variables for the tasks per node: first of the job step, then of the job."""

_GROUPS = itertools.count()
"""Counts the groups that this process created. The numbers agree on all ranks."""

_LOOKED_EVERY_S = 0.05
"""Time in seconds between two checks whether rank 0 has answered."""


@dataclass(frozen=True)
class Place:
    """Describe this process within the job.

    Attributes:
        address: The address of rank 0, as ``host:port``. None if torchrun's variables contain it, or for one process.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str | None = None

    def beside(self) -> range:
        """Return the ranks on this machine, or all ranks if unknown. torchrun and Slurm number them consecutively."""
        if self.local_rank is None:
            return range(self.world_size)
        first = self.rank - self.local_rank
        return range(first, min(self.world_size, first + (self.local_world_size or self.world_size)))


def place_here() -> Place:
    """Return this process's place: from the process group, or else from torchrun's variables, or Slurm's.

    Otherwise the process is the only process of its job.
    """
    if dist.is_initialized():
        local = _number_in("LOCAL_RANK"), _number_in("LOCAL_WORLD_SIZE")
        return Place(dist.get_rank(), dist.get_world_size(), *local)
    rank, world_size = _number_in("RANK"), _number_in("WORLD_SIZE")
    if rank is None and world_size is None:
        # Only srun sets SLURM_STEP_NUM_TASKS. A batch script sees the job's variables but is a single process.
        return _place_in_slurm() if os.environ.get("SLURM_STEP_NUM_TASKS") else Place(0, 1)
    if rank is None or world_size is None or rank >= world_size:
        raise InputError(
            f"RANK is {os.environ.get('RANK')} and WORLD_SIZE is {os.environ.get('WORLD_SIZE')}. Expected both, and "
            "a RANK below WORLD_SIZE. Start the job with torchrun, or unset both for a single process.",
        )
    return Place(rank, world_size, _number_in("LOCAL_RANK"), _number_in("LOCAL_WORLD_SIZE"))


def _place_in_slurm() -> Place:
    world_size, rank = int(os.environ["SLURM_STEP_NUM_TASKS"]), int(os.environ["SLURM_PROCID"])
    if world_size == 1:
        return Place(0, 1, 0, 1)
    one_node = _number_in("SLURM_STEP_NUM_NODES") == 1
    host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_node else None)
    if host is None:
        raise InputError(
            f"MASTER_ADDR is not set, and srun has {world_size} processes on several nodes. Expected the name of "
            'the first node. Before srun, export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | '
            "head -n 1)",
        )
    job, step = _number_in("SLURM_JOB_ID") or 0, _number_in("SLURM_STEP_ID") or 0
    # All ranks of a job step compute the same port, and other jobs on the machine seldom compute the same.
    port = _number_in("MASTER_PORT") or 20_000 + (31 * job + step) % 10_000
    local_world_size = world_size if one_node else _tasks_of_node()
    return Place(rank, world_size, _number_in("SLURM_LOCALID"), local_world_size, f"{host}:{port}")


def _tasks_of_node() -> int | None:
    """Return how many processes of the Slurm job step run on this node, or None if that is unknown.

    Slurm writes 4, 4 and 3 processes as "4(x2),3".
    """
    name = next((name for name in _TASKS_PER_NODE if os.environ.get(name)), None)
    if name is None:
        return None
    pieces = re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", os.environ[name])
    counts = [int(count) for count, nodes in pieces for _ in range(int(nodes or 1))]
    if len(set(counts)) == 1:
        return counts[0]
    node = _number_in("SLURM_NODEID")
    return None if node is None or node >= len(counts) else counts[node]


def _number_in(name: str) -> int | None:
    text = os.environ.get(name)
    return int(text) if text else None


def meeting_place(place: Place) -> Any:
    """Return the torch store that connects the ranks of the job."""
    stores: Any = dist  # torch documents the stores there, but type checkers do not find them
    if place.world_size == 1:  # without other ranks, neither address nor port is needed
        return stores.HashStore()
    url = "env://" if place.address is None else f"tcp://{place.address}"
    ranks = () if place.address is None else (place.rank, place.world_size)
    store, _, _ = next(rendezvous(url, *ranks))
    # torchrun keeps one store for the whole job, and earlier groups have left values in it. So use new keys.
    group = stores.PrefixStore(f"autosplit/{next(_GROUPS)}", store)
    return stores.PrefixStore(_agreed_round(group, place, store.timeout.total_seconds()), group)


def store_of_group() -> Any:
    """Return the store of the process group that exists already. None for MPI, and if torch drops the private name."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def _agreed_round(store: Any, place: Place, limit_s: float) -> str:
    """Agree with the other ranks on a new name that no earlier process of this job used.

        rank 0                               another rank
        publishes a new name        ->       reads the name, which may be an old one
        waits for every rank        <-       writes a unique word under that name
        answers each word           ->       repeats with newer names until rank 0 answers its word

    torchrun restarts processes but keeps the store. Without a new name, a rank that starts first would read the
    addresses of dead processes.
    """
    if place.rank == 0:
        name = uuid.uuid4().hex
        store.set("round", name)
        words = [store.get(f"{name}/{other}").decode() for other in range(1, place.world_size)]
        for word in words:
            store.set(f"{name}/{word}", "")
        return name
    word, name = uuid.uuid4().hex, ""
    deadline = time.monotonic() + limit_s
    while not (name and store.check([f"{name}/{word}"])):
        if time.monotonic() > deadline:
            raise InputError(
                f"Rank {place.rank} of {place.world_size} has waited {limit_s:.0f} s for rank 0, which does not "
                "answer. All ranks must join. Look for the error of the missing rank, and start the job again.",
            )
        found = store.get("round").decode()
        if found != name:
            name = found
            store.set(f"{name}/{place.rank}", word)
        time.sleep(_LOOKED_EVERY_S)
    return name
