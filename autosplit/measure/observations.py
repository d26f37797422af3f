"""Keep what was seen of one device in one role: traces, real steps, failures, and the line through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autosplit.runtime.protocol import Runtime, StepShape
from autosplit.solve.memory import Limit, Role

__all__ = ["SLOPE_TOLERANCE", "Observations", "alike_slopes", "step_kind", "traced_near"]


SLOPE_TOLERANCE = 0.01
"""A traced slope that is off the real one by more is not trusted."""


@dataclass
class Observations:
    """The observations of one device in one role.

    Attributes:
        traced: Bytes by samples, of traces.
        on_line: Bytes by samples that need no trace: they lie on a straight line between traces and real steps.
        ran: Bytes by samples, of real steps.
        failed: Sizes that ran out of memory, each with what it would at least have needed.
        limit: Set where something else than memory ended the search.
        lost: The process of a step died of it, which says nothing of bytes.
    """

    traced: dict[int, int] = field(default_factory=dict)
    on_line: dict[int, int] = field(default_factory=dict)
    ran: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    limit: Limit | None = None
    lost: bool = False

    def points(self) -> tuple[tuple[int, int, bool], ...]:
        """Return all sizes that were looked at, in order."""
        known = {**{n: (n, nbytes, False) for n, nbytes in self.traced.items()}}
        known.update({n: (n, nbytes, True) for n, nbytes in self.ran.items()})
        return tuple(known[n] for n in sorted(known))

    def ends_at(self, n: int) -> bool:
        """Tell whether one sample more was looked at."""
        return any(n + 1 in sizes for sizes in (self.traced, self.on_line, self.failed))

    @property
    def exact_size(self) -> int:
        """The largest real step that held to the byte what its trace says; 0 where there is none.

        A trace that knows this one knows others.
        """
        return max((n for n, nbytes in self.ran.items() if self.traced.get(n) == nbytes), default=0)

    def known(self) -> dict[int, int]:
        """Return bytes by samples that need no further trace."""
        return {**(self.ran if self.exact_size else {}), **self.on_line, **self.traced}

    def draw_line(self, start: int, found: int, real_slope: float) -> None:
        """Keep what lies on the line from the first trace to the last, and next after it, if real steps have its slope.

        Args:
            start: The first trace.
            found: What fits; it, or one sample more, was the last that was traced.
            real_slope: Bytes per sample of real steps.
        """
        end = next((n for n in (found + 1, found) if n in self.traced), start)
        if end <= start or start not in self.traced:
            return
        slope = (self.traced[end] - self.traced[start]) / (end - start)
        if not alike_slopes(slope, real_slope):
            return
        for n in {*self.ran, found, found + 1} - set(self.traced):
            self.on_line[n] = int(self.traced[start] + slope * (n - start))

    def slope_near(self, n: int) -> float:
        """Return the bytes that a sample adds, by the two traced sizes nearest to one; 0 where there are not two."""
        nearest = sorted(self.traced, key=lambda size: abs(size - n))[:2]
        if len(nearest) < 2:
            return 0.0
        n0, n1 = sorted(nearest)
        return max(0.0, (self.traced[n1] - self.traced[n0]) / (n1 - n0))

    def residual(self, n: int, predicted: Callable[[int], float]) -> float:
        """Return what real steps hold beyond their traces, at a size that was not run.

        It is that of the nearest real step, and, where two of them show that it grows (the slope of the trace is off
        by more than `SLOPE_TOLERANCE`), the line through the two nearest. A size that failed needs more than there is.
        """
        # Beside a small step of which the trace is exact, another one tells nothing that would be worth its trace.
        sizes = [n for n in self.ran if n in self.traced or n in self.on_line or n > 2 * self.exact_size]
        known = {size: self.ran[size] - predicted(size) for size in sizes}
        for size, nbytes in self.failed.items():
            known[size] = max(0.0, nbytes - predicted(size), max(known.values(), default=0.0))
        if not known:
            return 0.0
        nearest = sorted(known, key=lambda size: abs(size - n))[:2]
        if len(nearest) == 1:
            return known[nearest[0]]
        n0, n1 = sorted(nearest)
        slope = (known[n1] - known[n0]) / (n1 - n0)
        traced_slope = (predicted(n1) - predicted(n0)) / (n1 - n0)
        if abs(slope) <= SLOPE_TOLERANCE * abs(traced_slope):
            return known[nearest[0]]
        return known[n0] + slope * (n - n0)


def traced_near(seen: Observations, wanted: int, *, most: int, least: int = 1) -> int:
    """Return the traced size nearest to one that is wanted; that one, where there is none between the bounds."""
    near = [n for n in seen.traced if max(least, wanted / 2) <= n <= most]
    return min(near, key=lambda n: abs(n - wanted), default=wanted)


def alike_slopes(slope: float, other: float) -> bool:
    """Tell whether two slopes agree, within `SLOPE_TOLERANCE`."""
    return abs(slope - other) <= SLOPE_TOLERANCE * abs(other)


def step_kind(
    runtime: Runtime, index: int, role: Role, shape_of: Callable[[int], StepShape]
) -> tuple[str, int, Role, int]:
    """Tell equal devices in equal steps: the same card with as much memory, in a step of as many micro-steps."""
    return runtime.devices[index].name, runtime.capacities_bytes[index], role, len(shape_of(2).splits)
