"""Describe a device, its capacity and its memory reserve.

Devices are accelerators under torch's names (``cuda``, ``xpu``, ``npu``, ``mps``, ...), ``cpu`` (this machine's CPU,
with or without a memory budget) and ``sim`` (GPUs of the catalogue). This module imports neither torch nor NVML.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from autosplit.accelerators import is_accelerator
from autosplit.devices.catalog import GpuSpec
from autosplit.errors import InputError, shown
from autosplit.text import parse_bytes, size_text

Evidence = Literal["steps", "bytes", "time"]

MAX_DEVICES = 1024
"""Maximum number of devices in a spec. A larger count is a typing error."""

_ACCELERATOR_RESERVE = 0.05


@dataclass(frozen=True)
class Device:
    """One device of a plan.

    Attributes:
        kind: ``"cpu"``, ``"sim"``, or torch's name of an accelerator (``"cuda"``, ``"xpu"``).
        index: The logical index of an accelerator, otherwise the position among the devices.
        name: ``"NVIDIA GeForce RTX 3090"``, ``"RTX3090"`` (simulated) or ``"cpu"``.
        capacity_bytes: Memory for planning, before the reserve. For an accelerator, the free memory and the memory of
            this process's allocator. For ``sim``, the GPU's memory, or the size after ``@``. For ``cpu``, the budget,
            or 80% of the available memory.
        budgeted: Whether the capacity is enforced exactly, as for ``sim`` and ``cpu:SIZE``.
        spec: The catalogue's row. Only for ``sim``.
        uuid: ``"GPU-..."``. Only for accelerators, None if unknown.
        driver: The driver's version. Only for ``cuda``, None if unknown.
        integrated: Whether an accelerator uses the host's memory.
    """

    kind: str
    index: int
    name: str
    capacity_bytes: int
    budgeted: bool = False
    spec: GpuSpec | None = None
    uuid: str | None = None
    driver: str | None = None
    integrated: bool = False

    @property
    def label(self) -> str:
        """The device's name in reports: ``"cuda:0"``, ``"cpu:1"``, ``"sim:2"``, or ``"cpu"`` without a budget."""
        return "cpu" if self.kind == "cpu" and not self.budgeted else f"{self.kind}:{self.index}"

    @property
    def evidence(self) -> Evidence:
        """What shows how many samples fit.

        ``"steps"``: only real steps do, on accelerators. ``"bytes"``: bytes are counted and predicted, for ``sim`` and
        CPU budgets. ``"time"``: nothing limits memory, on a CPU without a budget, so the time of a step does.
        """
        if is_accelerator(self.kind):
            return "steps"
        return "bytes" if self.budgeted else "time"


LEAST_RESERVE_BYTES = 1024
"""Minimum reserve. A smaller number is probably a size without its unit."""


def parse_reserve(value: str | float | None) -> int | float | None:
    """Parse a device's memory reserve: an int of bytes, a float fraction of its capacity, or None for the default.

    Raises:
        InputError: The reserve is neither a size nor a fraction below 1, or probably lacks its unit.
    """
    if value is None:
        return None
    reserve = _reserve_in(value) if isinstance(value, str) else value
    is_bytes = isinstance(reserve, int) and not isinstance(reserve, bool) and reserve >= 0
    if not is_bytes and not (isinstance(reserve, float) and 0 <= reserve < 1):
        raise InputError(
            f"reserve is {shown(value)}. Expected bytes (1GiB) or a fraction of at least 0 and below 1 (5%, 0.05)."
        )
    if isinstance(reserve, int) and 0 < reserve < LEAST_RESERVE_BYTES:
        raise InputError(
            f"reserve {shown(value)} is {reserve} bytes. Expected a size with its unit or a fraction. Use {reserve}GiB "
            f"or {reserve}%."
        )
    return reserve


def _reserve_in(text: str) -> int | float | None:
    if percent := re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*%", text.strip()):
        return float(Fraction(percent[1]) / 100)
    if re.fullmatch(r"0?\.[0-9]{1,20}", text.strip()):
        return float(text)
    try:
        return parse_bytes(text)
    except InputError:
        return None


def reserve_bytes(reserve: str | float | None, device: Device) -> int:
    """Return the bytes to keep free on a device, rounded up. The default is 5% on accelerators and 0 elsewhere.

    Raises:
        InputError: As `parse_reserve`, or the reserve is at least the whole capacity.
    """
    wanted = parse_reserve(reserve)
    if wanted is None:
        wanted = _ACCELERATOR_RESERVE if is_accelerator(device.kind) else 0
    kept_bytes = wanted if isinstance(wanted, int) else math.ceil(wanted * device.capacity_bytes)
    if kept_bytes and kept_bytes >= device.capacity_bytes:
        raise InputError(
            f"reserve {shown(reserve)} keeps {size_text(kept_bytes)} free on {device.label}, but the device has only "
            f"{size_text(device.capacity_bytes)}. Lower the reserve."
        )
    return kept_bytes
