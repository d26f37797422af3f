"""Read NVML's data of NVIDIA GPUs without creating a context: memory, drivers, MIG."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

from autosplit.errors import first_line


def is_mig(name: str) -> bool:
    """Return whether CUDA's name is a MIG slice of a GPU (``"NVIDIA A100-SXM4-40GB MIG 1g.5gb"``)."""
    return " MIG " in f"{name} "


def mig_count(names: Iterable[str]) -> int:
    """Count the MIG instances assigned to this process, in ``CUDA_VISIBLE_DEVICES`` or in CUDA's `names`.

    CUDA uses only one and silently ignores the others.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return max(sum(item.strip().startswith("MIG-") for item in mask), sum(map(is_mig, names)))


def started_nvml() -> tuple[Any, str]:
    """Return NVML's started module and an empty string, or None and the reason. Tests replace it with fakes."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, (
            "NVML is not installed, so the memory of other processes is unknown. Run pip install nvidia-ml-py."
        )
    except Exception as error:  # noqa: BLE001 (NVML is optional, whatever error its module raises)
        return None, f"NVML cannot be imported ({first_line(error)}). Reinstall nvidia-ml-py."
    try:
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 (every failure becomes a note)
        return None, _nvml_start_problem(error)
    return nvml, ""


def _nvml_start_problem(error: Exception) -> str:
    reasons = {
        "NVMLError_LibraryNotFound": ("no NVIDIA driver is installed", "Install it"),
        "NVMLError_DriverNotLoaded": ("the NVIDIA driver is installed but not loaded", "Load it, or reboot"),
        "NVMLError_LibRmVersionMismatch": ("the NVIDIA driver was updated while it was loaded", "Reboot"),
        "NVMLError_NoPermission": ("this user may not access the NVIDIA driver", "Run as a user who may"),
    }
    reason, cure = reasons.get(type(error).__name__, (f"NVML does not start ({first_line(error)})", "Run nvidia-smi"))
    return f"{reason}, so the memory of other processes is unknown. {cure}."


def free_bytes_by_nvml(nvml: Any, uuid: str | None) -> int | None:
    """Return a GPU's free bytes, or None if NVML does not report them."""
    if nvml is None or uuid is None:
        return None
    try:
        return int(memory_by_nvml(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)).free)
    except Exception:  # noqa: BLE001 (torch reports the free memory instead)
        return None


def memory_by_nvml(nvml: Any, handle: Any) -> Any:
    """Read a GPU's memory from NVML. Version 2 excludes the driver's memory. Version 1 is the fallback."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except Exception:  # noqa: BLE001 (some drivers answer "unknown error" to version 2)
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def driver_version(nvml: Any) -> str | None:
    """Return the driver's version from NVML, or None if it is not reported."""
    try:
        return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # noqa: BLE001 (a plan does not need the driver version)
        return None
