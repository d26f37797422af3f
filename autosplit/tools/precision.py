"""Choose the precisions to search. bf16 runs on any device, but without native support it is not faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autosplit.accelerators import backend, is_accelerator
from autosplit.devices.device import Device
from autosplit.errors import WorkloadError
from autosplit.notes import Note
from autosplit.workload.workload import PRECISIONS, precision_name

BF16_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with bfloat16 units (CUDA C++ Programming Guide, arithmetic instructions)."""

WITHOUT_BF16 = ("gfx8", "gfx900", "gfx906", "gfx10")
"""AMD architectures without matrix units for bfloat16, up to MI50 and RDNA 2.

Sources: "MI100" Instruction Set Architecture, "RDNA3" Instruction Set Architecture. PyTorch reports compute capability
9.0 for both these and later architectures.
"""


def precision_list(value: Any) -> tuple[str | None, ...]:
    """Return the precisions to search, for one precision, ``("none", "bf16")``, ``"none,bf16"`` or None."""
    if value is None:
        return (None,)
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not names:
        names = [value]
    known = [precision_name(name.strip() if isinstance(name, str) else name) for name in names]
    for name in known:
        if not isinstance(name, str) or name not in PRECISIONS:
            raise WorkloadError(
                f"precision is {value!r}. Expected one of {', '.join(map(repr, PRECISIONS))}, or several of them as in "
                "('none', 'bf16'). 'none' is fp32, or the precision of the model.",
            )
    return tuple(dict.fromkeys(known))


def without_bf16(precisions: Sequence[str | None], devices: Sequence[Device]) -> list[str]:
    """Return the devices without native bfloat16, by label and name, if bf16 is one of several precisions.

    A single precision is the user's choice. The devices must belong to this process, because ``cuda:0`` of another
    process may be another GPU.
    """
    if len(precisions) < 2 or "bf16" not in precisions:
        return []
    return [f"{device.label} ({device.name})" for device in devices if not _has_bf16(device)]


def native_ones(
    precisions: Sequence[str | None], lacking: Sequence[str]
) -> tuple[tuple[str | None, ...], tuple[Note, ...]]:
    """Return the precisions that all devices run natively, and a note if bf16 is left out."""
    if not lacking:
        return tuple(precisions), ()
    who = f"{', '.join(sorted(set(lacking)))} has no native bfloat16"
    text = f"autosplit did not try bf16, because {who}. To plan for bf16 anyway, use precision='bf16' alone."
    return tuple(name for name in precisions if name != "bf16"), (Note("precision-left-out", text),)


def _has_bf16(device: Device) -> bool:
    if device.kind == "sim":
        assert device.spec is not None, device
        return "bfloat16" in device.spec.peak_flops
    if device.kind == "cuda" and torch.version.hip:
        return not torch.cuda.get_device_properties(device.index).gcnArchName.startswith(WITHOUT_BF16)
    if device.kind == "cuda":
        return torch.cuda.get_device_capability(device.index) >= BF16_CAPABILITY
    if is_accelerator(device.kind):
        question = getattr(backend(device.kind), "is_bf16_supported", None)
        return question is not None and bool(question())
    # PyTorch has only private functions to query a CPU's instructions. Treat a removed function as no support.
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(question is not None and question() for question in asked)
