"""Where a tuning stands, for whoever draws a bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["Progress", "fraction_of", "part_of"]

_STAGES = {"ceilings": (0.0, 0.3), "times": (0.3, 0.45), "search": (0.45, 1.0), "done": (1.0, 1.0)}
"""Where on the whole each stage begins and ends, roughly."""


@dataclass(frozen=True)
class Progress:
    """Where a tuning stands.

    Attributes:
        stage: ``"waiting"`` for another process, ``"checks"``, ``"ceilings"``, ``"times"``, ``"search"`` or ``"done"``.
        message: What is being done, in a few words.
        fraction: Of the whole, 0 to 1, as far as it can be told.
        steps: Real training steps so far.
        ooms: How many of them ran out of memory.
        best_samples_per_s: The best trial so far.
    """

    stage: str
    message: str
    fraction: float
    steps: int = 0
    ooms: int = 0
    best_samples_per_s: float | None = None


def fraction_of(stage: str, done_share: float = 0.0) -> float:
    """Return how much of a whole tuning is done, given the share of its stage that is, as far as it can be told."""
    begin, end = _STAGES[stage]
    return begin + (end - begin) * min(1.0, done_share)


def part_of(progress: Callable[[Progress], None], number: int, count: int, name: object) -> Callable[[Progress], None]:
    """Report one tuning of several, called by a name, as its part of the whole."""

    def tell(part: Progress) -> None:
        progress(replace(part, message=f"{name}: {part.message}", fraction=(number + part.fraction) / count))

    return tell
