"""Assign a plan's batch sizes to the ranks of a job by their devices. Solve the plan again if other devices are there.

plan    RTX 3090: 24 samples, RTX 3060: 8 samples, effective batch 64
job     rank 0 RTX 3060, rank 1 RTX 3090   ->   8 and 24 samples
job     rank 0 RTX 3060                    ->   solved again: 16 samples, 4 micro-steps
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autosplit.ddp.device import gathered_objects
from autosplit.ddp.rendezvous import Place
from autosplit.devices.accelerator import visible_devices
from autosplit.errors import DeviceError, PlanError
from autosplit.plan.layout import Layout, PlanDevice
from autosplit.plan.plan import Plan
from autosplit.plan.solve_again import resolve
from autosplit.plan.torchrun import trainable_ranks
from autosplit.solve.change import Change
from autosplit.solve.split import accumulation_steps
from autosplit.text import printable, size_text


@dataclass(frozen=True)
class RankDevice:
    """The device of a rank.

    Attributes:
        label: torch's name of the device in the rank's process, such as ``"cuda:1"``.
        name: Model name of the device.
        budget_bytes: Memory budget of a CPU. None if the device has no budget.
    """

    label: str
    name: str
    uuid: str | None = None
    budget_bytes: int | None = None

    def __str__(self) -> str:
        return _kind_text(self.name, self.budget_bytes)


def own_device(plan: Plan, place: Place) -> RankDevice:
    """Return the device of this process in an elastic job: the GPU with the number of its local rank, or a CPU."""
    kind = plan.devices[0].kind
    if kind == "cpu":  # memory budgets exist only in the plan
        planned = plan.devices[min(place.rank, len(plan.devices) - 1)]
        return RankDevice(f"cpu:{place.rank}", planned.name, budget_bytes=_budget_of(planned))
    gpus = visible_devices(kind)
    index = 0 if len(gpus) == 1 else place.rank if place.local_rank is None else place.local_rank
    if index >= len(gpus):
        raise DeviceError(
            f"The process has local rank {index}, but it sees {len(gpus)} {kind} devices. Expected a device for each "
            "process. Start one process per device (torchrun --nproc-per-node gpu).",
        )
    return RankDevice(f"{kind}:{index}", gpus[index].name, gpus[index].uuid)


def devices_of_job(own: RankDevice, place: Place, store: Any) -> list[RankDevice]:
    """Return every rank's device. Exchange them through the store, or through an existing process group."""
    if store is None:
        return gathered_objects(own)
    store.set(f"device/{place.rank}", json.dumps(asdict(own)))
    return [RankDevice(**json.loads(store.get(f"device/{rank}"))) for rank in range(place.world_size)]


def plan_for_job_devices(plan: Plan, place: Place, store: Any) -> Plan:
    """Return the plan for the devices of this elastic job. All ranks call this."""
    return plan_for_devices(plan, devices_of_job(own_device(plan, place), place, store))


def plan_for_devices(plan: Plan, devices: Sequence[RankDevice]) -> Plan:
    """Return the plan for a job whose rank `r` has `devices[r]`. It is a plan for DDP only.

    A device is found in the plan by its UUID, or by its name and budget. If each of the plan's devices has exactly one
    rank, the batch sizes stay the same. Otherwise they are solved again from the plan's measured times and ceilings,
    and the throughput is predicted. The effective batch size stays the same in both cases.

    Raises:
        DeviceError: The plan has no device of this kind, or is for simulated GPUs.
        PlanError: The plan has no ranks. Or the devices differ, and the plan has no time model or its optimizer step
            does not fit. Or the devices differ, and the plan is for a sharded model.
    """
    ranks = trainable_ranks(plan)
    entries = _entries(plan, devices)
    layout = of_entries(ranks, entries, devices)
    found = replace(plan, layouts=(layout,), trials=(), what_ifs=None)
    if sorted(entries) == [*range(len(plan.devices))]:
        return found
    if ranks.shard_size is not None:
        raise PlanError(
            f"The plan is for a sharded model on {len(plan.devices)} devices, and the job has {len(devices)} or others "
            f"({', '.join(map(str, devices))}). Expected the plan's devices, because a rank's memory depends on their "
            "number. Call setup with the unsharded plan, or start the job on the plan's devices.",
        )
    effective = layout.effective_batch_size
    capacities = tuple(seat.ceiling.capacity_bytes for seat in layout.seats)
    change = Change(capacities_bytes=capacities, least_batch=layout.least_batch)
    again = resolve(replace(found, effective_batch_sizes=(effective, effective)), change)
    if again is None:
        why = "has no time model" if ranks.cost is None else f"has {effective} samples per optimizer step"
        raise PlanError(
            f"The plan for {len(plan.devices)} devices {why}. So autosplit can't adapt it to the job's devices "
            f"({', '.join(map(str, devices))}). Start the job on the plan's devices, or tune again for the job's "
            "devices.",
        )
    return again


def _entries(plan: Plan, devices: Sequence[RankDevice]) -> list[int]:
    """Return the index of each rank's device in the plan. Several ranks get the same index if the plan has too few."""
    by_uuid: dict[str | None, int] = {device.uuid: entry for entry, device in enumerate(plan.devices)}
    by_uuid.pop(None, None)
    found = [by_uuid.get(device.uuid) for device in devices]
    free = [entry for entry in range(len(plan.devices)) if entry not in found]
    for rank, device in enumerate(devices):
        if found[rank] is None:
            kind = [entry for entry, planned in enumerate(plan.devices) if _is_kind(planned, device)]
            if not kind:
                _refuse(plan, rank, device)
            entry = next((entry for entry in kind if entry in free), kind[0])
            found[rank] = entry
            free = [other for other in free if other != entry]
    return [entry for entry in found if entry is not None]


def _is_kind(planned: PlanDevice, device: RankDevice) -> bool:
    return (planned.name, _budget_of(planned)) == (device.name, device.budget_bytes)


def _budget_of(planned: PlanDevice) -> int | None:
    return planned.memory_bytes if planned.budgeted else None


def _kind_text(name: str, budget_bytes: int | None) -> str:
    return printable(name) if budget_bytes is None else f"{printable(name)} with {size_text(budget_bytes)}"


def _refuse(plan: Plan, rank: int, device: RankDevice) -> None:
    kinds = dict.fromkeys(_kind_text(planned.name, _budget_of(planned)) for planned in plan.devices)
    raise DeviceError(
        f"Rank {rank} has the device {device}, but the plan only has measurements of {', '.join(kinds)}. Start the "
        "rank on such a device, or tune again with this device.",
    )


def of_entries(layout: Layout, entries: Sequence[int], devices: Sequence[RankDevice]) -> Layout:
    """Return a layout with one rank for each entry, and the batch size of that entry."""
    seats = tuple(
        replace(seat, device=replace(seat.device, label=device.label, uuid=device.uuid))
        for seat, device in zip((layout.seats[entry] for entry in entries), devices, strict=True)
    )
    return replace(
        layout,
        seats=seats,
        accumulation_steps=accumulation_steps(layout.effective_batch_size, sum(seat.samples for seat in seats)),
        even_samples_per_s=None,
        cost=None if layout.cost is None else layout.cost.among(entries),
    )
