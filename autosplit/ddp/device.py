"""Choose this rank's device and the backend of the process group.

The device is the GPU that the plan names, even if its index has changed. On another machine it is a GPU of the same
name. Names and UUIDs come from the driver, so no other GPU gets a CUDA context.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from autosplit.accelerators import backend, is_accelerator
from autosplit.ddp.rendezvous import Place
from autosplit.devices.accelerator import Visible, device_uuid, indices_here, visible_devices
from autosplit.errors import DeviceError
from autosplit.plan.plan import Plan
from autosplit.plan.torchrun import required_ranks


def device_for(plan: Plan, place: Place, visible: Sequence[Visible] | None = None) -> torch.device:
    """Return the device of this rank.

    If the process sees a single GPU with the planned name (``srun --gpus-per-task=1``), it uses that GPU.
    """
    devices = required_ranks(plan).devices
    own = devices[place.rank]
    label = own.label
    kind = label.partition(":")[0]
    if kind == "cpu":
        return torch.device("cpu")
    gpus = visible_devices(kind) if visible is None else visible
    # Ranks that share a GPU have the same label.
    wanted = {planned.label: planned for planned in (devices[other] for other in place.beside())}
    found = indices_here([Visible(planned.name, planned.uuid) for planned in wanted.values()], gpus)
    number = found[list(wanted).index(label)]
    if number is None and [gpu.name for gpu in gpus] == [own.name]:
        number = 0  # each process sees only its own GPU. `agreed_backend` raises an error if two see the same GPU.
    if number is not None:
        return torch.device(kind, number)
    here = ", ".join(f"{kind}:{number} {gpu.name}" for number, gpu in enumerate(gpus)) or "none"
    raise DeviceError(
        f"The rank's device is {label} ({own.name}), and the visible GPUs are: {here}. Expected that GPU, or a GPU "
        "of the same name on another machine with the same devices. Set CUDA_VISIBLE_DEVICES to its value during "
        "the tuning, or tune here.",
    )


def card_of(device: torch.device) -> str:
    """Return an identifier of a rank's GPU that is unique in the job: its UUID, or else its host and index."""
    properties = backend(device.type).get_device_properties(device) if is_accelerator(device.type) else None
    return device_uuid(properties) or f"{socket.gethostname()} {device}"


def backend_for(kind: str, cards: Sequence[str]) -> str:
    """Return the backend of the process group: torch's default for the device type, or gloo.

    NCCL does not support two ranks on one GPU.

    Args:
        cards: The identifier of each rank's GPU, from `card_of`.
    """
    if not is_accelerator(kind):
        return "gloo"
    usual = dist.get_default_backend_for_device(kind)
    shares = len(set(cards)) < len(cards)
    return "gloo" if (usual == "nccl" and shares) or not dist.is_backend_available(usual) else usual


def agreed_backend(store: Any, place: Place, device: torch.device, plan: Plan) -> str:
    """Return the backend of the process group. Rank 0 chooses it for all ranks.

    Raises:
        DeviceError: Two ranks have the same GPU, but the plan has a GPU for each. All ranks raise it.
    """
    store.set(f"card/{place.rank}", card_of(device))
    if place.rank == 0:
        cards = [store.get(f"card/{rank}").decode() for rank in range(place.world_size)]
        planned = [device.uuid for device in required_ranks(plan).devices]
        twice = _first_twice(cards) if None not in planned and _first_twice(planned) is None else None
        store.set("backend", backend_for(device.type, cards) if twice is None else f"twice {twice[0]} {twice[1]}")
    chosen = str(store.get("backend").decode())
    if chosen.startswith("twice "):
        _, one, other = chosen.split()
        raise DeviceError(
            f"Ranks {one} and {other} both see only one GPU, the same one. The plan expects a separate GPU for each "
            "rank. Give each process its own GPU (srun --gpus-per-task=1), or let all processes see all GPUs.",
        )
    return chosen


def _first_twice(values: Sequence[object]) -> tuple[int, int] | None:
    return next(((values.index(one), at) for at, one in enumerate(values) if one in values[:at]), None)


def exchange_device(device: torch.device) -> torch.device:
    """Return the device for tensors in collectives. For gloo this is the CPU."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def gathered(own: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's tensor. `own` must be on the `exchange_device` and have the same shape on all ranks."""
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return found


def gathered_objects(value: Any) -> list[Any]:
    """Send a value to all ranks as a pickle, and return every rank's value."""
    values = [value] * dist.get_world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
