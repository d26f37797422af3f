"""The precisions that are searched, and where they are native: bf16 runs on any device, and gains nothing on many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autosplit.accelerators import backend, is_accelerator
from autosplit.devices.device import Device
from autosplit.errors import WorkloadError
from autosplit.notes import Note
from autosplit.workload.workload import PRECISIONS

BF16_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with bfloat16 units (CUDA C++ Programming Guide, arithmetic instructions)."""

WITHOUT_BF16 = ("gfx8", "gfx900", "gfx906", "gfx10")
"""AMD's architectures without matrix units for bfloat16, MI50 and RDNA 2 the last of them: "MI100" Instruction Set
Architecture, "RDNA3" Instruction Set Architecture. Their compute capability is 9.0 as that of later ones is.
"""


def precision_list(value: Any) -> tuple[str | None, ...]:
    """Read the precisions to search: one, several as ``("none", "bf16")`` or ``"none,bf16"``; or None."""
    if value is None:
        return (None,)
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not names:
        names = [value]
    known = [name.strip() if isinstance(name, str) else name for name in names]
    for name in known:
        if not isinstance(name, str) or name not in PRECISIONS:
            raise WorkloadError(
                f"precision is {value!r}; expected one of {', '.join(map(repr, PRECISIONS))}, or several of them as in "
                "('none', 'bf16'); choose among them ('none' is fp32, or what the model is in)",
                code="precision",
            )
    return tuple(dict.fromkeys(known))


def without_bf16(precisions: Sequence[str | None], devices: Sequence[Device]) -> list[str]:
    """List the devices that have no units for bfloat16 where it is one of several precisions, by label and name.

    One precision alone is what the user wants, native or not. The devices are this process's own: what another one
    calls ``cuda:0`` may be another card, or none here.
    """
    if len(precisions) < 2 or "bf16" not in precisions:
        return []
    return [f"{device.label} ({device.name})" for device in devices if not _has_bf16(device)]


def native_ones(
    precisions: Sequence[str | None], lacking: Sequence[str]
) -> tuple[tuple[str | None, ...], tuple[Note, ...]]:
    """Return the precisions that all devices run natively, and a note on the others."""
    if not lacking:
        return tuple(precisions), ()
    who = f"{', '.join(sorted(set(lacking)))} has no native bfloat16"
    text = f"precision bf16 was not searched: {who}; precision='bf16' alone plans for it anyway"
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
    # What a processor has is told by names that torch keeps to itself; one that went away counts as a no.
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(question is not None and question() for question in asked)
