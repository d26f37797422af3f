"""NVML's figures of NVIDIA's cards, without a context on them: memory, drivers, MIG."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any

from autosplit.errors import first_line


def is_mig(name: str) -> bool:
    """Tell whether CUDA's name is that of a slice of a GPU (``"NVIDIA A100-SXM4-40GB MIG 1g.5gb"``)."""
    return " MIG " in f"{name} "


def mig_count(names: Iterable[str]) -> int:
    """Count the MIG instances that this process is meant to use: CUDA gives it one, and silently loses the others.

    They are those that ``CUDA_VISIBLE_DEVICES`` or CUDA's `names` tell of, whichever are more.
    """
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return max(sum(item.strip().startswith("MIG-") for item in mask), sum(map(is_mig, names)))


def started_nvml() -> tuple[Any, str]:
    """Return NVML's module, started, and an empty text; or None and why not. Tests put fakes in its place."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "NVML is not installed, so use, temperature and power are unknown; pip install nvidia-ml-py"
    except Exception as error:  # noqa: BLE001 (whatever goes wrong in a foreign module, NVML stays optional)
        return None, f"NVML cannot be imported ({first_line(error)}); reinstall nvidia-ml-py"
    try:
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 (the same: every failure is a note)
        return None, _nvml_start_problem(error)
    return nvml, ""


def _nvml_start_problem(error: Exception) -> str:
    """Return the note for an NVML that doesn't start."""
    reasons = {
        "NVMLError_LibraryNotFound": "no NVIDIA driver is installed here",
        "NVMLError_DriverNotLoaded": "the NVIDIA driver is installed but not loaded; load it, or reboot",
        "NVMLError_LibRmVersionMismatch": "the NVIDIA driver was updated while loaded; reboot",
        "NVMLError_NoPermission": "NVML has no permission to talk to the driver; run as a user who has",
    }
    reason = reasons.get(type(error).__name__, f"NVML does not start ({first_line(error)})")
    return f"{reason}; use, temperature and power are unknown"


def free_bytes_by_nvml(nvml: Any, uuid: str | None) -> int | None:
    """Return the bytes of a card that nobody holds; None where NVML doesn't tell."""
    if nvml is None or uuid is None:
        return None
    try:
        return int(memory_by_nvml(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)).free)
    except Exception:  # noqa: BLE001 (the same: torch is asked then)
        return None


def memory_by_nvml(nvml: Any, handle: Any) -> Any:
    """Ask NVML for a card's memory: in its second version, which keeps the driver's own share apart, else the first."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except Exception:  # noqa: BLE001 (some drivers answer "unknown error": the first one decides)
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def driver_version(nvml: Any) -> str | None:
    """Return the driver's version by NVML, None where it doesn't tell."""
    try:
        return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # noqa: BLE001 (the same: a plan needs no driver version)
        return None
