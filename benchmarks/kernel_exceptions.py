"""Rows of `cuda_kernels.py` that are known not to match CUDA, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Mismatch:
    """Cases with a prediction that is known to differ from CUDA's numbers.

    Attributes:
        case: A shell pattern for the names of the cases, without their precision.
        precisions: The precisions that differ.
        quantities: What differs: ``"memory"``, ``"saved"`` or ``"time"``.
    """

    case: str
    precisions: tuple[str, ...]
    quantities: tuple[str, ...]
    reason: str

    def covers(self, name: str, quantity: str) -> bool:
        """Return whether a quantity of a case may differ."""
        case, _, precision = name.removesuffix("]").rpartition(" [")
        return fnmatchcase(case, self.case) and precision in self.precisions and quantity in self.quantities


MISMATCHES: tuple[Mismatch, ...] = ()


def reason_for(name: str, quantity: str) -> str:
    """Return why a quantity of a case differs from CUDA's, or "" if it has to match."""
    return next((one.reason for one in MISMATCHES if one.covers(name, quantity)), "")
