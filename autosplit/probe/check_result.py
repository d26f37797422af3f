"""The results of the gradient check: plain values, each with its figures and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

EXACT = 1e-6
"""A relative difference below this is shown as it is, a larger one in percent."""


@dataclass(frozen=True)
class Check:
    """One result of the gradient check: whether something changes when the batch is split.

    Attributes:
        subject: What it is: ``"gradient"``, ``"loss"``, ``"model"``, ``"batch"``, ``"BatchNorm2d at features.1"``,
            ``"gradient of optimizer 0"``, ``"state in queue"`` (a buffer).
        split_error: Relative difference (0.1 for 10 %) between the whole sample batch and the same batch split
            unevenly over two devices: of the gradient, or of a BatchNorm's output. None where it was not compared,
            or is not finite. In a plan 0 where it is no more than rounding.
        accumulation_error: The same, for two uneven micro-batches that are accumulated as `plan.steps` does, and as the
            ranks of DDP weigh theirs.
        depends: Whether it changes with the split.
        advice: What to do; empty where there is nothing to do.
        remark: What else is to be known of the figures; empty for nothing.
        reduce: Of ``"gradient"``: what a loss that the model takes itself is a mean over, found by leaving some of the
            sample batch's `labels` out, and how `plan.wrap` combines the devices' losses: by ``"samples"``, by
            ``"tokens"`` (labels that are not -100), or by ``"next tokens"`` (without the first of each sequence). None
            where none of them makes it exact, or there are no labels: then by samples.
        count: Of ``"loss"``: what it is a mean over, as an expression of a micro-batch `batch`, where `plan.steps` has
            to be told by ``count=lambda batch: ...``; None elsewhere.
    """

    subject: str
    split_error: float | None
    accumulation_error: float | None
    depends: bool
    advice: str = ""
    remark: str = ""
    reduce: Literal["samples", "tokens", "next tokens"] | None = None
    count: str | None = None

    @property
    def most(self) -> float:
        """The larger of both differences, as far as they are known."""
        return max(self.split_error or 0.0, self.accumulation_error or 0.0)

    def __str__(self) -> str:
        """Say it in one line."""
        verdict = "changes" if self.depends else "stays the same"
        split, accumulated = error_text(self.split_error), error_text(self.accumulation_error)
        said = f"{self.subject} {verdict} when the batch is split (over devices: {split}, accumulated: {accumulated})"
        more = "; ".join(filter(None, (self.advice, self.remark)))
        return f"{said}: {more}" if more else said


def changed(checks: Iterable[Check]) -> list[Check]:
    """Return what splitting changes: first what there is something to do about, of it first what changes the most."""
    found = [check for check in checks if check.depends]
    return sorted(found, key=lambda check: (not check.advice, -check.most))


def error_text(error: float | None) -> str:
    """Write a relative difference for reading: ``68 % off``, ``2e-16``, ``not checked``."""
    if error is None:
        return "not checked"
    if error == 0:
        return "no difference"
    if error < EXACT:
        return f"{error:.0e}"
    return f"{100 * error:.0f} % off" if error >= 0.1 else f"{100 * error:.2g} % off"
