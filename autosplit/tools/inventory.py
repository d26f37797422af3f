"""List every GPU of the machine with its memory, for ``autosplit devices``.

CUDA's GPUs are matched with NVML's by UUID or PCI address. Failures of CUDA or NVML become notes.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from autosplit.devices.accelerator import Found, accelerator_at, device_uuid, uses_host_memory, why_unsupported
from autosplit.devices.host_memory import available_host_bytes
from autosplit.devices.nvml import is_mig, memory_by_nvml, mig_count, started_nvml
from autosplit.errors import first_line

_T = TypeVar("_T")


# Values that NVML reports for a whole GPU, and CUDA for a MIG slice of it.
_MEASURED = ("total_bytes", "free_bytes", "used_bytes", "own_bytes")


@dataclass(frozen=True)
class DeviceReport:
    """One GPU as ``autosplit devices`` shows it. Unknown values are None.

    Attributes:
        logical_index: Its number in torch (``cuda:N``), or None if it is not visible to this process.
        physical_index: Its number in NVML and nvidia-smi, or None if NVML does not list it.
        name: Its product name.
        total_bytes: Total memory.
        free_bytes: Free memory.
        used_by_others_bytes: Memory of other processes.
        uuid: ``"GPU-..."``.
        visible: Whether this process can use it.
        notes: Special properties, and values that could not be read.
        kind: Torch's name for the device type: ``"cuda"``, ``"xpu"``.
        unsupported: Why the installed torch cannot use the GPU, with the next step, or None.
    """

    logical_index: int | None
    physical_index: int | None
    name: str
    total_bytes: int | None
    free_bytes: int | None
    used_by_others_bytes: int | None
    uuid: str | None
    visible: bool
    notes: tuple[str, ...] = ()
    kind: str = "cuda"
    unsupported: str | None = None


@dataclass(frozen=True)
class Devices:
    """The GPUs of this machine.

    Attributes:
        devices: One report per GPU. Empty if there is no GPU.
        notes: Notes on all GPUs, one sentence each.
    """

    devices: tuple[DeviceReport, ...]
    notes: tuple[str, ...]


@dataclass
class _Gpu:
    name: str
    notes: list[str]
    logical_index: int | None = None
    physical_index: int | None = None
    uuid: str | None = None
    pci: tuple[int, int, int] | None = None
    mig: bool = False
    integrated: bool = False
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    own_bytes: int | None = None
    unsupported: str | None = None


def survey_devices() -> tuple[tuple[DeviceReport, ...], tuple[str, ...]]:
    """List every GPU of the machine, including GPUs that are not visible to this process.

    Returns:
        The GPUs, first the visible GPUs in CUDA's order, and notes about the machine: no driver, no NVML, failures,
        the mapping of ``CUDA_VISIBLE_DEVICES``.
    """
    notes: list[str] = []
    found = accelerator_at()
    nvml: Any
    nvml, why_no_nvml = started_nvml() if found.kind == "cuda" else (None, "")
    notes.extend(note for note in (found.why_not, why_no_nvml, _pynvml_distribution_note()) if note)
    logical = [] if found.module is None else _logical_gpus(found, notes)
    physical: list[_Gpu] = []
    count = None if nvml is None else _read(notes, "NVML's number of GPUs", nvml.nvmlDeviceGetCount)
    for index in range(count or 0):
        handle = _read(notes, f"physical GPU {index}", functools.partial(nvml.nvmlDeviceGetHandleByIndex, index))
        if handle is not None:
            physical.append(_physical_gpu(nvml, index, handle))
    rows = [_merged(gpu, physical, found.module) for gpu in logical]
    matched = {gpu.physical_index for gpu in rows}
    rows.extend(gpu for gpu in physical if gpu.physical_index not in matched)
    reports = tuple(_report(gpu, found.kind) for gpu in rows)
    notes.extend(_visibility_notes(reports, nvml_answers=bool(physical)))
    return reports, tuple(dict.fromkeys(notes))


def _logical_gpus(found: Found, notes: list[str]) -> list[_Gpu]:
    gpus, cuda = [], found.module
    for index in range(_read(notes, "the number of GPUs", cuda.device_count) or 0):
        gpu = _Gpu(name="unknown GPU", notes=[], logical_index=index)
        properties = _read(gpu.notes, "properties", functools.partial(cuda.get_device_properties, index))
        if properties is not None:
            gpu.name = str(properties.name)
            gpu.uuid = device_uuid(properties)
            gpu.total_bytes = int(properties.total_memory)
            gpu.mig = is_mig(gpu.name)
            gpu.integrated = uses_host_memory(properties)
            gpu.notes.extend(["it uses the host's memory"] if gpu.integrated else [])
            if found.kind == "cuda":
                gpu.pci = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
                gpu.unsupported = _read(gpu.notes, "architecture", functools.partial(why_unsupported, cuda, index))
                gpu.notes.extend([gpu.unsupported] if gpu.unsupported else [])
        gpus.append(gpu)
    if mig_count(gpu.name for gpu in gpus) > 1:
        notes.append(
            "several MIG instances are visible, but a process can use only one. Set CUDA_VISIBLE_DEVICES to one."
        )
    return gpus


def _physical_gpu(nvml: Any, index: int, handle: Any) -> _Gpu:
    notes: list[str] = []
    name = _read(notes, "name", lambda: str(nvml.nvmlDeviceGetName(handle)))
    gpu = _Gpu(name=name or "unknown GPU", notes=notes, physical_index=index)
    gpu.uuid = _read(notes, "UUID", lambda: str(nvml.nvmlDeviceGetUUID(handle)))
    pci = _read(notes, "PCI address", lambda: nvml.nvmlDeviceGetPciInfo(handle))
    gpu.pci = None if pci is None else (int(pci.domain), int(pci.bus), int(pci.device))
    memory = _read(notes, "memory", lambda: memory_by_nvml(nvml, handle))
    if memory is not None:
        gpu.total_bytes, gpu.free_bytes, gpu.used_bytes = int(memory.total), int(memory.free), int(memory.used)
    gpu.own_bytes = _own_bytes(nvml, handle, notes)
    # A GPU without MIG raises "not supported", which needs no note.
    mig = _read([], "MIG", lambda: nvml.nvmlDeviceGetMigMode(handle))
    if mig and mig[0]:
        gpu.mig = True
        notes.append("MIG is on. Set CUDA_VISIBLE_DEVICES to the MIG- UUID of one instance")
    return gpu


def _own_bytes(nvml: Any, handle: Any, notes: list[str]) -> int | None:
    processes = _read(notes, "processes", lambda: list(nvml.nvmlDeviceGetComputeRunningProcesses(handle)))
    if processes is None:
        return None
    if any(process.usedGpuMemory is None for process in processes):
        notes.append("the driver does not report the memory of each process (as on Windows and WSL)")
    own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return sum(own) if own and None not in own else None


def _merged(gpu: _Gpu, physical: Sequence[_Gpu], cuda: Any) -> _Gpu:
    known = _same_gpu(gpu, physical)
    if known is not None:
        # For a MIG slice, use CUDA's memory size. NVML reports the whole GPU.
        for name in ("physical_index", *(() if gpu.mig else _MEASURED)):
            if getattr(known, name) is not None:
                setattr(gpu, name, getattr(known, name))
        gpu.uuid = gpu.uuid or known.uuid
        gpu.notes.extend(known.notes)
    index = gpu.logical_index
    if gpu.integrated:
        gpu.free_bytes = available_host_bytes()
        gpu.used_bytes = max(0, (gpu.total_bytes or 0) - gpu.free_bytes)
    if gpu.free_bytes is None:
        # Only CUDA has values for unified memory and slices. The call creates a context, so avoid it if possible.
        memory = _read(gpu.notes, "free memory", lambda: cuda.mem_get_info(index))
        if memory is not None:
            gpu.free_bytes, gpu.total_bytes = int(memory[0]), int(memory[1])
            gpu.used_bytes = gpu.total_bytes - gpu.free_bytes
    if gpu.own_bytes is None:
        gpu.own_bytes = _read(
            [], "own memory", lambda: int(cuda.memory_reserved(index) if cuda.is_initialized() else 0)
        )
    return gpu


def _same_gpu(gpu: _Gpu, physical: Sequence[_Gpu]) -> _Gpu | None:
    """Find a CUDA GPU in NVML's list by UUID, then by PCI address. The indices differ, because the orders differ."""
    for attribute in ("uuid", "pci"):
        value = getattr(gpu, attribute)
        matches = [other for other in physical if value is not None and getattr(other, attribute) == value]
        if len(matches) == 1:
            return matches[0]
    if physical:
        gpu.notes.append("NVML lists no GPU with this UUID or PCI address")
    return None


