"""This rank's device: the very card that the plan means, wherever it stands now, or its like on a twin machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosplit.ddp.place import Place
from autosplit.devices import device_uuid
from autosplit.errors import DeviceError, PlanError
from autosplit.plan import Plan, PlanDevice

__all__ = ["Visible", "backend_for", "device_for", "visible_gpus"]


@dataclass(frozen=True)
class Visible:
    """A GPU that this process sees, at its place in CUDA's order."""

    name: str
    uuid: str | None


def visible_gpus() -> tuple[Visible, ...]:
    """List the GPUs that this process sees."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Visible(str(properties.name), device_uuid(properties)) for properties in found)


def device_for(plan: Plan, place: Place, visible: Sequence[Visible] | None = None) -> torch.device:
    """Return where this rank computes.

    A GPU is known by its UUID, so that another CUDA_VISIBLE_DEVICES moves no share to another card. On a machine that
    has none of the plan's cards, a twin, it is the one of the same name in the same order.

    Args:
        plan: With a rank for each process.
        place: Of this process.
        visible: The GPUs that are here. Default: `visible_gpus`.

    Raises:
        PlanError: The plan's label is no device.
        DeviceError: No such card is visible.
    """
    label = plan.ddp.ranks[place.rank].device
    kind, _, index = label.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or not index.isdigit():
        raise PlanError(f"the rank's device is {label!r}; expected 'cpu', 'cpu:0' or 'cuda:0'; tune again")
    gpus = visible_gpus() if visible is None else visible
    wanted = {other: _planned(plan, other) for other in place.beside()}
    own = wanted[place.rank]
    uuids = {gpu.uuid: number for number, gpu in enumerate(gpus) if gpu.uuid is not None}
    if own.uuid in uuids:
        return torch.device("cuda", uuids[own.uuid])
    if not any(planned.uuid in uuids for planned in wanted.values()):
        alike = [number for number, gpu in enumerate(gpus) if gpu.name == own.name]
        # Ranks that share a card have one label; before this one come the other cards of its name.
        before = {planned.label for other, planned in wanted.items() if other < place.rank and planned.name == own.name}
        nth = len(before - {own.label})
        if len(gpus) == 1 and alike:  # each process was given its own
            return torch.device("cuda", 0)
        if nth < len(alike):
            return torch.device("cuda", alike[nth])
    here = ", ".join(f"cuda:{number} {gpu.name}" for number, gpu in enumerate(gpus)) or "none"
    raise DeviceError(
        f"the rank's device is {label} ({own.name}), and the GPUs that are visible are: {here}; expected that card, or "
        "its like on a twin of the machine; set CUDA_VISIBLE_DEVICES as it was when the plan was made, or tune here"
    )


def _planned(plan: Plan, rank: int) -> PlanDevice:
    label = plan.ddp.ranks[rank].device
    # Labels come again on a second machine: what stands at the rank's place is meant, if it has that label.
    devices = [plan.devices[rank]] if rank < len(plan.devices) else []
    found = next((device for device in (*devices, *plan.devices) if device.label == label), None)
    if found is None:
        raise PlanError(
            f"rank {rank} of the plan is on {label}, which is none of its devices; expected one of them; tune again"
        )
    return found


def backend_for(plan: Plan, place: Place, device: torch.device) -> str:
    """Return the backend of the process group: NCCL takes no two ranks of one card."""
    labels = [plan.ddp.ranks[rank].device for rank in place.beside()]
    return "nccl" if device.type == "cuda" and len(set(labels)) == len(labels) else "gloo"
