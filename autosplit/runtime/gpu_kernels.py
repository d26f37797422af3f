"""What decides which kernels torch's CUDA back end runs on a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuKernels:
    """The properties of an NVIDIA GPU by which torch and its libraries choose kernels.

    Attributes:
        capability: Compute capability times ten: 75 for Turing, 80 and 86 for Ampere, 89 for Ada, 90 for Hopper, 100
            and 120 for Blackwell.
    """

    capability: int = 80