def _report(gpu: _Gpu, kind: str) -> DeviceReport:
    others = None if gpu.used_bytes is None else max(0, gpu.used_bytes - (gpu.own_bytes or 0))
    values = {one.name: getattr(gpu, one.name) for one in fields(DeviceReport) if hasattr(gpu, one.name)}
    values |= {"notes": tuple(dict.fromkeys(gpu.notes)), "kind": kind}
    return DeviceReport(**values, used_by_others_bytes=others, visible=gpu.logical_index is not None)


def _visibility_notes(reports: Sequence[DeviceReport], *, nvml_answers: bool) -> list[str]:
    if any(report.kind != "cuda" for report in reports):
        return []  # other back ends have no driver numbers
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [report for report in reports if report.visible]
    setting = "CUDA_VISIBLE_DEVICES is not set" if mask is None else f"CUDA_VISIBLE_DEVICES={mask!r}"
    if not visible:
        return [f"{setting}: no GPU is visible to this process"] if reports or mask is not None else []
    if not nvml_answers:
        return [f"{setting}: {len(visible)} visible. Their physical numbers are unknown without NVML."]
    unknown = "an unknown GPU"
    pairs = [
        f"cuda:{r.logical_index} is {unknown if r.physical_index is None else f'physical {r.physical_index}'}"
        for r in visible
    ]
    notes = [f"{setting}: {', '.join(pairs)}"]
    physical = [r.physical_index for r in visible if r.physical_index is not None]
    if mask is None and physical != sorted(physical):
        notes.append(
            "CUDA numbers the fastest GPU first. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to number the GPUs as "
            "nvidia-smi does."
        )
    return notes


def _read(notes: list[str], what: str, call: Callable[[], _T]) -> _T | None:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 (one unreadable value must not hide the others)
        notes.append(f"{what} unknown: {first_line(error)}")
        return None


def _pynvml_distribution_note() -> str | None:
    try:
        version = importlib.metadata.version("pynvml")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"The package pynvml {version} is installed and hides nvidia-ml-py. Run pip uninstall pynvml, then pip "
        "install --force-reinstall nvidia-ml-py."
    )
