"""Connect the ranks of a job: each rank contributes its device, and all ranks get the same request.

each rank   its device of its machine | all devices in the order of the ranks | one request, one machine, one key
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from torch import distributed as dist

from autosplit.accelerators import backend, is_accelerator
from autosplit.ddp.device import backend_for, card_of
from autosplit.ddp.failure import HEAD_START_S, recorded
from autosplit.ddp.group_end import keep_backend
from autosplit.ddp.rendezvous import Place, meeting_place, place_here, store_of_group
from autosplit.devices.accelerator import with_free_memory
from autosplit.devices.device import Device
from autosplit.devices.spec import parse_devices
from autosplit.errors import AutosplitError, DeviceError, RankFailedError, is_broken_off, one_line
from autosplit.launcher import end_with_launcher
from autosplit.probe.request import Request
from autosplit.profiles.key import machine_of
from autosplit.tuning.peers import Interrupts, Peers
from autosplit.tuning.process import Job, refuse_differing, torch_device

_GROUP_NUMBERS = itertools.count()
"""Counts the groups for messages, because a process group may serve several. The numbers agree on all ranks."""


def own_devices(spec: Any) -> tuple[Device, ...]:
    """Parse the spec of this rank's machine. Of accelerators, return the rank's own.

    So the rank does not initialise other ranks' GPUs. If the devices can't be divided among the ranks, return all.
    Then `joined` raises on all ranks.
    """
    found = parse_devices(spec, ask_memory=False)
    if not is_accelerator(found[0].kind):
        return found
    try:
        own = found[_own_index(found, place_here())]
    except DeviceError:
        return found
    return (with_free_memory(own),)


def in_a_job() -> bool:
    """Return whether this process is one of several ranks."""
    return place_here().world_size > 1


@contextmanager
def joined_job(request: Request) -> Iterator[Job]:
    """Connect to the other ranks of this job, and exchange device descriptions.

    The resulting request lists the devices of all ranks.

    Raises:
        DeviceError: The number of devices of a machine is not the number of its ranks, or the devices are simulated.
        InputError: The ranks' arguments or versions differ, or a rank is missing.
    """
    place = place_here()
    with peers_here() as peers:
        indices = peers.all_run(lambda: _own_index(request.devices, place))  # If one machine fails, all ranks raise.
        yield _job(request, indices, place, peers)


@contextmanager
def peers_here() -> Iterator[Peers]:
    """Connect to the other ranks of this job. All ranks call this. Call `Peers.part` at the end.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed after the last order, so no order has reported it to the other ranks.
    """
    with _message_group(place_here()) as peers, peers.interrupts.noted():
        yield peers
    if peers.interrupts.came and not peers.stopped:
        raise KeyboardInterrupt


def _job(request: Request, indices: Sequence[int], place: Place, peers: Peers) -> Job:
    index = indices[place.rank]
    device = request.devices[index]
    if is_accelerator(device.kind):
        backend(device.kind).set_device(device.index)  # NCCL sends from the current device.
    capacity_bytes = request.capacities_bytes[index]
    machine, card = machine_of((device,)), card_of(torch_device(device))
    found = peers.gathered((replace(request, sampler=None), machine, place.local_rank, card))
    requests, machines, local_ranks, cards = map(list, zip(*found, strict=True))
    peers.all_run(lambda: _refuse_different(requests, machines))
    pairs = [*zip(requests, indices, strict=True)]
    whole = replace(
        request,
        devices=tuple(one.devices[at] for one, at in pairs),
        capacities_bytes=tuple(one.capacities_bytes[at] for one, at in pairs),
        reserved_bytes=tuple(one.reserved_bytes[at] for one, at in pairs),
    )
    machine = _machine_of_all(machines, local_ranks)
    return Job(place, peers, (device,), (capacity_bytes,), whole, machine, backend_for(device.kind, cards))


def _own_index(devices: Sequence[Device], place: Place) -> int:
    kind, count = devices[0].kind, len(devices)
    if kind == "sim":
        raise DeviceError(
            f"The devices are simulated, but {place.world_size} ranks were started. One process simulates all "
            "devices. Start the script without torchrun."
        )
    here = place.local_world_size or place.world_size
    local = place.local_rank if place.local_rank is not None else place.rank
    if count == 1 and is_accelerator(kind) and here > 1:
        return 0  # the spec is this rank's part already, or only one GPU is visible
    if count != here or local >= count:
        raise DeviceError(
            f"There are {count} devices ({', '.join(device.label for device in devices)}) for {here} ranks of this "
            "machine. Expected one device per rank. Name one device per rank (--devices cpu:2GiB,cpu:1GiB), or "
            f"start torchrun with --nproc-per-node {count}."
        )
    return local


def _refuse_different(requests: Sequence[Request], machines: Sequence[Mapping[str, Any]]) -> None:
    for name in ("strategy", "effective_batch_sizes", "max_batch_size", "n_trials", "profile", "name", "seed"):
        refuse_differing(name, [getattr(request, name) for request in requests])
    for name in ("torch", "cuda", "autosplit"):
        refuse_differing(f"the version of {name}", [machine[name] for machine in machines])
    refuse_differing("the device type", [request.kind for request in requests])


def _machine_of_all(machines: Sequence[Mapping[str, Any]], local_ranks: Sequence[int | None]) -> dict[str, Any]:
    """Describe the devices of all ranks as one machine. For several machines, add the ranks of each machine."""
    devices = [{k: v for k, v in machine["devices"][0].items() if k != "count"} for machine in machines]
    counted_devices = [{**device, "count": len(list(group))} for device, group in itertools.groupby(devices)]
    ranks_per_machine: list[int] = []
    for local in local_ranks:
        if not ranks_per_machine or local == 0:
            ranks_per_machine.append(0)
        ranks_per_machine[-1] += 1
    several = {"ranks_per_machine": ranks_per_machine} if len(ranks_per_machine) > 1 else {}
    return {**machines[0], "devices": counted_devices, **several}


@contextmanager
def _message_group(place: Place) -> Iterator[Peers]:
    """Connect the ranks by gloo for messages, and disconnect at the end. Keep the job's own process group, if any."""
    end_with_launcher()
    has_own_group = dist.is_initialized()
    group, store = (dist.new_group(backend="gloo"), store_of_group()) if has_own_group else _new_process_group(place)
    keep_backend(group)
    if store is not None:
        store = dist.PrefixStore(f"autosplit/tuning/{next(_GROUP_NUMBERS)}", store)  # type: ignore[attr-defined]
    try:
        with recorded(), _lost_ranks_named(place):
            yield Peers(place.rank, place.world_size, group, Interrupts(), store)
    finally:
        with suppress(RuntimeError):  # a failed destroy must not hide the rank's failure
            dist.destroy_process_group(group if has_own_group else None)


def _new_process_group(place: Place) -> tuple[Any, Any]:
    store = meeting_place(place)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)
    return dist.group.WORLD, store


@contextmanager
def _lost_ranks_named(place: Place) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, AutosplitError) or not is_broken_off(error):
            raise
        time.sleep(HEAD_START_S)
        raise RankFailedError(
            f"rank {place.rank} stops, because another rank ended without an error message ({one_line(error)}). "
            f"Expected all {place.world_size} ranks to finish. Check the other ranks' output, and whether the system "
            "killed one."
        ) from error
