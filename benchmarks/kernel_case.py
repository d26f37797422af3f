"""The type of the cases that `cuda_kernels.py` traces.

A case is one small training step. Its name ends with the precision: ``"GPT-2 [bf16]"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autosplit import Workload

DEFAULT_CAPABILITY = 80
OTHER_CAPABILITIES = (75, 86, 90, 100, 120)
"""Compute capabilities, times ten, at which only attention is traced."""


@dataclass(frozen=True)
class Case:
    """One training step that is traced on the CPU back end and on the CUDA back end.

    Attributes:
        build: Returns a new workload.
        samples: Two batch sizes. The slope between them gives the bytes per sample, so constant memory cancels. At both
            sizes the peak must lie in the backward, and not in the optimizer's update.
        needs: Packages that the case imports, without torch.
        every_capability: Trace the case at each compute capability, because it contains attention.
        build_for_cuda: Returns an equivalent workload that can be traced with fake tensors, if the Python code of the
            real one reads values of tensors.
    """

    name: str
    build: Callable[[], Workload]
    samples: tuple[int, int]
    needs: tuple[str, ...] = ()
    every_capability: bool = False
    build_for_cuda: Callable[[], Workload] | None = None

    def capabilities(self) -> tuple[int, ...]:
        """Return the compute capabilities at which the case is traced."""
        return (DEFAULT_CAPABILITY, *OTHER_CAPABILITIES) if self.every_capability else (DEFAULT_CAPABILITY,)
