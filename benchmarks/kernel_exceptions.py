"""Rows of `cuda_kernels.py` that are known not to match CUDA, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_case import DEFAULT_CAPABILITY


@dataclass(frozen=True)
class Mismatch:
    """Rows that are known to differ from CUDA's numbers.

    Attributes:
        cases: Names of cases.
        quantities: What differs: ``"memory"``, ``"saved"`` or ``"time"``.
        capabilities: The compute capabilities at which they differ, times ten.
    """

    cases: tuple[str, ...]
    quantities: tuple[str, ...]
    reason: str
    capabilities: tuple[int, ...] = (DEFAULT_CAPABILITY,)


MISMATCHES = (
    Mismatch(
        ("renorm [none]", "renorm [bf16]"),
        ("memory", "time"),
        "the backward computes in float64 on the CPU, and in float32 on CUDA (renorm_backward in FunctionsManual.cpp)",
    ),
    Mismatch(
        ("SegFormer [none]",),
        ("time",),
        "a batch norm and an interpolation of the decoder run on planes on the CPU, and in channels_last on CUDA",
    ),
    Mismatch(
        tuple(
            f"{name}, channels_last [{precision}]"
            for name in ("PixelShuffle", "ReflectionPad2d", "ReplicationPad2d")
            for precision in ("none", "bf16")
        ),
        ("time",),
        "the CPU's operator returns channels_last, and CUDA's a contiguous output, so the next convolution differs",
    ),
)


def reason_for(case: str, capability: int, quantity: str) -> str:
    """Return why a quantity of a row differs from CUDA's, or "" if it has to match."""
    for one in MISMATCHES:
        if case in one.cases and capability in one.capabilities and quantity in one.quantities:
            return one.reason
    return ""
