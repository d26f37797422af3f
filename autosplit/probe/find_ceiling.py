"""Find the largest batch that fits on one device in one role."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from autosplit.accelerators import is_accelerator
from autosplit.devices.device import Device
from autosplit.devices.spec import list_devices, parse_devices
from autosplit.errors import DeviceError, InputError, ends_tracebacks
from autosplit.probe.ceilings import ceiling_of, does_not_fit
from autosplit.probe.prober import Prober
from autosplit.probe.request import checked_request
from autosplit.rng import preserved_rng
from autosplit.runtime.live_tensors import untouched
from autosplit.runtime.prepare import build, prepare, workload_source
from autosplit.solve.memory import Ceiling, Role
from autosplit.workload.workload import COPYING, Workload

_UNBOUNDED_BYTES = 2**62
"""More bytes than any device has."""


@ends_tracebacks
def find_ceiling(
    workload: Any,
    device: Any,
    *,
    role: Role = "rank",
    max_batch_size: int | None = None,
    exact: bool = False,
    reserve: str | float | None = None,
    time_limit_s: float | None = None,
    isolate: bool = False,
) -> Ceiling:
    """Find the largest number of samples that a device can run in one training step.

    On GPUs, real steps decide. On a CPU with a budget, steps of few samples predict the ceiling, and a step of exactly
    this size confirms it. For simulated GPUs it is only predicted. The workload is not changed.

    Args:
        workload: A `Workload`, or a function that returns a `Workload`.
        device: One device: ``"cuda:0"``, ``"cpu:2GiB"``, ``"sim:RTX3090"``.
        role: ``"rank"``: a DDP process. ``"primary"``: device 0 of BalancedDataParallel, without samples on other
            devices. ``"replica"``: another device of BalancedDataParallel. ``"eval"``: a forward without gradients of a
            model that is not trained. ``"resume"``: a DDP process with the copies of the parameters that loading a
            checkpoint leaves on the device. ``"save"``: a DDP process with copies of parameters and optimizer state,
            which are saved in the background.
        max_batch_size: Largest batch to try.
        exact: Also run one more sample than the ceiling, which must run out of memory.
        reserve: Memory to keep free: bytes, or a fraction. Default: 5% on GPUs.
        time_limit_s: Time in seconds after which no further step is run to confirm the ceiling.
        isolate: Run the steps in a separate process, so that a crash does not end this process.

    Raises:
        InputError: An argument is invalid.
        DoesNotFitError: Not even one sample fits.
        UserCodeError: The workload's own code raised on its sample batch.
    """
    devices = parse_devices(device)
    request = checked_request(
        devices=devices, reserve=reserve, max_batch_size=max_batch_size, time_limit_s=time_limit_s
    )
    if role not in get_args(Role):
        raise InputError(f"role is {role!r}. Expected one of {', '.join(get_args(Role))}.")
    if len(devices) != 1:
        raise InputError(f"{len(devices)} devices are given. Expected one. Call find_ceiling for each.")
    asked, source = role, workload_source(workload, None, {})
    if role == "eval" or role in COPYING:
        source = _holding(source, role) if isinstance(source, Workload) else partial(_built_holding, source, role)
    role = "rank" if role in COPYING else role
    capacities_bytes, index = request.capacities_bytes, 0
    if role == "replica":
        # A replica needs a device 0: use another GPU, or an equal device with unlimited memory.
        devices, capacities_bytes, index = _with_companion(devices[0], capacities_bytes[0])
    with preserved_rng(), ExitStack() as closing:
        built = build(source, devices)
        closing.enter_context(untouched(built.workload))
        deadline_s = request.deadline.end_s
        options: dict[str, Any] = {"largest_batch": request.largest_batch, "isolate": isolate}
        prepared = prepare(built, devices, capacities_bytes, closing, deadline_s=deadline_s, **options)
        prober = Prober(
            prepared.worker,
            prepared.workload,
            request.largest_batch,
            num_ranks=2 if role == "rank" else 1,
            exact=exact,
            deadline_s=deadline_s,
        )
        found = ceiling_of(prober, index, role)
        if found.batch_size == 0:
            raise does_not_fit(prober, index)
        notes = (*prober.notes(), *prepared.notes, *prober.worker.notes)
        return replace(found, role=asked, device=request.devices[0].label, notes=notes)


def _holding(workload: Workload, role: Role) -> Workload:
    """Return the workload with what its steps hold for a role. Evaluation may already be next to training."""
    return (
        workload
        if role == "eval" and workload.held
        else replace(workload, held=("forward" if role == "eval" else role,))
    )


def _built_holding(build: Callable[[], Workload], role: Role) -> Workload:
    built = build()
    # The caller raises for a function that returns something other than a Workload.
    return _holding(built, role) if isinstance(built, Workload) else built


def _with_companion(device: Device, capacity_bytes: int) -> tuple[tuple[Device, ...], tuple[int, ...], int]:
    if is_accelerator(device.kind):
        others = [other for other in list_devices() if other.kind == device.kind and other.index != device.index]
        if not others:
            raise DeviceError(
                f"{device.label} is the only GPU. A replica needs another GPU as device 0. "
                "Probe it with role='rank' or role='primary'."
            )
        return (others[0], device), (others[0].capacity_bytes, capacity_bytes), 1
    if device.kind == "cpu" and not device.budgeted:
        return (device,), (capacity_bytes,), 0  # Its memory is only predicted, so one device is enough.
    companion = replace(device, budgeted=False, capacity_bytes=_UNBOUNDED_BYTES)
    return (companion, replace(device, index=device.index + 1)), (_UNBOUNDED_BYTES, capacity_bytes), 1
