"""Find accelerators, and read their memory, their UUIDs and whether torch has kernels for them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from autosplit.accelerators import accelerator_kind, backend
from autosplit.devices.device import Device
from autosplit.devices.host_memory import HOST_SHARE, available_host_bytes
from autosplit.devices.nvml import driver_version, free_bytes_by_nvml, is_mig, mig_count, started_nvml
from autosplit.errors import DeviceError, first_line, warn_user


class DeviceWarning(UserWarning):
    """Warning that an existing device is not used."""


class Found(NamedTuple):
    """Torch's module for a kind of accelerator, or the reason why there is none."""

    module: Any
    kind: str
    why_not: str = ""
    ask_memory: bool = True


def accelerator_at(kind: str | None = None) -> Found:
    """Return an accelerator kind, by default the kind that torch detects. Tests replace it with fakes."""
    try:
        import torch  # only for accelerators: parsing `sim:` and `cpu` specs must not wait for torch
    except ImportError as error:
        return Found(None, kind or "cuda", f"torch cannot be imported: {error}")
    with warnings.catch_warnings():
        # torch warns if the driver is too old or broken. Its return value is enough here.
        warnings.simplefilter("ignore")
        here = accelerator_kind()
    if here is not None and kind in {None, here}:
        return Found(backend(here), here)
    wanted = kind or "cuda"
    if wanted == "cuda" and torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return Found(None, wanted, f"the installed torch {torch.__version__} is a build without CUDA")
    mask = os.environ.get("CUDA_VISIBLE_DEVICES") if wanted == "cuda" else None
    under = f" under CUDA_VISIBLE_DEVICES={mask!r}" if mask is not None else ""
    return Found(None, wanted, f"torch sees no {'GPU' if wanted == 'cuda' else wanted + ' device'}{under}")


def devices_of(found: Found, indices: Sequence[int], *, all_of: bool = False) -> tuple[Device, ...]:
    """Return the devices at the given indices.

    With `all_of`, skip a device that fails or that another process uses exclusively, if another device works.

    Raises:
        DeviceError: A device fails or is not supported by the installed torch, or several MIG instances are visible.
    """
    if found.kind == "cuda":
        _refuse_several_mig(found.module, indices)
        _refuse_unsupported(found.module, indices, range(found.module.device_count()))
    nvml = started_nvml()[0] if found.kind == "cuda" else None
    devices, problems = [], []
    for index in indices:
        try:
            devices.append(_device_at(found, index, nvml))
        except RuntimeError as error:
            problems.append(f"Device '{found.kind}:{index}' does not report its memory ({first_line(error)})")
    if problems and not (all_of and devices):
        raise DeviceError(f"{problems[0]}. Run `autosplit devices` for its state, or choose another GPU.")
    for problem in problems:
        warn_user(
            f"{problem}. autosplit does not use this device. Run `autosplit devices` for its state.",
            DeviceWarning,
        )
    return tuple(devices)


def with_free_memory(device: Device) -> Device:
    """Return an accelerator with the memory that is free now as its capacity. Raise DeviceError if it fails."""
    return devices_of(accelerator_at(device.kind), [device.index])[0]


def _device_at(found: Found, index: int, nvml: Any) -> Device:
    """Return the device at an index.

    Its capacity is the free memory plus the memory of this process's allocator. If the device uses host memory, a share
    of that memory counts as free.
    """
    properties = found.module.get_device_properties(index)
    total_bytes, uuid = int(properties.total_memory), device_uuid(properties)
    free_bytes: int | None
    if not found.ask_memory:
        free_bytes = total_bytes
    elif uses_host_memory(properties):
        # The driver does not count memory that the system could reclaim.
        free_bytes = int(HOST_SHARE * available_host_bytes())
    else:
        free_bytes = None if is_mig(str(properties.name)) else free_bytes_by_nvml(nvml, uuid)
        if free_bytes is None:  # this creates a context, which uses some of the memory
            free_bytes = int(found.module.mem_get_info(index)[0])
    return Device(
        kind=found.kind,
        index=index,
        name=str(properties.name),
        capacity_bytes=min(total_bytes, free_bytes + int(found.module.memory_reserved(index))),
        uuid=uuid,
        driver=driver_version(nvml),
        integrated=uses_host_memory(properties),
    )


def uses_host_memory(properties: Any) -> bool:
    """Return whether a GPU uses the host's memory: GB10, Jetson, Apple's GPUs, and GPUs in AMD's and Intel's CPUs.

    torch reports this for CUDA and ROCm, and in recent versions for XPU.
    """
    return bool(getattr(properties, "is_integrated", False) or getattr(properties, "is_integrated_gpu", False))


