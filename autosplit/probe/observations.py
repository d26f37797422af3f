"""Keep what was seen of one device in one role: predictions, real steps, and failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autosplit.runtime.protocol import StepShape
from autosplit.solve.memory import Limit, Role

__all__ = ["Observations"]


SLOPE_TOLERANCE = 0.01
"""Relative error up to which a predicted slope is left as it is."""


@dataclass
class Observations:
    """The observations of one device in one role.

    Attributes:
        predicted: Bytes by samples, by traces.
        ran: Bytes by samples, of real steps.
        failed: Sizes that ran out of memory, each with what it would at least have needed.
        limit: Set where something else than memory ended the search.
        lost: The process of a step died of it, which says nothing of bytes.
    """

    index: int
    role: Role
    shape_of: Callable[[int], StepShape]
    predict: Callable[[int], float] = float
    predicted: dict[int, int] = field(default_factory=dict)
    ran: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    limit: Limit | None = None
    lost: bool = False

    def points(self) -> tuple[tuple[int, int, bool], ...]:
        """Return all sizes that were looked at, in order."""
        known = {n: (n, nbytes, False) for n, nbytes in self.predicted.items()}
        known.update({n: (n, nbytes, True) for n, nbytes in self.ran.items()})
        return tuple(known[n] for n in sorted(known))

    def corrected(self, n: int) -> float:
        """Predict the bytes of n samples, with what real steps hold beyond their predictions."""
        return self.predict(n) + self._residual(n)

    def _residual(self, n: int) -> float:
        """Return what real steps hold beyond their prediction, in bytes, at a size that was not run.

        It is that of the nearest real step, or, where the two nearest show that it grows (a slope off by more than
        `SLOPE_TOLERANCE`), the line through them. A size that failed needs more than there is.
        """
        known = {size: nbytes - self.predict(size) for size, nbytes in self.ran.items()}
        for size, nbytes in self.failed.items():
            known[size] = max(0.0, nbytes - self.predict(size), max(known.values(), default=0.0))
        if not known:
            return 0.0
        nearest = sorted(known, key=lambda size: abs(size - n))[:2]
        if len(nearest) == 1:
            return known[nearest[0]]
        n0, n1 = sorted(nearest)
        slope = (known[n1] - known[n0]) / (n1 - n0)
        predicted_slope = (self.predict(n1) - self.predict(n0)) / (n1 - n0)
        if abs(slope) <= SLOPE_TOLERANCE * abs(predicted_slope):
            return known[nearest[0]]
        return known[n0] + slope * (n - n0)
