"""Describe a GPU by its compute capability, which determines the kernels that torch's CUDA back end runs."""

from __future__ import annotations

from dataclasses import dataclass

_GENERATIONS = (50, 60, 70, 75, 80, 86, 89, 90, 100, 120)
"""Compute capabilities at which torch or its libraries switch to other kernels."""


@dataclass(frozen=True)
class GpuKernels:
    """The kernels of an NVIDIA GPU, which torch and its libraries choose by compute capability.

    Attributes:
        capability: Compute capability times ten: 75 for Turing, 80 and 86 for Ampere, 89 for Ada, 90 for Hopper, 100
            and 120 for Blackwell.
    """

    capability: int = 80

    @classmethod
    def of(cls, capability: str | None) -> GpuKernels:
        """Return the kernels for a compute capability such as "8.9". For None (other vendors), return an A100's."""
        if capability is None:
            return cls()
        major, minor = map(int, capability.split("."))
        own = 10 * major + minor
        return cls(max((one for one in _GENERATIONS if one <= own), default=_GENERATIONS[0]))