def device_uuid(properties: Any) -> str | None:
    """Return an accelerator's UUID, or None. torch omits the prefix of CUDA's UUIDs, so add it as in NVML."""
    uuid = getattr(properties, "uuid", None)
    if uuid is None:
        return None
    return str(uuid) if re.match("[A-Z]{3}-", str(uuid)) else f"GPU-{uuid}"


class Visible(NamedTuple):
    """An accelerator that this process can use, in torch's order."""

    name: str
    uuid: str | None


def visible_devices(kind: str) -> tuple[Visible, ...]:
    """List the accelerators of a kind that this process can use, without creating a context."""
    module = accelerator_at(kind).module
    found = [] if module is None else [module.get_device_properties(index) for index in range(module.device_count())]
    return tuple(Visible(str(properties.name), device_uuid(properties)) for properties in found)


def indices_here(wanted: Sequence[Visible], here: Sequence[Visible]) -> list[int | None]:
    """Return the current index of each device of a plan, or None if the device is missing.

    Match devices by UUID, because CUDA_VISIBLE_DEVICES may have changed. If no UUID matches, as on an identical
    machine, match devices by name in the same order.
    """
    by_uuid: dict[str | None, int] = {device.uuid: index for index, device in enumerate(here)}
    by_uuid.pop(None, None)
    if any(device.uuid in by_uuid for device in wanted):
        return [by_uuid.get(device.uuid) for device in wanted]
    alike = {name: iter([i for i, device in enumerate(here) if device.name == name]) for name, _ in wanted}
    return [next(alike[name], None) for name, _ in wanted]


def _refuse_several_mig(cuda: Any, indices: Iterable[int]) -> None:
    count = mig_count(str(cuda.get_device_properties(index).name) for index in indices)
    if count > 1:
        raise DeviceError(
            f"{count} MIG instances are visible, but CUDA lets a process use only one. "
            "Set CUDA_VISIBLE_DEVICES to one of them."
        )


def _refuse_unsupported(cuda: Any, indices: Iterable[int], visible: Iterable[int]) -> None:
    problems = {index: why_unsupported(cuda, index) for index in visible}
    bad = [index for index in indices if problems[index] is not None]
    if bad:
        name = str(cuda.get_device_properties(bad[0]).name)
        good = ",".join(str(index) for index, problem in problems.items() if problem is None)
        other = f", or use 'cuda:{good}'" if good else ", or use 'cpu' or a simulated GPU ('sim:')"
        raise DeviceError(f"Device 'cuda:{bad[0]}' ({name}): {problems[bad[0]]}{other}.")


def why_unsupported(cuda: Any, index: int) -> str | None:
    """Return why the installed torch has no kernels for a GPU and which build has them, or None if it has them."""
    major, minor = cuda.get_device_capability(index)
    return _missing_arch((int(major), int(minor)), cuda.get_arch_list())


def _missing_arch(capability: tuple[int, int], built_for: Sequence[str]) -> str | None:
    """Return an error message if torch was not built for a compute capability, or None.

    Machine code (``sm_86``) runs on the same major version from its minor version upwards. With the suffix ``a``, it
    runs only on that exact version. PTX (``compute_90``) is compiled for any newer version. An empty list or a list
    without CUDA architectures (``gfx90a``) is accepted.
    """
    arches = [match for arch in built_for if (match := re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])([af]?)", arch))]
    if not arches or any(_arch_runs(match, capability) for match in arches):
        return None
    listed = " ".join(match[0] for match in arches)
    return (
        f"compute capability {capability[0]}.{capability[1]} is not supported by this build of torch ({listed}). "
        f"Install {_build_for(capability)}"
    )


def _arch_runs(arch: re.Match[str], capability: tuple[int, int]) -> bool:
    built = (int(arch[2]), int(arch[3]))
    if arch[4] == "a":
        return built == capability
    if arch[1] == "compute" and not arch[4]:
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def _build_for(capability: tuple[int, int]) -> str:
    """Name a torch build with kernels for a GPU. See pytorch's CUDA support matrix (pytorch#172352, #190385)."""
    if capability < (5, 0):
        return f"a torch built from source for sm_{capability[0]}{capability[1]}, because no current wheel supports it"
    if capability < (7, 5):
        return "a torch of at most 2.14 built for CUDA 12.6 (cu126), which still supports Maxwell, Pascal and Volta"
    if capability >= (10, 0):
        return "a torch built for CUDA 12.8 or newer (cu128, cu130)"
    return "a torch built for CUDA 12.6 or newer (cu126, cu128, cu130)"
