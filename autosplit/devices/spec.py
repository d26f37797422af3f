"""Parse device specs: ``cuda:0,2``, ``cpu:2GiB``, ``sim:2xA100-40GB``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autosplit.accelerators import is_accelerator
from autosplit.devices.accelerator import Found, accelerator_at, devices_of
from autosplit.devices.catalog import find_card, mentions_card
from autosplit.devices.device import MAX_DEVICES, Device
from autosplit.devices.host_memory import HOST_SHARE, available_host_bytes
from autosplit.errors import DeviceError, InputError, shown
from autosplit.text import parse_bytes, size_text

if TYPE_CHECKING:
    import torch

_EXPECTED = "Expected 'auto', 'cuda', 'cuda:0,2', 'cpu', 'cpu:2GiB,cpu:1GiB' or 'sim:2xA100-40GB+1xRTX3090'."


def list_devices() -> tuple[Device, ...]:
    """List the accelerators that this process can use, in torch's order, or the CPU if there are none.

    Raises:
        DeviceError: No accelerator reports its memory.

    Warns:
        DeviceWarning: An accelerator does not report its memory and is left out.
    """
    return parse_devices()


def parse_devices(
    spec: str | Device | torch.device | Sequence[str | int | Device | torch.device] | None = None,
    *,
    ask_memory: bool = True,
) -> tuple[Device, ...]:
    """Parse a device spec.

    Args:
        spec: ``"cuda"`` (every visible GPU), ``"cuda:0,2"``, ``"xpu:0,1"`` (any accelerator type of torch), ``"cpu"``,
            ``"cpu:2GiB,cpu:1GiB"`` (enforced budgets), ``"sim:2xA100-40GB+1xRTX3090"``, ``"sim:3xRTX3090@10GiB"``
            (reduced memory), a `Device`, a ``torch.device``, or a sequence of these. All must have one kind. A sequence
            may contain numbers of visible accelerators, as in ``[0, 1]``. None and ``"auto"`` select every visible
            accelerator, or the CPU if there are none.
        ask_memory: If False, use an accelerator's total memory as its capacity. Without NVML, reading the free memory
            creates a context. A process that does not compute there should avoid it.

    Returns:
        The devices in the order of the spec. Devices of ``cpu`` and ``sim`` are numbered by position.

    Raises:
        DeviceError: The spec cannot be parsed. Or it names an unknown GPU, an absent GPU, one GPU twice, a GPU that the
            installed torch was not built for, a count or budget of 0, several kinds, or over 1024 devices.

    Warns:
        DeviceWarning: The spec selects every GPU, and a GPU that does not report its memory is left out.
    """
    if spec is None or (isinstance(spec, str) and spec.strip().lower() == "auto"):
        found = accelerator_at()._replace(ask_memory=ask_memory)
        return (_plain_cpu(),) if found.module is None else _accelerator_piece(found, None)
    is_one = isinstance(spec, (str, Device, Mapping)) or not isinstance(spec, Iterable)
    parts: Iterable[Any] = [spec] if is_one else spec  # type: ignore[assignment]
    devices: list[Device] = []
    for part in parts:
        text = "" if isinstance(part, Device) else _spec_text(part, in_sequence=not is_one)
        devices.extend([part] if isinstance(part, Device) else _parse_text(text, ask_memory))
    return _joined(devices, spec)


def _spec_text(part: object, *, in_sequence: bool) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, int) and not isinstance(part, bool):
        if in_sequence:
            return f"{accelerator_at().kind}:{part}"
        raise DeviceError(
            f"devices={part} is a number. Use 'cuda:{part}' for the GPU with this number, or "
            "'cuda:0,1' for the first two GPUs."
        )
    if type(part).__module__ == "torch" and type(part).__name__ == "device":
        return str(part)
    raise DeviceError(
        f"Device {shown(part)} is of type {type(part).__name__}. {_EXPECTED} Pass a string or a torch.device."
    )


def _parse_text(text: str, ask_memory: bool) -> list[Device]:
    devices: list[Device] = []
    kind = ""
    for piece in (piece.strip() for piece in text.split(",")):
        # In "cuda:0,2", the second item has the kind of the first.
        goes_on = kind not in {"", "cpu", "sim"} and re.fullmatch(r"[+-]?[0-9]+", piece)
        head, colon, tail = (kind, ":", piece) if goes_on else piece.partition(":")
        kind = head.strip().lower()
        tail = tail.strip()
        if kind == "cpu":
            devices.append(
                Device("cpu", 0, "cpu", _budget(f"cpu:{tail}", tail), budgeted=True) if colon else _plain_cpu()
            )
        elif kind == "sim":
            devices.extend(_sim_piece(tail))
        elif kind in _ACCELERATORS or (kind.isidentifier() and kind == accelerator_at().kind):
            found = accelerator_at(kind)._replace(ask_memory=ask_memory)
            devices.extend(_accelerator_piece(found, tail if colon else None))
        else:
            raise DeviceError(_unknown_device(text, piece, kind_before=devices[-1].kind if devices else ""))
        if len(devices) > MAX_DEVICES:
            break
    return devices


def _unknown_device(text: str, piece: str, kind_before: str) -> str:
    if not piece:
        return f"Device spec {shown(text)} has an empty item. {_EXPECTED} Name at least one device."
    hint = "Correct the name."
    word = piece.partition(":")[0].strip().lower()
    # "gpu" is spelled like "cpu" but means "cuda".
    near = ["cuda"] if word.startswith("gpu") else difflib.get_close_matches(word, ("cuda", "cpu", "sim"), 1, 0.5)
    if kind_before == "cpu":
        hint = f"Every budget needs its own 'cpu:', so write 'cpu:{piece}'."
    elif kind_before == "sim":
        hint = f"GPUs are joined by '+', so write '+{piece}'."
    elif near:
        hint = f"Did you mean {near[0]!r}?"
    elif mentions_card(piece):
        hint = f"For a simulated GPU write 'sim:{piece}'."
    elif re.fullmatch(r"[0-9]+", piece):
        hint = f"For a GPU write 'cuda:{piece}'."
    return f"Device {shown(piece)} is unknown. {_EXPECTED} {hint}"


def _joined(devices: list[Device], spec: object) -> tuple[Device, ...]:
    if not devices:
        raise DeviceError(f"Device spec {shown(spec)} names no device. {_EXPECTED} Name at least one.")
    _check_count(len(devices), spec)
    kinds = sorted({device.kind for device in devices})
    if len(kinds) > 1:
        mixed = " and ".join(kinds)
        raise DeviceError(
            f"Device spec {shown(spec)} mixes {mixed}, but a plan is for one kind of device. Make a plan for each kind."
        )
    if is_accelerator(kinds[0]):
        labels = [device.label for device in devices]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise DeviceError(f"Device spec {shown(spec)} names {twice} twice. Remove one.")
        return tuple(devices)
    if len(devices) > 1 and any(device.label == "cpu" for device in devices):
        raise DeviceError(
            f"Device spec {shown(spec)} names 'cpu' next to other devices. "
            "Give each a budget: write 'cpu:2GiB,cpu:1GiB'."
        )
    return tuple(replace(device, index=position) for position, device in enumerate(devices))


def _check_count(count: int, spec: object) -> None:
    if count > MAX_DEVICES:
        raise DeviceError(f"Device spec {shown(spec)} has more than {MAX_DEVICES} devices. Lower the count.")


def _plain_cpu() -> Device:
    return Device("cpu", 0, "cpu", int(available_host_bytes() * HOST_SHARE))


def _budget(item: str, text: str) -> int:
    """Return a budget in bytes. Reject a number without a unit, since ``cpu:1`` looks like a device index."""
    what = f"Budget {shown(text)} in {shown(item)}"
    try:
        n_bytes = parse_bytes(text)
    except InputError as error:
        raise DeviceError(f"{what} is not a size. Write a size such as 2GiB or 600MiB.") from error
    if re.fullmatch(r"[0-9.]+", text):
        hint = "Write 'cpu:2GiB,cpu:2GiB' for two devices." if item.startswith("cpu") else "Add the unit."
        raise DeviceError(f"{what} has no unit. {hint}")
    if n_bytes < 1:
        raise DeviceError(f"{what} is less than one byte. Write a size such as 2GiB.")
    return n_bytes


def _sim_piece(tail: str) -> tuple[Device, ...]:
    if not tail:
        raise DeviceError(f"Device 'sim' names no GPU. {_EXPECTED} Write 'sim:RTX3090', or 'sim:2xRTX3090' for two.")
    if "(" in tail:
        raise DeviceError(
            f"Device spec {shown(f'sim:{tail}')} is a cluster, and only autosplit compare accepts clusters. Use "
            "autosplit compare, or name the GPUs of one machine, such as sim:8xA100-80GB."
        )
    devices: list[Device] = []
    for item in tail.split("+"):
        count, device = sim_item(item.strip(), f"sim:{tail}")
        _check_count(len(devices) + count, f"sim:{tail}")
        devices.extend([device] * count)
    return tuple(devices)


def sim_item(item: str, spec: str) -> tuple[int, Device]:
    """Parse ``2xRTX3090@10GiB``. Return the number of GPUs, and one of them. Errors mention the whole `spec`."""
    card, at, memory = (text.strip() for text in item.partition("@"))
    # Also match invalid counts such as "0x..." and "-1x...", which a later check rejects.
    match = re.fullmatch(r"(?:([+-]?[0-9.]+)\s*[xX*]\s*)?(.*)", card)
    assert match is not None
    count_text, name = match[1] or "1", match[2]
    if not name:
        raise DeviceError(f"Device spec {shown(spec)} has an item without a GPU. {_EXPECTED} Name a GPU.")
    askew = None if match[1] else re.fullmatch(r"([0-9]+)([A-Za-z].*)|(.*)[xX*]([0-9]+)", name)
    if askew is not None and mentions_card(askew[2] or askew[3]):
        meant = f"{askew[1] or askew[4]}x{(askew[2] or askew[3]).strip()}"
        raise DeviceError(
            f"GPU {shown(name)} contains a count, but the count belongs in front of the name. Write 'sim:{meant}'."
        )
    if not re.fullmatch(r"[0-9]+", count_text) or not count_text.strip("0"):
        raise DeviceError(f"Count {shown(count_text)} in {shown(spec)} is not a whole number of 1 or more. Correct it.")
    gpu = find_card(name)
    capacity_bytes = _budget(item, memory) if at else gpu.usable_bytes
    if capacity_bytes > gpu.memory_bytes:
        raise DeviceError(
            f"Memory {shown(memory)} in {shown(item)} is more than the {size_text(gpu.memory_bytes)} of a {gpu.name}. "
            "'@' can only lower the memory. Write a smaller size, or choose a larger GPU."
        )
    # int() rejects very long strings. A number with more digits than the limit is above the limit anyway.
    count = int(count_text) if len(count_text.lstrip("0")) <= len(str(MAX_DEVICES)) else MAX_DEVICES + 1
    return count, Device("sim", 0, gpu.name, capacity_bytes, budgeted=True, spec=gpu)


def _accelerator_piece(found: Found, tail: str | None) -> tuple[Device, ...]:
    spec = found.kind if tail is None else f"{found.kind}:{tail}"
    if found.module is None:
        advice = f"Make a {found.kind} device visible to this process."
        if "build without" in found.why_not:
            advice = f"Install a build of torch for {found.kind} (https://pytorch.org/get-started/locally)."
        raise DeviceError(
            f"Device {shown(spec)} is not available: {found.why_not}. {advice} Or use 'cpu', or a simulated GPU such "
            "as 'sim:2xRTX3090'."
        )
    visible = range(found.module.device_count())
    if tail is None:
        return devices_of(found, visible, all_of=True)
    if not re.fullmatch(r"[0-9]{1,9}", tail) or int(tail) not in visible:
        known = f"{found.kind}:0 to {found.kind}:{len(visible) - 1}" if len(visible) > 1 else f"{found.kind}:0 alone"
        raise DeviceError(f"Device {shown(spec)} is not available. This process sees {known}.")
    return devices_of(found, [int(tail)])


_ACCELERATORS = ("cuda", "xpu", "npu", "mps", "hpu", "mtia")
"""Known accelerator kinds. If a spec names an absent kind, the error reports this."""
