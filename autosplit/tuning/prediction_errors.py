"""How far predictions for simulated cards were off, where that was measured; and a sentence where it was not.

The figures are in ``prediction_errors.json``, which ``benchmarks/simulation.py --record`` fills.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["MeasuredError", "error_sentences", "measured_errors"]


@dataclass(frozen=True)
class MeasuredError:
    """A figure that was predicted and measured a number of times.

    Attributes:
        what: ``"samples_per_s"``, ``"memory"`` (a step's peak) or ``"ceiling"`` (the largest batch that fits).
        kind: Where it was measured: ``"cuda"`` or ``"cpu"``.
        device: What was measured, in the words of its maker.
        card: The simulated card; None where it was no card.
        source: The file with all cases, in the project's repository.
        date: When it was measured, ``"2026-11-21"``.
        count: Cases.
        median_ratio: Of predicted / measured.
        least_ratio: The least of them.
        most_ratio: The largest of them.
        median_error: Of the ratios' distances from 1.
        worst_error: The largest of these.
    """

    what: Literal["samples_per_s", "memory", "ceiling"]
    kind: Literal["cuda", "cpu"]
    device: str
    card: str | None
    source: str
    date: str
    count: int
    median_ratio: float
    least_ratio: float
    most_ratio: float
    median_error: float
    worst_error: float


@functools.lru_cache(maxsize=1)
def measured_errors() -> tuple[MeasuredError, ...]:
    """Read what was measured; once."""
    path = importlib.resources.files("autosplit").joinpath("tuning/prediction_errors.json")
    rows = json.loads(path.read_text(encoding="utf-8"))["measured"]
    return tuple(MeasuredError(**row) for row in rows)


def error_sentences(errors: Sequence[MeasuredError], *, several_devices: bool) -> tuple[str, ...]:
    """Say how far the figures of simulated cards may be trusted: by what was measured on real ones, and nothing else.

    Args:
        errors: From `measured_errors`.
        several_devices: Some simulated machine has several cards, between which there are copies.
    """
    rates, peaks, ceilings = (_of_cards(errors, what) for what in ("samples_per_s", "memory", "ceiling"))
    said = [
        f"samples/s: {one.device} gave {_share(1 / one.median_ratio)} of those predicted, "
        f"{_share(1 / one.most_ratio)} to {_share(1 / one.least_ratio)} ({_basis(one, 'steps')})"
        for one in rates
    ]
    if not rates:
        said.append("samples/s of simulated cards have not been compared with real ones yet")
    elif several_devices:
        said.append("that is of one card: the time of copies between cards has not been compared with real ones yet")
    said += [
        f"memory: {one.device} held {_share(1 / one.median_ratio)} of the peaks predicted, "
        f"{_share(1 / one.most_ratio)} to {_share(1 / one.least_ratio)} ({_basis(one, 'steps')})"
        for one in peaks
    ]
    said += [
        f"largest batch: {one.device} took {_share(1 / one.median_ratio)} of the one predicted, "
        f"{_share(1 / one.most_ratio)} to {_share(1 / one.least_ratio)} ({_basis(one, 'cases')})"
        for one in ceilings
    ]
    if not peaks and not ceilings:
        said.append(f"memory of simulated cards has not been compared with real ones yet{_on_processors(errors)}")
    return tuple(said)


def _of_cards(errors: Sequence[MeasuredError], what: str) -> list[MeasuredError]:
    return [one for one in errors if one.what == what and one.kind == "cuda"]


def _on_processors(errors: Sequence[MeasuredError]) -> str:
    """Add what is known of the same traces elsewhere."""
    found = [one for one in errors if one.what == "ceiling" and one.kind == "cpu"]
    if not found:
        return ""
    count, worst = sum(one.count for one in found), max(one.worst_error for one in found)
    off = "predicted to the sample" if worst == 0 else f"off by {worst:.1%} at most"
    return f"; on processors with a memory budget the largest batch was {off} in {count} cases"


def _basis(error: MeasuredError, cases: str) -> str:
    return f"median and range of {error.count} {cases}, {error.date}"


def _share(ratio: float) -> str:
    """Write a ratio in percent, so that only what is exact reads 100 %."""
    percent = 100 * ratio
    return f"{percent:.0f} %" if abs(percent - 100) >= 1 or percent == 100 else f"{percent:.1f} %"
